"""Errors against iterations: per layer, mean and spread over seeds, and the bound of equation (9), in one panel."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from conserved.output.figure import PALETTE, band, line, positive
from conserved_papers.lab.exponents import Runs
from conserved_papers.lab.trajectory import Quantity, Trajectory

MORE_THAN_ROUNDING = {
    "float64": 1e-12,
    "float32": 1e-5,
    "bfloat16": 1e-1,
    "double": 1e-12,
    "single": 1e-5,
    "pieces": 1e-5,
    "half": 1e-2,
}
"""By precision of the gradients, or by the products of a long run, relative drift that rounding does not explain."""

Curve = list[float | None]


def spread(values: Sequence[Sequence[float]]) -> tuple[Curve, Curve, Curve]:
    """Mean, least and largest of several curves at each point; what is not positive has no place on a log axis."""
    columns = list(zip(*values, strict=True))
    means = positive([sum(column) / len(column) for column in columns])
    return means, positive([min(column) for column in columns]), positive([max(column) for column in columns])


def common_steps(runs: Sequence[Trajectory]) -> list[int]:
    """Places of the recorded steps after the first, in runs that were recorded alike."""
    shortest = min(runs, key=lambda run: len(run.at))
    return [index for index, step in enumerate(shortest.at) if step > 0]


def panel_curves(runs: Runs, family: str, panel: int, *, legend: bool) -> list[dict[str, Any]]:
    """Return one panel: for every step size the layers (thin), their mean (thick), seeds (band) and the bound
    (dotted).
    """
    drawn: list[dict[str, Any]] = []
    for color, (rate, group) in zip(PALETTE, runs.items(), strict=False):
        drawn += _curves(group, family, panel, color=color, name=f"τ = {rate:g}", legend=legend)
    return drawn


def _curves(
    group: Sequence[Trajectory], family: str, panel: int, *, color: str, name: str, legend: bool
) -> list[dict[str, Any]]:
    indices = common_steps(group)
    steps = [float(group[0].at[index]) for index in indices]
    quantities = [run.quantity(family) for run in group]
    mean, low, high = spread([[q.mean[index] for index in indices] for q in quantities])
    drawn = [_band(steps, low, high, name=name, color=color, panel=panel)]
    for each in layers(quantities).values():
        thin, _, _ = spread([[values[index] for index in indices] for values in each])
        drawn.append(line(steps, thin, name=name, color=color, panel=panel, width=0.8, opacity=0.55, legend=False))
    drawn.append(line(steps, mean, name=name, color=color, panel=panel, width=3.2, legend=legend))
    if all(q.bound is not None for q in quantities) and not quantities[0].linear:
        bound, _, _ = spread([[(q.bound or ())[index] for index in indices] for q in quantities])
        label = f"bound (9), {name}"
        drawn.append(line(steps, bound, name=label, color=color, panel=panel, width=1.6, dash="dot", legend=legend))
    return drawn


def _band(steps: list[float], low: Curve, high: Curve, *, name: str, color: str, panel: int) -> dict[str, Any]:
    points = [(s, a, b) for s, a, b in zip(steps, low, high, strict=True) if a is not None and b is not None]
    return band(
        [k[0] for k in points], [k[1] for k in points], [k[2] for k in points], name=name, color=color, panel=panel
    )


def layers(quantities: Sequence[Quantity]) -> dict[str, list[tuple[float, ...]]]:
    """Return the curves of every layer, one per seed; blocks of one layer (experts) are averaged."""
    result: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for quantity in quantities:
        inside: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        for block, values in quantity.errors.items():
            numbered = re.match(r"(.*?\b\d+)\b", block)
            inside[numbered.group(1) if numbered else block].append(values)
        for layer, curves in inside.items():
            result[layer].append(tuple(sum(column) / len(column) for column in zip(*curves, strict=True)))
    return dict(result)
