"""Programs made to mislead: every exact law listed for one holds on its gradients, its outputs and its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conserved import LawSet, Leg, Symmetry, View
from conserved.symmetry import GeneralLinear
from law_checks import Subject, check, drifts, subject
from trap_programs import EXPECTED_FALSE, HONEST, TRAPS, build

FIRST_ORDER = 1e-3
"""A law moves by the square of the rate in one step; what moves by more than this times the rate is no law."""

LINEAR = {"a copy written, the original used", "an expanded view added to in place"}
"""Traps that only look like one: between the two maps stands something that is linear over samples alone."""

pytestmark = pytest.mark.filterwarnings("ignore")


def inputs(prepared: Subject) -> Iterator[Subject]:
    """The same model on inputs of other signs and sizes: a law may not depend on them."""
    for factor in (1.0, -1.0, 3.0):
        args: Any = tuple(factor * a for a in prepared.args)
        yield Subject(model=prepared.model, args=args, loss=prepared.loss)


def inferred(name: str) -> tuple[LawSet, Subject]:
    """The laws of a trap that are claimed without a reservation; those that rest on a backward of others are marked."""
    inference = pytest.importorskip("conserved.inference", reason="laws are not inferred from programs yet")
    model, args, kwargs = build(name)()
    laws: LawSet = inference.recognize(model, *args, **kwargs)
    return laws, subject(build(name))


def claimed(laws: LawSet) -> LawSet:
    """Without the laws that say of themselves that they rest on an assumption."""
    return laws.select(lambda symmetry: getattr(symmetry, "source", "typed") != "assumed")


@pytest.mark.parametrize("name", [name for name in TRAPS if name not in EXPECTED_FALSE])
def test_no_listed_law_is_wrong(name: str) -> None:
    result, prepared = inferred(name)
    laws = claimed(result)
    for case in inputs(prepared):
        assert check(laws, case).wrong == {}
        assert {law: d for law, d in drifts(laws, case).items() if d > FIRST_ORDER} == {}


@pytest.mark.parametrize("name", TRAPS)
def test_the_honest_network_beside_a_trap_keeps_its_laws(name: str) -> None:
    laws, prepared = inferred(name)
    honest = laws.select(lambda s: all(p.startswith("honest.") for p in s.parameters))
    theta = {n: p.detach() for n, p in prepared.model.named_parameters(remove_duplicate=False)}
    assert honest.independent(theta) == HONEST


@pytest.mark.parametrize("name", EXPECTED_FALSE)
def test_a_wrong_backward_is_seen_by_the_laws_of_the_function(name: str) -> None:
    laws, prepared = inferred(name)
    failing = check(laws, prepared, moves=False).wrong
    assert any(law for law in failing if not law.startswith("honest")), EXPECTED_FALSE[name]
    assert all(r <= 1e-11 for r in check(laws, prepared).moves.values())


def test_the_checks_see_what_a_trap_breaks() -> None:
    """The law of a plain pair of linear maps, held against traps: each of them must fail one check or another."""
    seen = set()
    for name in TRAPS:
        prepared = subject(build(name))
        own = dict(prepared.model.named_parameters())
        if not {"inner.a.weight", "inner.b.weight"} <= set(own) or tuple(own["inner.b.weight"].shape) != (2, 4):
            continue
        legs = (
            Leg(View.of("inner.a.weight", (4, 3), axes=0), 1),
            Leg(View.of("inner.b.weight", (2, 4), axes=1), -1),
        )
        pair = LawSet(symmetries=(Symmetry(block="", family="pair", kind=GeneralLinear(), legs=legs),))
        wrong = check(pair, prepared).wrong
        moved = {law: d for law, d in drifts(pair, prepared).items() if d > FIRST_ORDER}
        seen.add((name, bool(wrong or moved)))
    assert {name for name, broken in seen if not broken} == LINEAR
    assert len(seen) > 30
