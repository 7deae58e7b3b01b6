"""Predictions of theory for a whole run, compared with the run.

- Equation (9) of the paper: |h(θ_k) − h(θ_0)| ≤ (C_h C_L / 2) Σ τ_i² for (stochastic) gradient descent. C_h bounds the
  curvature of the law, which for the entries of μ(θ, θ) is twice the largest degree of a leg (and zero for a linear
  law); C_L bounds ‖∇L‖² over the law's legs and is estimated by its largest value in the run.
- Weight decay λ: h(t) = e^{−2λt} h(0) with t = Σ τ_i, up to the discretisation that the ledger accounts for.
- Heavy-ball momentum: for an antisymmetric generator the angular momentum A_k = anti μ(θ_k, b_k) of the parameters with
  their momentum buffers obeys A_{k+1} = m A_k **exactly**, at any step size: b_{k+1} = m b_k + (1 − d)(g_k + λθ_k) and
  θ_{k+1} = θ_k − τ b_{k+1}, so A_{k+1} = anti μ(θ_k, b_{k+1}) because anti μ(b, b) = 0, and there the gradient drops
  out by the identity and λθ by antisymmetry. A_k / m^k is Noether's exponentially weighted angular momentum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from conserved.laws import LawSet
from conserved.moment import Direction, Magnitudes, Point
from conserved.symmetry import Tensors
from conserved.tracking.kept_account import RunningTotals
from conserved.tracking.ledger import Ledger
from conserved.tracking.optimizer_watch import OptimizerWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftBound:
    """Equation (9) for one law; `applies` says whether the optimizer is the one it is a theorem about."""

    law: str
    curvature: float
    """C_h."""
    steepness: float
    """C_L, as seen in the run."""
    square_steps: float
    """Σ τ_i²."""
    bound: float
    second_order: float
    """C_h/2 Σ ‖U_i‖²: the same bound with the updates the optimizer really made, for the second-order part."""
    observed: float
    predicted: float
    """The change that the exact account adds up to."""
    applies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """The share of a law that weight decay leaves: e^{−2 Σ τλ}, and ⟨h, h_0⟩/⟨h_0, h_0⟩; for a linear law e^{−Σ τλ}."""

    law: str
    time: float
    decayed: float
    """Σ τ_i λ."""
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AngularMomentum:
    """The size of a law's angular momentum at the start and now, and the factor Π m_i between them."""

    law: str
    start: float
    now: float
    factor: float
    error: float
    """‖A_k − factor · A_0‖ over the size the terms of A_k have."""


Momenta = Mapping[str, tuple[Tensor, Tensor]]
"""By law, the angular momentum and the size of the terms it is made of."""


def drift_bounds(
    ledger: Ledger, running: list[RunningTotals], watch: OptimizerWatch, impostors: Collection[str]
) -> list[DriftBound]:
    """Return equation (9) for every law, in the order of the laws."""
    bounds: dict[int, DriftBound] = {}
    for stack, account in zip(ledger.stacks, running, strict=True):
        observed = (account.previous - account.reference).abs().amax(-1).tolist()
        predicted = account.accounted.abs().amax(-1).tolist()
        for row, index in enumerate(stack.indices):
            symmetry = ledger.symmetries[index]
            curvature = 0.0 if symmetry.kind.linear else 2.0 * max(abs(degree) for degree in symmetry.degrees)
            squares = max(float(watch.sums_of(name).squares) for name in symmetry.parameters)
            steepness, moved = float(account.steepest[row]), float(account.moved[row])
            bounds[index] = DriftBound(
                law=symmetry.name,
                curvature=curvature,
                steepness=steepness,
                square_steps=squares,
                bound=curvature * steepness * squares / 2,
                second_order=curvature * moved / 2,
                observed=observed[row],
                predicted=predicted[row],
                applies=symmetry.exact
                and symmetry.name not in impostors
                and all(watch.descends_plainly(name) for name in symmetry.parameters),
            )
    return [bounds[index] for index in sorted(bounds)]


def decays(ledger: Ledger, running: list[RunningTotals], watch: OptimizerWatch) -> list[Decay]:
    """Return the decay law for every law whose legs decay alike, by a rate that is known, in the order of the laws."""
    by_place: dict[int, Decay] = {}
    for stack, account in zip(ledger.stacks, running, strict=True):
        weights = stack.kind.products.multiplicities(stack.n, stack.m).to(account.reference)
        size = (weights * account.reference.square()).sum(-1)
        share = ((weights * account.reference * account.previous).sum(-1) / size).tolist()
        for index, share_left in zip(stack.indices, share, strict=True):
            symmetry = ledger.symmetries[index]
            sums = [watch.sums_of(name) for name in symmetry.parameters]
            decayed = {float(sums_of_group.decayed) for sums_of_group in sums}
            total = decayed.pop()
            if not decayed and not math.isnan(total):
                predicted = math.exp(-total if stack.kind.linear else -2 * total)
                by_place[index] = Decay(
                    law=symmetry.name, time=float(sums[0].time), decayed=total, predicted=predicted, observed=share_left
                )
    return [by_place[index] for index in sorted(by_place)]


def momenta(
    laws: LawSet, theta: Tensors, watch: OptimizerWatch, dtype: torch.dtype | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return a = anti μ(θ, b) and the size of its terms, for every law all of whose legs have momentum buffers."""
    buffers = {name: buffer for name in theta if (buffer := watch.buffer_of(name)) is not None}
    turning = laws.select(lambda s: all(name in buffers for name in s.parameters))
    sources = Point(theta), Direction(buffers)
    with torch.no_grad():
        values, bounds = (
            turning.plan.evaluate(read, [(0, 1)], dtype=dtype).values()
            for read in (sources, [Magnitudes(source) for source in sources])
        )
        return {
            symmetry.name: (part, torch.linalg.vector_norm(bound))
            for symmetry, value, bound in zip(turning, values, bounds, strict=True)
            if (part := symmetry.kind.products.rotation(value)) is not None
        }


def angular_momenta(laws: LawSet, start: Momenta, now: Momenta, watch: OptimizerWatch) -> list[AngularMomentum]:
    """Return every angular momentum against what A_k = A_0 Π m_i makes of its start; a run begins with none."""
    norm = torch.linalg.vector_norm
    result = []
    for name, (value, size) in now.items():
        first = start[name][0].to(value) if name in start else torch.zeros_like(value)
        factor = float(watch.sums_of(laws[name].parameters[0]).damped)
        result.append(
            AngularMomentum(
                law=name,
                start=float(norm(first)),
                now=float(norm(value)),
                factor=factor,
                error=float(norm(value - factor * first)) / float(size) if float(size) else 0.0,
            )
        )
    return result
