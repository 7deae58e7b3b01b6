"""Evidence for claims from stored runs at the paper's own sizes and lengths, beside small and quick checks.

The runs take half an hour of a graphics processor (`benchmarks/long_runs.py`); a summary of them lies in the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from conserved.verdict import Evidence
from conserved_papers.lab.long import LongRun
from conserved_papers.lab.trajectory import Quantity
from conserved_papers.lab.windows import windows

ARITHMETIC = {"half": "half precision", "pieces": "float32 in pieces", "single": "float32", "double": "float64"}
"""Precisions of gradients, coarsest first."""

FINENESS = tuple(ARITHMETIC)

STAND_INS = {
    "cifar": "Fashion-MNIST",
    "imagenet": "Fashion-MNIST",
    "penn": "the King James Bible",
    "wikitext": "the King James Bible",
}
"""The data of the stored runs, by recipe."""


def runs_that_count(runs: Sequence[LongRun]) -> dict[str, LongRun]:
    """Return the runs that count: of every recipe the longest in the finest arithmetic, and one in float64 if that is
    another.

    Args:
        runs: Long runs, several of a recipe where they differ in arithmetic.

    Returns:
        By recipe, and those in float64 that did not come to the end as "RECIPE, float64".
    """
    latest: dict[str, LongRun] = {}
    for run in sorted(runs, key=lambda run: (run.trajectory.steps, FINENESS.index(run.arithmetic.products))):
        latest[run.trajectory.recipe] = run
    exact = [run for run in runs if run.arithmetic.products == "double"]
    latest |= {f"{recipe}, float64": run for run in exact if latest[recipe := run.trajectory.recipe] is not run}
    return dict(sorted(latest.items()))


def summary_of(runs: Sequence[LongRun], fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what claims are told of the runs: steps, the share of the bound, exponents by window, and energy fields.

    Args:
        runs: Long runs, several of a recipe where they differ in arithmetic.
        fields: Rows that describe energy fields at some of their steps.
    """
    result: dict[str, Any] = {}
    for name, run in runs_that_count(runs).items():
        t = run.trajectory
        laws = {}
        for quantity in t.quantities:
            if quantity.role == "law" and quantity.ledger is not None:
                exponents = [w.predicted_in_squares for w in windows(t, quantity.family)]
                laws[quantity.family] = {
                    "share": None if quantity.linear else _share(quantity),
                    "drift": quantity.drift[-1],
                    "leak": quantity.ledger["leak"][-1],
                    "predicted": quantity.ledger["predicted"][-1],
                    "in_squares": [round(fit.value, 2) for fit in exponents if fit is not None],
                }
        rows = [row for row in fields if row["recipe"] == name]
        result[name] = {"steps": t.steps, "planned": t.planned, "products": run.arithmetic.products, "laws": laws}
        if rows:
            result[name]["fields"] = {
                "rows": len(rows),
                "participation": min(row["participation"] for row in rows),
                "gaussian": min(row["gaussian_participation"] for row in rows),
                "coherence": max(row["coherence"] / row["gaussian_coherence"] for row in rows),
            }
    return result


def _share(quantity: Quantity) -> float:
    """Return the largest part of the bound (9) that the error (10) reached at a recorded step."""
    return max(error / bound for error, bound in zip(quantity.mean, quantity.bound or (), strict=True) if bound > 0)


@cache
def stored() -> dict[str, Any]:
    """Return the summary that lies in the package."""
    text = files("conserved_papers.claims").joinpath("long_runs.json").read_text(encoding="utf-8")
    summary: dict[str, Any] = json.loads(text)
    return summary


def share_of_bound(recipe: str, families: Sequence[str]) -> Evidence:
    """Return the largest share of the bound (9) that laws reached in a stored run."""
    share = max(stored()[recipe]["laws"][family]["share"] for family in families)
    return Evidence(what=f"largest share of the bound (9), {_run(recipe)}", value=share, limit=1.0)


def rounding(recipe: str, families: Sequence[str]) -> Evidence:
    """Return how large rounding was against the drift of exact steps in a stored run, law by law."""
    laws = stored()[recipe]["laws"]
    ratios = ", ".join(f"{laws[family]['leak'] / laws[family]['predicted']:.2g} ({family})" for family in families)
    arithmetic = ARITHMETIC[stored()[recipe]["products"]]
    return Evidence(
        what=f"rounding over the drift of exact steps, gradients in {arithmetic}, {_run(recipe)}", value=ratios
    )


def within_bound(recipe: str, families: Sequence[str]) -> bool:
    """Return whether all of these laws kept within the bound (9) in a stored run."""
    return all(stored()[recipe]["laws"][family]["share"] <= 1 for family in families)


def in_squares(recipe: str, family: str) -> list[float]:
    """Exponents of the second-order drift in Σ τ_i², early, in the middle and late in a stored run."""
    result: list[float] = stored()[recipe]["laws"][family]["in_squares"]
    return result


def drifted(recipe: str, family: str) -> Evidence:
    """Return how far a law went in a stored run."""
    what = f"relative drift, gradients in {ARITHMETIC[stored()[recipe]['products']]}, {_run(recipe)}"
    return Evidence(what=what, value=stored()[recipe]["laws"][family]["drift"])


def spread() -> list[Evidence]:
    """Return how evenly fields were spread, and how coherent keys were, along the stored runs."""
    fields = [run["fields"] for run in stored().values() if "fields" in run]
    count = sum(result["rows"] for result in fields)
    where = "along stored runs at the paper's sizes, medians over heads"
    least = min(result["participation"] for result in fields)
    most = max(result["coherence"] for result in fields)
    return [
        Evidence(what=f"least participation, {where}", value=least, samples=count),
        Evidence(what=f"largest coherence over that of Gaussian keys, {where}", value=most, samples=count),
    ]


@cache
def trained_encoder() -> dict[str, Any]:
    """Return what `benchmarks/delocalisation.py` found in the heads of a trained encoder, eight texts of 256 tokens."""
    text = files("conserved_papers.claims").joinpath("trained_encoder.json").read_text(encoding="utf-8")
    summary: dict[str, Any] = json.loads(text)
    return summary


def run_name(recipe: str) -> str:
    """Return what a stored run is called: its recipe, and the data that stood in for the paper's."""
    return f"full-size run {recipe} on {STAND_INS[recipe.partition(',')[0]]}"


def _run(recipe: str) -> str:
    run = stored()[recipe]
    return f"{run_name(recipe)}, {run['steps']:,} of {run['planned']:,} steps"
