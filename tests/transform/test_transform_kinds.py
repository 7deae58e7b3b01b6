"""Kinds of group of one's own: optional methods are used, and without them a kind is skipped with a reason."""

from __future__ import annotations

import copy
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved import Kind, LawSet, Leg, Symmetry, View
from conserved.symmetry import KINDS, OneScale, RowProducts, Scaling, Term
from conserved.transform import (
    EqualizeEvery,
    Exchange,
    Orthogonal,
    UnmovableError,
    align,
    canonical,
    equalize,
    fingerprint,
    mappings,
    move,
    symmetries_of,
)
from conserved.transform.elements import validate_element


class Threes(Kind):
    """Rows in threes, scaled together: a kind without optional methods."""

    __slots__ = ()
    code = "threes"
    title = "scaling in threes"
    products = RowProducts(tuple(Term(row, row) for row in range(3)), unit=3)

    def act(self, g: Tensor, a: Tensor, degree: float) -> Tensor:
        return g.repeat_interleave(3)[:, None] ** degree * a

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Tensor:
        return torch.exp(spread * torch.randn(n // 3, generator=generator, dtype=torch.float64))

    def group(self, n: int, m: int) -> str:
        return f"(R₊)^{n // 3}"


class Factors(Kind):
    """Every row by a number other than zero, with the methods of positive scalings."""

    __slots__ = ()
    code = "factors"
    title = "factors"
    products = RowProducts()

    def act(self, g: Tensor, a: Tensor, degree: float) -> Tensor:
        return g[:, None] ** degree * a

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Tensor:
        return 1 + spread * torch.randn(n, generator=generator, dtype=torch.float64)

    def group(self, n: int, m: int) -> str:
        return f"(R*)^{n}"

    def inverse(self, g: Tensor) -> Tensor:
        return 1 / g

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        return later * earlier

    def scaling_element(self, factors: Tensor) -> Tensor:
        return factors


EVERY = [*KINDS.values(), Exchange(), Orthogonal()]


def pair(kind: Kind, minus: int = -1) -> tuple[Symmetry, dict[str, Tensor]]:
    """A symmetry of qᵀk, or of (q, k) as columns of one space, and weights."""
    legs = (Leg(View.of("q", (6, 8))), Leg(View.of("k", (6, 8)), minus))
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(6, 8, generator=generator, dtype=torch.float64) for name in ("q", "k")}
    return Symmetry(block="", family="pair", kind=kind, legs=legs), weights


@pytest.fixture
def quaternions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The example of a kind in one file, and of moving along it."""
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(examples)
    monkeypatch.delitem(sys.modules, "custom_kind", raising=False)
    result = runpy.run_path(str(examples / "moving_along_my_kind.py"))
    capsys.readouterr()
    return result


def moved_at_random(law: Symmetry, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return law.act(weights, law.element(spread=0.5, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.code)
def test_elements_of_every_kind_of_the_package_form_a_group(kind: Kind) -> None:
    law, weights = pair(kind)
    first, second = (law.element(generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    identity = kind.identity(law.n, law.m)
    assert kind.movable
    torch.testing.assert_close(kind.compose(first, kind.inverse(first)), identity)
    torch.testing.assert_close(validate_element(law, first), first)
    torch.testing.assert_close(law.act(weights, identity), weights)
    both = law.act(law.act(weights, first), second)
    torch.testing.assert_close(law.act(weights, kind.compose(second, first)), both)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.code)
def test_every_kind_of_the_package_has_one_point_that_stands_for_an_orbit(kind: Kind) -> None:
    assert kind.defines(Kind.canonical_element)
    law, weights = pair(kind, minus=1 if isinstance(kind, Exchange | Orthogonal) else -1)
    there, elsewhere = (
        canonical(one, laws=LawSet(symmetries=(law,))) for one in (weights, moved_at_random(law, weights))
    )
    torch.testing.assert_close(there, elsewhere, rtol=1e-7, atol=1e-7)
    assert max(float((there[name] - weights[name]).abs().max()) for name in weights) > 0.1


def test_a_kind_that_does_not_say_how_it_is_undone_moves_nothing() -> None:
    law, weights = pair(Threes())
    element = law.element(generator=torch.Generator().manual_seed(0))
    sentence = r"scaling in threes defines no inverse .* Symmetry.act"
    with pytest.raises(UnmovableError, match=sentence):
        move(weights, {law: element})
    done = equalize(weights, laws=[law])
    assert "scaling in threes" in done.skipped[law.name]
    near = align(weights, moved_at_random(law, weights), laws=[law])
    assert "scaling in threes" in near.skipped[law.name]
    assert f"{law.name} was left alone: scaling in threes defines no inverse" in str(near)
    assert near.steps == ()
    with pytest.warns(UserWarning, match="scaling in threes defines no representative of an orbit"):
        result = canonical(weights, laws=LawSet(symmetries=(law,)))
    assert all(torch.equal(weights[name], state[name]) for state in (done.state, result) for name in weights)
    moved = law.act(weights, element)
    assert not torch.equal(moved["q"], weights["q"])
    torch.testing.assert_close(moved["q"].mT @ moved["k"], weights["q"].mT @ weights["k"])


@pytest.mark.parametrize("kind", [Exchange(), Orthogonal()], ids=lambda kind: kind.code)
@pytest.mark.parametrize(
    ("objective", "why"), [("balanced", "defines no scaling of units"), ("range", "nothing to say about it")]
)
def test_groups_without_scales_are_left_alone_by_what_scales(kind: Kind, objective: str, why: str) -> None:
    law, weights = pair(kind, minus=1)
    done = equalize(weights, laws=[law], objective=objective)
    assert why in done.skipped[law.name]
    assert all(torch.equal(done.state[name], weights[name]) for name in weights)


def test_a_kind_of_ones_own_is_moved_and_moved_back(quaternions: dict[str, Any]) -> None:
    model, law, scores = quaternions["model"], quaternions["law"], quaternions["scores"]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    expected = scores().item()
    done = move(model, {law: law.element(generator=torch.Generator().manual_seed(0))})
    assert not torch.allclose(before["q"], model["q"])
    assert scores().item() == pytest.approx(expected, rel=1e-12)
    move(model, done.inverse)
    torch.testing.assert_close(dict(model.named_parameters()), before)


def test_a_kind_of_ones_own_is_balanced_by_the_scales_it_defines(quaternions: dict[str, Any]) -> None:
    model, law, scores = quaternions["model"], quaternions["law"], quaternions["scores"]
    move(model, {law: law.element(spread=0.5, generator=torch.Generator().manual_seed(0))})
    before, expected = dict(model.named_parameters()), scores().item()
    sizes = [before[name].detach().unflatten(0, (2, 4)).square().sum((1, 2)) for name in ("q", "k")]
    done = equalize(model, laws=[law])
    after = [model[name].detach().unflatten(0, (2, 4)).square().sum((1, 2)) for name in ("q", "k")]
    torch.testing.assert_close(after, [(sizes[0] * sizes[1]).sqrt()] * 2)
    assert done.skipped == {}
    assert scores().item() == pytest.approx(expected, rel=1e-12)


def test_a_kind_of_ones_own_has_fingerprints_and_is_aligned(quaternions: dict[str, Any]) -> None:
    law = quaternions["law"]
    laws = LawSet(symmetries=(law,))
    weights = {name: value.detach().clone() for name, value in quaternions["model"].named_parameters()}
    other = moved_at_random(law, weights)
    assert fingerprint(weights, laws=laws).difference(fingerprint(other, laws=laws)) < 1e-9
    result = align(weights, other, laws=laws)
    assert result.after < 1e-9 * result.before
    torch.testing.assert_close(result.state, weights)


@pytest.mark.parametrize("objective", ["balanced", "range", "activation"])
def test_what_scales_for_a_kind_of_ones_own_is_what_positive_scalings_get(objective: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False)).double()
    batches = [torch.randn(8, 5, dtype=torch.float64)]
    result = []
    for kind in (Scaling(), Factors()):
        one = copy.deepcopy(model)
        law = replace(symmetries_of(model, *batches).symmetries[0], kind=kind)
        done = equalize(one, laws=[law], objective=objective, batches=batches, spaces="all")
        assert done.skipped == {}
        result.append([p.detach() for p in one.parameters()])
    torch.testing.assert_close(result[0], result[1], rtol=1e-12, atol=0)
    assert not torch.allclose(result[1][0], model[0].weight, rtol=0.1)


def test_layers_that_a_kind_of_ones_own_scales_are_mapped() -> None:
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False))
    x = torch.randn(8, 5)
    (law,) = symmetries_of(model, x)
    own, unknown = (LawSet(symmetries=(replace(law, kind=kind),)) for kind in (Factors(), Threes()))
    assert mappings(model, x, laws=own) == mappings(model, x)
    assert mappings(model, x, laws=unknown) == []


def test_averages_of_squares_go_along_where_legs_of_one_scale_have_other_numbers_of_rows() -> None:
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": torch.randn(3, 4), "b": 5 * torch.randn(2, 5)}).double()
    legs = (Leg(View.of("a", (3, 4))), Leg(View.of("b", (2, 5)), -1))
    law = Symmetry(block="", family="scale", kind=OneScale(), legs=legs)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    (model["a"].square().sum() * model["b"].square().sum()).backward()
    optimizer.step()
    squares = {name: optimizer.state[model[name]]["exp_avg_sq"].clone() for name in ("a", "b")}
    before = model["a"].detach().clone()
    EqualizeEvery(model, optimizer=optimizer, every=0, laws=[law])
    scale = (model["a"] / before).detach().mean()
    assert scale > 1.5
    torch.testing.assert_close(optimizer.state[model["a"]]["exp_avg_sq"], squares["a"] / scale**2)
    torch.testing.assert_close(optimizer.state[model["b"]]["exp_avg_sq"], squares["b"] * scale**2)
