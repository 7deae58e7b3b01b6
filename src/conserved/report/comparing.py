"""Several watched runs beside each other: a row for each, and the drift of every law they share in one plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conserved.report.plot import Plot, axes, line
from conserved.report.table import ReportTable
from conserved.store.run_digest import Digest

_FAMILIES_DRAWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The drift of the same laws in several runs."""

    table: ReportTable
    plots: tuple[Plot, ...]


def comparison(runs: Sequence[Digest]) -> RunComparison:
    """Return a row for every run, and a plot for every family of laws that two of them have, those that differ most
    first.
    """
    families = dict.fromkeys(family for run in runs for family in run.errors)
    shared = [family for family in families if sum(family in run.errors for run in runs) > 1]
    listed = sorted(shared, key=lambda family: -_spread(runs, family))[:_FAMILIES_DRAWN]
    # Plots stand in two columns: where the number is odd, the one in which runs differ least would stand alone.
    drawn = listed[: len(listed) - len(listed) % 2] or listed
    rows = [
        (
            run.name,
            run.steps,
            run.laws,
            len(run.alarms),
            run.worst[0] if run.worst else None,
            *(run.errors[family][-1] if run.errors.get(family) else None for family in listed),
        )
        for run in runs
    ]
    heads = ("run", "steps", "laws", "alarms", "left over / rounding", *(f"drift of {family}" for family in listed))
    return RunComparison(table=ReportTable.of(heads, rows), plots=tuple(_plot(runs, family) for family in drawn))


def _spread(runs: Sequence[Digest], family: str) -> float:
    """Return how many powers of ten the runs' last drifts are apart."""
    ends = [run.errors[family][-1] for run in runs if run.errors.get(family)]
    known = [math.log10(end) for end in ends if end > 0 and math.isfinite(end)]
    return max(known) - min(known) if known else 0.0


def _plot(runs: Sequence[Digest], family: str) -> Plot:
    ends = ", ".join(f"{run.name} {run.errors[family][-1]:.3g}" for run in runs if run.errors.get(family))
    return Plot(
        anchor=f"compared-{family}",
        title=family,
        alt=f"Lines of the relative drift of {family} over steps, one for each run; at the end: {ends}.",
        data=[
            line(run.name, run.shown, [value if value > 0 else None for value in run.errors[family]])
            for run in runs
            if run.errors.get(family)
        ],
        layout=axes("step", "relative drift", log=True),
        small=True,
    )
