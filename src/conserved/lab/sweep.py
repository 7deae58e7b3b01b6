"""Many training runs: recipes × step sizes × seeds, each stored as soon as it is finished, resumable at any moment.

A job is one recipe at one step size with all its seeds, which are trained together. Only the process that sweeps writes
to the store. A job counts as done when every one of its trajectories is there, so a sweep that was killed goes on with
what is missing, and gives the same numbers as one that was not.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conserved.lab.places import Place
from conserved.lab.recipes import Recipe, examples_of
from conserved.lab.train import Limits, Progress, train
from conserved.lab.trajectory import Trajectory, trajectory_name
from conserved.track.sinks.sqlite import RunStore, store_document

KIND = "trajectory"
"""Under which trajectories are kept in a run store."""

Say = Callable[[str], None]


class NoRoom(OSError):
    """The store cannot be written to, because the disk is full or the file may not be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One recipe at one step size, with seeds that are trained together."""

    recipe: Recipe
    rate: float
    seeds: tuple[int, ...]
    source: str | None = None
    """Where the data is, if not embedded."""
    device: str = "cpu"
    seconds: float | None = None
    """When to stop, if not at the recipe's last step."""

    @property
    def name(self) -> str:
        return f"{self.recipe.name}/{self.rate:g}"

    @property
    def results(self) -> tuple[str, ...]:
        """What its trajectories are called in the store."""
        return tuple(trajectory_name(self.recipe.name, self.rate, seed) for seed in self.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A job that could not be finished, and why."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep did: trajectories stored now, trajectories that were there already, and failures."""

    stored: int = 0
    present: int = 0
    failures: tuple[Failure, ...] = field(default=())


def jobs_of(
    recipes: Sequence[Recipe],
    *,
    seeds: int | None = None,
    sources: Callable[[Recipe], str | None] = lambda _: None,
    device: str = "cpu",
    seconds: float | None = None,
) -> list[Job]:
    """Every recipe at every one of its step sizes; `seeds` replaces the recipe's seeds by 0, 1, …"""
    return [
        Job(
            recipe=recipe,
            rate=rate,
            seeds=recipe.seeds if seeds is None else tuple(range(seeds)),
            source=sources(recipe),
            device=device,
            seconds=seconds,
        )
        for recipe in recipes
        for rate in recipe.rates
    ]


def sweep(jobs: Sequence[Job], store: str | Path, place: Place, *, say: Say = lambda _: None) -> Sweep:
    """Run what is missing in the store, wherever `place` runs jobs, and store each result when it comes."""
    store = Path(store)
    names = [job.name for job in jobs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"The job {twice} is listed twice.")
    known = set(RunStore(store).documents(KIND)) if store.exists() else set()
    missing = [job for job in jobs if not known.issuperset(job.results)]
    present = sum(len(job.results) for job in jobs) - sum(len(job.results) for job in missing)
    if present:
        say(f"{present} trajectories are in {store} already")
    failures: list[Failure] = []
    done = 0
    for number, (job, found) in enumerate(place.run(missing, run_job, folder=checkpoints(store)), 1):
        if isinstance(found, BaseException):
            reason = str(found) or type(found).__name__
            failures.append(Failure(job=job.name, reason=reason))
            say(f"[{number}/{len(missing)}] {job.name} failed: {reason}")
            continue
        trajectories = [Trajectory.of(record) for record in found]
        for trajectory in trajectories:
            stored(store, trajectory)
        done += len(trajectories)
        say(f"[{number}/{len(missing)}] {job.name}: {trajectories[0].steps} steps of {len(trajectories)} seeds")
    return Sweep(stored=done, present=present, failures=tuple(failures))


def run_job(job: Job, checkpoint: Path | None = None, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Train one job, from its checkpoint if there is one; plain records, so that they travel."""
    examples = examples_of(job.recipe, job.source)
    limits = Limits(seconds=float("inf") if job.seconds is None else job.seconds, checkpoint=checkpoint)
    found = train(
        job.recipe,
        examples,
        rate=job.rate,
        seeds=job.seeds,
        device=job.device,
        limits=limits,
        progress=progress,
    )
    return [trajectory.record() for trajectory in found]


def stored(store: str | Path, trajectory: Trajectory) -> None:
    """Keep a trajectory."""
    keep(store, KIND, trajectory.name, trajectory.record())


def keep(store: str | Path, kind: str, name: str, content: dict[str, Any]) -> None:
    """Write a document; a full disk is said in words, and leaves what was stored before as it was."""
    try:
        store_document(store, kind, name, content)
    except (sqlite3.OperationalError, OSError) as problem:
        raise NoRoom(
            f"{store} cannot be written to: {problem}. What was stored before is safe; make room or name another "
            "place, and run the same command again to go on."
        ) from problem


def trajectories(store: str | Path) -> Iterator[Trajectory]:
    """All trajectories of a store, oldest first."""
    with RunStore(store) as opened:
        for record in opened.documents(KIND).values():
            yield Trajectory.of(record)


def checkpoints(store: Path) -> Path:
    """The folder beside a store where unfinished runs are kept."""
    return store.with_name(f"{store.name}.unfinished")
