"""Laws through functions without a rule, found by guessing what they are and moving parameters of the real program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from conserved.inference.further_laws.guessed_operations import StandIn, guesses, unknown_operations
from conserved.inference.further_laws.moving_parameters import RunProgram, move_parameters, runs
from conserved.inference.program.captured_program import CapturedProgram
from conserved.laws import LawSet
from conserved.symmetry import Symmetry

Follow = Callable[[Mapping[str, StandIn]], tuple[CapturedProgram, LawSet]]
"""Follows a program with functions standing in for some of its operations."""

_EACH = 64
"""Candidates that are tried one by one, where all of them together are no symmetry."""


def with_probed(
    law_set: LawSet,
    program: CapturedProgram,
    live: list[int],
    follow: Follow,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> LawSet:
    """Return the laws, with those that hold through operations without a rule, as far as moving parameters shows them.

    `unknown` keeps the operations through which nothing was found.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    run = runs(model, args, kwargs)
    laws_here: list[Symmetry] = []
    seen = {_motion(symmetry) for symmetry in law_set}
    explained: set[str] = set()
    for name, operation in unknown_operations(program, live).items():
        for guess in guesses(program, operation):
            try:
                _, laws = follow({name: guess})
                candidates = [symmetry for symmetry in laws if _motion(symmetry) not in seen]
                holding = _holding(run, parameters, candidates)
            except Exception:
                # A guess that does not fit may fail anywhere; the operation stays unknown.
                continue
            if holding:
                explained.add(name)
                seen |= {_motion(symmetry) for symmetry in holding}
                laws_here += [replace(symmetry, source="probed") for symmetry in holding]
                break
    if not laws_here:
        return law_set
    names = {symmetry.name for symmetry in law_set}
    fresh = []
    for symmetry in laws_here:
        part = symmetry.part
        while symmetry.name in names:
            part = f"{part}'"
            symmetry = replace(symmetry, part=part)
        names.add(symmetry.name)
        fresh.append(symmetry)
    unknown = {name: count for name, count in law_set.unknown.items() if name not in explained}
    moved_now = {parameter for symmetry in fresh for parameter in symmetry.parameters}
    return LawSet(
        symmetries=(*law_set.symmetries, *fresh),
        parameters=law_set.parameters,
        unclaimed=law_set.unclaimed,
        dropped=tuple(item for item in law_set.dropped if item.name not in moved_now),
        unknown=unknown,
        derivation=law_set.derivation,
    )


def _motion(symmetry: Symmetry) -> tuple[Any, ...]:
    return (symmetry.kind, frozenset((leg.view.squeezed(), leg.degree) for leg in symmetry.legs))


def _holding(run: RunProgram, parameters: Mapping[str, Tensor], candidates: list[Symmetry]) -> list[Symmetry]:
    """Return the candidates along which the outputs do not move."""
    if not candidates:
        return []
    exact = [symmetry for symmetry in candidates if symmetry.exact]
    if exact and _leave_outputs(run, parameters, exact):
        return exact
    return [symmetry for symmetry in exact[:_EACH] if _leave_outputs(run, parameters, [symmetry])]


def _leave_outputs(run: RunProgram, parameters: Mapping[str, Tensor], symmetries: list[Symmetry]) -> bool:
    """Return whether outputs stay the same along symmetries, at the given parameters and at those divided by their
    largest.
    """
    # Far from zero many functions are nearly homogeneous: softplus is its argument there, and erfcx its reciprocal.
    smaller = {name: value.detach() / _largest(value) for name, value in parameters.items()}
    return (
        bool(move_parameters(run, parameters, symmetries).holds)
        and move_parameters(run, smaller, symmetries).holds is not False
    )


def _largest(value: Tensor) -> float:
    return float(value.detach().abs().max()) or 1.0 if value.numel() else 1.0
