"""The exact account of a run of gradient descent: what each step adds to every law at second order, and at first.

A step θ' = θ − τG changes a law by Δh = τ² μ(G, G) − τ (μ(θ, G) + μ(G, θ)). The second part is zero for the gradient of
the model; for a gradient computed with rounding it is not, and its sum is the *leak* of a run. Both sums are kept in
float64 at every step, so h(θ_k) − h(θ_0) − Σ τ_i² μ(G_i, G_i) − leak is rounding of float64, whatever gradients were
computed in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from conserved.laws import LawSet
from conserved.moment import Direction, LawPairs, Point

_PRECISION = torch.float64

PARTS = ("predicted", "leak", "apart", "residual")


class RunLedger:
    """Sums over the steps of a run, for all numbers of all laws in a row."""

    def __init__(self, laws: LawSet, theta: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """Start at parameters and gradients whose tensors stay in memory while their values change."""
        self.laws, self.theta = laws, theta
        # All legs of one shape are read at once, however large: few kernels count more than a copy here.
        self.plan = replace(laws.plan, small=sys.maxsize)
        self._point, self._direction = Point(theta), Direction(grads)
        self.start = self.values()
        self.second = torch.zeros_like(self.start)
        self.first = torch.zeros_like(self.start)
        self.places = self._places()
        self.scales = {
            family: float(torch.linalg.vector_norm(self._sizes()[places])) for family, places in self.places.items()
        }

    def values(self) -> Tensor:
        """Return h(θ) of all laws."""
        return self._vector(self.plan.evaluate([self._point], LawPairs([(0, 0)]), dtype=_PRECISION).values())

    def _sizes(self) -> Tensor:
        return torch.cat([s.flatten() for s in self.laws.reference(self.theta, dtype=_PRECISION).scales.values()])

    def _vector(self, result: list[Tensor]) -> Tensor:
        return torch.cat([value.flatten() for value in result])

    def _places(self) -> dict[str, Tensor]:
        """Return which numbers belong to each family."""
        counts = [value.numel() for value in self.laws.values(self.theta, dtype=_PRECISION).values()]
        listed: dict[str, list[Tensor]] = {}
        begin = 0
        for symmetry, count in zip(self.laws, counts, strict=True):
            listed.setdefault(symmetry.family, []).append(torch.arange(begin, begin + count))
            begin += count
        return {family: torch.cat(parts).to(self.start.device) for family, parts in listed.items()}

    def add(self, rate: float) -> None:
        """Take a step of this size into account, before it is made."""
        sources, pairs = (self._point, self._direction), LawPairs([(0, 1), (1, 0), (1, 1)])
        with torch.no_grad():
            result = self.plan.evaluate(sources, pairs, dtype=_PRECISION)
            first, mirror, second = (self._vector(result.values(pair)) for pair in range(3))
            self.second += rate * rate * second
            self.first -= rate * (first + mirror)

    def measured(self) -> dict[str, dict[str, float]]:
        """Return by family the norm of every part over that of the laws' terms, and of the change itself as "drift"."""
        change = self.values() - self.start
        parts = {
            "drift": change,
            "predicted": self.second,
            "leak": self.first,
            "apart": change - self.second,
            "residual": change - self.second - self.first,
        }
        return {
            family: {
                name: float(torch.linalg.vector_norm(part[indices])) / (self.scales[family] or 1.0)
                for name, part in parts.items()
            }
            for family, indices in self.places.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run needs."""
        return {"start": self.start, "second": self.second, "first": self.first}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from sums that were saved."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
