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
from conserved.laws import LawSet, Reference
from conserved.output import html
from conserved.store import Run, Sink, SQLite, opened
from conserved.store.step_record import FIELDS, By, Entry, LawName, StepRecord, averaged
from conserved.symmetry import Symmetry, Tensors
from conserved.tracking.alarm_rules import Growth
from conserved.tracking.device_transfer import Transfer
from conserved.tracking.kept_account import Running, Scales, begun, settled
from conserved.tracking.ledger import Ledger, StepAccount
from conserved.tracking.monitor_config import MonitorConfig
from conserved.tracking.optimizer_watch import OptimizerWatch
from conserved.tracking.raised_alarms import RaisedAlarms
from conserved.tracking.run_audits import BUDGET, AuditEntry, Audits, Cadence, alarms_of
from conserved.tracking.step_expansion import Expansion
from conserved.tracking.theory import (
    AngularMomentum,
    Decay,
    DriftBound,
    angular_momenta,
    decays,
    drift_bounds,
    momenta,
)
from conserved.tracking.watched_laws import Selection, Where, inner_optimizer, unwrapped
from conserved.verdict import Status

LOGGER = logging.getLogger("conserved")

FORMAT = "conserved/monitor/1"

_OF_LAWS = frozenset(
    [
        "_audits",
        "laws",
        "left_out",
        "reference",
        "_impostors",
        "_lawful",
        "_theta",
        "_watch",
        "_ledger",
        "_scales",
        "_running",
        "_linear",
        "_momenta",
        "_names",
        "_transfer",
    ]
)
"""Attributes of a monitor that are made when its laws are known."""

_FORESEEN = (1_000, 10_000, 100_000)
"""Lengths of runs for which the size of the store is told in advance."""

_LARGE = 1e9
"""Bytes from which on that is a warning."""


class Monitor:
    """The laws of a model, its optimizer, and the account between them.

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
        config: MonitorConfig | Mapping[str, Any] | None = None,
        **former: Any,
    ) -> None:
        """Begin to watch; the laws as they are now are the reference.

        Gradients are audited before optimizers use them; the first backward pass always is.

        Args:
            model: the model, as it is called in training: compiled, sharded, wrapped.
            optimizer: what steps its parameters; several if there are several.
            laws: the laws; without them they are inferred at the first forward pass from the inputs that come, and
                that is when the reference is taken; or when something about them is asked for before, from made-up
                inputs.
            every: how many steps one account is made for.
            sinks: where records go: sinks, or paths of stores.
            where: which laws are watched, by patterns of their names or a function.
            loss: what the model is trained with, where laws are inferred; as for `conserved.recognize`.
            audit: "auto" audits as often as takes at most the share `budget` of the time of a step (and three seconds
                in all), and at least every hundred steps; a number fixes how often, None does without.
            budget: the share of the time of a step that audits may take.
            stop: whether a step whose gradients are refuted is not taken: GradientsDoNotConserve is raised before it.
            run: the name of the run in its sinks.
            config: everything else.
            former: fields of `config` under the names they had as arguments; for one more release.
        """
        config = MonitorConfig.of(config, former)
        dtype, precision = config.dtype, config.precision
        if every < 1:
            raise ValueError(f"every counts steps and is at least 1; got {every}.")
        self.model = unwrapped(model)
        self.every, self.count = every, 0
        self._causes, self._dtype = config.causes, dtype
        given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._optimizers = [inner_optimizer(one) for one in given]
        self._choice: dict[str, Any] = {"where": where, "with_impostors": config.baselines}
        self._rule, self._precision = config.rule, precision
        self._gauges = dict(config.gauges)
        self._watchmen = [one.watch() if isinstance(one, Growth) else one for one in config.alarms]
        self._alarms = RaisedAlarms(told=_writes())
        self._audit_options: dict[str, Any] = {"every": audit, "budget": budget, "precision": precision}
        self._stop = stop
        self._readings: dict[str, Tensor | float] = {}
        self._unstepped: tuple[int, int, int] | None = None
        self._passes = 0
        """Forward passes so far."""
        self._hooks: list[Any] = []
        self._looked = False
        self._within: Optimizer | None = None
        """Whose step is running, if it began before the laws were known."""
        self._skip = False
        """Whether the laws became known inside the last step, which cannot be accounted for then."""
        self._called = model
        self.records: deque[StepRecord] = deque(maxlen=config.keep)
        self._run = run or time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + f" {id(self):x}"
        self._config = dict(config.notes) | {"every": every}
        self._sinks = opened(sinks) if _writes() else ()
        self._unclipped: list[Tensor] | None = None
        self._begun = False
        self._restored: Mapping[str, Any] | None = None
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
            self.watch(self._first.laws())
            self._audits.passes += running

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
            self._take_reference()
        self._within = None

    def _take_reference(self) -> None:
        """The laws as they are now are what drift is counted from."""
        self.reference = _on_host(self.laws.reference(dtype=self._dtype))
        accounts = self._laws_now()
        self._scales = self._measured(accounts)
        self._running = [begun(account) for account in accounts]
        self._linear = any(bool((scales.floor > 0).any()) for scales in self._scales)

    def __getattr__(self, name: str) -> Any:
        """What depends on the laws is there from the first forward pass on; asked for before, they are inferred now."""
        if name in _OF_LAWS and vars(self).get("_first") is not None:
            self._infer()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _watch_laws(self, found: LawSet) -> None:
        """Bind the laws to the optimizers, and take the reference."""
        dtype, optimizers = self._dtype, self._optimizers
        selection = Selection.of(self.model, optimizers, found, **self._choice)
        self.laws, self._impostors, self.left_out = selection.laws, selection.impostors, selection.left_out
        self._lawful = self.laws.select(lambda symmetry: symmetry.name not in self._impostors)
        names = dict.fromkeys(name for symmetry in self.laws for name in symmetry.parameters)
        self._theta: Tensors = {name: self.laws.parameters[name] for name in names}
        self._watch = OptimizerWatch(
            optimizers,
            self._theta,
            rule=self._rule,
            before=self._before_step,
            converted=self._go_on_converted,
            sampled=self._sampled,
        )
        self._ledger = Ledger(self.laws.symmetries, self._theta, dtype=dtype)
        self._take_reference()
        self._momenta = momenta(self._lawful, self._theta, self._watch, dtype)
        self._names = tuple(_law_name(symmetry) for symmetry in self.laws)
        self._transfer = Transfer(self._names, [place for shelf in self._ledger.shelves for place in shelf.places])
        self._config |= {"optimizer": self._watch.rules}
        if self._within is not None:
            self._watch.begin(self._within)
        compiled = hasattr(self._called, "_orig_mod") or getattr(self._called, "_compiled_call_impl", None) is not None
        self._audits = Audits(self.model, optimizers, found, compiled=compiled, **self._audit_options)
        self._hooks += [one.register_step_pre_hook(self._before_optimizer) for one in optimizers]
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
        first = next((p.grad for p in self._theta.values() if p.grad is not None), None)
        return None if first is None else (id(first), first._version, self._passes)

    def watch(self, laws: LawSet) -> None:
        """Take these laws, in a monitor that waits for the first forward pass to infer them; the reference is now."""
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
        """Account for the step the optimizer has just made; its `loss`, if given, is kept beside the account."""
        if loss is not None:
            self._readings["loss"] = loss.detach() if isinstance(loss, Tensor) else float(loss)
        self._watch.check()
        self._unstepped = None if self._watch.stepped else self._gradient_mark()
        if not self._watch.stepped:
            self._audits.forget()
        self.count += 1
        if self.count % self.every == 0 and not self._skip:
            self._account()
        self._skip = False
        self._unclipped = None
        self._looked = False
        self._watch.clear()
        self._receive(wait=False)
        self._audits.after_step(self.count)

    @property
    def alarms(self) -> list[Alarm]:
        """Everything that should be looked at; alarms of one kind and one family of laws are one."""
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
        """Numbers to keep beside the next record, such as a loss that is known later than the step."""
        self._readings |= readings

    @property
    def pending(self) -> bool:
        """Whether an optimizer has made a step that `step()` has not accounted for."""
        return self._first is None and self._watch.stepped

    def before_clipping(self) -> None:
        """Tell clipping by value or by tensor apart from a wrong gradient: call it between backward and clipping.

        Clipping all gradients by one factor, as `clip_grad_norm_` does, moves no law to first order and needs no call.
        With a gradient scaler, call it after `unscale_`.
        """
        if not self._looked:
            # What is clipped by value satisfies no identity: the audit of this step is now.
            self._looked = True
            self._audit(self.count + 1)
        if self._sampled():
            self._unclipped = [account.slope for account in self._ledger.account(self._watch.unclipped)]

    def ledger(self, *, law: str | None = None, step: int | None = None) -> list[Entry]:
        """The account of the steps in memory, by step and law; of one law or one step if asked."""
        self.flush()
        return [
            entry
            for record in self.records
            if step is None or record.step == step
            for entry in record.entries()
            if law is None or entry.law == law
        ]

    def errors(self, parameters: Tensors | nn.Module | None = None, *, by: By = "block") -> dict[str, float]:
        """Equation (10) now, against the reference; of an averaged or otherwise copied model if one is given."""
        if by not in get_args(By):
            raise ValueError(f"by is one of {', '.join(get_args(By))}; got {by!r}.")
        theta: Tensors | None = parameters if not isinstance(parameters, nn.Module) else None
        if isinstance(parameters, nn.Module):
            theta = dict(unwrapped(parameters).named_parameters())
        like = next(iter(self._theta.values()))
        reference = Reference(
            {name: value.to(like.device) for name, value in self.reference.values.items()},
            {name: value.to(like.device) for name, value in self.reference.scales.items()},
        )
        found = self.laws.errors(reference, theta, by="law", dtype=self._dtype)
        return averaged(self._names, [found[law.name] for law in self._names], by)

    def plot(self, path: str | Path | None = None) -> Any:
        """The records in memory as a figure: loss, drift, causes and audits, with a mark for every alarm.

        Without a path a figure of matplotlib, which notebooks show; with one, it is written as .html (a page that needs
        no network), .png, .svg or .pdf, and the path is returned.
        """
        from conserved.tracking.run_figure import draw

        self.flush()
        return draw(tuple(self.records), self.audits, self.alarms, path)

    def summary(self) -> str:
        """Where the run stands: alarms first, then the last audit and the drift."""
        lines = [f"{len(self.alarms)} alarm{'s' if len(self.alarms) != 1 else ''} in {self.count:,} steps"]
        lines += [f"  {alarm}" for alarm in self.alarms]
        if self._first is not None:
            return "\n".join([*lines, "The laws are not known yet: they are read off the first forward pass."])
        last = self.last_audit
        if last is not None:
            entry = self.audits[-1]
            refuted = sum(one.status == Status.REFUTED for one in self.audits)
            left_open = sum(not one.conclusive and one.status != Status.REFUTED for one in self.audits)
            lines.append(
                f"{len(self.audits)} audits, {refuted} refuted, {left_open} not conclusive; the last in step "
                f"{entry.step}: {last.badge}, largest residual {entry.excess:.2g} of what rounding explains"
            )
            lines += [f"  {text}" for text in last.coverage.lines()]
        if self.records:
            drift = self.records[-1].errors("family")
            lines.append(f"{len(self.laws)} laws; relative drift since the start (normal under Adam):")
            lines += [f"  {family}: {value:.2e}" for family, value in drift.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        known = "laws not known yet" if self._first is not None else f"{len(self.laws)} laws"
        return f"<Monitor: {known}, {self.count} steps, {len(self.audits)} audits, {len(self.alarms)} alarms>"

    def _repr_html_(self) -> str:
        """The summary for notebooks, alarms first."""
        last = self.last_audit
        parts = [html.paragraph(str(alarm)) for alarm in self.alarms] or [html.paragraph("no alarms", quiet=True)]
        if last is not None:
            parts.append(html.badge(last.verdict, last.badge))
        rest = [line for line in self.summary().splitlines() if not line.startswith("  step")]
        return html.panel(*parts, *(html.paragraph(line, quiet=True) for line in rest[1:]))

    def bounds(self) -> list[DriftBound]:
        """Equation (9) for every law, with C_h and C_L from the run, beside what happened and what was predicted."""
        return drift_bounds(self._ledger, self._running, self._watch, self._impostors)

    def decay(self) -> list[Decay]:
        """The decay law e^{−2λt} for every law whose legs decay alike."""
        return decays(self._ledger, self._running, self._watch)

    def angular_momenta(self) -> list[AngularMomentum]:
        """The conserved angular momenta of a heavy-ball run, for every law that has rotations among its generators."""
        now = momenta(self._lawful, self._theta, self._watch, self._dtype)
        return angular_momenta(self.laws, self._momenta, now, self._watch)

    def memory(self) -> dict[str, int]:
        """Bytes held between steps: by the laws, and by copies of parameters that an optimizer's rule asks for."""
        tensors = [tensor for running in self._running for tensor in running.tensors().values()]
        tensors += [
            tensor
            for scales in self._scales
            for tensor in (scales.denominators, scales.multiplicities, scales.rounding, scales.tolerance, scales.floor)
        ]
        own = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        watched = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        return {"laws": sum(own.values()), "copies": self._watch.copied_bytes(), "parameters": watched}

    def flush(self) -> None:
        """Wait for everything that is under way, and hand it to the sinks."""
        if self._first is None:
            self._receive(wait=True)

    def close(self) -> None:
        """Flush, close the sinks and take the hooks off the optimizer."""
        self.flush()
        if self._first is None:
            self._watch.close()
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
        return {
            "format": FORMAT,
            "count": self.count,
            "run": self._run,
            "laws": [symmetry.name for symmetry in self.laws],
            "reference": {"values": dict(self.reference.values), "scales": dict(self.reference.scales)},
            "running": [
                {name: tensor.detach().cpu().clone() for name, tensor in running.tensors().items()}
                for running in self._running
            ],
            "momenta": {name: (value.cpu(), size.cpu()) for name, (value, size) in self._momenta.items()},
            "sums": [
                [[float(one.time), float(one.squares), float(one.decayed), float(one.damped)] for one in sums]
                for sums in self._watch.optimizer_sums()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, after the model and the optimizer have been restored.

        The laws of the restored model are held against those that were saved in the next step: a checkpoint that
        lost something shows as a residual there.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"Expected a monitor's state in format {FORMAT!r}; got {state.get('format')!r}.")
        if self._first is not None:
            self._restored = state
            return
        names = [symmetry.name for symmetry in self.laws]
        if list(state["laws"]) != names:
            strange = sorted(set(state["laws"]) ^ set(names))
            raise ValueError(
                f"The state is of {len(state['laws'])} laws and this monitor watches {len(names)}; "
                f"they differ in {strange[0] if strange else 'their order'}."
            )
        if self._begun:
            raise RuntimeError("Load a monitor's state before its first step; its sinks have begun another run.")
        self.count = int(state["count"])
        self._audits.expect("the first after a resume")
        self._run = str(state["run"])
        self.reference = Reference(dict(state["reference"]["values"]), dict(state["reference"]["scales"]))
        for number, saved in enumerate(state["running"]):
            like = self._running[number].reference
            self._running[number] = Running(**{name: tensor.to(like) for name, tensor in saved.items()})
        self._scales = [
            scales.measured_against(shelf, self.laws.symmetries, self.reference)
            for scales, shelf in zip(self._scales, self._ledger.shelves, strict=True)
        ]
        self._momenta = {name: (value, size) for name, (value, size) in state["momenta"].items()}
        for sums, saved_sums in zip(self._watch.optimizer_sums(), state["sums"], strict=True):
            for one, values in zip(sums, saved_sums, strict=True):
                one.time, one.squares, one.decayed, one.damped = values

    def _sampled(self) -> bool:
        return (self.count + 1) % self.every == 0

    def _measured(self, accounts: Sequence[StepAccount]) -> list[Scales]:
        """What changes are relative to and what rounding explains of them, with parameters as they are now."""
        return [
            Scales.of(
                shelf,
                self.laws.symmetries,
                self._theta,
                self.reference,
                impostors=self._impostors,
                dtype=self._dtype,
                precision=self._precision,
                like=account.law,
            )
            for shelf, account in zip(self._ledger.shelves, accounts, strict=True)
        ]

    def _go_on_converted(self, names: Sequence[str]) -> None:
        """Parameters were converted to another type between two steps: that is no step, and rounding is another."""
        kind = str(self._theta[names[0]].dtype).removeprefix("torch.")
        LOGGER.warning(
            "%s and %d other parameters became %s after step %d. The account goes on from the converted values.",
            *(names[0], len(names) - 1, kind, self.count),
        )
        self._audits.expect("the precision of parameters changed")
        accounts = self._laws_now()
        self._scales = [new.no_finer_than(old) for new, old in zip(self._measured(accounts), self._scales, strict=True)]
        for running, account in zip(self._running, accounts, strict=True):
            running.accounted += account.law - running.previous
            running.previous, running.sizes = account.law.clone(), account.sizes.clone()

    def _before_step(self) -> None:
        """With some steps left out, the laws before a step are not those after the last one that was looked at."""
        if self.every > 1:
            for running, account in zip(self._running, self._laws_now(), strict=True):
                running.previous, running.sizes = account.law.clone(), account.sizes.clone()

    def _laws_now(self) -> list[StepAccount]:
        return self._ledger.account(lambda names: [Expansion.of(self._theta[name]) for name in names])

    def _account(self) -> None:
        skipped = not self._watch.stepped
        if skipped:
            self._before_step()
        accounts = self._ledger.account(lambda names: self._watch.expand(names, causes=self._causes))
        norm = self._watch.gradient_norm() if self._linear and not skipped else None
        rows: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        with torch.no_grad():
            for number, (shelf, account) in enumerate(zip(self._ledger.shelves, accounts, strict=True)):
                rows.append(
                    settled(
                        shelf,
                        self._scales[number],
                        self._running[number],
                        account,
                        unclipped=None if self._unclipped is None else self._unclipped[number],
                        gradient_norm=None if norm is None else norm.to(account.law.dtype),
                    )
                )
            causes = tuple(dict.fromkeys(cause for _, by_cause in rows for cause in by_cause))
            host = rows[0][0]["moved"].device
            numbers = torch.cat(
                [
                    torch.stack(
                        [fields[name] for name in FIELDS]
                        + [by_cause.get(cause, torch.zeros_like(fields["moved"])) for cause in causes],
                        dim=-1,
                    ).to(host, non_blocking=True)
                    for fields, by_cause in rows
                ]
            )
            readings = {name: gauge() for name, gauge in self._gauges.items()} | self._readings
            self._readings = {}
        self._transfer.send(self.count, causes, numbers, readings, skipped)

    def _receive(self, *, wait: bool) -> None:
        """Look at what has arrived, and pass it on."""
        for record in self._transfer.receive(wait=wait):
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
            laws=self._names,
            formulas=tuple(symmetry.formula for symmetry in self.laws),
            config=self._config,
            step=step,
            reference=self.reference.values,
        )
        for sink in self._sinks:
            sink.begin(header)
            if isinstance(sink, SQLite):
                bytes_of = {steps: sink.bytes_of(header, steps) for steps in _FORESEEN}
                sizes = ", ".join(f"{size / 1e6:,.0f} MB for {steps:,} steps" for steps, size in bytes_of.items())
                level = logging.WARNING if max(bytes_of.values()) > _LARGE else logging.INFO
                LOGGER.log(level, "%s: %d laws, about %s", sink.path, len(self._names), sizes)
        self._begun = True


def _law_name(symmetry: Symmetry) -> LawName:
    numbers = symmetry.kind.numbers(symmetry.n, symmetry.m)
    return LawName(
        name=symmetry.name,
        block=symmetry.block,
        family=symmetry.family,
        units=1 if symmetry.kind.together else numbers,
    )


def _writes() -> bool:
    """Whether this process writes to sinks and logs: of several, only the first does."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _on_host(reference: Reference) -> Reference:
    return Reference(
        {name: value.cpu() for name, value in reference.values.items()},
        {name: value.cpu() for name, value in reference.scales.items()},
    )
