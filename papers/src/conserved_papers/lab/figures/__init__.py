"""Every figure, from what a run store holds and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from conserved.output.figure import Figure
from conserved.store.run_store import RunStore
from conserved_papers.lab import CODES, accounts, counts, levels, sweep
from conserved_papers.lab.figures import beyond
from conserved_papers.lab.figures.contrast import figure5
from conserved_papers.lab.figures.drift import figure2, figure3
from conserved_papers.lab.figures.gating import figure4
from conserved_papers.lab.figures.level_sets import figure1
from conserved_papers.lab.trajectory import Trajectory

__all__ = ["CODES", "all_figures", "figure1", "figure2", "figure3", "figure4", "figure5"]


def all_figures(store: str | Path) -> list[Figure]:
    """Return every figure the store has data for, without findings that need longer runs."""
    return [
        replace(figure, findings=tuple(finding for finding in figure.findings if math.isfinite(finding.value)))
        for figure in _figures(store)
        if figure is not None
    ]


def _figures(store: str | Path) -> Iterator[Figure | None]:
    with RunStore(store) as opened:
        runs = [Trajectory.of(record) for record in opened.documents(sweep.KIND).values()]
        account, count, level = (opened.documents(kind) for kind in (accounts.KIND, counts.KIND, levels.KIND))
    yield figure1(level)
    for make in (figure2, figure3, figure4, figure5):
        for scale in ("small", "full"):
            yield make(runs, scale)
    yield beyond.blog(runs)
    yield beyond.schedules(runs)
    yield beyond.ledger(account)
    yield beyond.optimizers(account)
    yield beyond.counts(count)
