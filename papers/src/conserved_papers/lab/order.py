"""The order test: what halving the step size does to a drift tells a law from an impostor.

Gradient descent with step τ follows the flow for a time T = τk. At fixed T a quadratic law drifts by
τ² Σ μ(G, G) ∝ τ, so the drift halves with τ; a linear law stays at rounding; anything that the flow does
not conserve drifts by an amount that does not depend on τ.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conserved.laws import LawSet, Reference
from conserved_papers.lab.fits import exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """One run of gradient descent: its step size, and the relative drift by family."""

    step: float
    drift: dict[str, float]


def descend(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    watched: Callable[[nn.Module], LawSet],
    *,
    step: float,
    time: float,
) -> Descent:
    """Follow the gradient of `loss` from a copy of `model` for a flow time, watching laws against their terms."""
    model = copy.deepcopy(model)
    laws = watched(model)
    reference = laws.reference(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    for _ in range(max(1, round(time / step))):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return Descent(step=step, drift=relative_drift(laws, reference))


def relative_drift(laws: LawSet, reference: Reference) -> dict[str, float]:
    """Return the change of all laws of a family together, over the size of the terms they are made of.

    Unlike the mean of ratios in equation (10) this is not swayed by single laws that start near zero.
    """
    current = laws.values(dtype=torch.float64)
    change: dict[str, float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)
    for symmetry in laws:
        difference = current[symmetry.name] - reference.values[symmetry.name]
        change[symmetry.family] += float(difference.square().sum())
        size[symmetry.family] += float(reference.scales[symmetry.name].square().sum())
    return {family: math.sqrt(change[family] / size[family]) if size[family] else 0.0 for family in change}


def drift_orders(runs: Sequence[Descent]) -> dict[str, float]:
    """Return the exponent p of drift ∝ τ^p for each family, by least squares over runs of different steps."""
    steps = [run.step for run in runs]
    return {family: exponent(steps, [run.drift[family] for run in runs]) for family in runs[0].drift}
