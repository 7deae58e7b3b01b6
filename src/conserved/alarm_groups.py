"""Alarms as defects: what a monitor, a report and a list of runs count is the same number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from conserved.alarm import STEP_CODES, Alarm

_ACCOUNT = ("residual", "leak")
"""Alarms of the account, which a wrong gradient explains."""

_GRADIENT = ("gradient", "hardware")
"""Alarms of audits: the gradient is wrong."""


class AlarmGroups:
    """Alarms that one defect explains, merged; they are added in the order they were raised."""

    def __init__(self, alarms: Iterable[Alarm] = ()) -> None:
        self._alarms: dict[tuple[str, str], Alarm] = {}
        # Those that explain others, in order: a broken account may raise an alarm for each of thousands of laws.
        self._causes: dict[tuple[str, str], None] = {}
        for alarm in alarms:
            self.add(alarm)

    @property
    def all(self) -> list[Alarm]:
        """One alarm for each defect, with its first and last step, in the order of their first steps."""
        return sorted(self._alarms.values(), key=lambda alarm: alarm.step)

    def knows(self, alarm: Alarm) -> bool:
        """Return whether an alarm of this code was raised for the same family of laws."""
        return _key(alarm) in self._alarms

    def add(self, alarm: Alarm) -> bool:
        """Take an alarm in, and return whether it is about a defect that was not known."""
        known = self._alarms.get(_key(alarm))
        if alarm.code in _ACCOUNT and (other := self.explaining(alarm)) is not None:
            explained = self._alarms[other]
            self._alarms[other] = replace(explained, last=max(explained.last, explained.step, alarm.step))
            return False
        if alarm.code in _ACCOUNT and self._explained_by_step(alarm):
            return False
        if alarm.code in _GRADIENT and self._replicas_apart(alarm.step):
            return False
        if alarm.code in STEP_CODES or alarm.code == "replicas":
            self._drop_explained(alarm)
        if alarm.code in _GRADIENT:
            alarm = self._absorbing(alarm)
        key = _key(alarm)
        self._alarms[key] = alarm if known is None else known.merged(alarm)
        if alarm.code in STEP_CODES or alarm.code in (*_GRADIENT, "replicas"):
            self._causes[key] = None
        return known is None

    def _forget(self, key: tuple[str, str]) -> None:
        del self._alarms[key]
        self._causes.pop(key, None)

    def explaining(self, alarm: Alarm) -> tuple[str, str] | None:
        """Return the key of the alarm about wrong gradients that explains one of the account."""
        laws = {alarm.law, *alarm.laws}
        return next(
            (
                key
                for key, earlier in self._alarms.items()
                if key[0] in _GRADIENT and laws & {earlier.law, *earlier.laws}
            ),
            None,
        )

    def _explained_by_step(self, alarm: Alarm) -> bool:
        """Return whether an identity of the step, or of the one before, already says what went wrong in it.

        Updates and writes are not looked at in steps over the budget, so one that was seen explains later ones as well.
        """
        return any(
            other.code in STEP_CODES
            and other.step - 1 <= alarm.step
            and (other.kind == "update" or alarm.step <= max(other.step, other.last) + 1)
            for other in map(self._alarms.__getitem__, self._causes)
        )

    def _drop_explained(self, alarm: Alarm) -> None:
        """Forget what the account raised about the same step: the identity names the cause."""
        explained = (*_ACCOUNT, *_GRADIENT) if alarm.code == "replicas" else _ACCOUNT
        for key, other in list(self._alarms.items()):
            if key[0] in explained and abs(other.step - alarm.step) <= 1:
                self._forget(key)

    def _replicas_apart(self, step: int) -> bool:
        """Return whether replicas differ by now.

        Then a gradient that was reduced over them belongs to no one's weights.
        """
        return any(key[0] == "replicas" and self._alarms[key].step <= step for key in self._causes)

    def _absorbing(self, alarm: Alarm) -> Alarm:
        """Return an alarm about wrong gradients with what the account had to say of the same laws before."""
        own_laws = {alarm.law, *alarm.laws}
        for key, other in list(self._alarms.items()):
            # Gradients that are wrong in one audit after the other were no hardware fault in the first.
            superseded = key[0] in _ACCOUNT or (key[0] == "hardware" and alarm.code == "gradient")
            if superseded and (alarm.certain or not other.certain) and {other.law, *other.laws} & own_laws:
                self._forget(key)
                alarm = replace(alarm, step=min(alarm.step, other.step), last=max(alarm.step, other.last))
        return alarm


def _key(alarm: Alarm) -> tuple[str, str]:
    # A certain finding is reported even if a statement named it before.
    return alarm.code, (alarm.family or alarm.law) + ("" if alarm.certain else " (stated)")
