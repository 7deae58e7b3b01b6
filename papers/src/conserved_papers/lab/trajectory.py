"""The record of one training run: what was trained and how, and every watched quantity at the steps that were recorded.

A trajectory is kept in the run store as a document of kind "trajectory" named RECIPE/STEP/SEED. Its content is
`Trajectory.record()`:

    recipe, title, scale      the recipe's name and title; "small" or "full"
    step, schedule, seed      initial step size τ_0, "constant", "linear" or "inverse", seed of weights and batches
    precision, weights        what gradients were computed in and what the weights are kept in
    data, batch, examples     the data set's name, examples per step (null: all of them) and in all
    steps, planned            steps done, and steps the schedule was planned for
    parameters, device, seconds, examples_per_second
    at                        the recorded steps k, 0 first
    time, squares             Σ_{i<k} τ_i and Σ_{i<k} τ_i² at each of them
    loss                      the training loss at each of them
    quantities                one entry per family of quantities:
        {family, role, formula, laws, numbers, linear,
         errors: {block: [equation (10) at each recorded step]}, mean: [over all laws of the family],
         drift: [‖change‖ over ‖terms‖ of the whole family], bound: [equation (9) in units of `mean`] or null,
         ledger: null, or for laws of runs that keep the exact account of every step, in units of `drift`:
             {predicted: [‖Σ τ_i² μ(G_i, G_i)‖], leak: [‖Σ τ_i (μ(θ_i, G_i) + its mirror)‖, zero but for rounding],
              apart: [‖change − predicted‖], residual: [‖change − predicted − leak‖]}}

`role` is "law" (conserved by gradient flow), "impostor" (a law with a sign or pairing spoiled, Appendix E.2) or "claim"
(called conserved by a source and not recognised as a law).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Role = Literal["law", "impostor", "claim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One family of watched quantities along a run."""

    family: str
    role: Role
    formula: str
    laws: int
    numbers: int
    linear: bool
    errors: Mapping[str, tuple[float, ...]]
    mean: tuple[float, ...]
    drift: tuple[float, ...]
    bound: tuple[float, ...] | None
    ledger: Mapping[str, tuple[float, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished training run; the file's docstring says what each field holds."""

    recipe: str
    title: str
    scale: Literal["small", "full"]
    step: float
    schedule: str
    seed: int
    precision: str
    weights: str
    data: str
    batch: int | None
    examples: int
    steps: int
    planned: int
    parameters: int
    device: str
    seconds: float
    examples_per_second: float
    at: tuple[int, ...]
    time: tuple[float, ...]
    squares: tuple[float, ...]
    loss: tuple[float, ...]
    quantities: tuple[Quantity, ...]

    @property
    def name(self) -> str:
        """Its name in the run store."""
        return trajectory_name(self.recipe, self.step, self.seed)

    def quantity(self, family: str) -> Quantity:
        """Return the quantity of a family."""
        for quantity in self.quantities:
            if quantity.family == family:
                return quantity
        known = ", ".join(quantity.family for quantity in self.quantities)
        raise KeyError(f"{self.name} has no quantity {family!r}; it has {known}.")

    def has(self, family: str) -> bool:
        """Return whether the family was watched."""
        return any(quantity.family == family for quantity in self.quantities)

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON and the run store."""
        return asdict(self)

    @staticmethod
    def of(record: Mapping[str, Any]) -> Trajectory:
        """Return the inverse of `record`, also after a passage through JSON."""
        known = [field.name for field in fields(Trajectory)]
        missing = [name for name in known if name not in record]
        if missing:
            raise ValueError(f"Not the record of a trajectory: {min(missing)} is missing.")
        plain: dict[str, Any] = {name: _tuples(record[name]) for name in known}
        names = [field.name for field in fields(Quantity)]
        items = [{"ledger": None} | item for item in plain["quantities"]]
        return Trajectory(
            **plain | {"quantities": tuple(Quantity(**{name: item[name] for name in names}) for item in items)}
        )


def _tuples(value: Any) -> Any:
    """Plain data with tuples for its lists."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def trajectory_name(recipe: str, step: float, seed: int) -> str:
    """Return the name RECIPE/STEP/SEED."""
    return f"{recipe}/{step:g}/{seed}"
