"""A law without a symbolic proof is enclosed around zero at θ itself, whatever sizes the entries have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conserved import LawSet, Leg, Symmetry, View, certify
from conserved.certificates.certifying import issue
from conserved.symmetry import Translation

pytestmark = pytest.mark.usefixtures("as_users_run_it")

Function = Callable[[dict[str, Tensor], Tensor], Tensor]

ALONE = LawSet(symmetries=(Symmetry(block="", family="b", kind=Translation(), legs=(Leg(View.of("b", (1,))),)),))
"""The impostor: b itself is conserved."""


def unequal(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The field of b is 1e-40 of that of a."""
    return (1e40 * p["a"] + p["b"]) * x


def switched(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Where a < 5 nothing depends on b; the certificate is about a = 10."""
    return torch.relu(p["a"] - 5) * p["b"] * x


def far_inputs(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Inputs near 0 see nothing of b; those that are given lie near 100."""
    return p["a"] * x + torch.relu(x - 50) * p["b"]


@pytest.mark.parametrize("f", [unequal, switched, far_inputs])
def test_a_quantity_that_moves_is_not_listed_as_a_law(f: Function) -> None:
    params = {"a": torch.full((1,), 10.0), "b": torch.ones(1)}
    certificate = certify(f, lambda g: 100 + torch.randn(1, generator=g), params=params, laws=ALONE)
    assert certificate.found == 0


@pytest.mark.parametrize("f", [unequal, switched])
def test_a_certificate_that_lists_it_all_the_same_does_not_pass_its_check(f: Function) -> None:
    """The laws of a certificate of a function that does not depend on b, with the program of one that does."""
    params = {"a": torch.full((1,), 10.0), "b": torch.ones(1)}
    honest = certify(lambda p, x: p["a"] * x + 0 * p["b"], torch.zeros(1), params=params, laws=ALONE)
    assert honest.found == 1
    other = certify(f, torch.zeros(1), params=params, laws=ALONE)
    forged = issue(replace(other.contents, laws=honest.contents.laws))
    assert not forged.verdict.holds


def test_a_law_whose_terms_have_very_unequal_sizes_is_still_enclosed() -> None:
    """Gradients of 1e12 cancel to rounding, and rounding is what an enclosure is held against."""

    def f(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.sin(p["a"] * p["b"] * 1e12 * x)

    certificate = certify(f, torch.zeros(1), params={"a": torch.ones(1), "b": torch.ones(1)})
    assert certificate.verdict.holds
    assert certificate.found == certificate.at_most == 1
