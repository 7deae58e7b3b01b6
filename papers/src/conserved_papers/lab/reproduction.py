"""From the names of figures to the work they need, the store it fills, and the figures made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from conserved.output.figure import Figure
from conserved.plain_data import record_of
from conserved_papers.lab.accounts import OPTIMIZERS, Account
from conserved_papers.lab.counts import COMPONENTS, Count
from conserved_papers.lab.data import UnusableDataError
from conserved_papers.lab.data.sources import kind_of
from conserved_papers.lab.figures import CODES, all_figures, drift, gating
from conserved_papers.lab.levels import RATES, Levels
from conserved_papers.lab.places import Place
from conserved_papers.lab.recipes import Recipe, examples_of, named
from conserved_papers.lab.sweep import Say, Sweep, keep, sweep, trainings
from conserved_papers.lab.task import Task

FIGURES = "figure"
"""Under which figures are kept in a run store."""

ExperimentSize = Literal["small", "full"]

_RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    **drift.RECIPES,
    "figure4": {scale: (*gating.SOFTMAX[scale], *dict(gating.SIGMOID[scale])) for scale in ("small", "full")},
    "figure5": drift.RECIPES["figure2"],
    "relu-attention": {"small": ("relu-attention",), "full": ("relu-attention",)},
    "schedules": {"small": ("digits", "digits-decaying"), "full": ("digits", "digits-decaying")},
}
"""The recipes of each figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """The work that was done, and the figures that were requested."""

    sweep: Sweep
    figures: tuple[Figure, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing failed and every finding is as expected."""
        return not self.sweep.failures and all(f.holds for figure in self.figures for f in figure.findings)

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "ok": self.holds,
            **record_of(self.sweep, "stored present failures"),
            "figures": [record_of(figure, "code title findings") for figure in self.figures],
        }


def plan(
    figures: Sequence[str] = CODES,
    *,
    scale: ExperimentSize = "small",
    seeds: int | None = None,
    data: Sequence[str] = (),
    device: str = "cpu",
    seconds: float | None = None,
) -> list[Task]:
    """Return all the work the figures need, each piece once, the longest first; a user's files are looked at first."""
    unknown = [code for code in figures if code not in CODES]
    if unknown:
        raise UnusableDataError(f"There is no figure {unknown[0]!r}. There are: {', '.join(CODES)}.")
    if seeds is not None and seeds < 1:
        raise UnusableDataError(f"There must be at least one seed; got {seeds}.")
    chosen = dict.fromkeys(name for code in figures for name in _RECIPES.get(code, {}).get(scale, ()))
    recipes = [named(name) for name in chosen]
    sources = sources_among(data)
    seen = set()
    for recipe in recipes:
        source = sources(recipe)
        if (source, recipe.wants) not in seen:
            # One example is enough to find a wrong path or a damaged file before hours of training.
            examples_of(replace(recipe, examples=1), source)
            seen.add((source, recipe.wants))
    tasks: list[Task] = [*trainings(recipes, seeds=seeds, sources=sources, device=device, seconds=seconds)]
    if "counts" in figures:
        tasks += [Count(component=name) for name in COMPONENTS]
    if "ledger" in figures or "optimizers" in figures:
        tasks += [Account(optimizer=name) for name in OPTIMIZERS]
    if "figure1" in figures:
        tasks += [Levels(rate=rate) for rate in RATES]
    return tasks


def sources_among(data: Sequence[str]) -> Callable[[Recipe], str | None]:
    """Return for each recipe the first given source that holds its kind of data, if any does."""
    kinds = {source: kind_of(source) for source in data}

    def source_of(recipe: Recipe) -> str | None:
        if recipe.architecture == "relu_attention":
            return None
        return next((source for source, kind in kinds.items() if kind in (recipe.wants, "either")), None)

    return source_of


def reproduce(
    tasks: Sequence[Task],
    store: str | Path,
    index: Place,
    *,
    codes: Sequence[str] = CODES,
    say: Say = lambda _: None,
) -> Reproduction:
    """Do what the store lacks, make and store every figure it has data for, and give back those asked for."""
    done = sweep(tasks, store, index, say=say)
    figures = all_figures(store) if Path(store).exists() else []
    for figure in figures:
        keep(store, FIGURES, figure.code, figure.record())
    asked = tuple(figure for figure in figures if figure.code.removesuffix("-full") in codes)
    return Reproduction(sweep=done, figures=asked)
