r"""How many steps apart a monitor accounts for one, so that all it does stays within its budget.

Let a step of the run take p seconds, what a monitor does in every step b, and the account of one c. With an account
every n steps the monitor takes b + c/n a step, which is at most the allowance a = max(budget · p, least) if

    n ≥ c / (a − b).

Times are medians, because a garbage collection or a checkpoint falls into some of them. All processes of a run that
share parameters account together, so the stride changes only at steps whose numbers are known in advance.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

LEAST = 2e-3
"""Seconds a step that a monitor may take on a CPU, whatever the budget: a tiny model steps in less than a millisecond,
and a share of that buys nothing."""

SHARE_ON_CPU = 0.05
"""The share on a CPU where none is given."""

SHARE_ON_GPU = 0.01
"""The share on an accelerator where none is given."""

MOST = 1000
"""Steps between two accounts at most."""

_KEPT = 9
"""Times of a kind that a median is taken of."""

_FIRST = 2
"""Steps that are accounted for whatever they cost: the first one warms caches and says nothing about the others."""

_REVISED = 64
"""Steps after which the stride is chosen anew, once the powers of two below are past."""


class AccountStride:
    """Chooses which steps are accounted for.

    Args:
        every: a fixed number of steps, or None to adapt it.
        share: the share of a step's time that a monitor may take.
        least: seconds a step that it may always take.
    """

    def __init__(self, every: int | None, *, share: float, least: float) -> None:
        self.steps = every or 1
        """Steps from one account to the next, as it is now."""
        self.adapts, self.share = every is None, share
        self._least = least
        self._last = 0
        self._accounts: deque[float] = deque(maxlen=_KEPT)
        self._others: deque[float] = deque(maxlen=_KEPT)
        self._runs: deque[float] = deque(maxlen=_KEPT)

    def due(self, step: int) -> bool:
        """Whether step number `step` is accounted for."""
        if not self.adapts:
            return step % self.steps == 0
        return step <= _FIRST or step >= self._last + self.steps

    def note(self, step: int, *, inside: float, run: float, accounted: bool) -> None:
        """Take the times of a step.

        Args:
            step: its number.
            inside: seconds that the monitor took, besides audits, which have a pace of their own.
            run: seconds that the step took without the monitor.
            accounted: whether the step was accounted for.
        """
        if accounted:
            self._last = step
        if step > 1:
            (self._accounts if accounted else self._others).append(inside)
            self._runs.append(run)

    def revises(self, step: int) -> bool:
        """Whether the stride is chosen anew after this step: at powers of two, then every 64 steps."""
        if not self.adapts or step < _FIRST:
            return False
        return step % _REVISED == 0 or (step < _REVISED and step & (step - 1) == 0)

    def wanted(self) -> int:
        """The stride that the times so far ask for."""
        if not self._accounts:
            return self.steps
        other = median(self._others) if self._others else 0.0
        allowance = max(self.share * median(self._runs), self._least) - other
        cost = median(self._accounts) - other
        if allowance <= 0:
            return MOST
        return min(max(math.ceil(cost / allowance), 1), MOST)
