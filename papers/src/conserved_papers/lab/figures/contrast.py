"""Figure 5 of the paper: conserved against not conserved quantities of the same components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conserved.output.figure import PALETTE, Figure, Finding, Table, in_words, line, panels
from conserved_papers.lab.figures.curves import common_steps, spread
from conserved_papers.lab.figures.drift import panels_of
from conserved_papers.lab.trajectory import Trajectory

_TIMES = 100.0

_SPOILED = {
    "(a) attention QQᵀ − KKᵀ": "QQᵀ + KKᵀ",
    "(b) SwiGLU neurons": "A²ᵢⱼ − C²ᵢⱼ entry by entry",
    "(c) rotary attention": "first row − second row of each plane",
    "(d) softmax gate Σ Wᵢ": "W of the first expert",
}


def figure5(trajectories: Sequence[Trajectory], scale: str = "small") -> Figure | None:
    """Laws beside the quantities of Appendix E.2, at the middle step size."""
    results = panels_of(trajectories, "figure2", scale)
    shown = [(title, runs[sorted(runs)[len(runs) // 2]], family) for title, runs, family in results]
    if not shown:
        return None
    data: list[dict[str, Any]] = []
    findings: list[Finding] = []
    rows: list[tuple[str | float | int | None, ...]] = []
    for number, (title, group, family) in enumerate(shown, 1):
        indices = common_steps(group)
        steps = [float(group[0].at[index]) for index in indices]
        for name, color, which in (("conserved", PALETTE[0], family), ("not conserved", PALETTE[1], f"not_{family}")):
            mean, _, _ = spread([[run.quantity(which).mean[index] for index in indices] for run in group])
            data.append(line(steps, mean, name=name, color=color, panel=number, legend=number == 1))
        label = title.partition(" ")[2]
        ratios = [_final(run, f"not_{family}") / max(_final(run, family), 1e-300) for run in group]
        findings.append(
            Finding(
                what=f"{label}: error of {_SPOILED[title]} over that of the law",
                value=sum(ratios) / len(ratios),
                low=min(ratios),
                high=max(ratios),
                expected=f"at least {_TIMES:g}",
                holds=min(ratios) >= _TIMES,
            )
        )
        mean_of = [sum(_final(run, name) for run in group) / len(group) for name in (family, f"not_{family}")]
        rows.append((label, _SPOILED[title], *mean_of, mean_of[1] / mean_of[0] if mean_of[0] else None))
    return Figure(
        code="figure5" if scale == "small" else "figure5-full",
        title="Conserved against not conserved",
        caption=(
            "Laws of each component, and forms of the same weights with a sign or a pairing spoiled (Appendix E.2), "
            f"over the same training, mean of {len(shown[0][1])} seeds. Low and high are the least and largest ratio."
        ),
        alt=in_words(findings),
        data=tuple(data),
        layout=panels([title for title, _, _ in shown], x="iteration k", y="relative error (10)"),
        findings=tuple(findings),
        table=Table(
            columns=("law", "not conserved", "error of the law", "error of the other", "ratio"), rows=tuple(rows)
        ),
    )


def _final(run: Trajectory, family: str) -> float:
    return run.quantity(family).mean[-1]
