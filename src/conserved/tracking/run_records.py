"""The records of a run on their way: looked at by alarm rules, kept in memory, handed to sinks, each part guarded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conserved.alarm import Alarm, group_alarms
from conserved.boundary import Boundary, described
from conserved.store import Run, Sink
from conserved.store.background_sink import BackgroundSink
from conserved.store.step_record import FIELDS, StepRecord
from conserved.tracking.alarm_rules import Growth
from conserved.tracking.device_transfer import Transfer
from conserved.tracking.law_account import LawAccount
from conserved.tracking.monitor_config import MonitorConfig
from conserved.tracking.raised_alarms import ACCOUNT, RaisedAlarms
from conserved.tracking.run_audits import Audits

RECORDS = "records"
"""The stage that makes records out of numbers that arrive from the device."""


class RunRecords:
    """Takes numbers that have arrived, raises alarms about them, and passes them on to the sinks."""

    def __init__(
        self,
        run: str,
        sinks: Sequence[Sink],
        config: MonitorConfig,
        boundary: Boundary,
        records: deque[StepRecord],
        *,
        every: int | str,
        logs: bool,
    ) -> None:
        self._every = every
        self.run, self.started = run, False
        self.alarms = RaisedAlarms(logs=logs)
        self._sinks = [BackgroundSink(sink) if sink.slow else sink for sink in sinks]
        self._rules = [alarm.watch() if isinstance(alarm, Growth) else alarm for alarm in config.alarms]
        self._config, self._boundary, self._kept = config, boundary, records
        self._account: LawAccount | None = None
        self._transfer = self._lawless = Transfer((), [])
        self._parts, self._recorded_conditions = 1, ""
        self._explained: set[int] = set()
        """Steps of which there is a reason for what the account leaves over."""
        self._explained_from = math.inf

    def watch(self, account: LawAccount | None) -> None:
        """Take the numbers of this account from now on; None for a monitor without laws."""
        self._account = account
        self._transfer = self._lawless if account is None else account.transfer

    def begin_again(self, step: int) -> None:
        """Start a new run for later records, because the laws have changed and rows of both would not compare."""
        self._receive_from(self._transfer, None, wait=True)
        if self.started:
            self._parts += 1
            self.run = f"{self.run.removesuffix(f' ({self._parts - 1})')} ({self._parts})"
        self.started = False

    def send_readings(self, step: int, readings: dict[str, Tensor | float], *, skipped: bool) -> None:
        """Keep readings of a step that has no account."""
        numbers = torch.zeros(0, len(FIELDS), dtype=torch.float64)
        self._lawless.send(step, (), numbers, readings, skipped)

    def raise_at_once(self, alarms: Iterable[Alarm]) -> None:
        """Raise alarms before there is a record of their step."""
        self.alarms.at_once(alarms)

    def receive(self, audits: Audits | None, *, wait: bool) -> None:
        """Look at what has arrived, and pass it on."""
        for transfer in dict.fromkeys((self._transfer, self._lawless)):
            self._boundary.attempt(RECORDS, self._receive_from, transfer, audits, wait=wait)
        self._look_after_sinks()

    def explain(self, step: int, *, later: bool = False) -> None:
        """Know a reason for what the account leaves over in a step: it is recorded, and raises no alarm.

        Args:
            step: the number of the step.
            later: whether the reason holds for all later steps too.
        """
        self._explained.add(step)
        self._explained_from = min(self._explained_from, step if later else math.inf)

    def _is_explained(self, alarm: Alarm) -> bool:
        """Return whether there is a reason for an alarm of the account; a leak is made of all steps so far."""
        if alarm.code == "leak":
            return any(step <= alarm.step for step in self._explained)
        return alarm.code in ACCOUNT and (alarm.step in self._explained or alarm.step >= self._explained_from)

    def _receive_from(self, transfer: Transfer, audits: Audits | None, *, wait: bool) -> None:
        for record in transfer.receive(wait=wait):
            raised = tuple(self._raised(record, audits))
            alarms = (*self.alarms.until(record.step), *(alarm for alarm in raised if alarm.certain))
            record = replace(record, alarms=alarms, statements=tuple(a for a in raised if not a.certain))
            for alarm in raised:
                if not self._is_explained(alarm):
                    self.alarms.add(alarm)
            self._kept.append(record)
            self._write(record)

    def _raised(self, record: StepRecord, audits: Audits | None) -> Iterable[Alarm]:
        """Return the alarms of a record, with their causes where an audit names them."""
        seen: list[Alarm] = []
        for number, rule in enumerate(self._rules):
            name = getattr(rule, "__name__", str(number))
            seen += self._boundary.attempt(f"alarm rule {name}", lambda rule=rule: list(rule(record))) or []
        for alarm in group_alarms(seen):
            reason = "" if audits is None else self.alarms.undecided(alarm, audits)
            if reason:
                self._boundary.remark("account", f"laws are not accounted for: {reason}")
            else:
                yield alarm if audits is None else self.alarms.explained(alarm, audits)

    def _write(self, record: StepRecord) -> None:
        if not self.started:
            header = self._header(record.step - 1)
            for sink in self._sinks:
                self._boundary.attempt(_stage(sink), sink.begin, header)
            self.started = True
        for sink in self._sinks:
            self._boundary.attempt(_stage(sink), sink.write, record)

    def _header(self, step: int) -> Run:
        account = self._account
        notes = dict(self._config.notes) | {"every": self._every}
        if account is None:
            return Run(name=self.run, config=notes, step=step)
        return Run(
            name=self.run,
            laws=account.names,
            formulas=tuple(symmetry.formula for symmetry in account.laws),
            config=notes | {"optimizer": account.watch.rules},
            step=step,
            reference=account.reference.values,
        )

    def _look_after_sinks(self) -> None:
        """Report the state of sinks that write on a thread of their own, and pass the monitor's state to all."""
        for sink in self._sinks:
            if isinstance(sink, BackgroundSink) and not self._boundary.off(_stage(sink)):
                if sink.failure is not None:
                    self._boundary.turn_off(_stage(sink), described(sink.failure))
                    if self._boundary.strict:
                        raise sink.failure
                elif sink.dropped:
                    self._boundary.remark(_stage(sink), "records are dropped, because it does not keep up")
        conditions = "; ".join([*map(str, self._boundary.conditions), *self.alarms.state])
        if conditions != self._recorded_conditions and self.started:
            self._recorded_conditions = conditions
            for sink in self._sinks:
                self._boundary.attempt(_stage(sink), sink.note_state, conditions)

    def drain(self) -> None:
        """Wait, for a limited time, until sinks have written what they were given."""
        for sink in self._sinks:
            if isinstance(sink, BackgroundSink) and not self._boundary.off(_stage(sink)) and not sink.drain():
                self._boundary.remark(_stage(sink), "it takes too long to write and is not waited for")
        self._look_after_sinks()

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            self._boundary.attempt(f"closing {_stage(sink)}", sink.close)
        self._look_after_sinks()


def _stage(sink: Sink) -> str:
    name = sink.name if isinstance(sink, BackgroundSink) else getattr(sink, "path", type(sink).__name__)
    return f"store {name}"
