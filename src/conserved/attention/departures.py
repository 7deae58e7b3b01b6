r"""Departures of a head's series from its own recent past that healthy training does not show.

A series x_1, x_2, … of positive numbers (key coherence, largest logit, evenness of attention) is read in logarithms.
Its departure at t is how far log x_t lies, in the harmful direction, from the median of the `memory` samples before the
last `patience` ones. An alarm is raised when the departure has been above the threshold for `patience` samples in a
row. A median forgets a slow trend and is not moved by one odd sample; patience keeps single odd samples quiet. The
thresholds are not chosen but measured: the largest departure seen in healthy runs, times a margin.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from conserved.alarm import Alarm

HARM = {"coherence": 1, "largest_logit": 1, "evenness": -1}
"""The series that are watched, and the direction in which each is harmful."""

FLOOR = {"coherence": 1.0, "largest_logit": 1.0, "evenness": 1e-3}
"""Below these, differences do not matter: a largest logit of 0.1 or of 0.5 both mean even attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepartureRule:
    """When a head's series raises an alarm: thresholds by series, in natural logarithms, and what they were calibrated
    with.

    Attributes:
        thresholds: by series ("coherence", "largest_logit", "evenness"), the departure above which an alarm is raised.
        memory: number of earlier samples whose median a sample is compared with.
        patience: number of samples in a row that must depart.
    """

    thresholds: Mapping[str, float]
    memory: int = 6
    patience: int = 2

    @staticmethod
    def calibrated(
        runs: Iterable[Mapping[str, Sequence[float]]], *, margin: float = 1.25, memory: int = 6, patience: int = 2
    ) -> DepartureRule:
        """Measure the thresholds on runs that went well.

        Args:
            runs: the series of each healthy run, by the names a monitor gives them: LAYER[HEAD].SERIES.
            margin: factor by which thresholds lie above the largest departure that was seen.
            memory: number of earlier samples whose median a sample is compared with.
            patience: number of samples in a row that must depart.

        Returns:
            The rule.

        Raises:
            ValueError: no run is longer than the memory.
        """
        largest = dict.fromkeys(HARM, 0.0)
        for run in runs:
            for name, series in run.items():
                kind = name.rpartition(".")[2]
                if kind in HARM:
                    values = departures(kind, series, memory=memory, patience=patience)
                    largest[kind] = max([largest[kind], *(value for value in values if not math.isnan(value))])
        if not any(largest.values()):
            raise ValueError("Expected a healthy run longer than the rule's memory, got none. Pass longer runs.")
        thresholds = {kind: margin * value for kind, value in largest.items()}
        return DepartureRule(thresholds=thresholds, memory=memory, patience=patience)


def departures(kind: str, series: Sequence[float], *, memory: int, patience: int) -> list[float]:
    """Return at every sample the smallest departure among the last `patience` ones; NaN while the past is too short."""
    watch = _Series(kind, memory, patience)
    return [watch.add(value) for value in series]


@dataclass(slots=True)
class _Series:
    """A few past samples of one series."""

    kind: str
    memory: int
    patience: int
    past: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.past = deque(maxlen=self.memory + self.patience)

    def add(self, value: float) -> float:
        """Add a sample and return how far the last few lie from the samples before them, at least."""
        # What is not a number any more has departed as far as anything can.
        level = math.log(max(value, FLOOR[self.kind])) if math.isfinite(value) else HARM[self.kind] * math.inf
        self.past.append(level)
        if len(self.past) < self.memory + self.patience:
            return math.nan
        samples = list(self.past)
        usual = median(samples[: self.memory])
        if math.isinf(usual):
            return math.inf
        return min(HARM[self.kind] * (sample - usual) for sample in samples[self.memory :])


class DepartureWatch:
    """Applies a rule to many series as they come; a series that has raised an alarm is quiet until it is back."""

    def __init__(self, rule: DepartureRule) -> None:
        self.rule = rule
        self._series: dict[str, _Series] = {}
        self._raised: set[str] = set()

    def look(self, step: int, readings: Mapping[str, float]) -> list[Alarm]:
        """Return the alarms of one sample."""
        result = []
        for name, value in readings.items():
            kind = name.rpartition(".")[2]
            limit = self.rule.thresholds.get(kind)
            if limit is None:
                continue
            series = self._series.setdefault(name, _Series(kind, self.rule.memory, self.rule.patience))
            departure = series.add(value)
            if not departure > limit:
                self._raised.discard(name)
            elif name not in self._raised:
                self._raised.add(name)
                result.append(_alarm(step, kind, name, value, departure, limit))
        return result


_MEANING = {
    "coherence": "one key has become a direction of its own (a sink, or a broken position)",
    "largest_logit": "its logits are growing out of bounds (too large a learning rate, or no query/key norm)",
    "evenness": "its attention is collapsing onto few keys",
}


def _alarm(step: int, kind: str, name: str, value: float, departure: float, limit: float) -> Alarm:
    times = math.exp(min(departure, 700.0))
    way = "above" if HARM[kind] > 0 else "below"
    message = (
        f"{name} is {value:.4g} at step {step}, a factor of {times:.2f} {way} its recent past; healthy runs stay "
        f"within {math.exp(limit):.2f}. Perhaps {_MEANING[kind]}."
    )
    return Alarm(step=step, code=f"attention.{kind}", law=name, value=value, limit=limit, message=message)
