r"""How often a run can afford to look at its gradients: what audits take, and what watching makes of the passes before.

Let a step take p seconds, one whose passes are watched (1 + r)p, and an audit c. From the end of an audit to the
beginning of the next, n steps later, T_n = (n + r)p passes, so that r follows from times between audits of successive
steps and of every second one: 1 + r = T_1/(T_2 − T_1). Audits of every n-th step then cost (c + rp)/np of the run.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

GRACE = 3.0
"""Seconds that audits may take in a run beyond their budget: short runs of small models are audited at every step."""

WATCHED = 60.0
"""Seconds of a run whose steps are all watched, before it is found out what that costs."""

AT_LEAST = 100
"""Steps between two audits at the most, whatever they cost."""

_KEPT = 20
"""Times of a kind that are remembered."""

_NEARLY = 0.01
"""Of a step: times are not known so well that one more would be waited for."""

_ENOUGH = 3
"""Times of a kind from which its median is taken."""


class Pace:
    """Decides after how many steps the next audit comes, by the times of those before."""

    def __init__(self, budget: float) -> None:
        if not 0 < budget <= 1:
            raise ValueError(f"The budget of audits is a share of step time between 0 and 1; got {budget}.")
        self.budget = budget
        self._costs: deque[float] = deque(maxlen=_KEPT)
        self._spans: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        """Steps from one audit to the next, and the seconds they took."""
        self._learnt: dict[int, list[float]] = {1: [], 2: []}
        """T_1 and T_2."""
        self._spent, self._watched = 0.0, 0.0

    def start_again(self) -> None:
        """Something has changed that makes other times of steps and audits likely."""
        self._costs.clear()
        self._spans.clear()
        self._learnt = {1: [], 2: []}

    def note(self, seconds: float, *, steps: int = 1, between: float | None = None) -> None:
        """An audit was made.

        Args:
            seconds: what it took.
            steps: how many steps after the last one.
            between: the seconds that passed in between; None where there was none before, or more than steps happened.
        """
        self._spent += seconds
        self._costs.append(seconds)
        if between is None:
            return
        self._spans.append((steps, between))
        self._watched += between / steps
        if steps in self._learnt:
            self._learnt[steps] = [*self._learnt[steps], between][-_KEPT:]

    def interval(self) -> int:
        """Steps until the next audit."""
        in_grace = self._spent <= GRACE and self._watched <= WATCHED
        if in_grace or self.budget == 1 or not self._costs:
            return 1
        for steps, times in self._learnt.items():
            if len(times) < _ENOUGH:
                return steps
        extra = self.extra()
        step = median(seconds / (steps + extra) for steps, seconds in self._spans)
        cost = median(self._costs) + extra * step
        return min(max(math.ceil(cost / (self.budget * max(step, 1e-9)) - _NEARLY), 1), AT_LEAST)

    def extra(self) -> float:
        """r: by how much watching makes a step longer, as a share of it; 0 as long as it is not known."""
        once, twice = (median(times) if times else math.nan for times in self._learnt.values())
        more = once / (twice - once) - 1 if twice > once else 0.0
        return more if more > 0 else 0.0
