"""A run in one figure: loss, drift, what the optimizer did, and audits, with a mark where something was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conserved.alarm import Alarm
from conserved.optional import require
from conserved.track.audits import AuditEntry
from conserved.track.record import StepRecord

Series = Mapping[str, Sequence[tuple[int, float]]]

_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines over steps that share an axis."""

    title: str
    series: Series
    log: bool
    limit: float | None = None


def panels(records: Sequence[StepRecord], audits: Sequence[AuditEntry]) -> list[Panel]:
    """What is worth drawing of a run."""
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
    found = [Panel(title="loss", series={"loss": loss}, log=False)] if loss else []
    found.append(Panel(title="drift of the laws since the start, relative", series=drift, log=True))
    if causes:
        found.append(Panel(title="first-order change in a step, by cause", series=causes, log=True))
    if audits:
        worst: dict[str, list[tuple[int, float]]] = {}
        for entry in audits:
            for family, value in entry.families.items():
                worst.setdefault(family, []).append((entry.step, value))
        title = "audits: residual of gradient identities over what rounding explains"
        found.append(Panel(title=title, series=worst, log=True, limit=1.0))
    return found


def draw(
    records: Sequence[StepRecord], audits: Sequence[AuditEntry], alarms: Sequence[Alarm], path: str | Path | None
) -> Any:
    """A plotly figure, or the path it was written to: .html as a page that needs no network, .png, .svg or .pdf."""
    chosen = panels(records, audits)
    if path is None:
        return _plotly(chosen, alarms)
    path = Path(path)
    if path.suffix == ".html":
        path.write_text(_plotly(chosen, alarms).to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
        return path
    if path.suffix not in _PICTURES:
        raise ValueError(f"A figure is written as .html, {', '.join(_PICTURES)}; got {path.name!r}.")
    return _matplotlib(chosen, alarms, path)


def _plotly(chosen: Sequence[Panel], alarms: Sequence[Alarm]) -> Any:
    subplots: Any = require("plotly.subplots", "Drawing a run")
    figure = subplots.make_subplots(
        rows=len(chosen), cols=1, shared_xaxes=True, subplot_titles=[one.title for one in chosen], vertical_spacing=0.08
    )
    for row, panel in enumerate(chosen, 1):
        for name, points in panel.series.items():
            x, y = [step for step, _ in points], [value for _, value in points]
            mode = "lines+markers" if len(points) < 30 else "lines"
            figure.add_scatter(x=x, y=y, name=name, mode=mode, row=row, col=1, legendgroup=panel.title)
        figure.update_yaxes(type="log" if panel.log else "linear", row=row, col=1)
        if panel.limit is not None:
            figure.add_hline(y=panel.limit, line_dash="dot", row=row, col=1)
        for alarm in alarms:
            figure.add_vline(x=alarm.step, line_color="crimson", line_width=1, row=row, col=1)
    for alarm in alarms:
        figure.add_annotation(
            x=alarm.step,
            y=1.02,
            yref="paper",
            text=f"{alarm.code}: {alarm.law}",
            showarrow=False,
            font={"color": "crimson"},
            xanchor="left",
        )
    figure.update_xaxes(title_text="step", row=len(chosen), col=1)
    return figure.update_layout(height=260 * len(chosen) + 80, template="plotly_white")


def _matplotlib(chosen: Sequence[Panel], alarms: Sequence[Alarm], path: Path) -> Path:
    require("matplotlib", "Drawing a run as a picture")
    figures: Any = require("matplotlib.figure", "Drawing a run as a picture")
    figure = figures.Figure(figsize=(9, 2.4 * len(chosen)), layout="constrained")
    axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, chosen, strict=True):
        for name, points in panel.series.items():
            style = "o-" if len(points) < 30 else "-"
            axis.plot([s for s, _ in points], [v for _, v in points], style, label=name, linewidth=1.2, markersize=3)
        axis.set_title(panel.title, fontsize="small", loc="left")
        if panel.log and any(value > 0 for points in panel.series.values() for _, value in points):
            axis.set_yscale("log")
        if panel.limit is not None:
            axis.axhline(panel.limit, linestyle=":", color="gray")
        for alarm in alarms:
            axis.axvline(alarm.step, color="crimson", linewidth=1)
        axis.legend(fontsize="xx-small", frameon=False, ncols=4)
    for place, alarm in enumerate(alarms[:3]):
        axes[0].annotate(
            f"{alarm.code}: {alarm.law}",
            (alarm.step, 0.95 - 0.14 * place),
            xycoords=("data", "axes fraction"),
            color="crimson",
            fontsize="x-small",
        )
    axes[-1].set_xlabel("step")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
