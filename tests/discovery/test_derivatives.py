"""Brackets by reverse mode over many samples are those of forward over reverse mode, one sample at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import reference.brackets as slow
from conserved.blocks import Attention, FeedForward, TransformerBlock
from conserved.discovery import derivatives
from conserved.discovery.fields import derivative_error, draw_words, gradient_rows, one_of, vectors
from conserved.discovery.function import ParameterFunction, function_of, without_fused_kernels
from tolerances import AGREE

COUNT = 5


def attention() -> ParameterFunction:
    torch.manual_seed(0)
    return function_of(Attention(4, 2), torch.zeros(3, 4), loss="any", params=None, device=None)


def block() -> ParameterFunction:
    torch.manual_seed(0)
    model = TransformerBlock(Attention(4, 2, bias=True), FeedForward(4, 3, bias=True))
    return function_of(model, torch.zeros(3, 4), loss="cross_entropy", params=None, device=None)


def unmappable() -> ParameterFunction:
    """A function that looks at numbers, which vmap cannot."""

    def f(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return p["a"] * (p["b"] @ x) if float(x[0]) > 0 else p["a"] * (p["b"] ** 2 @ x)

    params = {"a": torch.randn(3), "b": torch.randn(3)}
    return function_of(f, torch.zeros(3), loss="any", params=params, device=None)


@pytest.mark.parametrize("precision", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("build", [attention, block, unmappable], ids=["attention", "pre-norm block", "branches"])
def test_brackets_agree_with_forward_over_reverse(build: Any, depth: int, precision: torch.dtype) -> None:
    if (build, depth) == (block, 3):
        pytest.skip("seconds, and no more of the product rule than attention shows")
    function = build()
    generator = torch.Generator().manual_seed(1)
    theta = function.generic_point(generator)
    words = draw_words(function, theta, depth, COUNT, generator)
    wanted = slow.vectors(function, theta, depth, words, COUNT)
    if precision == torch.float32:
        theta, words = theta.float(), tree_map(Tensor.float, words)
        function = dataclasses.replace(function, start={n: t.float() for n, t in function.start.items()})
        limit = 20 * AGREE[precision]
    else:
        limit = 100 * AGREE[precision]
    result = vectors(function, theta, depth, words, COUNT)
    assert result.dtype == precision
    assert float((result - wanted).abs().max()) < limit


def test_fields_at_points_of_their_own_agree_with_one_by_one() -> None:
    function = attention()
    generator = torch.Generator().manual_seed(2)
    points = torch.stack([function.generic_point(generator) for _ in range(COUNT)])
    samples = function.draw_many(points[0], COUNT, generator)
    field = slow.gradient_field(function)
    with without_fused_kernels():
        wanted = torch.stack([field(point, one_of(samples, i)) for i, point in enumerate(points)])
    assert torch.allclose(gradient_rows(function, points, samples, COUNT), wanted, rtol=1e-12, atol=1e-13)


def test_a_gradient_is_found_where_none_is_asked_for() -> None:
    """Inside no_grad too: a count does not depend on what the caller switched off."""
    function = attention()
    generator = torch.Generator().manual_seed(2)
    theta = function.generic_point(generator)
    words = draw_words(function, theta, 1, COUNT, generator)
    wanted = vectors(function, theta, 1, words, COUNT)
    with torch.no_grad():
        assert torch.equal(vectors(function, theta, 1, words, COUNT), wanted)


def test_a_wrong_derivative_shows_against_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    function = attention()
    theta = function.generic_point(torch.Generator().manual_seed(0))
    assert derivative_error(function, theta, 2, torch.Generator().manual_seed(3)) < 1e-6
    grad = derivatives.Derivatives._gradient_of

    def wrong(self: derivatives.Derivatives, index: int, directions: tuple[Tensor, ...]) -> Tensor:
        result = grad(self, index, directions)
        return 1.01 * result if len(directions) == 2 else result

    monkeypatch.setattr(derivatives.Derivatives, "_gradient_of", wrong)
    assert derivative_error(function, theta, 2, torch.Generator().manual_seed(3)) > 1e-4
