"""A run in one figure: loss, drift, what the optimizer did, and audits, with a mark where something was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from conserved.alarm import Alarm
from conserved.optional import require
from conserved.store.step_record import StepRecord
from conserved.tracking.audit_entry import AuditEntry

Series = Mapping[str, Sequence[tuple[int, float]]]

_PAGES = (".html",)
_PICTURES = (".png", ".svg", ".pdf")
_UNDATED = {"Date": None}
_WHY = "Drawing a run"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A run, drawn by conserved</title>
<style>body {{ margin: 1em auto; max-width: 72em }} svg {{ width: 100%; height: auto }}</style></head>
<body><svg role="img" aria-label="Loss, drift, causes and audits over steps, with a mark for every alarm"{picture}
</body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPanel:
    """Lines over steps that share an axis."""

    title: str
    series: Series
    log: bool
    limit: float | None = None


def panels(records: Sequence[StepRecord], audits: Sequence[AuditEntry]) -> list[RunPanel]:
    """Return what is worth drawing of a run."""
    drift: dict[str, list[tuple[int, float]]] = {}
    causes: dict[str, list[tuple[int, float]]] = {}
    loss: list[tuple[int, float]] = []
    for record in records:
        for family, value in record.errors("family").items():
            drift.setdefault(family, []).append((record.step, value))
        for name, value in record.totals().items():
            if name.startswith("total/cause/"):
                causes.setdefault(name.removeprefix("total/cause/"), []).append((record.step, value))
        if "loss" in record.readings:
            loss.append((record.step, record.readings["loss"]))
    result = [RunPanel(title="loss", series={"loss": loss}, log=False)] if loss else []
    result.append(RunPanel(title="drift of the laws since the start, relative", series=drift, log=True))
    if causes:
        result.append(RunPanel(title="first-order change in a step, by cause", series=causes, log=True))
    if audits:
        worst: dict[str, list[tuple[int, float]]] = {}
        for entry in audits:
            for family, value in entry.families.items():
                worst.setdefault(family, []).append((entry.step, value))
        title = "audits: residual of gradient identities over what rounding explains"
        result.append(RunPanel(title=title, series=worst, log=True, limit=1.0))
    return result


def draw(
    records: Sequence[StepRecord], audits: Sequence[AuditEntry], alarms: Sequence[Alarm], path: str | Path | None
) -> Any:
    """Return a figure that notebooks show, or the path it was written to.

    The file is a page that needs no network, or a picture.
    """
    if path is None:
        return _drawn(panels(records, audits), alarms)
    path = Path(path)
    if path.suffix not in _PAGES + _PICTURES:
        raise ValueError(f"Expected a path that ends in {', '.join(_PAGES + _PICTURES)}, got {path.name!r}. Rename it.")
    figure = _drawn(panels(records, audits), alarms)
    if path.suffix in _PICTURES:
        figure.savefig(path, metadata=_UNDATED if path.suffix == ".svg" else None)
        return path
    picture = StringIO()
    with require("matplotlib", _WHY).rc_context({"svg.fonttype": "none"}):
        figure.savefig(picture, format="svg", metadata=_UNDATED)
    path.write_text(_PAGE.format(picture=picture.getvalue().partition("<svg")[2]), encoding="utf-8")
    return path


INK, MUTED, RULE, CARD, ALARM = "#1c222b", "#5a626d", "#e2ddd2", "#ffffff", "#a8261c"
LINES = ("#0b6e99", "#c2510c", "#3f7d20", "#7444c9", "#b4237a", "#866a00", "#55606e", "#0f766e")
"""Colours of the report, whose style sheet has the same."""

_STYLE = {
    "font.family": ["sans-serif"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": CARD,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": CARD,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def _drawn(chosen: Sequence[RunPanel], alarms: Sequence[Alarm]) -> Any:
    library: Any = require("matplotlib", _WHY)
    figures: Any = require("matplotlib.figure", _WHY)
    with library.rc_context({**_STYLE, "axes.prop_cycle": library.cycler(color=LINES)}):
        figure = figures.Figure(figsize=(9, 2.6 * len(chosen)), layout="constrained")
        axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
        for axis, panel in zip(axes, chosen, strict=True):
            _draw_panel(axis, panel, alarms)
        for index, alarm in enumerate(alarms[:3]):
            axes[0].annotate(
                f"{alarm.kind}: {alarm.law or alarm.tensor}",
                (alarm.step, 0.93 - 0.14 * index),
                xytext=(4, 0),
                textcoords="offset points",
                xycoords=("data", "axes fraction"),
                color=ALARM,
                fontsize="small",
            )
        axes[-1].set_xlabel("step")
    return figure


def _draw_panel(axis: Any, panel: RunPanel, alarms: Sequence[Alarm]) -> None:
    for name, points in panel.series.items():
        style = "o-" if len(points) < 30 else "-"
        axis.plot([s for s, _ in points], [v for _, v in points], style, label=name, linewidth=1.6, markersize=3)
    axis.set_title(panel.title, family="serif")
    if panel.log and any(value > 0 for points in panel.series.values() for _, value in points):
        axis.set_yscale("log")
    if panel.limit is not None:
        axis.axhline(panel.limit, linestyle=":", color=MUTED)
    for alarm in alarms:
        axis.axvline(alarm.step, color=ALARM, linewidth=1)
    # Beside the lines: a legend inside the axes hides what it names.
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
