"""Two checkpoints of one architecture: how near one can be moved to the other, and what then remains of the difference.

Exchanges of equal units are assignments (the Hungarian method on inner products of units); elements of general linear
groups, scalings and translations are the nearest ones in closed form or by Newton's method in one unknown. Each step
makes the distance smaller or leaves it, so going round ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.output.result import PrintableResult
from conserved.symmetry import Symmetry, Tensors, UnmovableError
from conserved.transform.canonical_form import GaugeFreedom, find_gauge, representative
from conserved.transform.gauge_fixing import fix_scales, is_gain
from conserved.transform.moving import Weights, act_on

ROUNDS = 50


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment(PrintableResult):
    """The result of `align`: distances, the move, and the difference that remains."""

    before: float
    """The distance of all weights that symmetries move, before and after."""
    after: float
    remains: dict[str, float]
    """By parameter, the remaining difference: the distance over the size of the reference."""
    rounds: int
    steps: tuple[tuple[Symmetry, Tensor], ...]
    """The elements, in the order they were applied; the inverse of their kind undoes each."""
    parameters: tuple[str, ...]
    """Names of the tensors that were written."""
    state: dict[str, Tensor]
    """The moved weights, where a dictionary was given."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Symmetries that were left alone, and why."""

    def __repr__(self) -> str:
        return f"<Alignment: distance {self.before:.4g} → {self.after:.4g} in {self.rounds} rounds>"

    def summary(self) -> str:
        """Return what was done, and what was left alone, as text."""
        worst = sorted(self.remains.items(), key=lambda item: -item[1])[:3]
        remaining = ", ".join(f"{name} {size:.2g}" for name, size in worst)
        text = f"distance {self.before:.4g} → {self.after:.4g} in {self.rounds} rounds; most remains in {remaining}"
        return "\n  ".join([text, *(f"{name} was left alone: {why}" for name, why in self.skipped.items())])


def align(
    reference: nn.Module | Mapping[str, Tensor],
    target: nn.Module | Mapping[str, Tensor],
    *args: Any,
    laws: LawSet | Iterable[Symmetry] | None = None,
    exchanges: Iterable[Symmetry] | None = None,
    continuous: bool = True,
    **kwargs: Any,
) -> Alignment:
    """Move one checkpoint along its orbit as near to another as it gets. Its function stays the same.

    Args:
        reference: the checkpoint to come near to; it is not changed.
        target: the checkpoint that is moved: a module in place; for a dictionary the result is `Alignment.state`.
        *args: example inputs, as the model is called; not needed with `laws`, or where the model says how.
        laws: the symmetries, as `conserved.transform.symmetries_of` gives them; a dictionary needs them.
        exchanges: units that may change places, as `conserved.transform.exchanges` finds them; they are looked for
            where neither they nor laws are given.
        continuous: whether to use scalings, general linear groups and translations as well.
        **kwargs: more example inputs, by name.

    Returns:
        An `Alignment`: the distance before and after, the move, and the difference that remains in each parameter.

    Raises:
        UnmovableError: a tensor is missing, of another shape, quantised or not finite.
        ValueError: the target is a dictionary and no laws are given.
    """
    gauge = find_gauge(target, args, kwargs, laws, exchanges)
    skipped = {s.name: s.kind.undefined() for s in gauge.all if not s.kind.movable}
    gauge = GaugeFreedom(
        exact=[s for s in gauge.exact if s.name not in skipped],
        exchanges=[s for s in gauge.exchanges if s.name not in skipped],
        rotations=gauge.rotations,
    )
    every = [*gauge.exchanges, *(gauge.exact if continuous else ())]
    known = laws.parameters if isinstance(laws, LawSet) else ()
    wanted, own = Weights(reference), Weights(target, known)
    for symmetry in (*every, *gauge.rotations):
        for name in symmetry.parameters:
            wanted.movable(name, symmetry)
            own.movable(name, symmetry)
    names = dict.fromkeys(name for symmetry in (*every, *gauge.rotations) for name in symmetry.parameters)
    goal, start = ({name: weights.read(name).cpu() for name in names} for weights in (wanted, own))
    for weights in (goal, start):
        for name, tensor in weights.items():
            if not bool(torch.isfinite(tensor).all()):
                raise UnmovableError(f"{name} has entries that are not finite: there is no distance to make small.")
    before = distance(goal, start)
    with torch.no_grad():
        ways = [_go_round(goal, start, every, [])]
        # Going round may end where no single symmetry helps. Two checkpoints of one orbit meet where scales are
        # fixed, whatever rotation of the stream is between them, and have one representative.
        for meet in (_by_rotations, _by_representatives) if continuous else ():
            if min(distance(goal, way.work) for way in ways) > 1e-6 * before:
                ways += meet(goal, start, gauge, every)
        best = min(ways, key=lambda item: distance(goal, item.work))
        own.write(best.work)
    return Alignment(
        parameters=tuple(own.written),
        state=own.state,
        steps=tuple(_merge(best.steps)),
        before=before,
        after=distance(goal, best.work),
        remains={n: float((best.work[n] - goal[n]).norm() / goal[n].norm().clamp_min(1e-300)) for n in names},
        rounds=best.rounds,
        skipped=skipped,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Way:
    """Weights on their way to a goal."""

    work: dict[str, Tensor]
    steps: list[tuple[Symmetry, Tensor]]
    rounds: int


def _by_representatives(goal: Tensors, start: Tensors, gauge: GaugeFreedom, every: Sequence[Symmetry]) -> list[_Way]:
    """Go to the representative of the orbit and back to the goal, then round again."""
    (_, there), (middle, steps) = (representative(weights, gauge) for weights in (goal, start))
    return [_undo_steps(goal, {name: middle[name].clone() for name in goal}, steps, there, every)]


def _by_rotations(goal: Tensors, start: Tensors, gauge: GaugeFreedom, every: Sequence[Symmetry]) -> list[_Way]:
    """Rotate streams where all scales are fixed, first by what nothing else moves, and return to the goal."""
    if not gauge.rotations:
        return []
    ends = [fix_scales(Weights(weights), gauge.exact) for weights in (goal, start)]
    there, own = ({name: end.read(name) for name in goal} for end in ends)
    steps = list(ends[1].steps)
    others = [s for s in gauge.exact if not is_gain(s)] + gauge.still_exchanged
    for symmetry in gauge.rotations:
        moved = {name for other in others for name in other.parameters}
        still = tuple(leg for leg in symmetry.legs if leg.view.parameter not in moved)
        element = nearest(replace(symmetry, legs=still or symmetry.legs), there, own)
        assert element is not None
        act_on(symmetry, element, own)
        steps.append((symmetry, element))
    fixed = _go_round(there, own, [*others, *gauge.rotations], steps)
    return [_undo_steps(goal, fixed.work, fixed.steps, ends[0].steps, every)]


def _undo_steps(
    goal: Tensors,
    work: dict[str, Tensor],
    steps: Sequence[tuple[Symmetry, Tensor]],
    there: Sequence[tuple[Symmetry, Tensor]],
    every: Sequence[Symmetry],
) -> _Way:
    """Undo the steps that led the goal to where weights now are, and go round once more."""
    back = [(s, s.kind.inverse(element)) for s, element in reversed(there)]
    for symmetry, element in back:
        act_on(symmetry, element, work)
    return _go_round(goal, work, every, [*steps, *back])


def _go_round(
    goal: Tensors, start: Tensors, every: Sequence[Symmetry], steps: Sequence[tuple[Symmetry, Tensor]]
) -> _Way:
    """Bring one symmetry after the other as near to the goal as it gets, until nothing comes nearer."""
    work, taken = dict(start), list(steps)
    now = distance(goal, work)
    rounds, last, least = 0, float("inf"), 1e-9 * now
    while rounds < ROUNDS and now < last - least:
        rounds, last = rounds + 1, now
        for symmetry in every:
            element = nearest(symmetry, goal, work)
            if element is None:
                continue
            trial = {name: work[name].clone() for name in symmetry.parameters}
            act_on(symmetry, element, trial)
            own_tensors = {name: work[name] for name in trial}
            if distance({n: goal[n] for n in trial}, trial) <= distance({n: goal[n] for n in trial}, own_tensors):
                work |= trial
                taken.append((symmetry, element))
        now = distance(goal, work)
    return _Way(work=work, steps=taken, rounds=rounds)


def _merge(steps: Sequence[tuple[Symmetry, Tensor]]) -> list[tuple[Symmetry, Tensor]]:
    """Return steps, with those along one symmetry that follow each other made one."""
    merged: list[tuple[Symmetry, Tensor]] = []
    for symmetry, element in steps:
        if merged and merged[-1][0] == symmetry:
            merged[-1] = (symmetry, symmetry.kind.compose(element, merged[-1][1]))
        else:
            merged.append((symmetry, element))
    return merged


def distance(a: Tensors, b: Tensors) -> float:
    """Return the Euclidean distance of two collections."""
    return float(torch.stack([(a[name] - b[name]).square().sum() for name in a]).sum().sqrt()) if a else 0.0


def nearest(symmetry: Symmetry, goal: Tensors, work: Tensors) -> Tensor | None:
    """Return the element that brings one symmetry's legs nearest to the goal; None if its kind has none to offer."""
    if symmetry.logarithmic:
        # A scale that is traded for a shift is fixed where representatives meet.
        return None
    return symmetry.kind.nearest_element(symmetry.matrices(goal), symmetry.matrices(work), symmetry.degrees)
