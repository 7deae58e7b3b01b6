"""Where jobs run: in this process, in several processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from conserved.optional import require


class Named(Protocol):
    """Anything with a name that files can be called after, and a device."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...


J = TypeVar("J", bound=Named)
Work = Callable[..., list[dict[str, Any]]]
"""work(job, checkpoint, progress) -> records."""

Result = list[dict[str, Any]] | BaseException


class Place(ABC):
    """Runs jobs and gives each result, or the error it ended in, as it comes; one failure does not sink the rest."""

    @abstractmethod
    def run(self, jobs: Sequence[J], work: Work, *, folder: Path) -> Iterator[tuple[J, Result]]:
        """Results in the order in which they are ready; unfinished runs are kept in `folder`."""


class Here(Place):
    """One job after another in this process."""

    def __init__(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        self.progress = progress

    def run(self, jobs: Sequence[J], work: Work, *, folder: Path) -> Iterator[tuple[J, Result]]:
        for job in jobs:
            yield job, self._one(job, work, folder)
        _tidy(folder)

    def _one(self, job: J, work: Work, folder: Path) -> Result:
        progress = self.progress
        told = None if progress is None else (lambda done, planned: progress(job.name, done, planned))
        try:
            return work(job, checkpoint_of(folder, job), told)
        except Exception as problem:
            return problem


class Processes(Place):
    """Several processes of this machine, each with its part of the cores.

    A process that dies (killed for memory, say) takes the pool with it and does not say whose fault it was; jobs that
    were not finished are then tried alone, so that only the one that dies again fails.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"There must be at least one worker; got {workers}.")
        self.workers = workers

    def run(self, jobs: Sequence[J], work: Work, *, folder: Path) -> Iterator[tuple[J, Result]]:
        left = {job.name: job for job in jobs}
        for job, found in self._pooled(jobs, work, folder, self.workers):
            if not isinstance(found, BrokenProcessPool):
                del left[job.name]
                yield job, found
        for job in left.values():
            for _, found in self._pooled([job], work, folder, 1):
                yield job, _explained(found)
        _tidy(folder)

    def _pooled(self, jobs: Sequence[J], work: Work, folder: Path, workers: int) -> Iterator[tuple[J, Result]]:
        if not jobs:
            return
        threads = max(1, (os.cpu_count() or 1) // self.workers)
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(threads,)
        )
        try:
            waiting: dict[Future[list[dict[str, Any]]], J] = {
                pool.submit(work, job, checkpoint_of(folder, job)): job for job in jobs
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

    def run(self, jobs: Sequence[J], work: Work, *, folder: Path) -> Iterator[tuple[J, Result]]:
        ray = require("ray", "A sweep on a cluster")
        local = self.address == "local"
        where: dict[str, Any] = {"num_cpus": self.workers} if local else {"address": self.address}
        ray.init(**where, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            remote = ray.remote(_alone)
            waiting = {
                remote.options(num_cpus=1, num_gpus=1 if job.device.startswith("cuda") else 0).remote(work, job): job
                for job in jobs
            }
            while waiting:
                for reference in ray.wait(list(waiting))[0]:
                    yield waiting.pop(reference), _fetched(ray, reference)
        finally:
            ray.shutdown()


def _fetched(ray: Any, reference: Any) -> Result:
    try:
        found: list[dict[str, Any]] = ray.get(reference)
    except ray.exceptions.RayTaskError as problem:
        return RuntimeError(str(problem.cause))
    except ray.exceptions.RayError as problem:
        return RuntimeError(f"Ray lost the job: {problem}")
    return found


def checkpoint_of(folder: Path, job: Named) -> Path:
    """Where an unfinished job is kept."""
    return folder / f"{job.name.replace('/', '-')}.pt"


def _begin(threads: int) -> None:
    """In a worker: take a part of the cores, and end when the process that started it is gone."""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _alone(work: Work, job: Named) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return work(job)


def _explained(found: Result) -> Result:
    if isinstance(found, BrokenProcessPool):
        return RuntimeError("its process ended abruptly; it may have run out of memory")
    return found


def _tidy(folder: Path) -> None:
    """Remove the folder of unfinished runs if there are none."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
