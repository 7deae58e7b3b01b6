r"""Decide laws up to ε by replaying the pass: what ε leaves of them is measured at the norms, and not assumed.

The identity of such a law is μ(θ, G) = R with R = Σ_t c ε/(s_t + ε) ⟨y_t, ∂L/∂y_t⟩ (`epsilon_terms`). Without R its
residual is held against √ε, which says little where norms divide by small numbers. A replay gives R for its own
gradients A, and f R for gradients G = f A. A second replay, of scaled output gradients, samples the rounding of μ − R.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from conserved.auditing.backward_pass import BackwardPass
from conserved.auditing.diagnosis import MEANING, Diagnosis, Origin, place_of
from conserved.auditing.epsilon_terms import EpsilonTerms, RightHandSide
from conserved.auditing.noise import suspicious
from conserved.auditing.reference_comparison import common_factor
from conserved.auditing.reference_form import wide_forms
from conserved.auditing.replay import SCALE, Replay
from conserved.laws.identities import coarsest
from conserved.moment import Direction, Plan, Point, to_host
from conserved.symmetry import Tensors
from conserved.tolerances import HALF, SIGMAS

LOGGER = logging.getLogger("conserved.audit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResidual:
    """The relative residual of a law up to ε with what ε leaves of it subtracted, and where it comes from."""

    residual: float
    limit: float
    diagnosis: Diagnosis


def decide_up_to_epsilon(
    backward: BackwardPass,
    indices: Sequence[int],
    floors: NDArray[np.float64],
    scales: NDArray[np.float64],
    replay: Replay,
    precision: torch.dtype,
) -> dict[int, ExactResidual]:
    """Replay the pass and return the exact residuals of laws up to ε, by place; none where norms were not understood.

    Args:
        backward: the pass.
        places: which of its laws.
        floors: the relative residual that rounding may leave of each of them.
        scales: the size of the terms of each of them.
        replay: the pass, to be run again.
        precision: the coarsest precision of the pass.
    """
    assert backward.gradients is not None
    some = [backward.laws.symmetries[index] for index in indices]
    names = {symmetry.name for symmetry in some}
    terms = EpsilonTerms(backward.model, backward.laws.select(lambda symmetry: symmetry.name in names))
    if not len(terms):
        return {}
    plan = Plan.of(some, kernels=False)
    wanted = {name: backward.points[name] for name in plan.needs}
    try:
        own, sides = terms.replayed(replay, wanted)
        scaled, others = terms.replayed(replay, wanted, scale=SCALE)
        known = [number for number, symmetry in enumerate(some) if symmetry.name in sides and symmetry.name in others]
        if not known:
            return {}
        factor = common_factor(backward.gradients, own)
        # What is left, for the gradients in .grad, for those of the pass run again, and with scaled output gradients.
        given = _left(plan, wanted, backward.gradients, sides, factor)
        again, twice = _left(plan, wanted, own, sides), _left(plan, wanted, scaled, others)
    except Exception as problem:
        # The one boundary to the user's program: it may refuse to run a second time, or run out of memory.
        LOGGER.info("laws up to ε were not decided by a replay: %s", problem)
        return {}
    decisions = {}
    for number in known:
        side = sides[some[number].name]
        size = math.hypot(scales[number] / abs(factor or 1.0), float(np.linalg.norm(side.value)), side.spread**0.5)
        noise = float(np.linalg.norm(again[number] - twice[number])) / math.sqrt(2) / size
        limit = max(float(floors[number]), SIGMAS * noise)
        residual = float(np.linalg.norm(given[number])) / size / abs(factor or 1.0)
        repeated = float(np.linalg.norm(again[number])) / size
        origin = Origin.ROUNDING
        if not residual <= limit:
            # Gradients that satisfy the identity when they are computed again were changed or corrupted.
            origin = Origin.TRANSIENT if repeated <= limit else Origin.PROGRAM
        decisions[indices[number]] = (residual, repeated, limit, origin)
    return _explained(decisions, indices, terms, plan, wanted, scales, replay, precision)


def _explained(
    decisions: dict[int, tuple[float, float, float, Origin]],
    indices: Sequence[int],
    terms: EpsilonTerms,
    plan: Plan,
    wanted: Tensors,
    scales: NDArray[np.float64],
    replay: Replay,
    precision: torch.dtype,
) -> dict[int, ExactResidual]:
    """Run what stays broken in higher precision, and put every residual into words."""
    rest = {index for index, (*_, origin) in decisions.items() if origin is Origin.PROGRAM}
    precise: set[int] = set()
    for form in wide_forms(precision) if rest else ():
        try:
            gradients, sides = terms.replayed(replay, wanted, form=form)
            remaining = _left(plan, wanted, gradients, sides)
        except Exception as problem:
            LOGGER.info("replay as %s failed: %s", form, problem)
            continue
        stored = coarsest(*(p.dtype for p in wanted.values()))
        floor = suspicious(stored if stored in HALF else torch.float32, plan.entries)
        for number, index in enumerate(indices):
            if index in rest and plan.symmetries[number].name in sides:
                residual = float(np.linalg.norm(remaining[number])) / scales[number]
                if residual <= max(float(floor[number]), decisions[index][1] / _SHRINKS):
                    precise.add(index)
    words = {"precision": str(precision).removeprefix("torch."), "where": place_of(next(iter(wanted.values())))}
    answers = {}
    for index, (residual, _, limit, origin) in decisions.items():
        origin = Origin.PRECISION if index in precise else origin
        message = MEANING[origin].format(kernel="", reason="", **words)
        answers[index] = ExactResidual(
            residual=residual, limit=limit, diagnosis=Diagnosis(origin=origin, limit=limit, message=message)
        )
    return answers


_SHRINKS = 8.0
"""Factor by which a residual of rounding shrinks in higher precision, at least; a defect does not shrink at all."""


def _left(
    plan: Plan, theta: Tensors, gradients: Tensors, sides: dict[str, RightHandSide], factor: float = 1.0
) -> list[NDArray[np.float64]]:
    """Return μ(θ, G) less what ε leaves of it, for every law."""
    points = {name: parameter.detach() for name, parameter in theta.items()}
    with torch.no_grad():
        moments = plan.evaluate((Point(points), Direction({n: gradients[n] for n in plan.needs})), [(0, 1)]).values()
    residuals = []
    for symmetry, mu in zip(plan.symmetries, to_host(moments), strict=True):
        side = sides.get(symmetry.name)
        residuals.append(mu.flatten() - (0.0 if side is None else factor * side.value))
    return residuals
