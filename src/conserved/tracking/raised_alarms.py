"""The alarms of a run: one for each defect, logs once, with the cause that an audit of the same step names."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from conserved.alarm import Alarm
from conserved.alarm_groups import AlarmGroups
from conserved.tracking.run_audits import Audits
from conserved.tracking.status_lines import say

LOGGER = logging.getLogger("conserved")

ACCOUNT = ("residual", "leak")
"""Alarms of the account, which a wrong gradient explains."""


class RaisedAlarms:
    """The grouped alarms of a run; those of audits wait here for the record of their step."""

    def __init__(self, *, logs: bool) -> None:
        """Create an empty collection; `logs` says whether this process logs alarms."""
        self._logs = logs
        self._groups = AlarmGroups()
        self._waiting: list[Alarm] = []
        self._fresh: list[Alarm] = []

    @property
    def all(self) -> list[Alarm]:
        """The defects so far; alarms that one defect explains are merged."""
        return [alarm for alarm in self._groups.all if alarm.certain]

    @property
    def statements(self) -> list[Alarm]:
        """Findings that the program may intend, one for each reason."""
        return [alarm for alarm in self._groups.all if not alarm.certain]

    @property
    def state(self) -> tuple[str, ...]:
        """The statements in a sentence each, for the state of the monitor."""
        return tuple(f"step {alarm.step}: {alarm.lines()[0].rstrip('.')}" for alarm in self.statements)

    def at_once(self, alarms: Iterable[Alarm]) -> None:
        """Raise alarms before there is a record of their step."""
        for alarm in alarms:
            if alarm.certain:
                self._waiting.append(alarm)
            self.add(alarm)

    def take_fresh(self) -> list[Alarm]:
        """Return alarms and statements of new kinds since the last call, for other processes."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def until(self, step: int) -> tuple[Alarm, ...]:
        """Return the alarms raised at once up to this step, for its record; each is returned once."""
        due = tuple(alarm for alarm in self._waiting if alarm.step <= step)
        self._waiting = [alarm for alarm in self._waiting if alarm.step > step]
        return due

    def add(self, alarm: Alarm) -> None:
        """Tell of every kind of alarm once for each family of laws; the records have all of them."""
        if not self._groups.add(alarm):
            return
        self._fresh.append(alarm)
        if not self._logs:
            return
        if alarm.certain:
            LOGGER.warning("conserved: %s", "\n    ".join(alarm.lines()))
        else:
            say(f"conserved: no alarm, as a program may mean it: {alarm.lines()[0]} ({alarm.kind}, step {alarm.step})")

    def explained(self, alarm: Alarm, audits: Audits) -> Alarm:
        """Return an alarm of the account with its cause, as an audit of its step names it.

        If that audit names none, the audit of the next step does.
        """
        if alarm.code not in ACCOUNT:
            return alarm
        return replace(alarm, message=f"{alarm.message} {self._cause(alarm, audits)}")

    def undecided(self, alarm: Alarm, audits: Audits) -> str:
        """Say why an alarm of the account is not to be raised; empty if it is.

        The audit of the same gradients found the identities of these laws broken for a reason that is no defect: they
        were clipped by value, the loss has a penalty on the weights, or the model took another way in this pass.
        """
        last, entry = audits.last, audits.series[-1] if audits.series else None
        if alarm.code not in ACCOUNT or last is None or entry is None or entry.refuted or entry.conclusive:
            return ""
        if alarm.code == "residual" and entry.step != alarm.step:
            return ""
        open_laws = {row.name for row in last.left_open}
        return last.verdict.message if last.changed or open_laws & {alarm.law, *alarm.laws} else ""

    def _cause(self, alarm: Alarm, audits: Audits) -> str:
        entry = next((audit_entry for audit_entry in reversed(audits.series) if audit_entry.step == alarm.step), None)
        if self._groups.explaining(alarm) is not None:
            return "The audit has found gradients of these parameters to be wrong."
        if entry is not None and audits.last is not None and not entry.conclusive and not entry.refuted:
            return audits.last.verdict.message
        if entry is not None and not entry.refuted:
            return (
                f"The gradients of this step passed the audit ({entry.excess:.2g} of what rounding explains), so "
                "something else than the optimizer wrote to these parameters, or gradients were clipped by value "
                "without monitor.before_clipping()."
            )
        if not self._groups.knows(alarm):
            audits.expect(f"an alarm in step {alarm.step}")
        return "The gradients of this step were not audited; those of the next one are, to find the cause."
