"""Watches the laws of a model while it trains: after every optimizer step, an exact account of what it did to each."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.alarm import Alarm, grouped
from conserved.auditing import Audit, GradientsDoNotConserve
from conserved.inference import FirstCall, NoExample, being_followed, run_as_written
from conserved.laws import Dropped, LawSet, Reference
from conserved.store import Run, Sink, opened
from conserved.store.step_record import By, Entry, StepRecord
from conserved.symmetry import Tensors
from conserved.tracking import run_summary
from conserved.tracking.alarm_rules import Growth
from conserved.tracking.law_account import LawAccount
from conserved.tracking.monitor_config import MonitorConfig
from conserved.tracking.raised_alarms import RaisedAlarms
from conserved.tracking.run_audits import BUDGET, AuditEntry, Audits, Cadence, alarms_of, pace
from conserved.tracking.theory import AngularMomentum, Decay, DriftBound
from conserved.tracking.watched_laws import Where, inner_optimizer, unwrapped

LOGGER = logging.getLogger("conserved")

FORMAT = "conserved/monitor/1"


class Monitor:
    """Watches the laws of a model while its optimizer trains it, and accounts for every change by cause.

    Call `step()` right after `optimizer.step()`, before gradients are cleared. Nothing is written to the model, and
    besides the laws themselves no memory is held, except where an optimizer's rule needs the parameters from before
    (`memory()` says how much). On a GPU nothing waits for the device; records reach the sinks a step or two later.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        laws: LawSet | None = None,
        *,
        every: int = 1,
        sinks: Iterable[Sink | str | Path] | Sink | str | Path = (),
        where: Where | None = None,
        loss: str = "any",
        audit: Cadence = "auto",
        budget: float = BUDGET,
        stop: bool = False,
        run: str | None = None,
        config: MonitorConfig | None = None,
    ) -> None:
        """Begin to watch; the laws as they are now are the reference.

        Gradients are audited before optimizers use them; the first backward pass always is.

        Args:
            model: the model, as it is called in training: compiled, sharded, wrapped.
            optimizer: the optimizer of its parameters; a sequence if there are several.
            laws: the laws to watch. By default they are inferred at the first forward pass from the inputs that come,
                and the reference is taken then; if something about them is asked for before, they are inferred from
                made-up inputs.
            every: number of steps from one record to the next.
            sinks: where records go: sinks, or paths of stores (.db, .jsonl).
            where: which laws are watched: patterns of their names, or a function that says it of a symmetry.
            loss: the loss the model is trained with, where laws are inferred; as for `conserved.recognize`.
            audit: "auto" audits as often as takes at most the share `budget` of the time of the run (and three seconds
                in all), but at least every hundred steps; a number fixes how often, None does without.
            budget: the share of the time that audits may take, with what watching makes of the passes before them.
            stop: whether a step whose gradients are refuted is not taken: GradientsDoNotConserve is raised before it.
            run: the name of the run in its sinks; by default the date and time.
            config: all further settings.

        Raises:
            ValueError: `every` is less than one, `audit` no cadence, or `budget` no share.
        """
        config = config or MonitorConfig()
        if every < 1:
            raise ValueError(f"every counts steps and is at least 1; got {every}.")
        pace(audit, budget)
        self.model, self.every, self.count = unwrapped(model), every, 0
        self.records: deque[StepRecord] = deque(maxlen=config.keep)
        given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._called, self._optimizers = model, [inner_optimizer(one) for one in given]
        self._config, self._where, self._stop = config, where, stop
        self._audit_options: dict[str, Any] = {"every": audit, "budget": budget, "precision": config.precision}
        self._watchmen = [one.watch() if isinstance(one, Growth) else one for one in config.alarms]
        self._alarms = RaisedAlarms(told=_writes())
        self._run = run or time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + f" {id(self):x}"
        self._sinks, self._begun = opened(sinks) if _writes() else (), False
        self._readings: dict[str, Tensor | float] = {}
        self._unstepped: tuple[int, int, int] | None = None
        self._passes = 0
        """Forward passes so far."""
        self._looked = False
        self._within: Optimizer | None = None
        """Whose step is running, if it began before the laws were known."""
        self._skip = False
        """Whether the laws became known inside the last step, which cannot be accounted for then."""
        self._restored: Mapping[str, Any] | None = None
        self._hooks: list[Any] = []
        self._known: LawAccount | None = None
        self._audits: Audits
        self._first: FirstCall | None = None
        if laws is None:
            self._first = FirstCall(model, self.model, loss=loss)
            self._first.came.append(lambda: self._infer(running=True))
            self._hooks += [one.register_step_pre_hook(self._before_first_step) for one in self._optimizers]
            self._hooks += [one.register_step_post_hook(self._after_first_step) for one in self._optimizers]
        else:
            self._watch_laws(laws)

    def _infer(self, *, running: bool = False) -> None:
        """Watch the laws of the model as it is called; `running`: in a forward pass that has just begun."""
        if self._first is not None:
            call = self._first.call
            self.watch(self._first.laws())
            self._audits.passes += running
            if running and call is not None:
                self._audits.begin_pass(*call)

    def _before_first_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A step that computes its gradients itself runs the first forward pass when it is too late to copy weights."""
        if self._first is None:
            return
        self._within = optimizer
        with suppress(NoExample):
            self._infer()
            self._within = None

    def _after_first_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._within is not None and self._first is None:
            LOGGER.warning("The laws became known inside the first step, which is not accounted for.")
            self._skip = True
            self._account.take_reference()
        self._within = None

    @property
    def _account(self) -> LawAccount:
        """What depends on the laws: there from the first forward pass on; asked for before, they are inferred now."""
        if self._known is None:
            self._infer()
        assert self._known is not None
        return self._known

    @property
    def laws(self) -> LawSet:
        """The laws that are watched."""
        return self._account.laws

    @property
    def left_out(self) -> tuple[Dropped, ...]:
        """Laws that are not watched, and why."""
        return self._account.left_out

    @property
    def reference(self) -> Reference:
        """The laws when watching began."""
        return self._account.reference

    def _watch_laws(self, found: LawSet) -> None:
        """Bind the laws to the optimizers, and take the reference."""
        self._known = LawAccount(
            self.model,
            self._optimizers,
            found,
            where=self._where,
            config=self._config,
            every=self.every,
            sampled=self._sampled,
            converted=self._go_on_converted,
        )
        if self._within is not None:
            self._known.watch.begin(self._within)
        compiled = hasattr(self._called, "_orig_mod") or getattr(self._called, "_compiled_call_impl", None) is not None
        options = self._audit_options | {"compiled": compiled, "called": self._called}
        self._audits = Audits(self.model, self._optimizers, found, **options)
        self._hooks += [one.register_step_pre_hook(self._before_optimizer) for one in self._optimizers]
        self._hooks.append(self._called.register_forward_pre_hook(self._count_pass))
        self._audits.arm()

    def _count_pass(self, module: nn.Module, args: Any) -> None:
        run_as_written()
        if torch.is_grad_enabled() and not being_followed():
            self._audits.passes += 1
            self._passes += 1

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to use the gradients: audit them, once for all optimizers of a step."""
        self._notice_order()
        if not self._looked:
            self._looked = True
            self._audit(self.count + 1)

    def _audit(self, step: int) -> None:
        found = self._audits.before_step(step)
        if found is None:
            return
        self._readings |= self._audits.series[-1].readings()
        alarms = tuple(alarms_of(found, step))
        self._alarms.at_once(alarms)
        if self._stop and alarms:
            raise GradientsDoNotConserve(found)

    def _notice_order(self) -> None:
        """An optimizer steps with gradients that `step()` has seen without any step: it was called too early."""
        if self._unstepped is not None and self._unstepped == self._gradient_mark():
            message = (
                "Monitor.step() was called before optimizer.step(): the account of a step is made after it. Call "
                "optimizer.step(), then monitor.step(), then zero_grad()."
            )
            alarm = Alarm(step=self.count, code="order", law="", value=1.0, limit=0.0, message=message, family="order")
            self._alarms.at_once((alarm,))
        self._unstepped = None

    def _gradient_mark(self) -> tuple[int, int, int] | None:
        """Which gradients there are: another pass makes others, maybe in the same place, or writes to them."""
        first = next((p.grad for p in self._account.theta.values() if p.grad is not None), None)
        return None if first is None else (id(first), first._version, self._passes)

    def watch(self, laws: LawSet) -> None:
        """Give the laws to a monitor that waits for the first forward pass to infer them; the reference is taken now.

        Args:
            laws: the laws of its model.

        Raises:
            RuntimeError: the monitor has its laws already.
        """
        if self._first is None:
            raise RuntimeError("This monitor has its laws already.")
        self._watch_laws(laws)
        self._first.close()
        self._first = None
        if self._restored is not None:
            state, self._restored = self._restored, None
            self.load_state_dict(state)

    @property
    def waiting(self) -> bool:
        """Whether the laws are not known yet, because no forward pass was seen."""
        return self._first is not None

    def step(self, *, loss: Tensor | float | None = None) -> None:
        """Account for the step the optimizer has just made.

        Args:
            loss: the loss of the step, to be kept beside the account; a tensor is not waited for.
        """
        if loss is not None:
            self._readings["loss"] = loss.detach() if isinstance(loss, Tensor) else float(loss)
        account = self._account
        account.watch.check()
        self._unstepped = None if account.watch.stepped else self._gradient_mark()
        if not account.watch.stepped:
            self._audits.forget()
        self.count += 1
        if self.count % self.every == 0 and not self._skip:
            causes, numbers = account.settle()
            with torch.no_grad():
                readings = {name: gauge() for name, gauge in self._config.gauges.items()} | self._readings
            self._readings = {}
            account.transfer.send(self.count, causes, numbers, readings, not account.watch.stepped)
        self._skip, self._looked = False, False
        account.forget_step()
        self._receive(wait=False)
        self._audits.after_step(self.count)

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms of the run; alarms of one kind and one family of laws are one."""
        return self._alarms.all

    @property
    def audits(self) -> list[AuditEntry]:
        """The audits of the run, in a few numbers each; the last one whole is `last_audit`."""
        return self._audits.series if self._first is None else []

    @property
    def last_audit(self) -> Audit | None:
        """The latest audit; None before the first."""
        return self._audits.last if self._first is None else None

    def note(self, **readings: float) -> None:
        """Keep further numbers with the next record, such as a loss that is known later than the step.

        Args:
            **readings: the numbers, by the name they are stored under.
        """
        self._readings |= readings

    @property
    def pending(self) -> bool:
        """Whether an optimizer has made a step that `step()` has not accounted for."""
        return self._known is not None and self._known.watch.stepped

    def before_clipping(self) -> None:
        """Tell clipping by value or by tensor apart from a wrong gradient: call it between backward and clipping.

        Clipping all gradients by one factor, as `clip_grad_norm_` does, moves no law to first order and needs no call.
        With a gradient scaler, call it after `unscale_`.
        """
        account = self._account
        if not self._looked:
            # What is clipped by value satisfies no identity: the audit of this step is now.
            self._looked = True
            self._audit(self.count + 1)
        if self._sampled():
            account.note_unclipped()

    def ledger(self, *, law: str | None = None, step: int | None = None) -> list[Entry]:
        """The account of the steps in memory.

        Args:
            law: the name of one law; by default all.
            step: the number of one step; by default all in memory.

        Returns:
            One entry for each step and law.
        """
        self.flush()
        return [
            entry
            for record in self.records
            if step is None or record.step == step
            for entry in record.entries()
            if law is None or entry.law == law
        ]

    def errors(self, parameters: Tensors | nn.Module | None = None, *, by: By = "block") -> dict[str, float]:
        """Equation (10) now: how far the laws are from their reference, relative to their size.

        Args:
            parameters: an averaged or otherwise copied model, or its tensors by name; by default the model itself.
            by: whether one number is given for each "block", "layer", "family" or "law".

        Returns:
            By block, layer, family or law, the mean relative change.

        Raises:
            ValueError: `by` is another word.
        """
        if by not in get_args(By):
            raise ValueError(f"by is one of {', '.join(get_args(By))}; got {by!r}.")
        if isinstance(parameters, nn.Module):
            parameters = dict(unwrapped(parameters).named_parameters())
        return self._account.errors(parameters, by)

    def plot(self, path: str | Path | None = None) -> Any:
        """The records in memory as a figure: loss, drift, causes and audits, with a mark for every alarm.

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
        """Where the run stands: alarms first, then the last audit and the drift."""
        return run_summary.summary(self)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        known = "laws not known yet" if self._first is not None else f"{len(self.laws)} laws"
        return f"<Monitor: {known}, {self.count} steps, {len(self.audits)} audits, {len(self.alarms)} alarms>"

    def _repr_html_(self) -> str:
        """The summary for notebooks, alarms first."""
        return run_summary.panel(self)

    def bounds(self) -> list[DriftBound]:
        """Equation (9) for every law, with C_h and C_L from the run, beside the observed and the predicted drift."""
        return self._account.bounds()

    def decay(self) -> list[Decay]:
        """The decay law e^{−2λt} for every law whose legs decay alike."""
        return self._account.decay()

    def angular_momenta(self) -> list[AngularMomentum]:
        """The conserved angular momenta of a heavy-ball run, for every law that has rotations among its generators."""
        return self._account.angular_momenta()

    def memory(self) -> dict[str, int]:
        """Bytes held between steps: by the laws, and by copies of parameters that an optimizer's rule asks for."""
        watched = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        return self._account.memory() | {"parameters": watched}

    def flush(self) -> None:
        """Wait for all records on their way from the device, and hand them to the sinks."""
        if self._first is None:
            self._receive(wait=True)

    def close(self) -> None:
        """Flush, close the sinks and take the hooks off the optimizer."""
        self.flush()
        if self._first is None:
            self._account.watch.close()
            self._audits.disarm()
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        else:
            self._first.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on from a checkpoint: references, sums, the number of the step."""
        self.flush()
        return {"format": FORMAT, "count": self.count, "run": self._run} | self._account.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, after the model and the optimizer have been restored.

        The laws of the restored model are held against those that were saved in the next step: a checkpoint that lost
        something shows as a residual there.

        Args:
            state: the result of `state_dict` of an earlier monitor of the same laws.

        Raises:
            ValueError: the state is of another format or of other laws.
            RuntimeError: this monitor has written records of its own already.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"Expected a monitor's state in format {FORMAT!r}; got {state.get('format')!r}.")
        if self._first is not None:
            self._restored = state
            return
        self._account.check_state(state)
        if self._begun:
            raise RuntimeError("Load a monitor's state before its first step; its sinks have begun another run.")
        self.count, self._run = int(state["count"]), str(state["run"])
        self._audits.expect("the first after a resume")
        self._account.load(state)

    def _sampled(self) -> bool:
        return (self.count + 1) % self.every == 0

    def _go_on_converted(self, names: Sequence[str]) -> None:
        """Parameters were converted to another type between two steps: that is no step, and rounding is another."""
        kind = str(self._account.theta[names[0]].dtype).removeprefix("torch.")
        LOGGER.warning(
            "%s and %d other parameters became %s after step %d. The account goes on from the converted values.",
            *(names[0], len(names) - 1, kind, self.count),
        )
        self._audits.expect("the precision of parameters changed")
        self._account.go_on_converted()

    def _receive(self, *, wait: bool) -> None:
        """Look at what has arrived, and pass it on."""
        for record in self._account.transfer.receive(wait=wait):
            seen = grouped(alarm for look in self._watchmen for alarm in look(record))
            raised = tuple(self._alarms.explained(alarm, self._audits) for alarm in seen)
            found = (*self._alarms.until(record.step), *raised)
            if found:
                record = replace(record, alarms=found)
                for alarm in raised:
                    self._alarms.add(alarm)
            self.records.append(record)
            if self._sinks and not self._begun:
                self._begin(record.step - 1)
            for sink in self._sinks:
                sink.write(record)

    def _begin(self, step: int) -> None:
        header = Run(
            name=self._run,
            laws=self._account.names,
            formulas=tuple(symmetry.formula for symmetry in self.laws),
            config=dict(self._config.notes) | {"every": self.every, "optimizer": self._account.watch.rules},
            step=step,
            reference=self.reference.values,
        )
        for sink in self._sinks:
            sink.begin(header)
        self._begun = True


def _writes() -> bool:
    """Whether this process writes to sinks and logs: of several, only the first does."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
