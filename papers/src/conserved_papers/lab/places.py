"""Where tasks run: one after another in this process, or on Ray, with workers on this machine or on a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from conserved.optional import require
from conserved_papers.lab.task import Documents, Task

Result = Documents | BaseException

LOCAL = "local"
"""The address that stands for workers of this machine, which are started for the sweep and end with it."""

_ABRUPT = "its process ended abruptly; it may have run out of memory"


class Place(ABC):
    """Runs tasks and gives each result, or the error it ended in, as it comes; one failure does not sink the rest."""

    @abstractmethod
    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        """Results in the order in which they are ready; unfinished runs are kept in `folder`."""


class Here(Place):
    """One task after another in this process."""

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        for task in tasks:
            try:
                result: Result = task.perform(checkpoint_of(folder, task))
            except Exception as problem:
                result = problem
            yield task, result
        _tidy(folder)


class Ray(Place):
    """A Ray cluster: one that runs at an address, or workers started on this machine.

    Every machine of a cluster needs this package, and the data under the same path. On this machine unfinished runs
    are kept, and a sweep that is interrupted goes on from them; a machine of a cluster may not see the folder.
    """

    def __init__(self, address: str = LOCAL, *, workers: int = 2) -> None:
        if workers < 1:
            raise ValueError(f"Expected at least one worker, got {workers}.")
        self.address, self.workers = address, workers

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        ray = require("ray", "A sweep by several processes")
        local = self.address == LOCAL
        where: dict[str, Any] = {"num_cpus": self.workers} if local else {"address": self.address}
        ray.init(**where, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            # A task whose process dies would die again; Ray's own retries would only delay saying so.
            perform = ray.remote(max_retries=0)(_perform)
            waiting = {
                perform.options(num_cpus=1, num_gpus=int(task.accelerated)).remote(
                    task, checkpoint_of(folder, task) if local else None
                ): task
                for task in tasks
            }
            while waiting:
                for reference in ray.wait(list(waiting))[0]:
                    yield waiting.pop(reference), _fetch(ray, reference)
        finally:
            ray.shutdown()
        _tidy(folder)


def _fetch(ray: Any, reference: Any) -> Result:
    try:
        documents: Documents = ray.get(reference)
    except ray.exceptions.RayTaskError as problem:
        return RuntimeError(str(problem.cause))
    except ray.exceptions.WorkerCrashedError:
        return RuntimeError(_ABRUPT)
    except ray.exceptions.RayError as problem:
        return RuntimeError(f"Ray lost the task: {problem}")
    return documents


def checkpoint_of(folder: Path, task: Task) -> Path:
    """Return the path where an unfinished task is kept."""
    return folder / f"{task.name.replace('/', '-')}.pt"


def _perform(task: Task, checkpoint: Path | None) -> Documents:
    """Run a task in a worker, which has one core."""
    torch.set_num_threads(1)
    return task.perform(checkpoint)


def _tidy(folder: Path) -> None:
    """Remove the folder of unfinished runs if there are none."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
