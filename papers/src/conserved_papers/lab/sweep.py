"""Many training runs: recipes × step sizes × seeds, each stored as soon as it is finished, resumable at any moment.

Seeds of one recipe at one step size are trained together, as one task. Only the process that sweeps writes to a store.
A task counts as done when every one of its documents is there, so a sweep that was killed goes on with what is missing,
and gives the same numbers as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from conserved.errors import InvalidInputError
from conserved.store.run_store import RunStore
from conserved.store.sqlite_sink import store_document
from conserved_papers.lab.places import Place
from conserved_papers.lab.recipes import Recipe, examples_of
from conserved_papers.lab.task import Documents, Task
from conserved_papers.lab.train import Limits, train
from conserved_papers.lab.trajectory import Trajectory, trajectory_name

KIND = "trajectory"
"""Under which trajectories are kept in a run store."""

Say = Callable[[str], None]


class NoRoomError(InvalidInputError, OSError):
    """The store cannot be written to, because the disk is full or the file may not be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Task):
    """One recipe at one step size, with seeds that are trained together."""

    kind: ClassVar[str] = KIND
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
        return tuple(trajectory_name(self.recipe.name, self.rate, seed) for seed in self.seeds)

    @property
    def accelerated(self) -> bool:
        return self.device.startswith("cuda")

    def perform(self, checkpoint: Path | None = None) -> Documents:
        result = train(
            self.recipe,
            examples_of(self.recipe, self.source),
            rate=self.rate,
            seeds=self.seeds,
            device=self.device,
            limits=Limits(seconds=math.inf if self.seconds is None else self.seconds, checkpoint=checkpoint),
        )
        return {trajectory.name: trajectory.record() for trajectory in result}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A task that could not be finished, and why."""

    task: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The result of a sweep: documents stored now, documents that were there already, and failures."""

    stored: int = 0
    present: int = 0
    failures: tuple[Failure, ...] = field(default=())


def trainings(
    recipes: Sequence[Recipe],
    *,
    seeds: int | None = None,
    sources: Callable[[Recipe], str | None] = lambda _: None,
    device: str = "cpu",
    seconds: float | None = None,
) -> list[Training]:
    """Return every recipe at every one of its step sizes; `seeds` replaces the recipe's seeds by 0, 1, …"""
    return [
        Training(
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


def sweep(tasks: Sequence[Task], store: str | Path, index: Place, *, say: Say = lambda _: None) -> Sweep:
    """Do what is missing in the store, wherever `place` does it, and store each result when it comes."""
    store = Path(store)
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"The task {twice} is listed twice.")
    known = _known(store, {task.kind for task in tasks})
    missing = [task for task in tasks if not known[task.kind].issuperset(task.results)]
    present = sum(len(task.results) for task in tasks) - sum(len(task.results) for task in missing)
    if present:
        say(f"{present} results are in {store} already")
    failures: list[Failure] = []
    done = 0
    for number, (task, result) in enumerate(index.run(missing, folder=checkpoints(store)), 1):
        if isinstance(result, BaseException):
            reason = str(result) or type(result).__name__
            failures.append(Failure(task=task.name, reason=reason))
            say(f"[{number}/{len(missing)}] {task.name} failed: {reason}")
            continue
        for name, content in result.items():
            keep(store, task.kind, name, content)
        done += len(result)
        say(f"[{number}/{len(missing)}] {task.name}")
    return Sweep(stored=done, present=present, failures=tuple(failures))


def _known(store: Path, kinds: set[str]) -> dict[str, set[str]]:
    if not store.exists():
        return {kind: set() for kind in kinds}
    with RunStore(store) as opened:
        return {kind: set(opened.documents(kind)) for kind in kinds}


def stored(store: str | Path, trajectory: Trajectory) -> None:
    """Keep a trajectory."""
    keep(store, KIND, trajectory.name, trajectory.record())


def keep(store: str | Path, kind: str, name: str, content: dict[str, Any]) -> None:
    """Write a document; a full disk is said in words, and leaves what was stored before as it was."""
    try:
        store_document(store, kind, name, content)
    except OSError as problem:
        raise NoRoomError(
            f"The store cannot be written to. {problem} What was stored before is safe; make room or name another "
            "place, and run the same command again to go on."
        ) from problem


def trajectories(store: str | Path) -> Iterator[Trajectory]:
    """Yield all trajectories of a store, oldest first."""
    with RunStore(store) as opened:
        for record in opened.documents(KIND).values():
            yield Trajectory.of(record)


def checkpoints(store: Path) -> Path:
    """Return the folder beside a store where unfinished runs are kept."""
    return store.with_name(f"{store.name}.unfinished")
