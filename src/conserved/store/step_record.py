"""The record of a monitored step: one row per law, errors by block, readings, alarms; plain data for sinks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from conserved.alarm import Alarm
from conserved.output.lines import counted
from conserved.plain_data import record_of

FIELDS = (
    "observed",
    "second_order",
    "residual",
    "bound",
    "excess",
    "leak",
    "error",
    "drift",
    "predicted",
    "moved",
    "rate",
)
"""The numbers of a law in a step, before those of its causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One law in one step: observed = first_order + second_order + residual, at its entry where most happened.

    `bound` is the residual that rounding explains at that entry, and `excess` the largest |residual| / bound over
    all entries. `leak` is the same for the residuals of all steps together. `error` is equation (10) for this law,
    `drift` its change since the reference where that is largest, `predicted` the sum of the account there, `moved`
    the squared length of the update of its legs, `rate` the learning rate.
    """

    law: str
    step: int
    observed: float
    first_order: float
    second_order: float
    residual: float
    causes: Mapping[str, float]
    bound: float
    excess: float
    leak: float
    error: float
    drift: float
    predicted: float
    moved: float
    rate: float

    def __repr__(self) -> str:
        return f"<Entry of {self.law}, step {self.step}: {self.observed:.2g}>"

    def __str__(self) -> str:
        causes = " ".join(f"{part:+.2g} {cause}" for cause, part in self.causes.items() if part)
        return (
            f"{self.law}, step {self.step}: changed by {self.observed:+.2g} = {causes or 'nothing'} "
            f"{self.residual:+.1g} unaccounted for (rounding explains {self.bound:.1g})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LawName:
    """A law as records know it: its name, its block and family, and the number of laws of equation (10) it holds."""

    name: str
    block: str
    family: str
    units: int

    @property
    def layer(self) -> str:
        """The block up to its first number: "layers.0" of "layers.0.attention"; the block itself if it has none."""
        steps = self.block.split(".")
        numbered = next((index for index, step in enumerate(steps) if step.isdigit()), len(steps))
        return ".".join(steps[: numbered + 1])


By = Literal["block", "layer", "family", "law"]
"""The groups that equation (10) is averaged over."""


def average(laws: Sequence[LawName], errors: Sequence[float], by: By) -> dict[str, float]:
    """Return Equation (10) for groups of laws, from the mean of each."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for law, error in zip(laws, errors, strict=True):
        key = law.name if by == "law" else getattr(law, by)
        total[key] += error * law.units
        count[key] += law.units
    return {key: total[key] / count[key] for key in total}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """One monitored step: a row of numbers for every law; a monitor of attention has readings and no laws."""

    step: int
    laws: Sequence[LawName] = ()
    causes: tuple[str, ...] = ()
    numbers: Tensor = field(default_factory=lambda: torch.zeros(0, len(FIELDS), dtype=torch.float64))
    """Laws × (FIELDS and causes), on the host."""
    readings: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    """Whether no optimizer made a step; nothing should have moved."""
    alarms: tuple[Alarm, ...] = ()
    statements: tuple[Alarm, ...] = ()
    """What the account leaves over and a program may mean."""

    def __repr__(self) -> str:
        skipped = ", skipped" if self.skipped else ""
        size = f"{counted(len(self.laws), 'law')}, {counted(len(self.alarms), 'alarm')}"
        return f"<StepRecord: step {self.step}, {size}{skipped}>"

    def entries(self, *, above: tuple[str, float] | None = None) -> list[Entry]:
        """Return the numbers of every law by name.

        Args:
            above: a field such as "excess" and a limit: only laws whose value is above it, or NaN.

        Returns:
            One entry per law.
        """
        result = []
        width = len(FIELDS)
        laws, numbers = self.laws, self.numbers
        if above is not None:
            name, limit = above
            (chosen,) = torch.where(~(numbers[:, FIELDS.index(name)] <= limit))
            laws, numbers = [laws[index] for index in chosen.tolist()], numbers[chosen]
        for law, row in zip(laws, numbers.tolist(), strict=True):
            causes = dict(zip(self.causes, row[width:], strict=True))
            result.append(
                Entry(
                    law=law.name,
                    step=self.step,
                    first_order=sum(causes.values(), 0.0),
                    causes=causes,
                    **dict(zip(FIELDS, row, strict=False)),
                )
            )
        return result

    def column(self, name: str) -> list[float]:
        """Return one number of every law, in the order of `laws`: the one that FIELDS calls `name`."""
        values: list[float] = self.numbers[:, FIELDS.index(name)].tolist()
        return values

    def errors(self, by: By = "block") -> dict[str, float]:
        """Return Equation (10), averaged over groups of laws.

        Args:
            by: whether one number is given for each "block", "layer", "family" or "law".

        Returns:
            By block, layer, family or law, the mean relative change.
        """
        return average(self.laws, self.column("error"), by)

    def totals(self) -> dict[str, float]:
        """Return the step in a few numbers: drift, the sum of each cause, how near the limit the worst law is."""
        if not len(self.laws):
            return {}
        units = torch.tensor([law.units for law in self.laws], dtype=torch.float64)
        drift = self.numbers[:, FIELDS.index("error")]
        sums = {
            "total/drift": float((drift * units).sum() / units.sum()),
            "total/observed": float(self.numbers[:, FIELDS.index("observed")].abs().sum()),
            "total/of_rounding": float(self.numbers[:, FIELDS.index("excess")].max()),
        }
        return sums | {f"total/cause/{cause}": amount for cause, amount in self._cause_sums().items()}

    def _cause_sums(self) -> dict[str, float]:
        """Return, by cause, the magnitudes of first-order changes summed over all laws."""
        sums = self.numbers[:, len(FIELDS) :].abs().sum(0).tolist() if len(self.laws) else []
        return dict(zip(self.causes, sums, strict=True)) if sums else {}

    def scalars(self, *, laws: bool = False) -> dict[str, float]:
        """Return named numbers for a dashboard.

        `drift/` is equation (10), how far laws are from where they began, which is normal under Adam. `cause/` is the
        effect of decay, momentum and preconditioner on all laws together in this step. `audit/` is about the gradients.

        Args:
            laws: whether the numbers of every law are given as well.

        Returns:
            By name, numbers by block and over all laws.
        """
        result = {f"drift/{block or 'model'}": error for block, error in self.errors().items()}
        result |= {f"cause/{cause}": amount for cause, amount in self._cause_sums().items()}
        result |= {
            name if name == "loss" or name.startswith("audit/") else f"reading/{name}": value
            for name, value in self.readings.items()
        }
        result["alarms"] = float(len(self.alarms))
        entries, parts = self.entries(), ("observed", "first_order", "second_order", "residual")
        if entries:
            result |= {f"largest/{name}": max(abs(getattr(entry, name)) for entry in entries) for name in parts}
            result["largest/excess"] = max(entry.excess for entry in entries)
        for entry in entries if laws else ():
            result |= {f"{name}/{entry.law}": getattr(entry, name) for name in parts}
            result[f"drift/{entry.law}"] = entry.error
        return result

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "errors": self.errors(),
            "readings": dict(self.readings),
            "laws": [record_of(entry, " ".join(("law", "first_order", *FIELDS, "causes"))) for entry in self.entries()],
            "alarms": [record_of(alarm, "code law value limit message") for alarm in self.alarms],
        }
