"""Where tasks run: in this process, in several processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch

from conserved.optional import require
from conserved.papers.lab.task import Documents, Task

Result = Documents | BaseException

_GRACE = 3.0
"""Seconds that interrupted workers have to save their state."""

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
                found: Result = task.perform(checkpoint_of(folder, task))
            except Exception as problem:
                found = problem
            yield task, found
        _tidy(folder)


class Processes(Place):
    """Several processes of this machine, each with its part of the cores.

    A process that dies (killed for memory, say) takes the pool with it and does not say whose fault it was; what was
    not finished is then done one after another, so that only the one that dies again fails.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"There must be at least one worker; got {workers}.")
        self.workers = workers

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        left = {task.name: task for task in tasks}
        workers = self.workers
        while left:
            # Alone in its pool, a task that breaks it is the one to blame; the others go on in the next pool.
            asked = list(left.values())
            for task, found in self._pooled(asked, folder, workers):
                broken = isinstance(found, BrokenProcessPool)
                if not broken or workers == 1:
                    del left[task.name]
                    yield task, RuntimeError(_ABRUPT) if broken else found
                if broken:
                    break
            workers = 1
        _tidy(folder)

    def _pooled(self, tasks: Sequence[Task], folder: Path, workers: int) -> Iterator[tuple[Task, Result]]:
        """Results as they come; with one worker in order, so that the first that is broken is the one that broke it.

        A worker may die between two tasks as well. The pool then refuses the next task, which is not to blame: what was
        under way is handed out as broken, and what was not begun is left to the caller's next pool.
        """
        threads = max(1, (os.cpu_count() or 1) // self.workers)
        pool = ProcessPoolExecutor(workers, _context(), initializer=_begin, initargs=(threads,))
        waiting: dict[Future[Documents], Task] = {}
        queue = list(tasks)
        try:
            while queue or waiting:
                while queue and len(waiting) < workers:
                    try:
                        with _undisturbed():
                            future = pool.submit(_interruptible, queue[0], checkpoint_of(folder, queue[0]))
                    except BrokenProcessPool:
                        queue.clear()
                        break
                    waiting[future] = queue.pop(0)
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    problem = future.exception()
                    yield waiting.pop(future), future.result() if problem is None else problem
        finally:
            _ended(pool, list(waiting))


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


def _context() -> BaseContext:
    """Workers are forked from a process that has imported PyTorch once, and has done nothing else with it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["conserved.papers.lab.sweep"])
    return found


def _begin(threads: int) -> None:
    """In a worker: take a part of the cores, do not hear Ctrl-C, and end when the process that started it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _ended(pool: ProcessPoolExecutor, unfinished: list[Future[Documents]]) -> None:
    """Let workers that were interrupted save what they have, and end those that are still at work."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    if unfinished:
        wait(unfinished, timeout=_GRACE)
        for process in processes:
            process.terminate()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Workers that start inside do not hear Ctrl-C, and do not end in tracebacks while they import or wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _interruptible(task: Task, checkpoint: Path) -> Documents:
    """In a worker: Ctrl-C ends the task, which saves its state, and nothing else."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return task.perform(checkpoint)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _alone(task: Task) -> Documents:
    torch.set_num_threads(1)
    return task.perform()


def _tidy(folder: Path) -> None:
    """Remove the folder of unfinished runs if there are none."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
