"""The results of a monitored run: its laws, alarms and audits, the account, theory, figures."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import nn

from conserved.alarm import Alarm
from conserved.attention.precision import AttentionPrecision
from conserved.auditing import Audit
from conserved.boundary import LAWS, Boundary, Condition
from conserved.laws import Dropped, LawSet, Reference
from conserved.laws.renaming import unwrap
from conserved.output.lines import counted
from conserved.output.result_list import ResultList
from conserved.store.step_record import By, Entry, StepRecord
from conserved.symmetry import Tensors
from conserved.tracking import run_summary
from conserved.tracking.audit_entry import AuditEntry
from conserved.tracking.optimizer_watch import ACCOUNT
from conserved.tracking.run_audits import AUDIT, Audits
from conserved.tracking.theory import AngularMomentum, Decay, DriftBound
from conserved.tracking.watched_laws import NoLawError

if TYPE_CHECKING:
    from conserved.inference import FirstCall
    from conserved.tracking.law_account import LawAccount
    from conserved.tracking.run_records import RunRecords
    from conserved.tracking.step_watch import StepWatch
    from conserved.tracking.time_budget import TimeBudget


_ENTRY = ("step", "law", "change", "first order by cause")


def _entry_row(entry: Entry) -> tuple[str, ...]:
    causes = ", ".join(f"{cause} {part:.1e}" for cause, part in entry.causes.items() if part)
    return str(entry.step), entry.law, f"{entry.observed:.1e}", causes or "–"


_ALARM = ("step", "kind", "event")


def _alarm_row(alarm: Alarm) -> tuple[str, ...]:
    return str(alarm.step), alarm.kind, alarm.lines()[0]


class RunResults:
    """Read-only results of a run. `Monitor` adds the methods that a training loop calls."""

    model: nn.Module
    count: int
    records: deque[StepRecord]
    _boundary: Boundary
    _budget: TimeBudget
    _every: int | str
    _steps: StepWatch
    _records: RunRecords
    _known: LawAccount | None
    _audits: Audits | None
    _first: FirstCall | None

    def _infer(self, *, running: bool = False) -> None:
        """Infer the laws now; implemented by `Monitor`."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait for all records; implemented by `Monitor`."""
        raise NotImplementedError

    @property
    def every(self) -> int:
        """Number of steps from one account to the next, as it is now."""
        return self._every if isinstance(self._every, int) else self._budget.interval

    @property
    def cadence(self) -> str:
        """A phrase for how often steps are accounted for and audited."""
        budget = self._budget
        allowed = f"{100 * budget.share:.2g} %" + (f" or {1e3 * budget.least:.0f} ms" if budget.least else "")
        if isinstance(self._every, int):
            return f"account every {counted(self._every, 'step')}"
        if self.count > 1:
            return f"account every {self.every} step{'s' if self.every > 1 else ''} ({allowed})"
        return f"account as often as {allowed} a step allow{'s' if not budget.least else ''}"

    @property
    def cost(self) -> float:
        """Seconds a step that the monitor took so far, without reading the laws."""
        return self._budget.spent / max(self.count, 1)

    @property
    def state(self) -> str:
        """The state of the monitor: "watching", or which parts are off, since when and why, and what it states."""
        off = {condition.stage for condition in self.conditions if condition.off}
        texts = [*map(str, self.conditions), *self._records.alarms.state]
        if self.waiting and LAWS not in off:
            texts.insert(0, "waiting for the first forward pass")
        elif {ACCOUNT, AUDIT} <= off:
            texts.insert(0, "laws only")
        return "; ".join(texts) or "watching"

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The parts of the monitor that are off or left something out."""
        return self._boundary.conditions

    @property
    def _account(self) -> LawAccount:
        """The part that depends on the laws. If no forward pass has run yet, the laws are inferred now."""
        if self._known is None and self._first is not None:
            self._infer()
        if self._known is None:
            raise NoLawError(self.state)
        return self._known

    @property
    def laws(self) -> LawSet:
        """The laws that are watched; none if the monitor is not watching."""
        return LawSet(symmetries=()) if self._lawless else self._account.laws

    @property
    def _lawless(self) -> bool:
        # Laws that could not be read once are not read again because somebody asks for them.
        return self._known is None and (self._first is None or bool(self._boundary.off(LAWS)))

    @property
    def left_out(self) -> tuple[Dropped, ...]:
        """Laws that are not watched, and why."""
        return () if self._lawless else self._account.left_out

    @property
    def reference(self) -> Reference:
        """The laws when watching began."""
        return Reference({}, {}) if self._lawless else self._account.reference

    @property
    def waiting(self) -> bool:
        """Whether the laws are not known yet, because no forward pass was seen."""
        return self._first is not None

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms of the run; alarms of one kind and one family of laws are one."""
        return ResultList(self._records.alarms.all, "alarm", _ALARM, _alarm_row)

    @property
    def statements(self) -> list[Alarm]:
        """Findings that a correct program may intend: writes to weights, frozen parts, changed gradients.

        They raise no alarm, and stand in the state of the monitor and in the report.
        """
        return self._records.alarms.statements

    @property
    def audits(self) -> list[AuditEntry]:
        """The audits of the run, in a few numbers each; the last one whole is `last_audit`."""
        return self._audits.series if self._audits is not None else []

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings about the precision of the run, which are not wrong gradients."""
        return () if self._audits is None else tuple(self._audits.notes)

    @property
    def attention_precision(self) -> AttentionPrecision:
        """The share of rounding in dQ and dK of attention in half precision, by audited step, layer and head.

        It has `.rows`, `.series()`, `.summary()` and `.plot(path)`, a heat map of layers and heads over steps.
        """
        return AttentionPrecision() if self._audits is None else self._audits.attention_precision

    @property
    def last_audit(self) -> Audit | None:
        """The latest audit; None before the first."""
        return self._audits.last if self._audits is not None else None

    @property
    def pending(self) -> bool:
        """Whether an optimizer has made a step that `step()` has not accounted for."""
        return self._steps.stepped

    def ledger(self, *, law: str | None = None, step: int | None = None) -> list[Entry]:
        """Return the account of the steps in memory.

        Args:
            law: the name of one law; by default all.
            step: the number of one step; by default all in memory.

        Returns:
            One entry for each step and law, in a list that prints as a table.
        """
        self.flush()
        entries = (
            entry
            for record in self.records
            if step is None or record.step == step
            for entry in record.entries()
            if law is None or entry.law == law
        )
        return ResultList(entries, "entry", _ENTRY, _entry_row, "entries")

    def errors(self, parameters: Tensors | nn.Module | None = None, *, by: By = "block") -> dict[str, float]:
        """Return Equation (10) now: how far the laws are from their reference, relative to their size.

        Args:
            parameters: an averaged or otherwise copied model, or its tensors by name; by default the model itself.
            by: whether one number is given for each "block", "layer", "family" or "law".

        Returns:
            By block, layer, family or law, the mean relative change.

        Raises:
            ValueError: `by` is another word.
        """
        if by not in get_args(By):
            raise ValueError(f"Expected by to be one of {', '.join(get_args(By))}, got {by!r}. Pass one of them.")
        if isinstance(parameters, nn.Module):
            parameters = dict(unwrap(parameters)[0].named_parameters())
        return {} if self._lawless else self._account.errors(parameters, by)

    def plot(self, path: str | Path | None = None) -> Any:
        """Return the records in memory as a figure: loss, drift, causes and audits, with a mark for every alarm.

        Args:
            path: a file to write: .html (a page that needs no network), .png, .svg or .pdf. By default nothing is
                written.

        Returns:
            The path, or without one a figure of matplotlib, which notebooks show.
        """
        from conserved.tracking.run_figure import draw

        self.flush()
        return draw(tuple(self.records), self.audits, self.alarms, path)

    def summary(self) -> str:
        """Return where the run stands: alarms first, then the last audit and the drift."""
        return run_summary.summary(self)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        known = "laws not known yet" if self.waiting else counted(len(self.laws), "law")
        ran = f"{counted(self.count, 'step')}, {counted(len(self.audits), 'audit')}"
        return f"<Monitor: {known}, {ran}, {counted(len(self.alarms), 'alarm')}>"

    def _repr_html_(self) -> str:
        """Return the summary for notebooks, alarms first."""
        return run_summary.panel(self)

    def bounds(self) -> list[DriftBound]:
        """Return equation (9) for every law, with C_h and C_L from the run, beside the observed and the predicted
        drift.
        """
        return [] if self._lawless else self._account.bounds()

    def decay(self) -> list[Decay]:
        """Return the decay law e^{−2λt} for every law whose legs decay alike."""
        return [] if self._lawless else self._account.decay()

    def angular_momenta(self) -> list[AngularMomentum]:
        """Return the conserved angular momenta of a heavy-ball run, for every law that has rotations among its
        generators.
        """
        return [] if self._lawless else self._account.angular_momenta()

    def memory(self) -> dict[str, int]:
        """Return bytes held between steps.

        The laws hold some, and so do copies of parameters that an optimizer's rule asks for.
        """
        watched = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        bytes_held = {"laws": 0, "copies": 0} if self._lawless else self._account.memory()
        return bytes_held | {"parameters": watched}
