"""Times of a monitored step: what the monitor took of it, by purpose, and what the run took."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from conserved.boundary import Boundary
from conserved.tracking.time_budget import TimeBudget

READING = "reading"
"""The purpose of reading the laws, which the budget does not pay for."""


class StepTimes:
    """Clocks that are read once a step, and hand its times to the budget.

    Args:
        boundary: measures all work of the monitor.
        budget: takes the times.
        asked: purposes whose cadence the user gave; the budget does not pay for these.
    """

    def __init__(self, boundary: Boundary, budget: TimeBudget, asked: Collection[str]) -> None:
        self._boundary, self._budget = boundary, budget
        self._unpaid = frozenset((*asked, READING))
        self._clock, self._inside, self._computed = time.perf_counter(), 0.0, 0.0
        self._spent: defaultdict[str, float] = defaultdict(float)
        """Seconds of this step, by purpose."""

    @contextmanager
    def spent_on(self, purpose: str) -> Iterator[None]:
        """Count the time of a block for a purpose."""
        began = self._now()
        try:
            yield
        finally:
            self._spent[purpose] += self._now() - began

    def end_step(self, step: int, *, looked: bool, waited: float, watching: float) -> None:
        """Take the times of a step.

        Args:
            step: its number.
            looked: whether the monitor looked at it.
            waited: seconds that an audit waited for passes of the run.
            watching: seconds that hooks add to a step that is looked at, where the host does not see them.
        """
        now, inside, computed = time.perf_counter(), self._boundary.seconds, self._boundary.processor_seconds
        elapsed, spent = now - self._clock, inside - self._inside
        own = computed - self._computed if self._budget.on_processor else spent
        self._clock, self._inside, self._computed = now, inside, computed
        unpaid = sum(self._spent[purpose] for purpose in self._unpaid)
        own = max(own - waited - unpaid, 0.0) + watching
        self._budget.note(step, spent=own, run=max(elapsed - spent + waited, 0.0), looked=looked)

    def forget_step(self) -> None:
        """Forget the purposes of the last step."""
        self._spent.clear()

    def _now(self) -> float:
        """Return the time by the clock that the monitor's own work is measured with."""
        return time.thread_time() if self._budget.on_processor else time.perf_counter()
