"""Figures the sources do not have: the exact ledger, optimizers, law counts, falling steps; and the blog's layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conserved.output.figure import PALETTE, Figure, Finding, Table, in_words, line, panels, positive
from conserved_papers.lab.accounts import OPTIMIZERS
from conserved_papers.lab.counts import COMPONENTS
from conserved_papers.lab.exponents import growth_after, in_step_size
from conserved_papers.lab.figures.curves import panel_curves
from conserved_papers.lab.figures.drift import exponent_findings, runs_of
from conserved_papers.lab.fits import fitted_finding
from conserved_papers.lab.task import Documents
from conserved_papers.lab.trajectory import Trajectory

_ROUNDING = 1e-13
_FAMILIES = (("query_key", "rotary attention"), ("gated_neurons", "SwiGLU neurons"), ("shift", "softmax gate Σ Wᵢ"))
_PARTS = (("first_order", "first order"), ("second_order", "second order"), ("residual", "residual"))
_COUNTED = ("title", "parameters", "counted", "recognised", "claimed", "gap")


def ledger(accounts: Documents) -> Figure | None:
    """Return what each step changed, by order: observed = first + second + residual, and the residual is rounding."""
    known = [name for name in OPTIMIZERS if any(a["optimizer"] == name for a in accounts.values())]
    if not known:
        return None
    data: list[dict[str, Any]] = []
    worst: dict[str, float] = {}
    for number, name in enumerate(known, 1):
        account = next(a for a in accounts.values() if a["optimizer"] == name)
        parts = account["families"]["query_key"]
        data.append(
            line(
                account["at"], positive(parts["observed"]), name="observed", color="#888888", panel=number, width=7,
                opacity=0.5, legend=number == 1,
            )
        )  # fmt: skip
        for color, (part, label) in zip(PALETTE, _PARTS, strict=False):
            # Plain gradient descent has no first-order part at all, and nothing to draw on a logarithmic axis.
            if any(parts[part]):
                first = label not in {trace["name"] for trace in data}
                data.append(
                    line(account["at"], positive(parts[part]), name=label, color=color, panel=number, legend=first)
                )
        worst[name] = max(
            max(f["residual"]) for a in accounts.values() if a["optimizer"] == name for f in a["families"].values()
        )
    findings = tuple(
        Finding.rounding(f"{OPTIMIZERS[name][0]}: largest residual of any law in any step", value, _ROUNDING)
        for name, value in worst.items()
    )
    layout = panels([OPTIMIZERS[name][0] for name in known], x="step", y="change in one step, rel.", log=(False, True))
    return Figure(
        code="ledger",
        title="The exact ledger: why each optimizer moves a law",
        caption=(
            "The change of the rotary attention law in every step of a small decoder, split by bilinearity into a part "
            "of first order in the update and one of second order. Plain gradient descent has no first-order part; "
            "momentum, decay and Adam's preconditioner put one there. What is left is rounding."
        ),
        alt=in_words(findings),
        data=tuple(data),
        layout=layout,
        findings=findings,
        section="beyond",
    )


def optimizers(accounts: Documents) -> Figure | None:
    """Equation (10) of three laws under five optimizers."""
    if not accounts:
        return None
    data: list[dict[str, Any]] = []
    final: dict[tuple[str, str], float] = {}
    rows: list[tuple[str | float | int | None, ...]] = []
    for number, (family, label) in enumerate(_FAMILIES, 1):
        for color, (name, (title, _)) in zip(PALETTE, OPTIMIZERS.items(), strict=False):
            group = [a for a in accounts.values() if a["optimizer"] == name]
            if not group:
                continue
            columns = zip(*(a["families"][family]["error"] for a in group), strict=True)
            mean = [sum(column) / len(column) for column in columns]
            data.append(line(group[0]["at"], positive(mean), name=title, color=color, panel=number, legend=number == 1))
            final[family, name] = mean[-1]
            rows.append((label, title, mean[-1]))
    findings = []
    for family, label in _FAMILIES[:2]:
        for name in ("momentum", "adam"):
            if (family, name) in final and (family, "sgd") in final:
                ratio = final[family, name] / final[family, "sgd"]
                what = f"{label}: drift under {OPTIMIZERS[name][0]} over that under SGD"
                expected = "above 1: a first-order part"
                findings.append(Finding(what=what, value=ratio, expected=expected, holds=ratio > 1))
    if ("shift", "momentum") in final:
        what = "softmax gate under momentum: drift of a linear law"
        findings.append(Finding.rounding(what, final["shift", "momentum"], 1e-12))
    return Figure(
        code="optimizers",
        title="Drift under momentum, decay and Adam",
        caption=(
            "The same decoder and data under five optimizers. Momentum keeps linear laws and lets quadratic ones drift "
            "to first order; decay shrinks all of them; Adam keeps none, since its preconditioner breaks the symmetry."
        ),
        alt=in_words(findings),
        data=tuple(data),
        layout=panels([label for _, label in _FAMILIES], x="step", y="relative error (10)", columns=3),
        findings=tuple(findings),
        table=Table(columns=("law", "optimizer", "final error"), rows=tuple(rows)),
        section="beyond",
    )


def counts(documents: Documents) -> Figure | None:
    """Laws that exist, counted by the Lie closure, beside those recognised and those the sources claim."""
    known = [documents[name] for name in COMPONENTS if name in documents]
    if not known:
        return None
    titles = [f["title"] for f in known]
    data = [
        {"type": "bar", "name": label, "x": titles, "y": [f[key] for f in known], "marker": {"color": color}}
        for label, key, color in (
            ("counted", "counted", PALETTE[0]),
            ("recognised", "recognised", PALETTE[2]),
            ("claimed by a source", "claimed", PALETTE[4]),
        )
    ]
    findings = [
        Finding(
            what=f"{f['title']}: independent laws",
            value=f["counted"],
            expected=f"{f['recognised']} recognised",
            holds=f["counted"] == f["recognised"],
        )
        for f in known
    ]
    wrong = [f["title"] for f in known if f["counted"] != f["claimed"]]
    rows = tuple(tuple(f[key] for key in _COUNTED) for f in known)
    layout = panels(["laws of one small component"], x="component", y="independent laws", log=(False, False))
    return Figure(
        code="counts",
        title="How many laws each component has",
        caption=(
            "The dimension that gradients and their brackets leave free, in float64, beside the laws read off the code "
            f"and those the sources give. They differ for: {', '.join(wrong) or 'none'}."
        ),
        alt="Bars per component. " + " ".join(f"{f.what}: {f.value:g}, {f.expected}." for f in findings),
        data=tuple(data),
        layout=layout | {"barmode": "group"},
        findings=tuple(findings),
        table=Table(columns=("component", *_COUNTED[1:5], "gap of singular values"), rows=rows),
        section="beyond",
    )


def schedules(trajectories: Sequence[Trajectory]) -> Figure | None:
    """Steps that fall as 1/(k+1): the drift stops growing, at a level ∝ τ₀²."""
    falling, constant = runs_of(trajectories, "digits-decaying"), runs_of(trajectories, "digits")
    if not falling:
        return None
    data = panel_curves(falling, "gated_neurons", 1, legend=True)
    titles = ["τ₀/(k+1)"]
    if constant:
        data += panel_curves(constant, "gated_neurons", 2, legend=True)
        titles.append("constant τ")
    largest = falling[max(falling)]
    late, scale = growth_after(largest, "gated_neurons", 1 / 4), in_step_size(falling, "gated_neurons")
    findings = (
        fitted_finding(
            "SwiGLU neurons: exponent of the drift in k over the last three quarters", late, 0, 0.15, note="bounded"
        ),
        fitted_finding("SwiGLU neurons: exponent of the final drift in τ₀", scale, 2, 0.2),
    )
    return Figure(
        code="schedules",
        title="With steps that fall as 1/(k+1) the drift stays bounded",
        caption=(
            "Equation (9) with Σ τᵢ² = τ₀² Σ 1/(k+1)² ≤ τ₀² π²/6: the error of the SwiGLU laws levels off, and its "
            "level is quadratic in τ₀. Beside it the same model at constant steps."
        ),
        alt=in_words(findings),
        data=tuple(data),
        layout=panels(titles, x="iteration k", y="relative error (10)"),
        findings=findings,
        section="beyond",
    )


def blog(trajectories: Sequence[Trajectory]) -> Figure | None:
    """Draw ‖W_QK‖² − ‖W_V‖² of the blog's ReLU attention, and the sum that is not conserved."""
    runs = runs_of(trajectories, "relu-attention")
    if not runs:
        return None
    data = panel_curves(runs, "query_key", 1, legend=True) + panel_curves(runs, "not_query_key", 2, legend=False)
    findings = tuple(exponent_findings(runs, "query_key", "‖W_QK‖² − ‖W_V‖²"))
    return Figure(
        code="relu-attention",
        title="The blog's law of ReLU attention",
        caption=(
            "relu(x W_QK xᵀ) x W_V trained with the square loss on rows of handwritten digits: the difference of "
            "squared norms drifts as τ²k, as a law does under gradient descent; their sum does not stay."
        ),
        alt=in_words(findings),
        data=tuple(data),
        layout=panels(["‖W_QK‖² − ‖W_V‖²", "‖W_QK‖² + ‖W_V‖²"], x="iteration k", y="relative error (10)"),
        findings=findings,
    )
