"""Rounding of the gradients of queries and keys by step, layer and head, with findings, series and a heat map."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from conserved.alarm import Alarm
from conserved.attention.precision_figure import heat_map, heat_table
from conserved.attention.rounding import AttentionRounding
from conserved.output import html
from conserved.plain_data import record_of

MOSTLY_ROUNDING = 0.5
"""Relative error above which a gradient counts as mostly rounding: half as long as the gradient itself."""

_MOST_STEPS = 256
"""Steps that are kept of a long run: more than a heat map has columns."""

_REMEDY = (
    "The backward pass is right and its precision is not: the kernel takes its softmax correction from a rounded "
    "output. Wrap the attention function in conserved.attention.centered, or use the math backend"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """One query head of one attention call: predicted relative rounding errors of its dQ and of its group's dK."""

    step: int
    name: str
    head: int
    query: float
    key: float
    kernel: str

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return record_of(self, "step name head query key kernel")


@dataclass(eq=False, repr=False)
class AttentionPrecision:
    """Predicted relative rounding errors of dQ and dK by step, layer and head.

    Filled by `conserved.attention.watch_precision`.
    """

    count: int = 0
    """The current step."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Attention layers without a prediction, and why."""
    _calls: list[tuple[int, str, str, AttentionRounding]] = field(default_factory=list)
    _rows: list[PrecisionRow] = field(default_factory=list)

    def add(self, name: str, kernel: str, rounding: AttentionRounding) -> None:
        """Add the prediction for one call of the current step; numbers are read from the device later.

        Args:
            name: the name of the layer.
            kernel: the name of the kernel.
            rounding: the prediction.
        """
        self._calls.append((self.count, name, kernel, rounding))

    def step(self) -> None:
        """Begin the next step."""
        self.count += 1

    def take(self, other: AttentionPrecision, step: int) -> None:
        """Add the predictions of another object as those of one step.

        A long run keeps a bounded number of steps: every second one is dropped when there are too many.

        Args:
            other: predictions of one pass.
            step: the number of the step it belongs to.
        """
        self.count = step
        self._rows += [replace(row, step=step) for row in other.rows]
        self.skipped |= other.skipped
        steps = sorted({row.step for row in self._rows})
        if len(steps) > _MOST_STEPS:
            kept_steps = set(steps[::2])
            self._rows = [row for row in self._rows if row.step in kept_steps]

    def readings(self, step: int) -> dict[str, float]:
        """Return the largest errors of a step and the share of heads that are mostly rounding, for a dashboard."""
        rows = [row for row in self.rows if row.step == step]
        if not rows:
            return {}
        query, key = ([_number(getattr(row, leg)) for row in rows] for leg in ("query", "key"))
        mostly = sum(max(pair) > MOSTLY_ROUNDING for pair in zip(query, key, strict=True))
        return {"dQ_rounding": max(query), "dK_rounding": max(key), "mostly_rounding": mostly / len(rows)}

    @property
    def rows(self) -> tuple[PrecisionRow, ...]:
        """One row for every head of every call so far."""
        if self._calls:
            calls, self._calls = self._calls, []
            self._rows += [row for call in calls for row in _rows_of(*call)]
        return tuple(self._rows)

    @property
    def worst(self) -> PrecisionRow | None:
        """The row with the largest error of dQ or dK; None if there is no row."""
        return max(self.rows, key=lambda row: max(_number(row.query), _number(row.key)), default=None)

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """One alarm of code "precision" for dQ and one for dK, if that is mostly rounding in any head."""
        return tuple(alarm for leg in ("query", "key") if (alarm := self._alarm(leg)) is not None)

    def _alarm(self, leg: str) -> Alarm | None:
        errors = [(row, _number(getattr(row, leg))) for row in self.rows]
        high = [(row, error) for row, error in errors if error > MOSTLY_ROUNDING]
        if not high:
            return None
        worst, value = max(high, key=lambda item: item[1])
        symbol = "dQ" if leg == "query" else "dK"
        heads = {(row.name, row.head) for row, _ in high}
        names = tuple(dict.fromkeys(row.name for row, _ in high))
        steps = [row.step for row, _ in high]
        message = (
            f"{symbol} of {len(heads)} heads in {len(names)} attention layers is mostly rounding: up to {value:.3g} "
            f"times the gradient in {worst.name}[{worst.head}] at step {worst.step} ({worst.kernel}). {_REMEDY}."
        )
        return Alarm(
            step=min(steps),
            last=max(steps),
            code="precision",
            law=f"{worst.name}[{worst.head}].{symbol}",
            value=value,
            limit=MOSTLY_ROUNDING,
            message=message,
            family=f"attention {symbol}",
            laws=tuple(f"{name}.{symbol}" for name in names),
            count=len(high),
        )

    def series(self) -> dict[str, list[float]]:
        """Return the errors of every head by step, for a logger: `name[head].dQ_rounding` and `.dK_rounding`."""
        table: dict[str, list[float]] = {}
        for row in self.rows:
            table.setdefault(f"{row.name}[{row.head}].dQ_rounding", []).append(row.query)
            table.setdefault(f"{row.name}[{row.head}].dK_rounding", []).append(row.key)
        return table

    def latest(self) -> dict[str, float]:
        """Return the last error of every head by name, as a logger takes it in each step."""
        return {name: values[-1] for name, values in self.series().items()}

    def share(self, limit: float = MOSTLY_ROUNDING, *, leg: str = "query") -> float:
        """Return the share of heads and steps whose error exceeds a limit; NaN if there are none."""
        errors = [_number(getattr(row, leg)) for row in self.rows]
        return sum(error > limit for error in errors) / len(errors) if errors else math.nan

    def summary(self) -> str:
        """Return what was seen in a few lines."""
        rows, worst = self.rows, self.worst
        if worst is None:
            lines = ["No attention was seen whose precision can be predicted."]
        else:
            steps = len({row.step for row in rows})
            lines = [
                f"{len(rows):,} predictions for {len({row.name for row in rows})} attention layers in {steps} steps. "
                f"Of dQ {self.share():.1%} and of dK {self.share(leg='key'):.1%} are mostly rounding. The worst is "
                f"{worst.name}[{worst.head}] at step {worst.step}: dQ {worst.query:.3g}, dK {worst.key:.3g}."
            ]
        lines += [f"precision: {alarm}" for alarm in self.alarms]
        return "\n".join([*lines, *(f"  left out: {name}, because {why}" for name, why in self.skipped.items())])

    def plot(self, path: str | Path, *, leg: str = "query") -> Path:
        """Write a heat map of the share of rounding, with layers and heads over steps.

        Args:
            path: the file to write; its ending is the format.
            leg: "query" for dQ or "key" for dK.

        Returns:
            The path.

        Raises:
            ValueError: there is nothing to draw.
        """
        return heat_map(self._cells(leg), path, "dQ" if leg == "query" else "dK")

    def _cells(self, leg: str) -> dict[tuple[str, int], float]:
        return {(f"{row.name}[{row.head}]", row.step): _number(getattr(row, leg)) for row in self.rows}

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return record_of(self, "rows skipped") | {
            "alarms": [record_of(alarm, "step last code law value limit message count") for alarm in self.alarms],
            "share": {"dQ": self.share(), "dK": self.share(leg="key")},
        }

    def _repr_html_(self) -> str:
        """Show the summary and the heat map of dQ in a notebook."""
        return html.panel(html.paragraph(self.summary()), heat_table(self._cells("query")))

    def __repr__(self) -> str:
        worst = self.worst
        size = "nothing seen" if worst is None else f"worst {max(worst.query, worst.key):.2g}"
        return f"<AttentionPrecision: {len(self.rows)} heads and steps, {size}>"


def _rows_of(step: int, name: str, kernel: str, rounding: AttentionRounding) -> Iterator[PrecisionRow]:
    groups = len(rounding.query) // len(rounding.key)
    both = torch.stack((rounding.query, rounding.key.repeat_interleave(groups)))
    for head, (query, key) in enumerate(both.double().T.tolist()):
        yield PrecisionRow(step=step, name=name, head=head, query=query, key=key, kernel=kernel)


def _number(error: float) -> float:
    """Return infinity for an error that is NaN: gradients that are not finite hold nothing but error."""
    return math.inf if math.isnan(error) else error
