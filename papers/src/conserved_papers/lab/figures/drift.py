"""Figures 2 and 3 of the paper: conservation error against iteration for three step sizes, with fitted exponents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conserved.output.figure import Figure, Finding, Table, in_words, panels
from conserved_papers.lab.exponents import Runs, by_rate, growth, in_step_size
from conserved_papers.lab.figures.curves import MORE_THAN_ROUNDING, panel_curves
from conserved_papers.lab.fits import fitted_finding
from conserved_papers.lab.trajectory import Trajectory

_IN_K, _IN_TAU = 0.15, 0.2
"""How far exponents may be from 1 and 2."""

_LEAK = 0.1
"""With more rounding than this part of the drift, what is fitted is no longer the law's drift."""

PANELS = (
    ("(a) attention QQᵀ − KKᵀ", "images", "query_key"),
    ("(b) SwiGLU neurons", "images", "gated_neurons"),
    ("(c) rotary attention", "text", "query_key"),
    ("(d) softmax gate Σ Wᵢ", "text", "shift"),
)

KINDS = ("images", "text")
RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    "figure2": {"small": ("digits-sgd", "bytes-sgd"), "full": ("imagenet", "wikitext")},
    "figure3": {"small": ("digits", "bytes"), "full": ("cifar", "penn")},
}
"""The recipes of a figure, on images and on text; Figure 5 shows the runs of Figure 2."""


def figure2(trajectories: Sequence[Trajectory], scale: str = "small") -> Figure | None:
    """Draw mini-batch gradient descent: the paper's ImageNet-1K and WikiText-103."""
    return _figure(trajectories, "figure2", "mini-batches", scale)


def figure3(trajectories: Sequence[Trajectory], scale: str = "small") -> Figure | None:
    """Draw full-batch gradient descent: the paper's CIFAR-10 and Penn Treebank."""
    return _figure(trajectories, "figure3", "full batches", scale)


def runs_of(trajectories: Sequence[Trajectory], recipe: str) -> dict[float, list[Trajectory]]:
    """Return the runs of a recipe by step size."""
    return by_rate([run for run in trajectories if run.recipe == recipe])


def exponent_findings(runs: Runs, family: str, label: str) -> list[Finding]:
    """Return the two exponents of a quadratic law, with intervals over seeds, and how much of the bound is used.

    One step size has no exponent in it. Where the account of every step was kept, it says how much of the drift is
    rounding.
    """
    largest = runs[max(runs)]
    stem = f"{label}: exponent of the drift in"
    result = [fitted_finding(f"{stem} iteration k", growth(largest, family), 1, _IN_K)]
    if len(runs) > 1:
        in_tau = in_step_size(runs, family)
        result.append(fitted_finding(f"{stem} step size τ at fixed k", in_tau, 2, _IN_TAU))
    # At smaller steps the drift comes near rounding, which equation (9) knows nothing of.
    used = max(
        error / bound
        for run in largest
        for error, bound in zip(run.quantity(family).mean, run.quantity(family).bound or (), strict=True)
        if bound > 0
    )
    what = f"{label}: largest share of the bound (9) at the largest step size"
    result.append(Finding(what=what, value=used, expected="≤ 1", holds=used <= 1))
    ledgers = [ledger for run in largest if (ledger := run.quantity(family).ledger) is not None]
    if ledgers:
        leak = max(ledger["leak"][-1] / ledger["predicted"][-1] for ledger in ledgers)
        what = f"{label}: leak of rounding over the drift of exact steps, at the end"
        result.append(Finding(what=what, value=leak, expected=f"≤ {_LEAK:g}", holds=leak <= _LEAK))
    return result


def rounding_finding(runs: Runs, family: str, label: str) -> Finding:
    """Return the finding that a linear law does not drift beyond rounding, whatever the step size."""
    worst = max(max(run.quantity(family).mean) for group in runs.values() for run in group)
    limit = max(MORE_THAN_ROUNDING[run.precision] for group in runs.values() for run in group)
    return Finding.rounding(f"{label}: largest drift at any step size", worst, limit)


def panels_of(trajectories: Sequence[Trajectory], code: str, scale: str) -> list[tuple[str, Runs, str]]:
    """Return the panels of a figure that there are runs for: title, runs by step size, and family."""
    runs = {kind: runs_of(trajectories, recipe) for kind, recipe in zip(KINDS, RECIPES[code][scale], strict=True)}
    return [(title, runs[kind], family) for title, kind, family in PANELS if runs[kind]]


def _figure(trajectories: Sequence[Trajectory], code: str, regime: str, scale: str) -> Figure | None:
    shown = panels_of(trajectories, code, scale)
    if not shown:
        return None
    data: list[dict[str, Any]] = []
    findings: list[Finding] = []
    rows: list[tuple[str | float | int | None, ...]] = []
    for number, (title, group, family) in enumerate(shown, 1):
        data += panel_curves(group, family, number, legend=number == 1)
        label = title.partition(" ")[2]
        linear = next(iter(group.values()))[0].quantity(family).linear
        findings += [rounding_finding(group, family, label)] if linear else exponent_findings(group, family, label)
        rows += _rows(label, group, family)
    one = next(iter(shown[0][1].values()))
    seeds, steps, rates = len(one), one[0].steps, len(shown[0][1])
    sizes = f"{rates} step sizes" if rates > 1 else "one step size"
    trained = "; ".join(dict.fromkeys(f"{next(iter(g.values()))[0].title}" for _, g, _ in shown))
    return Figure(
        code=code if scale == "small" else f"{code}-full",
        title=f"Conservation error against iteration, {regime}",
        caption=(
            f"Equation (10) over {steps:,} steps at {sizes} ({trained}). Thin lines are layers, thick ones "
            f"their mean, bands reach over {seeds} seeds, dotted lines are the bound of equation (9) with constants "
            "from the run; exponents are fitted to all laws of a family together. Quadratic laws drift as τ²k; the "
            "gate's law is linear and does not drift at all, which the paper's panel (d) does not show."
        ),
        alt=f"{len(shown)} log-log panels of drift against iteration. {in_words(findings)}",
        data=tuple(data),
        layout=panels([title for title, _, _ in shown], x="iteration k", y="relative error (10)"),
        findings=tuple(findings),
        table=Table(columns=("law", "step size", "seeds", "steps", "final error", "bound (9)"), rows=tuple(rows)),
    )


def _rows(label: str, runs: Runs, family: str) -> list[tuple[str | float | int | None, ...]]:
    result: list[tuple[str | float | int | None, ...]] = []
    for rate, group in runs.items():
        final = sum(run.quantity(family).mean[-1] for run in group) / len(group)
        bounds = [bound[-1] for run in group if (bound := run.quantity(family).bound) is not None]
        result.append((label, rate, len(group), group[0].steps, final, sum(bounds) / len(bounds) if bounds else None))
    return result
