"""A sink that writes on a thread of its own, so that a slow, locked or broken store never holds up training."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord

WAITING = 256
"""Records that may wait to be written. A thousand laws take about 0.1 MB a record, so the queue stays below 30 MB."""

PATIENCE = 5.0
"""Seconds that `close` waits for the last records; a commit to a healthy disk takes milliseconds."""


_OPEN: weakref.WeakSet[BackgroundSink] = weakref.WeakSet()
"""Sinks whose thread runs."""


@atexit.register
def _close_open_sinks() -> None:
    """Close what a program leaves open when it ends, so that its file is whole and can be copied."""
    for sink in tuple(_OPEN):
        if sink.process == os.getpid():  # A fork has neither the thread nor the file.
            sink.close()


class BackgroundSink(Sink):
    """Hands records to another sink on a daemon thread; when too many wait, further ones are dropped and counted.

    Args:
        sink: the sink that writes; it is used by the thread alone.
        waiting: number of records that may wait.
    """

    def __init__(self, sink: Sink, *, waiting: int = WAITING) -> None:
        self.sink, self.dropped = sink, 0
        self.failure: Exception | None = None
        """The exception that ended writing, if one did."""
        self._most = waiting
        self._jobs: deque[Callable[[], Any]] = deque()
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False
        self.process = os.getpid()
        """The process whose thread writes."""

    @property
    def name(self) -> str:
        """The file it writes, or the class of the sink."""
        return str(getattr(self.sink, "path", type(self.sink).__name__))

    def begin(self, run: Run) -> None:
        self._add(partial(self.sink.begin, run))

    def write(self, record: StepRecord) -> None:
        with self._changed:
            if len(self._jobs) >= self._most:
                self.dropped += 1
                return
        self._add(partial(self.sink.write, record))

    def note_state(self, state: str) -> None:
        self._add(partial(self.sink.note_state, state))

    def drain(self, seconds: float = PATIENCE) -> bool:
        """Wait until everything is written; False if that took longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(self._idle, timeout=seconds)

    def close(self) -> None:
        if self._thread is None:
            return
        # After a failure the sink still gets the chance to let go of its file.
        self._add(self.sink.close)
        self.drain()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        _OPEN.discard(self)

    def _idle(self) -> bool:
        return not self._jobs and not self._busy

    def _add(self, job: Callable[[], Any]) -> None:
        with self._changed:
            if self.failure is not None and job != self.sink.close:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="conserved store", daemon=True)
                self.process = os.getpid()
                self._thread.start()
                _OPEN.add(self)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._ended)
                if not self._jobs:
                    return
                job, self._busy = self._jobs.popleft(), True
            problem: Exception | None = None
            try:
                job()
            except Exception as raised:
                # A thread has no caller to raise to: the owner of the sink reads `failure`.
                problem = raised
            with self._changed:
                self._busy = False
                if problem is not None and self.failure is None:
                    self.failure = problem
                    self._jobs = deque(pending for pending in self._jobs if pending == self.sink.close)
                self._changed.notify_all()
