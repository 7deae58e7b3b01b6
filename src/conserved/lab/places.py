"""Where tasks run: in this process, in several processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from conserved.lab.task import Documents, Task
from conserved.optional import require

Result = Documents | BaseException


class Place(ABC):
    """Runs tasks and gives each result, or the error it ended in, as it comes; one failure does not sink the rest."""

    @abstractmethod
    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        """Results in the order in which they are ready; unfinished runs are kept in `folder`."""


class Here(Place):
    """One task after another in this process."""

    def __init__(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        self.progress = progress

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        for task in tasks:
            yield task, self._one(task, folder)
        _tidy(folder)

    def _one(self, task: Task, folder: Path) -> Result:
        progress = self.progress
        told = None if progress is None else (lambda done, planned: progress(task.name, done, planned))
        try:
            return task.perform(checkpoint_of(folder, task), told)
        except Exception as problem:
            return problem


class Processes(Place):
    """Several processes of this machine, each with its part of the cores.

    A process that dies (killed for memory, say) takes the pool with it and does not say whose fault it was; tasks that
    were not finished are then tried alone, so that only the one that dies again fails.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"There must be at least one worker; got {workers}.")
        self.workers = workers

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        left = {task.name: task for task in tasks}
        for task, found in self._pooled(tasks, folder, self.workers):
            if not isinstance(found, BrokenProcessPool):
                del left[task.name]
                yield task, found
        for task in left.values():
            for _, found in self._pooled([task], folder, 1):
                yield task, _explained(found)
        _tidy(folder)

    def _pooled(self, tasks: Sequence[Task], folder: Path, workers: int) -> Iterator[tuple[Task, Result]]:
        if not tasks:
            return
        threads = max(1, (os.cpu_count() or 1) // self.workers)
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(threads,)
        )
        try:
            waiting: dict[Future[Documents], Task] = {
                pool.submit(task.perform, checkpoint_of(folder, task)): task for task in tasks
            }
            while waiting:
                ready, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ready:
                    problem = future.exception()
                    yield waiting.pop(future), future.result() if problem is None else problem
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Ray(Place):
    """A Ray cluster: one that runs at an address, or two workers started on this machine.

    Every machine of the cluster needs this package, and the data under the same path.
    """

    def __init__(self, address: str, *, workers: int = 2) -> None:
        self.address, self.workers = address, workers

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        ray = require("ray", "A sweep on a cluster")
        local = self.address == "local"
        where: dict[str, Any] = {"num_cpus": self.workers} if local else {"address": self.address}
        ray.init(**where, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            remote = ray.remote(_alone)
            waiting = {remote.options(num_cpus=1, num_gpus=int(task.accelerated)).remote(task): task for task in tasks}
            while waiting:
                for reference in ray.wait(list(waiting))[0]:
                    yield waiting.pop(reference), _fetched(ray, reference)
        finally:
            ray.shutdown()


def _fetched(ray: Any, reference: Any) -> Result:
    try:
        found: Documents = ray.get(reference)
    except ray.exceptions.RayTaskError as problem:
        return RuntimeError(str(problem.cause))
    except ray.exceptions.RayError as problem:
        return RuntimeError(f"Ray lost the task: {problem}")
    return found


def checkpoint_of(folder: Path, task: Task) -> Path:
    """Where an unfinished task is kept."""
    return folder / f"{task.name.replace('/', '-')}.pt"


def _begin(threads: int) -> None:
    """In a worker: take a part of the cores, and end when the process that started it is gone."""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _alone(task: Task) -> Documents:
    torch.set_num_threads(1)
    return task.perform()


def _explained(found: Result) -> Result:
    if isinstance(found, BrokenProcessPool):
        return RuntimeError("its process ended abruptly; it may have run out of memory")
    return found


def _tidy(folder: Path) -> None:
    """Remove the folder of unfinished runs if there are none."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
