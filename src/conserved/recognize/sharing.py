"""What sharing, freezing and storage leave of the symmetries that an architecture has.

A parameter that two places of a model use moves in both. A symmetry found at one place survives if the other place has
one of the same kind on the same view; the two are then one symmetry with all their legs. Otherwise it is lost. The one
scale inside a larger group counts as a symmetry for this: with an embedding tied to the head, the scale of the residual
stream survives against the gain of the final norm. A leg that is not trained cannot follow the others, so its symmetry
is lost as a law too. So is one whose parameter shares its memory with another tensor, as when weights are tied through
`.data`: each has a gradient of its own, and every step moves both. What look-up tables do to laws is in `lookups`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import nn

from conserved.judging import TOLERANCE
from conserved.kind import Degree, OneScale, Scaling
from conserved.laws import Dropped
from conserved.recognize.lookups import lost, tables
from conserved.shared_memory import overlapping, tensors_of
from conserved.symmetry import Leg, Symmetry
from conserved.view import View


class _Lost(Exception):
    """A symmetry does not survive; the message says why."""


def settle(model: nn.Module, found: Sequence[Symmetry]) -> tuple[list[Symmetry], list[Dropped]]:
    """Symmetries with each parameter under its one canonical name, and those that were lost."""
    places = dict(model.named_parameters(remove_duplicate=False))
    uses: dict[int, list[str]] = defaultdict(list)
    for place, parameter in places.items():
        uses[id(parameter)].append(place)
    canonical = {place: uses[id(parameter)][0] for place, parameter in places.items()}
    siblings = {place: uses[id(parameter)] for place, parameter in places.items()}
    shared = [any(len(siblings[name]) > 1 for name in symmetry.parameters) for symmetry in found]
    candidates = list(found) + [
        _one_scale(symmetry)
        for symmetry, somewhere in zip(found, shared, strict=True)
        if isinstance(symmetry.kind, Scaling) and somewhere
    ]
    legs_at: dict[Hashable, list[tuple[int, Degree]]] = defaultdict(list)
    for number, symmetry in enumerate(candidates):
        for leg in symmetry.legs:
            if len(siblings[leg.view.parameter]) > 1:
                legs_at[_key(symmetry, leg, leg.view.parameter)].append((number, leg.degree))

    beside, looked_up = overlapping(tensors_of(model)), tables(model)
    kept: dict[frozenset[int], Symmetry] = {}
    dropped: list[Dropped] = []
    for number, symmetry in enumerate(found):
        try:
            signs = _merged(number, candidates, siblings, legs_at) if shared[number] else {number: 1}
            merged = _united(number, candidates, signs, canonical) if shared[number] else symmetry
            for name in merged.parameters:
                _trained(name, places[name])
                _alone(name, beside)
            if reason := lost(merged, looked_up):
                raise _Lost(reason)
        except _Lost as reason:
            dropped.append(Dropped(symmetry.name, str(reason)))
        else:
            kept.setdefault(frozenset(signs), merged)
    return list(kept.values()), dropped


def _one_scale(symmetry: Symmetry) -> Symmetry:
    """The subgroup that scales every row alike."""
    return replace(symmetry, kind=OneScale(), family=f"{symmetry.family}_scale")


def _sees(symmetry: Symmetry, leg: Leg, place: str) -> View:
    """What a leg sees, at the name `place`; one scale does not care how a whole parameter is faced."""
    view = replace(leg.view, parameter=place).squeezed()
    if isinstance(symmetry.kind, OneScale) and view.rows is None and all(chosen is None for chosen in view.pick):
        return View.of(place, view.shape, axes=tuple(range(len(view.shape))), offset=view.offset)
    return view


def _key(symmetry: Symmetry, leg: Leg, place: str) -> Hashable:
    return symmetry.kind, _sees(symmetry, leg, place), abs(leg.degree)


def _merged(
    start: int,
    found: Sequence[Symmetry],
    siblings: dict[str, list[str]],
    legs_at: dict[Hashable, list[tuple[int, Degree]]],
) -> dict[int, int]:
    """The symmetries that must move together with one of them, each with the sign it moves with."""
    signs = {start: 1}
    queue = [start]
    while queue:
        number = queue.pop()
        symmetry = found[number]
        for leg in symmetry.legs:
            for place in siblings[leg.view.parameter]:
                if place == leg.view.parameter:
                    continue
                partners = legs_at.get(_key(symmetry, leg, place))
                if not partners:
                    raise _Lost(f"{leg.view.parameter} is shared with {place}, which does not have this symmetry")
                # Something that moves along already suffices: two tables may both be able to follow a third.
                along = [one for one in partners if one[0] in signs]
                same_family = [one for one in partners if found[one[0]].family == symmetry.family]
                partner, degree = (along or same_family or partners)[0]
                sign = signs[number] if degree * leg.degree > 0 else -signs[number]
                if partner not in signs:
                    signs[partner] = sign
                    queue.append(partner)
                elif signs[partner] != sign:
                    raise _Lost(f"{leg.view.parameter} and {place} are one parameter and would have to move both ways")
    return signs


def _united(start: int, found: Sequence[Symmetry], signs: dict[int, int], canonical: dict[str, str]) -> Symmetry:
    """One symmetry with the legs of several, each view once, under canonical names.

    Two of them may move one place; there the degrees add up. All places of a shared parameter must then move alike.
    """
    at_place: dict[View, Degree] = defaultdict(int)
    for number, sign in sorted(signs.items()):
        for leg in found[number].legs:
            at_place[_sees(found[number], leg, leg.view.parameter)] += sign * leg.degree
    legs: dict[View, Degree] = {}
    for view, degree in at_place.items():
        renamed = replace(view, parameter=canonical[view.parameter])
        if legs.setdefault(renamed, degree) != degree:
            raise _Lost(
                f"{renamed} would have to move in two ways at once; at most rotations are left, which conserve nothing"
            )
    moving = tuple(Leg(view, degree) for view, degree in legs.items() if degree != 0)
    if not moving or (not found[start].kind.weighted and any(abs(leg.degree) != 1 for leg in moving)):
        raise _Lost("the places that share its parameters would have to move at different rates")
    return replace(found[start], legs=moving, epsilon=max(found[number].epsilon for number in signs))


def _alone(name: str, beside: dict[str, str]) -> None:
    if name in beside:
        raise _Lost(
            f"{name} shares memory with {beside[name]}, so that steps of one move the other; let both places use one "
            "Parameter, and the laws of a shared one are found"
        )


def _trained(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype not in TOLERANCE:
        raise _Lost(
            f"{name} is stored as {str(parameter.dtype).removeprefix('torch.')} and is not trained by gradients"
        )
    if not parameter.requires_grad:
        raise _Lost(f"{name} is frozen, so the other legs are not balanced against it")
