"""Spoiling any rule is noticed: every symmetry of every block with a sign, leg, head, axis or pairing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conserved import LawSet, Leg, Symmetry
from conserved.symmetry import ComplexScaling, GeneralLinear
from test_recognize_blocks import gradients
from tolerances import SEEN
from zoo import LAWFUL, Case, ids

Mutants = Iterator[tuple[str, Symmetry]]

STILL = 1e-12
"""Parameters with no larger gradient do not move, whatever their law: the router of one active expert."""


def with_leg(symmetry: Symmetry, index: int, leg: Leg) -> Symmetry:
    legs = (*symmetry.legs[:index], leg, *symmetry.legs[index + 1 :])
    return replace(symmetry, legs=legs)


def flipped_signs(symmetry: Symmetry) -> Mutants:
    if len(symmetry.legs) > 1:
        for index, leg in enumerate(symmetry.legs):
            yield f"sign of {leg.view}", with_leg(symmetry, index, Leg(leg.view, -leg.degree))


def dropped_legs(symmetry: Symmetry) -> Mutants:
    if len(symmetry.legs) > 1:
        for index, leg in enumerate(symmetry.legs):
            yield f"without {leg.view}", replace(symmetry, legs=symmetry.legs[:index] + symmetry.legs[index + 1 :])


def transposed_legs(symmetry: Symmetry) -> Mutants:
    """The group on the other axis: of one leg where its sizes allow, or of all of them."""

    def turned(leg: Leg) -> Leg:
        return Leg(replace(leg.view, axes=leg.view.rest), leg.degree)

    across = {leg.view.n if symmetry.kind.shared == "columns" else leg.view.m for leg in symmetry.legs}
    if symmetry.kind.shared != "nothing" and all(leg.view.rest for leg in symmetry.legs):
        for index, leg in enumerate(symmetry.legs):
            if leg.view.n == leg.view.m > 1 and len(symmetry.legs) > 1:
                yield f"transposed {leg.view}", with_leg(symmetry, index, turned(leg))
        if len(across) == 1 and symmetry.m > 1 and symmetry.n > 1:
            yield "all legs transposed", replace(symmetry, legs=tuple(map(turned, symmetry.legs)))


def wrong_heads(symmetry: Symmetry) -> Mutants:
    """A leg that picks the next head, expert or branch, while the others stay."""
    for index, leg in enumerate(symmetry.legs if len(symmetry.legs) > 1 else ()):
        for axis, chosen in enumerate(leg.view.pick):
            if isinstance(chosen, int) and leg.view.grid[axis] > 1:
                moved = tuple(
                    (chosen + 1) % leg.view.grid[axis] if a == axis else p for a, p in enumerate(leg.view.pick)
                )
                yield (
                    f"next head of {leg.view}",
                    with_leg(symmetry, index, Leg(replace(leg.view, pick=moved), leg.degree)),
                )


def wrong_pairings(symmetry: Symmetry) -> Mutants:
    """Rotary planes paired the other way, in every leg."""
    if isinstance(symmetry.kind, ComplexScaling) and symmetry.n > 2:
        legs = []
        for leg in symmetry.legs:
            rows = range(leg.view.faced) if leg.view.rows is None else leg.view.rows
            other = torch.tensor(list(rows)).unflatten(0, (2, -1)).T.flatten()
            legs.append(Leg(replace(leg.view, rows=tuple(other.tolist())), leg.degree))
        yield "other pairing", replace(symmetry, legs=tuple(legs))


def larger_groups(symmetry: Symmetry) -> Mutants:
    """All of GL(n) where only scalings or phases commute."""
    if symmetry.kind.shared == "rows" and not isinstance(symmetry.kind, GeneralLinear) and symmetry.n > 1:
        yield "GL(n)", replace(symmetry, kind=GeneralLinear())


RULES: dict[str, Callable[[Symmetry], Mutants]] = {
    rule.__name__: rule
    for rule in (flipped_signs, dropped_legs, transposed_legs, wrong_heads, wrong_pairings, larger_groups)
}


def makes_no_difference(symmetry: Symmetry, what: str, laws: LawSet) -> bool:
    """Mutations that give another law, or the same one.

    The gradient of a key bias under plain softmax is zero, so its sign is free. Where every mean of the stream is
    conserved, so is any combination of two of them.
    """
    names = {f"{leg.view}" for leg in symmetry.legs if leg.view.parameter.endswith("k.bias")}
    inert_bias = isinstance(symmetry.kind, GeneralLinear) and any(what.endswith(name) for name in names)
    means = symmetry.family == "bias_centre" and any(law.family == "centre" for law in laws)
    return inert_bias or means


def residual(symmetry: Symmetry, theta: dict[str, Tensor], grads: dict[str, Tensor]) -> float:
    return LawSet(symmetries=(symmetry,), parameters=theta).residuals(grads)[symmetry.name]


@pytest.mark.parametrize("case", LAWFUL, ids=ids)
def test_every_mutation_of_every_rule_is_noticed(case: Case) -> None:
    model = case.model(seed=3)
    case.objective()(model).backward()
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    grads = gradients(model)
    laws = case.laws(model)
    survivors = [
        f"{symmetry.name}: {rule}: {what}"
        for symmetry in laws
        for rule, mutate in RULES.items()
        for what, mutant in mutate(symmetry)
        if not makes_no_difference(symmetry, what, laws)
        and any(bool(grads[name].abs().max() > STILL) for name in symmetry.parameters)
        and residual(mutant, theta, grads) < SEEN
    ]
    assert survivors == []


def test_every_mutation_rule_has_something_to_mutate() -> None:
    symmetries = [symmetry for case in LAWFUL for symmetry in case.laws(case.model())]
    counts = {rule: sum(len(list(mutate(symmetry))) for symmetry in symmetries) for rule, mutate in RULES.items()}
    assert min(counts.values()) >= 2, counts


def test_the_sign_of_an_inert_key_bias_makes_no_difference() -> None:
    """The one exception above is real: the bias of the keys gets no gradient at all."""
    case = next(case for case in LAWFUL if case.name == "attention, biases")
    model = case.model()
    case.objective()(model).backward()
    assert gradients(model)["k.bias"].abs().max() < 1e-15
    assert gradients(model)["q.bias"].abs().max() > 1e-3
    assert torch.equal(case.laws(model).values()["k.inert_bias"], model.get_parameter("k.bias"))
