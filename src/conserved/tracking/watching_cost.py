r"""Estimate the device time of watching the passes of a step: no clock of the host sees work that hooks launch.

Let a step take p seconds and one whose passes are watched (1 + r)p. An audit waits for the device, so that from the end
of an audit to the beginning of the next, n steps later, T_n = (n + r)p passes. So p = (T_n − T_1)/(n − 1) and
1 + r = T_1/p follow from times between audits of successive steps and of every n-th one, the better the larger n.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import mean

FIRST = 4
"""Steps at the start of a run on a device that are all looked at: three times between successive audits."""

_KEPT = 20
"""Times of a kind that are remembered."""

_ENOUGH = 3
"""Times of a kind that are needed to say how long it usually takes."""

_ENDS = 0.1
"""Share of times at either end that do not count: evaluations and checkpoints come between steps too."""


class WatchingCost:
    """Estimates what watching adds to a step from the times between audits."""

    def __init__(self) -> None:
        self._between: dict[int, deque[float]] = {}
        """T_n, by n."""

    def start_again(self) -> None:
        """Forget all times: something has changed that makes other ones likely."""
        self._between.clear()

    def note(self, steps: int, between: float) -> None:
        """Take the time from the end of an audit to the beginning of the next.

        Args:
            steps: how many steps after it the next one came.
            between: the seconds.
        """
        self._between.setdefault(steps, deque(maxlen=_KEPT)).append(between)

    def seconds(self) -> float:
        """Return what watching adds to a step, rp; zero while it is not known."""
        enough = [steps for steps, times in self._between.items() if len(times) >= _ENOUGH]
        if 1 not in enough or len(enough) < 2:
            return 0.0
        steps = max(enough)
        once, longest = _usual(self._between[1]), _usual(self._between[steps])
        # Where one watched step takes longer than several of which one is watched, watching is all that shows.
        step = max((longest - once) / (steps - 1), 0.0)
        return max(once - step, 0.0)


def _usual(times: Sequence[float]) -> float:
    """Return the mean without both ends: where steps have two lengths, a median would be one of them."""
    out = int(_ENDS * len(times))
    return mean(sorted(times)[out : len(times) - out])
