"""Alarm rules: functions of the record of a step that yield alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite

from conserved.alarm import Alarm
from conserved.store.step_record import StepRecord

AlarmRule = Callable[[StepRecord], Iterator[Alarm]]
"""Looks at a record and yields what is wrong with it."""


def residual_above_rounding(record: StepRecord) -> Iterator[Alarm]:
    """Yield an alarm for each law that changed by more than its account and rounding explain in this step.

    Args:
        record: the record of the step.

    Yields:
        One alarm for every such law.
    """
    families = {law.name: law.family for law in record.laws}
    for entry in record.entries(above=("excess", 1.0)):
        if entry.excess == entry.excess and entry.residual == entry.residual:
            message = (
                f"An entry of {entry.law} changed by {entry.observed:.3g} in step {record.step}, of which "
                f"{entry.residual:.3g} is not the optimizer's doing: {entry.excess:.3g} times what rounding explains "
                f"({entry.bound:.3g})."
            )
        else:
            message = f"{entry.law} is not finite after step {record.step}."
        yield Alarm(
            step=record.step,
            code="residual",
            law=entry.law,
            value=entry.excess,
            limit=1.0,
            message=message,
            family=families[entry.law],
            # A program may write to its weights besides the optimizer.
            certain=not isfinite(entry.excess) or not isfinite(entry.residual),
        )


def faster_than_account(record: StepRecord) -> Iterator[Alarm]:
    """Yield an alarm for each law whose summed residuals exceed what rounding errors of either sign would reach.

    Args:
        record: the record of the latest step.

    Yields:
        One alarm for every law of which single steps stay within rounding and all together do not.
    """
    families = {law.name: law.family for law in record.laws}
    for entry in record.entries(above=("leak", 1.0)):
        if entry.excess <= 1:
            yield Alarm(
                step=record.step,
                code="leak",
                law=entry.law,
                value=entry.leak,
                limit=1.0,
                message=(
                    f"{entry.law} has drifted by {entry.drift:.4g} since the start, of which the account of all steps "
                    f"explains {entry.predicted:.4g}. Single steps stay within rounding, but what is left of them does "
                    f"not cancel: it adds up to {entry.leak:.3g} times what rounding errors of either sign would."
                ),
                family=families[entry.law],
                certain=False,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """An alarm for a reading (key coherence, the largest logit) that has grown by `factor` since it was first taken."""

    reading: str
    factor: float

    def watch(self) -> AlarmRule:
        """Return a function of the record that remembers the first value."""
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


STANDARD: tuple[AlarmRule, ...] = (residual_above_rounding, faster_than_account)
"""The alarm rules of a monitor by default."""
