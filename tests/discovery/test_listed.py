"""Formulas of a discovery come from the program where these are right and enough, and from a search where not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conserved import Verdict, discover
from conserved.blocks import Attention, SwiGLU
from conserved.discovery import discovery, listed
from conserved.discovery.function import function_of
from conserved.discovery.listed import LawsAtPoint, gradients_of, read_off
from conserved.discovery.rank import closure
from conserved.laws.independence import rank_of_gradients
from conserved.symmetry import Leg, Symmetry

INPUT = torch.zeros(5, 4)


def attention() -> Attention:
    torch.manual_seed(0)
    return Attention(4, 2)


def test_formulas_of_the_program_are_listed_and_nothing_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> tuple[Symmetry, ...]:
        raise AssertionError("searched although the program tells all laws")

    monkeypatch.setattr(discovery, "search", never)
    result = discover(attention(), INPUT)
    assert result.complete
    assert result.origin == "read off the program"
    assert set(result.inferred) == {law.name for law in result.laws}
    assert "Formulas: read off the program." in result.summary()
    assert result.record()["origin"] == result.origin


def test_a_search_alone_finds_as_much() -> None:
    model = attention()
    inferred, searched = discover(model, INPUT), discover(model, INPUT, infer=False)
    assert searched.origin == "searched for in gradients"
    assert searched.inferred == ()
    assert (searched.count, searched.explained) == (inferred.count, inferred.explained) == (12, 12)
    both = [*inferred.laws, *searched.laws]
    assert rank_of_gradients(both, inferred.laws.parameters) == 12


def test_a_formula_that_gradients_contradict_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """‖Q‖² + ‖K‖² of a head in place of a difference: inference never says so, and would not be believed."""

    def mistaken(function: object) -> list[Symmetry]:
        first, *others = read_off(function)  # type: ignore[arg-type]
        return [replace(first, legs=tuple(Leg(leg.view, 1) for leg in first.legs)), *others]

    monkeypatch.setattr(listed, "read_off", mistaken)
    result = discover(attention(), INPUT)
    assert result.verdict == Verdict.VERIFIED
    assert result.complete
    assert rank_of_gradients(result.laws.symmetries, result.laws.parameters) == 12
    assert not any(all(leg.degree > 0 for leg in law.legs) for law in result.laws)


def test_what_the_program_does_not_tell_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two heads the first is read off; a search that only knows of the other one completes the list."""
    model = attention()
    every = discover(model, INPUT).laws.symmetries
    half = [law for law in every if law.part == every[0].part]
    assert 0 < len(half) < len(every)
    monkeypatch.setattr(listed, "read_off", lambda function: half)
    monkeypatch.setattr(discovery, "search", lambda *args: (*[law for law in every if law not in half], half[0]))
    result = discover(model, INPUT)
    assert result.complete
    assert result.origin == f"{len(half)} read off the program, {len(every) - len(half)} searched for in gradients"
    assert len(result.laws) == len(every), "a law that is known already is not listed twice"


def test_a_program_that_cannot_be_followed_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*args: object) -> None:
        raise RuntimeError("no rule for this")

    monkeypatch.setattr(listed, "recognize", unable)
    result = discover(SwiGLU(3, 4), torch.zeros(5, 3))
    assert result.complete
    assert result.origin == "searched for in gradients"


def test_gradients_of_laws_agree_with_a_jacobian() -> None:
    function = function_of(attention(), INPUT, loss="any", params=None, device=None)
    theta = function.generic_point(torch.Generator().manual_seed(0))
    for symmetry in read_off(function):

        def numbers(point: Tensor, one: Symmetry = symmetry) -> Tensor:
            return one.kind.coordinates(one.law(function.split(point))).flatten()

        wanted = torch.func.jacrev(numbers)(theta)
        assert torch.allclose(gradients_of(symmetry, function, theta), wanted, rtol=1e-13, atol=1e-14)


def test_ranks_of_laws_and_what_of_them_lies_in_the_span() -> None:
    function = function_of(attention(), INPUT, loss="any", params=None, device=None)
    count = closure(function, depth=None, generator=torch.Generator().manual_seed(0), progress=lambda text: None)
    index, laws = LawsAtPoint(function, count), read_off(function)
    assert index.rank(laws) == rank_of_gradients(laws, function.split(count.theta)) == 12
    assert index.overlap(laws) < 1e-12
    wrong = replace(laws[0], legs=tuple(Leg(leg.view, 1) for leg in laws[0].legs))
    assert index.overlap([wrong]) > 1e-2
