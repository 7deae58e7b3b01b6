"""Choose, among all weights that compute the same function, those that are best for a purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.symmetry import Symmetry
from conserved.transform.activations import Batch, Call, activation_sizes
from conserved.transform.coupling import rotatable
from conserved.transform.elements import composed, identity, inverse
from conserved.transform.finding import symmetries_of
from conserved.transform.incoherent import Incoherent
from conserved.transform.moving import ABOUT_GRADIENTS, ABOUT_LOSS, Moved, Weights, apply, components, notes
from conserved.transform.objectives import Activation, Balanced, Impossible, Objective, Range

OBJECTIVES = ("balanced", "range", "activation", "incoherent")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Equalized:
    """What `equalize` did."""

    objective: str
    moved: Moved
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

    def __str__(self) -> str:
        worst = [max(values.values(), default=0.0) for values in (self.before, self.after)]
        text = f"{self.objective}: {self.moved}; objective {worst[0]:.3g} → {worst[1]:.3g} at worst"
        reasons: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            reasons.setdefault(why, []).append(name)
        return "\n  ".join(
            [text, *(f"{len(names)} left alone ({names[0]}, …): {why}" for why, names in reasons.items())]
        )


def equalize(
    target: nn.Module | Mapping[str, Tensor] | Weights,
    *args: Any,
    objective: str | Objective = "balanced",
    laws: LawSet | Iterable[Symmetry] | None = None,
    batches: Iterable[Batch] | None = None,
    alpha: int | float = 0.5,
    statistic: str = "max",
    approximate: bool = False,
    seed: int = 0,
    **kwargs: Any,
) -> Equalized:
    """Move a model to the best point of its orbit, by what `objective` calls best. Its function stays what it is.

    Args:
        target: a module, moved in place; or a dictionary of tensors, which needs `laws` and stays as it is; or a
            `Checkpoint`, which needs `laws` and writes files.
        *args: example inputs, as the model is called, from which its symmetries are read; not needed with `laws`.
        objective: "balanced" (all laws zero: the smallest norm), "range" (equal ranges of the channels of weights),
            "activation" (scale moved between activations and weights, from `batches`), "incoherent" (random rotations
            of spaces that allow any: heads and, if example inputs are given to probe it with, the residual stream
            after gains are folded into their readers), or an `Objective` of your own.
        laws: the symmetries to move along, for instance those of `conserved.recognize`.
        batches: for "activation", what to run the model on: tensors, tuples of arguments or dictionaries of them.
        alpha: for "activation", the share of the activations' spread that weights take over.
        statistic: for "activation", "max" (SmoothQuant) or "mean" (AWQ).
        approximate: whether to move along symmetries that hold only up to a norm's ε.
        seed: of random rotations.
        **kwargs: more example inputs, by name.

    Returns:
        An `Equalized`: the move, the objective of every symmetry before and after, and what was left alone and why.

    """
    known = _symmetries(target, laws, args, kwargs)
    name, chooser = _objective(objective, target, batches, alpha, statistic, seed)
    if isinstance(chooser, Incoherent) and isinstance(target, nn.Module) and (args or kwargs):
        spaces, folds = rotatable(target, Call(args, kwargs), LawSet(symmetries=tuple(known)))
        known += spaces
        chooser = Incoherent(seed, folds)
    skipped = {s.name: why for s in known if (why := _left_alone(s, approximate=approximate))}
    usable = [symmetry for symmetry in known if symmetry.name not in skipped]
    named = laws.parameters if isinstance(laws, LawSet) else ()
    weights = target if isinstance(target, Weights) else Weights(target, named)
    # A common shift of what is scaled later stays zero; the other way round it would not.
    usable.sort(key=lambda symmetry: not symmetry.kind.linear)
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    values: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    totals: dict[Symmetry, Tensor] = {}
    most = 0
    for group in components([(symmetry, torch.empty(0)) for symmetry in usable]):
        members = [symmetry for symmetry, _ in group]
        try:
            for symmetry in members:
                for parameter in symmetry.parameters:
                    weights.movable(parameter, symmetry)
        except ValueError as problem:
            skipped |= {symmetry.name: str(problem) for symmetry in members}
            continue
        work = {p: weights.read(p) for p in dict.fromkeys(p for s in members for p in s.parameters)}
        with torch.no_grad():
            start = {s.name: (chooser.value(s, work), s.law(work)) for s in members}
            elements, rounds = _go_round(members, chooser, work, skipped)
            most = max(most, rounds)
            for symmetry in elements:
                before[symmetry.name], values[0][symmetry.name] = start[symmetry.name]
                after[symmetry.name], values[1][symmetry.name] = chooser.value(symmetry, work), symmetry.law(work)
            totals |= elements
        touched = {p for symmetry in elements for p in symmetry.parameters}
        weights.write({name: tensor for name, tensor in work.items() if name in touched})
    moved = Moved(
        moved=tuple(symmetry.name for symmetry in totals),
        inverse={symmetry: inverse(symmetry.kind, element) for symmetry, element in reversed(totals.items())},
        before=values[0],
        after=values[1],
        parameters=tuple(weights.written),
        notes=tuple(notes(totals)),
        state=weights.state,
    )
    return Equalized(objective=name, moved=moved, before=before, after=after, skipped=skipped, sweeps=most)


def _symmetries(target: Any, laws: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Symmetry]:
    if laws is not None:
        return list(laws.symmetries if isinstance(laws, LawSet) else laws)
    if not isinstance(target, nn.Module):
        raise ValueError("Of a dictionary of weights the symmetries are not known: pass laws=conserved.recognize(…).")
    return list(symmetries_of(target, *args, **kwargs).symmetries)


def _objective(
    objective: str | Objective, target: Any, batches: Any, alpha: int | float, statistic: str, seed: int
) -> tuple[str, Objective]:
    if isinstance(objective, Objective):
        return type(objective).__name__.lower(), objective
    if objective == "balanced":
        return objective, Balanced()
    if objective == "range":
        return objective, Range()
    if objective == "incoherent":
        return objective, Incoherent(seed)
    if objective != "activation":
        raise ValueError(f"Unknown objective {objective!r}; expected one of {', '.join(OBJECTIVES)}.")
    if batches is None or not isinstance(target, nn.Module):
        raise ValueError('objective="activation" needs a model and batches= to run it on.')
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha lies between 0 (weights decide) and 1 (activations decide); got {alpha}.")
    return objective, Activation(activation_sizes(target, batches, statistic=statistic), alpha)


def _left_alone(symmetry: Symmetry, *, approximate: bool) -> str:
    if symmetry.family in ABOUT_GRADIENTS:
        return "it says that a gradient is zero, not that the function does not see these entries"
    if symmetry.family in ABOUT_LOSS:
        return "it changes outputs, though not the loss"
    if not symmetry.exact and not approximate:
        return "it holds up to a norm's ε only; approximate=True moves it"
    return ""


def _go_round(
    members: Sequence[Symmetry], chooser: Objective, work: dict[str, Tensor], skipped: dict[str, str]
) -> tuple[dict[Symmetry, Tensor], int]:
    """Move each symmetry to its best point in turn, until nothing moves."""
    totals: dict[Symmetry, Tensor] = {}
    active = list(members)
    rounds, furthest = 0, 1.0
    while rounds < chooser.sweeps and furthest >= chooser.settled:
        rounds, furthest = rounds + 1, 0.0
        for symmetry in list(active):
            try:
                element = chooser.element(symmetry, work)
            except Impossible as problem:
                element = None
                skipped[symmetry.name] = str(problem)
            if element is None:
                active.remove(symmetry)
                skipped.setdefault(symmetry.name, "the objective has nothing to say about it")
                continue
            element = element.cpu()
            one = identity(symmetry)
            size = (1 + element.abs().max()) if symmetry.kind.linear else torch.tensor(1.0)
            furthest = max(furthest, float((element - one).abs().max() / size))
            apply(symmetry, element, work)
            totals[symmetry] = composed(symmetry.kind, element, totals.get(symmetry, one))
    for symmetry in totals:
        skipped.pop(symmetry.name, None)
    return totals, rounds
