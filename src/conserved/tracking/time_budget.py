r"""Which steps a monitor looks at, so that everything it does stays within its share of the run.

Let a step of the run take p seconds. A monitor may take a = max(share · p, least) of it. It earns a in every step and
pays for whatever it did there: hooks, audits, the account, storing. It looks at a step, which means that it audits the
gradients and accounts for the update, whenever it owes nothing. After n steps it has then taken at most n · a, and
beyond that what one look costs. With looks of c seconds and b seconds in every step, looks are about c/(a − b) steps
apart.

Some looks take many times as long as others: the first builds what all later ones use, and on suspicion a pass is run
again. Paid at once, such a look would leave thousands of steps after it unseen, in which errors of a new program show.
What it takes beyond twice a usual look is a debt, paid by a quarter of what is earned; the rest buys usual looks. For
the same reason steps 1, 2, 4, 8, … are looked at whatever that costs.

Nothing is saved up beyond one step: the pause of an evaluation does not buy a row of expensive steps. p is a median,
because a checkpoint or a garbage collection falls into some steps.

Processes that share parameters look together. They agree on a number of steps between looks, at steps whose numbers are
known in advance, because a decision that each makes by its own clock would let the others wait for ever.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from torch import nn

from conserved.rank_agreement import several_processes
from conserved.tracking.watching_cost import FIRST

LEAST = 2e-3
"""Seconds a step that a monitor may take on a CPU, whatever the share: a tiny model steps in less than a millisecond,
and a share of that buys nothing."""

SHARE_ON_CPU = 0.05
"""The share on a CPU where none is given."""

SHARE_ON_GPU = 0.01
"""The share on an accelerator where none is given."""

MOST = 1000
"""Steps between two looks at most, whatever they cost."""

_KEPT = 9
"""Times of a kind that a median is taken of."""

_PAYS = 0.25
"""Share of the allowance that pays debts, if there are any: usual looks are then a third further apart."""

_REVISED = 64
"""Steps after which processes agree again, once the powers of two below are past."""


def check_budget(share: float) -> None:
    """Raise ValueError if `share` is not a share."""
    if not 0 < share <= 1:
        raise ValueError(
            f"Expected `budget` to be a share of the time between 0 and 1, got {share!r}. Pass budget=0.02, for "
            "example."
        )


class TimeBudget:
    """Decides which steps are looked at, by what steps and looks took so far.

    Args:
        share: the share of the run's time that the monitor may take.
        least: seconds a step that it may always take.
        first: steps that are looked at whatever they cost; on a device they show what watching costs.
        together: whether several processes have to look at the same steps.
        on_processor: whether the monitor's work is timed by the processor: nothing waits for a device or a process,
            and a busy machine does not make looks dearer.
    """

    def __init__(
        self,
        *,
        share: float,
        least: float = 0.0,
        first: int = 1,
        together: bool = False,
        on_processor: bool = False,
    ) -> None:
        check_budget(share)
        self.on_processor = on_processor
        self.share, self.least, self.together = share, least, together
        self.interval = 1
        """Steps from the last look but one to the last; where processes look together, the number they agreed on."""
        self.spent, self.run = 0.0, 0.0
        """Seconds that the monitor took, and that the run took without it."""
        self.first, self._last, self._balance = first, 0, 0.0
        self._debt = 0.0
        """Seconds of unusually long looks that are still to be paid for."""
        self._looks: deque[float] = deque(maxlen=_KEPT)
        self._others: deque[float] = deque(maxlen=_KEPT)
        self._runs: deque[float] = deque(maxlen=_KEPT)

    @property
    def allowance(self) -> float:
        """Seconds that the monitor may take in a step."""
        return max(self.share * median(self._runs), self.least) if self._runs else self.least

    @property
    def base(self) -> float:
        """Seconds that the monitor takes in a step that it does not look at."""
        return median(self._others) if self._others else 0.0

    def due(self, step: int) -> bool:
        """Return whether step number `step` is looked at."""
        if step <= self.first or self.share == 1 or step >= self._last + MOST or _is_power_of_two(step):
            return True
        return step >= self._last + self.interval if self.together else self._balance >= 0

    def note(self, step: int, *, spent: float, run: float, looked: bool) -> None:
        """Take the times of a step.

        Args:
            step: its number.
            spent: seconds that the monitor took in it.
            run: seconds that the step took without the monitor.
            looked: whether the monitor looked at it.
        """
        self.spent, self.run = self.spent + spent, self.run + run
        self._runs.append(run)
        if looked and not self._last:
            self._debt, spent = spent, 0.0
        elif looked:
            usual = 2 * median(self._looks) if self._looks else spent
            self._looks.append(spent)
            self._debt, spent = self._debt + max(spent - usual, 0.0), min(spent, usual)
        else:
            self._others.append(spent)
        paid = min(self._debt, _PAYS * self.allowance)
        self._debt, spent = self._debt - paid, spent + paid
        if looked:
            if self._last and not self.together:
                self.interval = step - self._last
            self._last = step
        self._balance = min(self._balance - spent, 0.0) + self.allowance

    def revises(self, step: int) -> bool:
        """Return whether processes agree again after this step: at powers of two, then every 64 steps."""
        if not self.together or step < 2:
            return False
        return step % _REVISED == 0 or (step < _REVISED and _is_power_of_two(step))

    def wanted(self) -> int:
        """Return the steps between looks that the times of this process ask for."""
        if not self._looks:
            return self.interval
        surplus = self.allowance - self.base
        if surplus <= 0:
            return MOST
        return min(max(math.ceil((median(self._looks) - self.base) / surplus), 1), MOST)


def budget_for(model: nn.Module, share: float | None) -> TimeBudget:
    """Return the budget of a monitor of a model: by default a larger share, and a least time, on a CPU."""
    on_host = all(p.device.type in ("cpu", "meta") for p in model.parameters())
    return TimeBudget(
        share=share or (SHARE_ON_CPU if on_host else SHARE_ON_GPU),
        least=LEAST if on_host and share is None else 0.0,
        first=1 if on_host else FIRST,
        on_processor=on_host and not several_processes(),
    )


def _is_power_of_two(step: int) -> bool:
    return step & (step - 1) == 0
