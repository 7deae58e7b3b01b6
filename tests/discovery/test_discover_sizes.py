"""Counts that rounding could have made: casts to coarser types inside, and entries of very different sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conserved import Status, discover
from conserved.blocks import Attention

pytestmark = pytest.mark.usefixtures("as_users_run_it")

Parameters = dict[str, Tensor]
PAIR = {"a": torch.ones(2, 3), "b": torch.ones(3, 2)}


class Hidden(torch.autograd.Function):
    """A cast to float32 that no node of the graph shows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return a.float().double()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        return moves[0]


def plain(p: Parameters, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, p["a"]), p["b"])


def between(p: Parameters, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, p["a"]).float().double(), p["b"])


def throughout(p: Parameters, x: Tensor) -> Tensor:
    return F.linear(F.linear(x.float(), p["a"].float()), p["b"].float()).double()


def hidden(p: Parameters, x: Tensor) -> Tensor:
    return Hidden.apply(F.linear(Hidden.apply(F.linear(x, p["a"])), p["b"]))


def test_without_a_cast_the_pair_has_three_laws() -> None:
    discovery = discover(plain, torch.zeros(3), params=PAIR)
    assert (discovery.count, discovery.verdict.status) == (3, Status.VERIFIED)


@pytest.mark.parametrize("f", [between, throughout, hidden])
def test_a_cast_to_float32_inside_leaves_the_count_open(f: Callable[..., Tensor]) -> None:
    """Rounding of 1e-7 fills every direction: nothing is dropped, so that there is no gap to judge."""
    discovery = discover(f, torch.zeros(3), params=PAIR, forms=False)
    assert discovery.verdict.status is Status.INCONCLUSIVE
    assert "rounds to about" in discovery.verdict.message


@pytest.mark.parametrize("scale", [1e-6, 1e-12, 1e-13, 1e-20, 1e-100])
def test_a_parameter_whose_gradient_is_tiny_is_not_conserved(scale: float) -> None:
    def f(p: Parameters, x: Tensor) -> Tensor:
        return torch.stack([p["a"][0] * x[0], scale * p["b"][0] * x[1]])

    discovery = discover(f, torch.zeros(2), params={"a": torch.ones(1), "b": torch.ones(1)})
    assert (discovery.count, discovery.verdict.status) == (0, Status.VERIFIED)


@pytest.mark.parametrize("scale", [1e-12, 1e-13, 1e-40])
def test_a_count_that_needs_brackets_of_tiny_fields_is_left_open(scale: float) -> None:
    """Two linear pairs have six laws; the brackets of the second one are 1e-24 of those of the first."""

    def f(p: Parameters, x: Tensor) -> Tensor:
        return torch.cat([plain(p, x[:3]), scale * F.linear(F.linear(x[3:], p["c"]), p["d"])])

    params = PAIR | {"c": PAIR["a"], "d": PAIR["b"]}
    assert discover(f, torch.zeros(6), params=params, forms=False).verdict.status is Status.INCONCLUSIVE


def test_a_gradient_that_is_rounding_alone_is_not_taken_for_a_small_one() -> None:
    """Key biases under softmax get no gradient but rounding, and are conserved."""
    torch.manual_seed(0)
    discovery = discover(Attention(2, 1, bias=True), torch.zeros(3, 2), forms=False)
    assert discovery.verdict.status is Status.VERIFIED
    assert discovery.count == discover(Attention(2, 1, bias=True), torch.zeros(3, 2), forms=False, seed=1).count
    without = discover(Attention(2, 1), torch.zeros(3, 2), forms=False)
    assert discovery.count > without.count
