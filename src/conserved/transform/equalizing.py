"""Choose, among all weights that compute the same function, those that are best for a purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.output.result import PrintableResult
from conserved.symmetry import NoBestPointError, Symmetry, UnmovableError
from conserved.transform.activations import Call, ModelInput, channel_sizes
from conserved.transform.coupling import rotatable
from conserved.transform.finding import as_a_function, symmetries_of
from conserved.transform.incoherent import IncoherentObjective
from conserved.transform.moving import (
    ABOUT_GRADIENTS,
    MovedWeights,
    Weights,
    act_on,
    notes,
    sharing_tensors,
)
from conserved.transform.objectives import BalancedObjective, Objective, Range
from conserved.transform.smoothing import Activation, check_smoothing

OBJECTIVES = ("balanced", "range", "activation", "incoherent")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Equalization(PrintableResult):
    """The result of `equalize`: the move, and the objective before and after."""

    objective: str
    moved: MovedWeights
    """The elements it chose, as one move: `.inverse` undoes it, `.before` and `.after` are the laws."""
    before: dict[str, float]
    """The objective of every symmetry before, and `after`."""
    after: dict[str, float]
    skipped: dict[str, str]
    """Symmetries that were left alone, and why."""
    sweeps: int
    """How often all symmetries of a group were gone round, at the most."""

    @property
    def state(self) -> dict[str, Tensor]:
        """The moved weights, where a dictionary was given."""
        return self.moved.state

    def __repr__(self) -> str:
        return f"<Equalization: {self.objective}, {self.moved.count}>"

    def summary(self) -> str:
        """Return what was done, and what was left alone, as text."""
        worst = [max(values.values(), default=0.0) for values in (self.before, self.after)]
        text = f"{self.objective}: {self.moved.count}; objective {worst[0]:.3g} → {worst[1]:.3g} at worst"
        reasons: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            reasons.setdefault(why, []).append(name)
        untouched = [
            f"{len(names)} left alone ({names[0]}{', …' if len(names) > 1 else ''}): {why}"
            for why, names in reasons.items()
        ]
        return "\n  ".join([text, *self.moved.notes, *untouched])


def equalize(
    target: nn.Module | Mapping[str, Tensor] | Weights,
    *args: Any,
    objective: str | Objective = "balanced",
    laws: LawSet | Iterable[Symmetry] | None = None,
    batches: Iterable[ModelInput] | None = None,
    alpha: int | float = 0.5,
    statistic: str = "max",
    spaces: str = "predicted",
    rounded: str = "any",
    approximate: bool = False,
    seed: int = 0,
    **kwargs: Any,
) -> Equalization:
    """Move a model to the best point of its orbit, by the `objective`. Its function stays the same.

    Args:
        target: a module, moved in place; or a dictionary of tensors, which needs `laws` and stays as it is; or a
            `Checkpoint`, which needs `laws` and writes files.
        *args: example inputs, as the model is called, from which its symmetries are read; not needed with `laws`.
        objective: "balanced" (all laws zero: the smallest norm), "range" (equal ranges of the channels of weights),
            "activation" (scale moved between activations and weights, from `batches`), "incoherent" (random rotations
            of spaces that allow any: heads and, if example inputs are given to probe it with, the residual stream after
            gains are folded into their readers), or an `Objective` of your own.
        laws: the symmetries to move along, for instance those of `conserved.recognize`.
        batches: for "activation", batches to run the model on: tensors, tuples of arguments or dictionaries of them.
        alpha: for "activation", the share of the activations' spread that weights take over.
        statistic: for "activation", "max" (SmoothQuant) or "mean" (AWQ).
        spaces: for "activation", which channels to scale: "predicted" (channels that gains make, and channels between
            two weights where rounding is predicted to get less noisy), "gains" (as SmoothQuant), or "all".
        rounded: for "activation", which tensors will be rounded, for the prediction: "weights", "both" for weights and
            the activations they read, or "any" where that is not known, so that neither gets noisier.
        approximate: whether to move along symmetries that hold only up to a norm's ε.
        seed: the seed of random rotations.
        **kwargs: more example inputs, by name.

    Returns:
        An `Equalization`: the move, the objective of every symmetry before and after, and the symmetries left alone and
        why.

    Raises:
        ValueError: an option is another word, the target is no module and has no laws, or "activation" has no batches.
        UnmovableError: a moved number leaves the range of its precision.
    """
    known = _symmetries(target, laws, args, kwargs)
    name, chooser = _objective(
        objective, target, batches, seed, alpha=alpha, statistic=statistic, spaces=spaces, rounded=rounded
    )
    if isinstance(chooser, IncoherentObjective) and isinstance(target, nn.Module) and (args or kwargs):
        streams, folds = rotatable(target, Call(args, kwargs), LawSet(symmetries=tuple(known)))
        known += streams
        chooser = IncoherentObjective(seed, folds)
    skipped = {s.name: why for s in known if (why := _untouched_names(s, chooser, approximate=approximate))}
    # A common shift of what is scaled later stays zero; the other way round it would not.
    usable = sorted(
        (symmetry for symmetry in known if symmetry.name not in skipped),
        key=lambda symmetry: (not symmetry.kind.linear, chooser.rank(symmetry)),
    )
    named = laws.parameters if isinstance(laws, LawSet) else ()
    weights = target if isinstance(target, Weights) else Weights(target, named)
    with weights.complete():
        groups = [
            _together([symmetry for symmetry, _ in group], chooser, weights, skipped)
            for group in sharing_tensors([(symmetry, torch.empty(0)) for symmetry in usable])
        ]
    totals = {symmetry: element for group in groups for symmetry, element in group.elements.items()}
    moved = MovedWeights(
        moved=tuple(symmetry.name for symmetry in totals),
        inverse={symmetry: symmetry.kind.inverse(element) for symmetry, element in reversed(totals.items())},
        before={name: law for group in groups for name, law in group.laws[0].items()},
        after={name: law for group in groups for name, law in group.laws[1].items()},
        parameters=tuple(weights.written),
        notes=tuple(notes(totals)),
        state=weights.state,
    )
    return Equalization(
        objective=name,
        moved=moved,
        before={name: value for group in groups for name, value in group.values[0].items()},
        after={name: value for group in groups for name, value in group.values[1].items()},
        skipped=skipped,
        sweeps=max((group.sweeps for group in groups), default=0),
    )


def _symmetries(target: Any, laws: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Symmetry]:
    if laws is not None:
        return list(laws.symmetries if isinstance(laws, LawSet) else laws)
    if not isinstance(target, nn.Module):
        raise ValueError("Expected laws for a dictionary of weights, got none. Pass laws=conserved.recognize(…).")
    return list(symmetries_of(target, *args, **kwargs).symmetries)


def _objective(
    objective: str | Objective, target: Any, batches: Any, seed: int, **smoothing: Any
) -> tuple[str, Objective]:
    if isinstance(objective, Objective):
        return type(objective).__name__.lower(), objective
    if objective == "balanced":
        return objective, BalancedObjective()
    if objective == "range":
        return objective, Range()
    if objective == "incoherent":
        return objective, IncoherentObjective(seed)
    if objective != "activation":
        raise ValueError(
            f"Expected objective to be one of {', '.join(OBJECTIVES)}, got {objective!r}. Pass one of them."
        )
    if batches is None or not isinstance(target, nn.Module):
        raise ValueError('Expected a model and batches= for objective="activation", got none. Pass both.')
    check_smoothing(**smoothing)
    with as_a_function(target):
        return objective, Activation(channel_sizes(target, batches), **smoothing)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """The outcome for symmetries that share tensors; pairs are before and after, by name."""

    elements: dict[Symmetry, Tensor]
    values: tuple[dict[str, float], dict[str, float]]
    laws: tuple[dict[str, Tensor], dict[str, Tensor]]
    sweeps: int


def _together(members: Sequence[Symmetry], chooser: Objective, weights: Weights, skipped: dict[str, str]) -> _Group:
    """Read the tensors of a group, move them to their best point, and write those that moved."""
    try:
        for symmetry in members:
            for parameter in symmetry.parameters:
                weights.movable(parameter, symmetry)
    except UnmovableError as problem:
        return _refusal(members, problem, skipped)
    with torch.no_grad():
        names = dict.fromkeys(p for s in members for p in s.parameters)
        work = {name: weights.read(name, chooser.precision) for name in names}
        start = {s.name: chooser.value(s, work) for s in members}
        elements, sweeps = _go_round(members, chooser, work, skipped)
        end = {s.name: chooser.value(s, work) for s in elements}
        work.clear()
        work |= {name: weights.read(name) for s in elements for name in s.parameters if name not in work}
        before = {s.name: s.law(work) for s in elements}
        for symmetry, element in elements.items():
            act_on(symmetry, element, work)
        after = {s.name: s.law(work) for s in elements}
    try:
        weights.write(work)
    except UnmovableError as problem:
        return _refusal(members, problem, skipped)
    return _Group(
        elements=elements,
        values=({name: start[name] for name in end}, end),
        laws=(before, after),
        sweeps=sweeps,
    )


def _refusal(members: Sequence[Symmetry], problem: UnmovableError, skipped: dict[str, str]) -> _Group:
    """Return a group that stays as it is, and why."""
    skipped |= {symmetry.name: str(problem) for symmetry in members}
    return _Group(elements={}, values=({}, {}), laws=({}, {}), sweeps=0)


def _untouched_names(symmetry: Symmetry, chooser: Objective, *, approximate: bool) -> str:
    if not symmetry.kind.movable:
        return symmetry.kind.undefined()
    if symmetry.logarithmic:
        return "it trades a scale for a shift, which no objective weighs"
    if symmetry.family in ABOUT_GRADIENTS:
        return "it says that a gradient is zero, not that the function does not see these entries"
    if symmetry.of_loss:
        return "it changes outputs, though not the loss"
    if not symmetry.exact and not approximate:
        return "it holds up to a norm's ε only; approximate=True moves it"
    return "" if chooser.applies(symmetry) else "the objective has nothing to say about it"


def _go_round(
    members: Sequence[Symmetry], chooser: Objective, work: dict[str, Tensor], skipped: dict[str, str]
) -> tuple[dict[Symmetry, Tensor], int]:
    """Move each symmetry to its best point in turn, until nothing moves."""
    totals: dict[Symmetry, Tensor] = {}
    active = list(members)
    rounds, furthest = 0, 1.0
    while rounds < chooser.sweeps and furthest >= chooser.tolerance:
        rounds, furthest = rounds + 1, 0.0
        for symmetry in list(active):
            try:
                element = chooser.element(symmetry, work)
            except NoBestPointError as problem:
                element = None
                skipped[symmetry.name] = str(problem)
            if element is None:
                active.remove(symmetry)
                skipped.setdefault(symmetry.name, "the objective has nothing to say about it")
                continue
            element = element.cpu()
            identity = symmetry.kind.identity(symmetry.n, symmetry.m)
            size = (1 + element.abs().max()) if symmetry.kind.linear else torch.tensor(1.0)
            furthest = max(furthest, float((element - identity).abs().max() / size))
            act_on(symmetry, element, work)
            chooser.applied(symmetry, element)
            totals[symmetry] = symmetry.kind.compose(element, totals.get(symmetry, identity))
    for symmetry in totals:
        skipped.pop(symmetry.name, None)
    return totals, rounds
