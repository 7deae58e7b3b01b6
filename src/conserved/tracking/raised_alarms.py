"""The alarms of a run: one for each defect, logs once, with the cause that an audit of the same step names."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from conserved.alarm import STEP_CODES, Alarm
from conserved.tracking.run_audits import Audits

LOGGER = logging.getLogger("conserved")

_ACCOUNT = ("residual", "leak")
"""Alarms of the account, which a wrong gradient explains."""


_GRADIENT = ("gradient", "hardware")
"""Alarms of audits: the gradient is wrong."""


class RaisedAlarms:
    """What a run has raised so far, grouped; those of audits wait here for the record of their step."""

    def __init__(self, *, logs: bool) -> None:
        """`logs`: whether this process is the one that tells of them."""
        self._logs = logs
        self._found: dict[tuple[str, str], Alarm] = {}
        self._waiting: list[Alarm] = []

    @property
    def all(self) -> list[Alarm]:
        """Alarms of one kind and one family of laws are one."""
        return list(self._found.values())

    def at_once(self, found: Iterable[Alarm]) -> None:
        """Raise alarms before there is a record of their step."""
        for alarm in found:
            self._waiting.append(alarm)
            self.add(alarm)

    def until(self, step: int) -> tuple[Alarm, ...]:
        """Those raised at once for steps up to this one, for its record; each is given once."""
        due = tuple(alarm for alarm in self._waiting if alarm.step <= step)
        self._waiting = [alarm for alarm in self._waiting if alarm.step > step]
        return due

    def add(self, alarm: Alarm) -> None:
        """Tell of every kind of alarm once for each family of laws; the records have all of them."""
        key = (alarm.code, alarm.family or alarm.law)
        known = self._found.get(key)
        if alarm.code in _ACCOUNT and (other := self._explaining(alarm)) is not None:
            # One defect is one alarm.
            self._found[other] = replace(self._found[other], last=alarm.step)
            return
        if alarm.code in _ACCOUNT and self._explained_by_step(alarm):
            return
        if alarm.code in _GRADIENT and self._replicas_apart(alarm.step):
            return
        if alarm.code in STEP_CODES or alarm.code == "replicas":
            self._drop_explained(alarm)
        if alarm.code in _GRADIENT:
            alarm = self._absorbing(alarm)
        self._found[key] = alarm if known is None else known.merged(alarm)
        if known is None and self._logs:
            LOGGER.warning("%s", alarm)

    def explained(self, alarm: Alarm, audits: Audits) -> Alarm:
        """An alarm of the account with its cause, as an audit of its step names it; else the next step gets one."""
        if alarm.code not in _ACCOUNT:
            return alarm
        return replace(alarm, message=f"{alarm.message} {self._cause(alarm, audits)}")

    def undecided(self, alarm: Alarm, audits: Audits) -> str:
        """Say why an alarm of the account is not to be raised; empty if it is.

        The audit of the same gradients found the identities of these laws broken for a reason that is no defect: they
        were clipped by value, the loss has a penalty on the weights, or the model took another way in this pass.
        """
        last, entry = audits.last, audits.series[-1] if audits.series else None
        if alarm.code not in _ACCOUNT or last is None or entry is None or entry.refuted or entry.conclusive:
            return ""
        if alarm.code == "residual" and entry.step != alarm.step:
            return ""
        open_laws = {row.name for row in last.left_open}
        return last.verdict.message if last.changed or open_laws & {alarm.law, *alarm.laws} else ""

    def _cause(self, alarm: Alarm, audits: Audits) -> str:
        entry = next((one for one in reversed(audits.series) if one.step == alarm.step), None)
        if self._explaining(alarm) is not None:
            return "The audit has found gradients of these parameters to be wrong."
        if entry is not None and audits.last is not None and not entry.conclusive and not entry.refuted:
            return audits.last.verdict.message
        if entry is not None and not entry.refuted:
            return (
                f"The gradients of this step passed the audit ({entry.excess:.2g} of what rounding explains), so "
                "something else than the optimizer wrote to these parameters, or gradients were clipped by value "
                "without monitor.before_clipping()."
            )
        if (alarm.code, alarm.family or alarm.law) not in self._found:
            audits.expect(f"an alarm in step {alarm.step}")
        return "The gradients of this step were not audited; those of the next one are, to find the cause."

    def _explaining(self, alarm: Alarm) -> tuple[str, str] | None:
        """The alarm about wrong gradients that explains one of the account."""
        laws = {alarm.law, *alarm.laws}
        return next((key for key, one in self._found.items() if key[0] in _GRADIENT and laws & set(one.laws)), None)

    def _explained_by_step(self, alarm: Alarm) -> bool:
        """Whether an identity of the step, or of the one before, already says what went wrong in it.

        Updates and writes are not looked at in steps over the budget, so one that was seen explains later ones as well.
        """
        return any(
            other.code in STEP_CODES
            and other.step - 1 <= alarm.step
            and (other.kind == "update" or alarm.step <= max(other.step, other.last) + 1)
            for other in self._found.values()
        )

    def _drop_explained(self, alarm: Alarm) -> None:
        """Forget what the account raised about the same step: the identity names the cause."""
        for key, other in list(self._found.items()):
            explained = (*_ACCOUNT, *_GRADIENT) if alarm.code == "replicas" else _ACCOUNT
            if key[0] in explained and abs(other.step - alarm.step) <= 1:
                del self._found[key]

    def _replicas_apart(self, step: int) -> bool:
        """Whether replicas differ by now: then a gradient that was reduced over them belongs to no one's weights."""
        return any(key[0] == "replicas" and other.step <= step for key, other in self._found.items())

    def _absorbing(self, alarm: Alarm) -> Alarm:
        """An alarm about wrong gradients, with what the account had to say of the same laws before."""
        for key, other in list(self._found.items()):
            # Gradients that are wrong in one audit after the other were no hardware fault in the first.
            superseded = key[0] in _ACCOUNT or (key[0] == "hardware" and alarm.code == "gradient")
            if superseded and {other.law, *other.laws} & set(alarm.laws):
                del self._found[key]
                alarm = replace(alarm, step=min(alarm.step, other.step), last=max(alarm.step, other.last))
        return alarm
