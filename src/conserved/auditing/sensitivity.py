r"""How small an error of a gradient an audit would have seen.

A factor 1 + s on the gradient of one leg ℓ changes an identity by s ‖t_ℓ‖, where t_ℓ is the term of that leg in
μ(θ, G) = Σ_ℓ t_ℓ. It exceeds the limit L (relative to the scale S of the identity) from

    s = L S / ‖t_ℓ‖

on. An error in a part of a leg counts in proportion to that part of the term: one row of a thousand is not seen at the
size at which the whole is. An identity of one leg (a sum over classes, a bias without gradient) does not see a factor:
its term is zero when the gradient is right. It sees an error in its own directions only, and s is relative to the
gradient's norm there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conserved.moment import Direction, Plan, Point
from conserved.plain_data import record_of
from conserved.symmetry import Symmetry, Tensors

STATED = 0.1
"""An error of this share of a leg must be visible for the leg to count as tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The smallest relative error of one leg that would have been refuted: of every law, by family, and the worst."""

    laws: Mapping[str, float]
    """By name of a law of several legs, for its least visible leg among those tested; infinite if none is.

    A leg is not tested if its gradient could be lost, s = −1, and the identity would still hold: a bias that is zero
    has no term. Coverage does not count its entries.
    """
    families: Mapping[str, float]
    """The median over these laws of a family."""
    legs: Mapping[tuple[str, str], float]
    """By law and parameter."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """The median over the laws of one leg of a family: relative to the gradient, for errors in their own directions.

    A wrong factor is not among them: a sum that should be zero is zero however it is multiplied.
    """

    @property
    def typical(self) -> float:
        """The median over tested laws of several legs; infinite without any."""
        values = [*self.laws.values()]
        return float(np.median(values)) if values else float("inf")

    @property
    def worst(self) -> float:
        """The largest over tested laws of several legs."""
        return max(self.laws.values(), default=float("inf"))

    def renamed(self, names: Mapping[str, str]) -> Sensitivity:
        """Return the same with legs by other names of their parameters, where `names` has one."""
        legs: dict[tuple[str, str], float] = {}
        for (law, parameter), size in self.legs.items():
            key = law, names.get(parameter, parameter)
            legs[key] = max(legs.get(key, 0.0), size)
        return replace(self, legs=legs)

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return record_of(self, "typical worst families sums laws")

    def __repr__(self) -> str:
        return f"<Sensitivity: typically {in_percent(self.typical)}, at worst {in_percent(self.worst)}>"

    def __str__(self) -> str:
        if not self.laws and not self.sums:
            return "nothing was tested"
        text = "no factor on a leg would have been seen"
        if self.laws:
            text = f"errors above {in_percent(self.typical)} of a leg would have been seen ({_listed(self.families)})"
        return f"{text}; in the directions of sums alone: {_listed(self.sums)}" if self.sums else text


def _listed(families: Mapping[str, float]) -> str:
    return ", ".join(f"{family} {in_percent(value)}" for family, value in families.items())


def of_legs(plan: Plan, theta: Tensors, gradients: Tensors) -> NDArray[np.float64]:
    """Return ‖t_ℓ‖ for every leg of every symmetry of a plan, one after the other.

    A symmetry of one leg has the norm of its gradient there instead: see above.
    """
    legs = plan.legs_alone
    if not legs.symmetries:
        return np.zeros(0)
    with torch.no_grad():
        moments = legs.evaluate((Point(theta), Direction(gradients)), [(0, 1)], sizes=True)
        indices, tables = moments.sizes()
        table = torch.cat([part.double().to(tables[0].device) for part in tables]).cpu().numpy()
    sizes = np.empty((len(legs.symmetries), 2))
    sizes[np.array(indices, dtype=np.int64)] = table
    single = np.array([len(symmetry.legs) == 1 for symmetry in plan.symmetries for _ in symmetry.legs])
    return np.where(single, sizes[:, 1], sizes[:, 0])


def sensitivity(
    symmetries: Sequence[Symmetry],
    tested: Collection[int],
    limits: NDArray[np.float64],
    scales: NDArray[np.float64],
    terms: NDArray[np.float64],
) -> Sensitivity:
    """Return what identities held against `limits` would have seen.

    Args:
        symmetries: all symmetries of an audit.
        tested: the places of those that were tested.
        limits: the relative residual each was held against.
        scales: what each residual is relative to.
        terms: the size of every leg's term, as `of_legs` gives it.
    """
    laws: dict[str, float] = {}
    legs: dict[tuple[str, str], float] = {}
    families: dict[str, list[float]] = {}
    sums: dict[str, list[float]] = {}
    begin = 0
    for index, symmetry in enumerate(symmetries):
        sizes = terms[begin : begin + len(symmetry.legs)]
        begin += len(symmetry.legs)
        if index not in tested:
            continue
        visible: list[float] = []
        for leg, size in zip(symmetry.legs, sizes.tolist(), strict=True):
            seen = float(limits[index] * scales[index] / size) if size > 0 else float("inf")
            key = symmetry.name, leg.view.parameter
            legs[key] = max(legs.get(key, 0.0), seen)
            if seen <= 1:
                visible.append(seen)
        least = max(visible, default=float("inf"))
        if len(symmetry.legs) == 1:
            sums.setdefault(symmetry.family, []).append(least)
            continue
        laws[symmetry.name] = least
        families.setdefault(symmetry.family, []).append(least)
    return Sensitivity(laws=laws, families=_medians(families), legs=legs, sums=_medians(sums))


def _medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: float(np.median(sizes)) for name, sizes in values.items()}


def in_percent(share: float) -> str:
    """Return a share as words."""
    if not np.isfinite(share):
        return "any size unseen"
    digits = 0 if share >= 0.02 else 1 if share >= 0.002 else 2 if share >= 0.0002 else 4
    return f"{100 * share:.{digits}f} %"
