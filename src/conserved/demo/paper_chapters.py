"""The chapters on the paper, shown if `conserved_papers` is installed."""

from __future__ import annotations

from pathlib import Path

from conserved.demo.chapters import Settings
from conserved.demo.training import Tell
from conserved.tracking import store_document
from conserved_papers.claims.registry import claims, outcomes
from conserved_papers.lab.figures import all_figures
from conserved_papers.lab.places import LOCAL, Here, Ray
from conserved_papers.lab.recipes import named
from conserved_papers.lab.sweep import keep, sweep, trainings


def judge_theorem(store: Path, settings: Settings, tell: Tell) -> None:
    """Check the paper's theorem on sigmoid gates, and the one on softmax gates that it was modelled on."""
    chosen = [claim for code in settings.claims for claim in claims(code) if claim.code == code]
    for outcome in outcomes(chosen, progress=lambda claim, index, total: tell(f"{claim.code}, {index + 1} of {total}")):
        store_document(store, "claim", outcome.claim.code, outcome.record())


def repeat_experiment(store: Path, settings: Settings, tell: Tell) -> None:
    """Train two decoders of the paper's kind, with softmax and sigmoid gates, at three step sizes, and draw their
    figures.
    """
    recipes = [named(name) for name in settings.recipes]
    executor = Ray(LOCAL, workers=settings.workers) if settings.workers > 1 else Here()
    done = sweep(trainings(recipes, seeds=settings.seeds), store, executor, say=tell)
    if done.failures:
        listing = "; ".join(f"{failure.task}: {failure.reason}" for failure in done.failures)
        raise RuntimeError(f"Experiments of the demonstration failed: {listing}")
    for figure in all_figures(store):
        keep(store, "figure", figure.code, figure.record())
