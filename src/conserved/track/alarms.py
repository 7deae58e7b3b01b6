"""What makes a monitored step worth a person's attention; an alarm is a function of the step's record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conserved.alarm import Alarm
from conserved.track.record import StepRecord

Watchman = Callable[[StepRecord], Iterator[Alarm]]
"""Looks at a record and yields what is wrong with it."""


def residual_above_rounding(record: StepRecord) -> Iterator[Alarm]:
    """A law changed by more than its account and rounding explain, in this step."""
    for entry in record.entries(above=("excess", 1.0)):
        yield Alarm(
            step=record.step,
            code="residual",
            law=entry.law,
            value=entry.excess,
            limit=1.0,
            message=(
                f"{entry.law} changed by {entry.observed:.3g} in step {record.step}, of which {entry.residual:.3g} "
                f"is neither the optimizer's doing nor rounding (about {entry.bound:.1g}). Something else wrote to "
                "these parameters, their gradients are not those of one loss (a wrong backward pass, a missing "
                "all-reduce, clipping by value that the monitor was not told of), or they are not finite."
            ),
        )


def faster_than_account(record: StepRecord) -> Iterator[Alarm]:
    """The residuals of all steps together exceed what rounding errors of either sign add up to."""
    for entry in record.entries(above=("leak", 1.0)):
        if entry.excess <= 1:
            yield Alarm(
                step=record.step,
                code="leak",
                law=entry.law,
                value=entry.leak,
                limit=1.0,
                message=(
                    f"{entry.law} has drifted by {entry.drift:.3g} since the start, {entry.predicted:.3g} of it "
                    "accounted for. Single steps stay within rounding but do not cancel: updates may be too small for "
                    "the parameters' precision."
                ),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A reading (key coherence, the largest logit) that has grown by a factor since it was first taken."""

    reading: str
    factor: float

    def watch(self) -> Watchman:
        """A function of the record that remembers the first value."""
        first: list[float] = []

        def look(record: StepRecord) -> Iterator[Alarm]:
            value = record.readings.get(self.reading)
            if value is None:
                return
            if not first:
                first.append(value)
            limit = self.factor * abs(first[0])
            if not abs(value) <= limit:
                message = (
                    f"{self.reading} is {value:.4g}, more than {self.factor:g} times its first value {first[0]:.4g}."
                )
                yield Alarm(
                    step=record.step, code="growth", law=self.reading, value=value, limit=limit, message=message
                )

        return look


STANDARD: tuple[Watchman, ...] = (residual_above_rounding, faster_than_account)
"""What a monitor looks for unless told otherwise."""
