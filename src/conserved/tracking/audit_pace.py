r"""How often a run can afford to look at its gradients: what audits take, and what watching makes of the passes before.

Let a step take p seconds, one whose passes are watched (1 + r)p, and an audit c. From the end of an audit to the
beginning of the next, n steps later, T_n = (n + r)p passes. So p = (T_n − T_1)/(n − 1) and 1 + r = T_1/p follow from
times between audits of successive steps and of every n-th one, the better the larger n. Audits of every n-th step then
cost (c + rp)/np of the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import mean, median

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
"""Times of a kind that are needed to say how long it usually takes."""

_AGAIN = 40
"""Audits after which it is measured again what watching makes of a step."""

_ENDS = 0.1
"""Share of times at either end that do not count: evaluations and checkpoints come between steps too."""

_SHORTEST = 1e-9
"""Seconds: no step takes less."""


class Pace:
    """Decides after how many steps the next audit comes, by the times of those before."""

    def __init__(self, budget: float) -> None:
        if not 0 < budget <= 1:
            raise ValueError(f"The budget of audits is a share of step time between 0 and 1; got {budget}.")
        self.budget = budget
        self._costs: deque[float] = deque(maxlen=_KEPT)
        self._between: dict[int, deque[float]] = {}
        """T_n, by n."""
        self._since = 0
        """Audits since T_1 was last taken."""
        self._spent, self._watched = 0.0, 0.0

    def start_again(self) -> None:
        """Something has changed that makes other times of steps and audits likely."""
        self._costs.clear()
        self._between.clear()

    def note(self, seconds: float, *, steps: int = 1, between: float | None = None) -> None:
        """An audit was made.

        Args:
            seconds: what it took.
            steps: how many steps after the last one.
            between: the seconds that passed in between; None where there was none before.
        """
        self._spent += seconds
        self._costs.append(seconds)
        if between is None:
            return
        self._watched += between / steps
        self._between.setdefault(steps, deque(maxlen=_KEPT)).append(between)
        self._since = 0 if steps == 1 else self._since + 1

    def interval(self) -> int:
        """Steps until the next audit."""
        in_grace = self._spent <= GRACE and self._watched <= WATCHED
        if in_grace or self.budget == 1 or not self._costs:
            return 1
        for steps in (1, 2):
            if len(self._between.get(steps, ())) < _ENOUGH:
                return steps
        if self._since >= _AGAIN:
            return 1
        extra, step = self._measured()
        cost = median(self._costs) + extra * step
        return min(max(math.ceil(cost / (self.budget * step) - _NEARLY), 1), AT_LEAST)

    def _measured(self) -> tuple[float, float]:
        """r, by how much watching makes a step longer, and p, the seconds of a step, from the longest times known."""
        once = _usual(self._between[1])
        steps = max(n for n, times in self._between.items() if len(times) >= _ENOUGH)
        longest = _usual(self._between[steps])
        if steps == 1 or longest <= once:
            # Watching takes so long that what a step takes beside it does not show.
            return float(AT_LEAST), once / (1 + AT_LEAST)
        step = max((longest - once) / (steps - 1), _SHORTEST)
        return max(once / step - 1, 0.0), step


def _usual(times: Sequence[float]) -> float:
    """The mean without both ends: where steps have two lengths, a median would be one of them."""
    out = int(_ENDS * len(times))
    return mean(sorted(times)[out : len(times) - out])
