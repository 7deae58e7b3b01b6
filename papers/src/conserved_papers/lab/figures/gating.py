"""Figure 4 of the paper: normalised-sigmoid gating beside softmax, with the order test that tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conserved.output.figure import PALETTE, Figure, Finding, in_words, line, panels
from conserved_papers.lab.exponents import Runs, at_flow_time, steps_at_flow_time
from conserved_papers.lab.figures.curves import panel_curves
from conserved_papers.lab.figures.drift import rounding_finding, runs_of
from conserved_papers.lab.fits import fitted_finding
from conserved_papers.lab.trajectory import Trajectory

_ORDER = 0.15
SIGMOID = {
    "small": (
        ("bytes-sigmoid", "full batch"),
        ("bytes-sgd-sigmoid", "mini-batches"),
        ("bytes-sparse-sigmoid", "top-2"),
    ),
    "full": (("penn-sigmoid", "full batch"), ("wikitext-sigmoid", "mini-batches"), ("penn-sparse-sigmoid", "top-2")),
}
SOFTMAX = {"small": ("bytes", "bytes-sparse"), "full": ("penn", "penn-sparse")}
"""Recipes of both kinds of gate; of the sigmoid with what tells them apart."""


def figure4(trajectories: Sequence[Trajectory], scale: str = "small") -> Figure | None:
    """Draw Σ Wᵢ of a normalised-sigmoid router, which drifts like anything that is not conserved; softmax keeps it to
    rounding.
    """
    sigmoid = [(label, runs) for name, label in SIGMOID[scale] if (runs := runs_of(trajectories, name))]
    softmax = [(name, runs) for name in SOFTMAX[scale] if (runs := runs_of(trajectories, name))]
    if not sigmoid:
        return None
    titles: list[str] = []
    data: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for label, runs in sigmoid:
        titles.append(f"sigmoid Σ Wᵢ, {label}")
        data += panel_curves(runs, "claimed_shift", len(titles), legend=len(titles) == 1)
        findings.append(_order(runs, "claimed_shift", f"sigmoid Σ Wᵢ, {label}", 0, "not conserved"))
    for name, group in softmax:
        label = "top-2" if "sparse" in name else "full batch"
        titles.append(f"softmax Σ Wᵢ, {label}")
        data += panel_curves(group, "shift", len(titles), legend=False)
        findings.append(rounding_finding(group, "shift", f"softmax Σ Wᵢ, {label}"))
    titles.append("order test: drift at one flow time")
    compared: list[tuple[str, Runs, str]] = [("sigmoid Σ Wᵢ", sigmoid[0][1], "claimed_shift")]
    if softmax:
        compared += [("softmax Σ Wᵢ", softmax[0][1], "shift"), ("rotary attention", softmax[0][1], "query_key")]
        findings.append(_order(softmax[0][1], "query_key", "rotary attention", 1, "a quadratic law"))
    for color, (label, shown, family) in zip(PALETTE[3:], compared, strict=False):
        data += _order_curve(label, shown, family, len(titles), color)
    layout = panels(titles, x="iteration k", y="relative error (10)")
    layout[f"xaxis{len(titles)}"]["title"] = {"text": "step size τ"}
    layout[f"yaxis{len(titles)}"]["title"] = {"text": "drift of the family"}
    return Figure(
        code="figure4" if scale == "small" else "figure4-full",
        title="Normalised-sigmoid gating does not conserve Σ Wᵢ",
        caption=(
            "Theorem 4.7 gives normalised-sigmoid routers the law of softmax routers. Followed to the same flow time "
            "with smaller and smaller steps, the drift of a law vanishes with the step, that of Σ Wᵢ under a sigmoid "
            "stays: it is a property of the flow, not of the discretisation. Error that grows with the step size at a "
            "fixed number of steps, as in the paper's figure, does not tell the two apart."
        ),
        alt=in_words(findings),
        data=tuple(data),
        layout=layout,
        findings=tuple(findings),
    )


def _order(runs: Runs, family: str, label: str, expected: int, note: str) -> Finding:
    what = f"{label}: exponent of the drift in τ at fixed flow time"
    return fitted_finding(what, at_flow_time(runs, family), expected, _ORDER, note=note)


def _order_curve(label: str, runs: Runs, family: str, panel: int, color: str) -> list[dict[str, Any]]:
    steps = steps_at_flow_time(runs)
    if steps is None:
        return []
    errors = []
    for rate, group in runs.items():
        result = [run.quantity(family).drift[run.at.index(steps[rate])] for run in group]
        errors.append(sum(result) / len(result))
    return [line(list(runs), errors, name=label, color=color, panel=panel, marks=True)]
