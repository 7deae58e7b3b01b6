"""Key coherence of every head over training, as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conserved.attention.monitor import AttentionMonitor
from conserved.optional import require


def coherence_figure(runs: Mapping[str, AttentionMonitor], path: str | Path) -> Path:
    """Draw the key coherence of every head over training, one panel per run and one line per head.

    Args:
        runs: monitors by the title of their panel.
        path: the file to write; its ending says the format (.svg, .png, .pdf).

    Returns:
        The path.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("Expected at least one run, got none. Pass the series of a run.")
    require("matplotlib", "Drawing the coherence of a run")
    figures: Any = require("matplotlib.figure", "Drawing the coherence of a run")
    figure = figures.Figure(figsize=(4.5 * len(runs), 3.2), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for panel, (name, monitor) in zip(panels, runs.items(), strict=True):
        steps = [record.step for record in monitor.records]
        for series, values in monitor.series().items():
            if series.endswith(".coherence") and len(values) == len(steps):
                panel.plot(steps, values, label=series.removesuffix(".coherence"), linewidth=1.2)
        for alarm in monitor.alarms:
            panel.axvline(alarm.step, color="tab:red", linewidth=0.5)
        panel.set(title=name, xlabel="step", yscale="log")
    panels[0].set_ylabel("key coherence")
    panels[-1].legend(fontsize="xx-small", frameon=False)
    path = Path(path)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
