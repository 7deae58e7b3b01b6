"""Watches the laws of a model while it trains: after every optimizer step, an exact account of what it did to each."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from conserved._torch_compat import children_of
from conserved.alarm import Alarm
from conserved.auditing import Audit, GradientsDoNotConserveError
from conserved.auditing.replay import random_numbers_kept
from conserved.boundary import LAWS, Boundary
from conserved.inference import FirstCall, NoExampleError
from conserved.inference.cached_laws import forget_model
from conserved.inference.first_calls import FirstCallsOfParts, in_parts
from conserved.inference.model_parts import parts_of
from conserved.laws import LawSet
from conserved.laws.identities import coarsest
from conserved.laws.renaming import unwrap
from conserved.rank_agreement import (
    NotTogetherError,
    confirm_together,
    several_processes,
)
from conserved.run_names import new_run_name
from conserved.store import Sink, open_sink
from conserved.store.step_record import StepRecord
from conserved.tracking.audit_alarms import alarms_of
from conserved.tracking.identities import StepIdentities
from conserved.tracking.identities.finding import name_tensors
from conserved.tracking.identities.step_identities import CLOSING
from conserved.tracking.law_account import LawAccount
from conserved.tracking.monitor_config import MonitorConfig
from conserved.tracking.objective import OBJECTIVE, LossObjective
from conserved.tracking.optimizer_watch import ACCOUNT
from conserved.tracking.peers import Peers, is_first_process
from conserved.tracking.process_laws import COPIED, SPREAD, laws_of_process, steps_copies
from conserved.tracking.relayed_alarms import RelayedAlarms
from conserved.tracking.run_audits import (
    AUDIT,
    Audits,
    Cadence,
    breaks_in_run_alone,
    changes_all_gradients,
    check_cadence,
)
from conserved.tracking.run_records import RunRecords
from conserved.tracking.run_results import RunResults
from conserved.tracking.status_lines import announced, closing_line, opening_line, say
from conserved.tracking.step_times import READING, StepTimes
from conserved.tracking.step_watch import StepWatch
from conserved.tracking.time_budget import TimeBudget, budget_for, check_budget
from conserved.tracking.trained_parameters import Outline, Signature, orphan_alarm, outline, signature
from conserved.tracking.watched_laws import NoLawError, Where, check_filter, named_as_in, optimizers_of

LOGGER = logging.getLogger("conserved")

FORMAT = "conserved/monitor/1"

STEP = "monitor"
"""The stage of all work that has no stage of its own."""

IDENTITIES = "identities of steps"
"""The stage of identities that hold in every step of every model."""

LINES = "status lines"
"""The stage that reports what is watched."""

RELAY = "alarms of other processes"
"""The stage that shows alarms to the first process."""

_UNSEEN = 3
"""Steps without a call of the model after which its laws are no longer waited for."""

_LEAST_SHARE = 8
"""Part of the budget that identities may take whatever the rest takes."""

_READ_AGAIN = 8
"""How often the laws may be read again in a run, because parameters were frozen, unfrozen or replaced."""


class Monitor(RunResults):
    """Watches the laws of a model while its optimizer trains it, and accounts for every change by cause.

    Call `step()` right after `optimizer.step()`, before gradients are cleared. Nothing is written to the model, and
    besides the laws themselves no memory is held, except where an optimizer's rule needs the parameters from before
    (`memory()` says how much). On a GPU nothing waits for the device; records reach the sinks a step or two later.

    A failure inside turns a part of the monitor off and never reaches the training loop: `state` says what it is
    doing. `MonitorConfig(strict=True)` raises instead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        laws: LawSet | str | Path | None = None,
        *,
        every: int | Literal["auto"] = "auto",
        sinks: Iterable[Sink | str | Path] | Sink | str | Path = (),
        where: Where | None = None,
        loss: str = "any",
        audit: Cadence = "auto",
        budget: float | None = None,
        stop: bool = False,
        run: str | None = None,
        config: MonitorConfig | None = None,
    ) -> None:
        """Start watching. The current values of the laws are the reference for all later ones.

        Gradients are audited before optimizers use them; the first backward pass always is.

        Args:
            model: the model, as it is called in training: compiled, sharded, wrapped.
            optimizer: the optimizer of its parameters; a sequence if there are several.
            laws: the laws to watch, or a file that `LawSet.save` wrote, for instance of a single-process twin: names
                are mapped through wrappers, and laws of other stages of a pipeline are left out. By default they are
                inferred at the first forward pass from the inputs that come, and the reference is taken then; if
                something about them is asked for before, they are inferred from made-up inputs.
            every: number of steps from one account to the next; "auto" accounts for the steps that `budget` allows.
            sinks: where records go: sinks, or paths of stores (.db, .jsonl).
            where: which laws are watched: patterns of their names, or a function that says it of a symmetry.
            loss: the loss the model is trained with, where laws are inferred; as for `conserved.recognize`.
            audit: number of steps from one audit to the next; "auto" audits the steps that `budget` allows, the first
                always and at least every thousandth; None does without.
            budget: the share of the time of the run that the monitor may take, audits, account, hooks and storing
                together; by default 0.01 on an accelerator and 0.05, or 2 ms a step if that is more, on a CPU. It does
                not cover reading the laws, once, nor a cadence that is given as a number.
            stop: whether to raise GradientsDoNotConserveError before a step whose gradients are refuted.
            run: the name of the run in its sinks; by default the date and time.
            config: all further settings.

        Raises:
            TypeError: `model` is not a module, or `optimizer` holds something that is not an optimizer.
            ValueError: the file `laws` holds no laws, `every` is less than one, `audit` no cadence, or `budget` no
                share; or `where` selects none of the given laws.
        """
        config = config or MonitorConfig()
        _check_arguments(model, every)
        check_cadence(audit)
        if budget is not None:
            check_budget(budget)
        self.model, self.count = unwrap(model)[0], 0
        self.records: deque[StepRecord] = deque(maxlen=config.keep)
        self._called, self._optimizers = model, optimizers_of(optimizer)
        self._config, self._where, self._loss = config, where, loss
        self._boundary = Boundary(
            strict=config.strict, passing=(GradientsDoNotConserveError,) if stop else (), logs=is_first_process()
        )
        self._peers = Peers()
        self._boundary.when_failed(self._withdraw)
        self._boundary.attempt(STEP, self._peers.announce)
        self._unshown: list[Alarm] = []
        """Alarms about gradients of which it is not known yet whether they are one process's own affair."""
        self._relay = self._boundary.attempt(RELAY, RelayedAlarms) if several_processes() else None
        self._stop, self._every, self._audit_every = stop, every, audit
        self._budget = budget_for(self.model, budget)
        self._known: LawAccount | None = None
        self._audits: Audits | None = None
        self._first: FirstCall | None = None
        self._restored: Mapping[str, Any] | None = None
        self._hooks: list[Any] = []
        self._optimizer_hooks: list[RemovableHandle] = []
        name = run or new_run_name()
        self._records = RunRecords(
            name,
            open_sink(sinks) if is_first_process() else (),
            config,
            self._boundary,
            self.records,
            every=every,
            logs=is_first_process(),
        )
        self._readings: dict[str, Tensor | float] = {}
        self._precisions: set[torch.dtype] = set()
        """The precisions that gradients of audited steps were found in."""
        self._objective = LossObjective()
        self._steps = StepWatch(
            self.model,
            model,
            self._optimizers,
            self._boundary,
            on_pass=self._count_pass,
            on_discarded=self._distrust_listening,
        )
        self._opened = False
        """Whether the first status line was logged and the last was not."""
        self._compiled = "_orig_mod" in children_of(model)
        """Whether calls of the model run compiled code, which calls no hooks."""
        self._clip: float | None = None
        """The value at which gradients are clipped, once it is known."""
        self._waiting: tuple[Alarm, ...] = ()
        """Alarms of an audit about gradients that the loop may change on purpose, until the next audit."""
        self._changed_from_start: frozenset[str] = frozenset()
        """Parameters whose gradients the program changes by itself since the first audit."""
        self._beside: frozenset[str] = frozenset()
        """The broken laws of those alarms, if the loop left the gradients alone, so that the loss may see more."""
        self._changes_gradients = False
        """Whether the loop changes gradients between `backward()` and `step()`."""
        self._unexplained = False
        """Whether alarms of the audit of this step may come from a loss that sees more than the outputs."""
        self._held: list[Alarm] = []
        """Alarms of audits, until `step` knows the loss that the gradients are of."""
        self._looked = False
        self._within: Optimizer | None = None
        """The optimizer whose step is running, if it began before the laws were known."""
        self._skip = False
        """Whether the laws became known inside the last step, which cannot be accounted for then."""
        self._unseen, self._read_again = 0, 0
        self._signature: Signature | None = None
        """The parameters whose laws are watched."""
        self._outline: Outline | None = None
        """The last values compared, to notice changes."""
        asked = {purpose for purpose, cadence in (("account", every), ("audit", audit)) if cadence != "auto"}
        self._times = StepTimes(self._boundary, self._budget, asked)
        self._boundary.attempt(STEP, self._listen)
        make = partial(StepIdentities, allowance=partial(_allowance_of_identities, self._budget))
        self._identities = self._boundary.attempt(IDENTITIES, make, self.model, model, self._optimizers, self._boundary)
        if laws is None:
            self._wait_for_call()
        else:
            given = named_as_in(self.model, laws)
            check_filter(where, given)
            self._boundary.attempt(LAWS, self._watch_laws, given)

    # Setting up

    def _listen(self) -> None:
        """Put the hooks that need no laws on the optimizers and the model."""
        hook = self._boundary.hook
        for optimizer in self._optimizers:
            self._optimizer_hooks.append(optimizer.register_step_pre_hook(hook(STEP, self._before_optimizer)))
            self._optimizer_hooks.append(optimizer.register_step_post_hook(hook(STEP, self._after_optimizer)))
        self._hooks += self._optimizer_hooks
        self._hooks.append(self._called.register_forward_hook(hook("loss", self._objective.note_outputs)))
        self._hooks += self._steps.hooks()

    def _wait_for_call(self) -> None:
        """Infer the laws from the inputs of the next forward pass."""
        made = FirstCallsOfParts if in_parts(self._called) else FirstCall
        self._first = self._boundary.attempt(LAWS, made, self._called, self.model, loss=self._loss)
        if self._first is not None:
            self._first.callbacks.append(partial(self._infer, running=True))

    def _infer(self, *, running: bool = False) -> None:
        """Watch the laws of the model as it is called; `running`: in a forward pass that has just started."""
        if self._first is None:
            return
        call = self._first.call
        with self._times.spent_on(READING):
            # Reading laws runs the model: its random numbers are those of the run.
            with announced("reading the laws of the model"), random_numbers_kept():
                laws = self._first.laws()
            self.watch(laws)
            if self._audits is not None:
                self._audits.passes += running
                if running and call is not None:
                    self._audits.begin_pass(*call)

    def _watch_laws(self, laws: LawSet) -> None:
        """Bind the laws to the optimizers, and take the reference."""
        self._signature = signature(self.model)
        self._steps.remember_weights()
        try:
            laws = self._peers.agree_on_laws(self.model, laws, self._config.layout)
            self._bind_laws(laws)
        except NotTogetherError as reason:
            for stage in (LAWS, ACCOUNT, AUDIT):
                self._boundary.turn_off(stage, str(reason))
        else:
            self._boundary.attempt(AUDIT, self._begin_audits, laws)

    def _withdraw(self, stage: str) -> None:
        """Tell other processes not to wait, because a stage failed on this one."""
        if stage in (STEP, LAWS, ACCOUNT, AUDIT):
            self._peers.withdraw()

    def _bind_laws(self, laws: LawSet) -> None:
        if self._identities is not None:
            self._identities.before_laws()
        of_process = laws_of_process(self.model, laws, self._config.layout)
        if len(laws) and not len(of_process):
            self._boundary.remark(ACCOUNT, f"of no law: {SPREAD}")
            return
        if len(laws) and steps_copies(self.model, self._optimizers):
            self._boundary.remark(ACCOUNT, f"of no law: {COPIED}")
            return
        try:
            self._known = LawAccount(
                self.model,
                self._optimizers,
                of_process,
                where=self._where,
                config=self._config,
                boundary=self._boundary,
                sampled=self._sampled,
                converted=self._go_on_converted,
            )
        except NoLawError as reason:
            # A model without laws is watched for what needs none: gradients that are missing or not finite.
            # The line at the start says it.
            self._boundary.turn_off(LAWS, str(reason), silent=not self._opened)
        else:
            self._records.watch(self._known)
            if self._within is not None:
                self._known.watch.before_step(self._within)

    def _begin_audits(self, laws: LawSet) -> None:
        self._audits = Audits(
            self.model,
            self._optimizers,
            laws,
            compiled=self._compiled,
            called=self._called,
            every=self._audit_every,
            budget=self._budget,
            precision=self._config.precision,
            layout=self._config.layout,
            compare=self._config.compare,
            repair=self._config.repair,
        )
        self._budget.together = self._audits.joint and several_processes()
        self._audits.arm()

    def watch(self, laws: LawSet) -> None:
        """Give the laws to a monitor that waits for the first forward pass to infer them; the reference is taken now.

        Args:
            laws: the laws of its model.

        Raises:
            RuntimeError: the monitor has its laws already.
        """
        if self._first is None:
            raise RuntimeError("Expected a monitor without laws, got one that has them. Call watch() once.")
        first, self._first = self._first, None
        self._compiled = self._compiled or first.listens_elsewhere
        first.close()
        self._watch_laws(laws)
        if self._restored is not None:
            state, self._restored = self._restored, None
            self.load_state_dict(state)

    # Hooks

    def _count_pass(self) -> None:
        if self._audits is not None:
            self._audits.passes += 1

    def _distrust_listening(self) -> None:
        if self._audits is not None:
            self._audits.distrust_listening()

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Audit the gradients that an optimizer is about to use, once for all optimizers of a step."""
        closure = _computes_gradients(args, kwargs)
        if self._identities is not None:
            self._identities.step.number = self.count + 1
            self._identities.before_optimizer(optimizer, closure=closure)
        if self._first is not None:
            self._boundary.attempt(LAWS, self._before_first_step, optimizer)
        if not self._looked:
            self._boundary.attempt(STEP, self._notice_new_parameters)
        if self._known is not None:
            self._boundary.attempt(ACCOUNT, self._before_account, self._known, optimizer)
        self._notice_order()
        if self._spoiled():
            # Laws hold of a gradient that belongs to the step.
            self._looked = True
        if self._clip is not None and _largest_repeats(self.model):
            # No account survives gradients that are clipped by value.
            self._steps.foreign = True
        if not closure and not self._steps.notice_foreign_gradients() and not self._takes_turns():
            self.look_at_gradients()

    def _before_account(self, account: LawAccount, optimizer: Optimizer) -> None:
        with self._peers.together():
            if self._sampled():
                confirm_together("values before the step")
            account.watch.before_step(optimizer)

    def look_at_gradients(self) -> None:
        """Audit the gradients as they are now, once a step: for loops whose optimizers get a closure.

        Without a closure the monitor does it by itself, just before an optimizer uses them.
        """
        if self._identities is not None:
            self._identities.gradients_ready()
            self._looked = self._looked or self._identities.spoiled
        if not self._looked:
            self._looked = True
            self._boundary.attempt(AUDIT, self._audit, self.count + 1)

    def _before_first_step(self, optimizer: Optimizer) -> None:
        """Infer the laws before a step that computes its own gradients, or note that the step began without them."""
        assert self._first is not None
        self._first.look_for_compiled()
        if not self._first.listens_elsewhere and self._steps.gradient_mark() is None:
            with suppress(NoExampleError):
                self._infer()
                return
        self._within = optimizer

    def _takes_turns(self) -> bool:
        """Return whether optimizers take turns: laws between their tensors then do not hold in this pass."""
        return self._identities is not None and self._identities.step.old_gradients

    def _spoiled(self) -> bool:
        return self._identities is not None and self._identities.spoiled

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps.note_optimizer_step()
        if self._identities is not None:
            self._identities.after_optimizer(optimizer)
        if self._known is not None:
            self._boundary.attempt(ACCOUNT, self._known.watch.after_step, optimizer)
        if self._within is not None and self._first is None and self._known is not None:
            LOGGER.info("conserved: the laws became known inside the first step, which is not accounted for.")
            self._skip = True
            self._boundary.attempt(ACCOUNT, self._take_reference, self._known)
        self._within = None

    def _take_reference(self, account: LawAccount) -> None:
        with self._peers.together():
            confirm_together("reference")
            account.take_reference()

    def _audit(self, step: int) -> None:
        if self._audits is None:
            return
        # A replayed pass is not an evaluation of the loop.
        paused = nullcontext() if self._identities is None else self._identities.paused()
        with self._times.spent_on("audit"), self._peers.together(), paused:
            audit = self._audits.before_step(step)
        if audit is None:
            return
        self._readings |= self._audits.series[-1].readings()
        # Losses in single precision on a double precision model, and autocast that hooks did not see, show in the bits.
        self._precisions.add(audit.precision)
        if self._reaches_unused():
            self._let_go_of_objective()
            return
        alarms = tuple(alarms_of(audit, step))
        if audit.clipped is not None:
            self._clip = audit.clipped
            self._records.explain(step, later=True)
        elif alarms and self._clip is not None and _largest_repeats(self.model):
            # Gradients of this step are clipped too, though in too few entries to be seen by themselves.
            self._steps.foreign = True
            return
        if self._stop and alarms:
            self._records.raise_at_once(alarms)
            raise GradientsDoNotConserveError(audit)
        self._held += self._without_habits(audit, alarms)

    def _reaches_unused(self) -> bool:
        """Return whether a parameter that the model does not use gets a gradient: from a loss that uses it."""
        laws = () if self._known is None else self._known.laws
        unused = {name for symmetry in laws if symmetry.family == "unused" for name in symmetry.parameters}
        gradients = [p.grad for name, p in self.model.named_parameters() if name in unused] if unused else []
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def _without_habits(self, audit: Audit, alarms: tuple[Alarm, ...]) -> tuple[Alarm, ...]:
        """Hold alarms about gradients that the loop itself may change; drop them if it does so in the next audit too.

        Noise, centring, compression or projection of gradients break most identities at once, while the backward pass
        satisfies them. Gradients that hooks or the loop change from the first step on are what the program means. A
        defect breaks a few in mid-run, comes once, or leaves nothing of the gradients. A difference from the same pass
        run again that nothing in the loop made is an alarm where the loss is known to be of the outputs alone.
        """
        assert self._audits is not None
        waiting, self._waiting = self._waiting, ()
        before, self._beside = self._beside, frozenset()
        if self._audits.one_entry:
            return (*waiting, *alarms)
        changed = self._audits.changed_by_program(audit)
        if alarms and changed and not audit.disagreements:
            begins, assigned = len(self._audits.series) == 1, self._steps.gradients_assigned()
            # Hooks of the program change gradients in every pass, though not in a way that each batch shows.
            assigned = assigned or (begins and set(changed) == set(self._audits.changed_in_hooks(audit)))
            if begins:
                self._changed_from_start = frozenset(changed)
            if begins and not assigned:
                # A program that changes gradients from its first step on does so in the next one too.
                self._steps.foreign = True
                self._waiting = alarms
                return ()
            if assigned or self._changed_from_start.intersection(changed):
                # The account takes gradients for those of the pass.
                self._steps.foreign = True
                return tuple(_changed_on_purpose(alarm, changed) for alarm in alarms)
        broken = frozenset(row.name for row in audit.failures)
        if breaks_in_run_alone(audit, again=bool(before)) and self._audits.untouched(audit):
            if not several_processes():
                self._unexplained = True
                alarms = tuple(replace(a, certain=a.code not in ("gradient", "hardware")) for a in alarms)
            # A loss that reaches further breaks the same laws in every audit. Flips and bad devices break others, and a
            # factor on one side of an identity comes from no loss.
            if not before:
                self._records.explain(self.count + 1)
                self._waiting, self._beside = (*waiting, *alarms), broken
                return ()
            if before & broken:
                self._records.explain(self.count + 1)
                self._let_go_of_objective()
                return ()
        written = self._steps.gradients_written() or self._audits.changes_most(audit)
        habitual = changes_all_gradients(audit) and written and not self._audits.unrelated
        if audit.disagreements or not habitual:
            # A loop that means to change gradients does so on all replicas.
            return (*waiting, *alarms)
        # The account takes gradients for those of the pass as well.
        self._steps.foreign = True
        if not waiting and not self._changes_gradients and not self._steps.gradients_assigned():
            self._waiting = alarms
        else:
            self._changes_gradients = True
            text = "the loop changes them between backward() and step(), so that laws are not tested; call "
            self._boundary.remark("gradients", f"{text}monitor.before_clipping() before it to have them tested")
        return ()

    def _notice_order(self) -> None:
        """Report that `step()` was called before `optimizer.step()`, where there is no step to account for."""
        if not self._steps.called_too_early():
            return
        message = (
            "Monitor.step() was called before optimizer.step(): the account of a step is made after it. Call "
            "optimizer.step(), then monitor.step(), then zero_grad()."
        )
        alarm = Alarm(step=self.count, code="order", law="", value=1.0, limit=0.0, message=message, family="order")
        self._records.raise_at_once((alarm,))

    def _notice_new_parameters(self) -> None:
        """Infer the laws again if parameters were frozen, unfrozen, replaced or reshaped."""
        if self._signature is None or self._first is not None:
            return
        identities = self._identities
        now = outline(parts_of(self.model) if identities is None else identities.step.structure.parts)
        if now == self._outline:
            return
        self._outline = now
        if signature(self.model) == self._signature:
            return
        alarm = orphan_alarm(self.model, self._optimizers, self._signature, self.count + 1)
        if alarm is not None:
            self._records.raise_at_once((alarm,))
        self._signature = None
        self._read_again += 1
        self._let_go_of_laws()
        if self._read_again > _READ_AGAIN:
            self._boundary.turn_off(LAWS, "the parameters that are trained change all the time")
            return
        self._boundary.turn_on(LAWS)
        self._boundary.turn_on(ACCOUNT)
        LOGGER.info("conserved: the trained parameters changed in step %d; laws are read again.", self.count + 1)
        self._records.begin_again(self.count)
        self._wait_for_call()

    def _let_go_of_laws(self) -> None:
        if self._audits is not None:
            self._audits.disarm()
        self._known, self._audits = None, None
        self._records.watch(None)

    # What training loops call

    def step(self, *, loss: Tensor | float | None = None) -> None:
        """Account for the step that the optimizer has just taken.

        Args:
            loss: the loss of the step, to be kept beside the account; a tensor is not waited for. Of several numbers
                their mean is kept.
        """
        self.count += 1
        self._boundary.step = self.count
        if loss is not None:
            self._boundary.attempt("loss", self._note_loss, loss)
            self._boundary.attempt("loss", self._look_at_loss, loss)
            if self._unexplained and self._boundary.attempt("loss", self._objective.is_of_outputs, loss, self.model):
                self._held = [replace(alarm, certain=True) for alarm in self._held]
                self._waiting = tuple(replace(alarm, certain=True) for alarm in self._waiting)
        self._boundary.attempt(STEP, self._step)
        self._boundary.attempt(RELAY, self._relay_alarms)
        self._boundary.attempt(STEP, self._take_times)
        if not self._opened:
            self._boundary.attempt(LINES, self._open)
        self._forget_step()

    def take_notes(self) -> list[str]:
        """Return notes of step identities since the last call: findings that may be intended."""
        if self._identities is None:
            return []
        notes, self._identities.step.notes = self._identities.step.notes, []
        return list(dict.fromkeys(notes))

    def _open(self) -> None:
        """Log what is watched, once, as soon as the laws are known."""
        if self.waiting and not self._boundary.off(LAWS):
            return
        self._opened = True
        if is_first_process():
            say(opening_line(self, self._optimizers, self._steps.autocast))

    def _note_loss(self, loss: Any) -> None:
        if isinstance(loss, Tensor):
            value = loss.detach()
            self._readings["loss"] = value if value.numel() == 1 else value.double().mean()
        else:
            self._readings["loss"] = float(loss)

    def _look_at_loss(self, loss: Any) -> None:
        """Drop the laws of the outputs if the loss depends on more than the outputs."""
        if self._objective.sees_more(loss, self.model):
            self._let_go_of_objective()

    def _let_go_of_objective(self) -> None:
        """Watch without the laws of the outputs, because the loss depends on more than the outputs."""
        self._held.clear()
        self._waiting = ()
        self._let_go_of_laws()
        self._boundary.turn_off(LAWS, OBJECTIVE)
        self._boundary.attempt(AUDIT, self._begin_audits, LawSet(symmetries=()))

    def _relay_alarms(self) -> None:
        """Show alarms of this process to the first one, and raise there what others have shown."""
        fresh = self._records.alarms.take_fresh()
        if self._relay is None:
            return
        parted = None if self._identities is None else self._identities.step.parted
        self._unshown += fresh
        # Laws between what is reduced and what one process holds alone are not those of its own gradients.
        shown = [alarm for alarm in self._unshown if parted is False or alarm.code not in ("gradient", "hardware")]
        self._unshown = [alarm for alarm in self._unshown if alarm not in shown]
        self._relay.show(shown)
        self._records.raise_at_once(self._relay.arrivals())

    def _mixes_processes(self, alarm: Alarm) -> bool:
        """Return whether a law of an alarm is one between replicated parameters and others of this process.

        The gradients of the first may be sums over processes by now, and those of the others are not.
        """
        if self._identities is None or self._known is None or alarm.code not in ("gradient", "hardware"):
            return False
        alike, parted = self._identities.step.alike, self._identities.step.parted
        own = {symmetry.name: {*symmetry.parameters} for symmetry in self._known.laws}
        names = [own.get(law, set()) for law in (alarm.laws or (alarm.law,))]
        return bool(parted) and bool(names) and all(any(n in alike for n in x) and not x <= alike for x in names)

    def _step(self) -> None:
        alarms, self._held = self._held, []
        if self._spoiled():
            self._steps.foreign = True
        if self._identities is not None and not self._hears_optimizers():
            self._boundary.turn_off(IDENTITIES, "hooks of the optimizer were removed")
            self._leave(self._identities.close)
            self._identities = None
        if self._identities is not None:
            self._identities.step.number = self.count
            rewritten = self._identities.after_step()
            if rewritten is not None:
                # What the account leaves over in such a step has its reason; the identity reports it if need be.
                self._records.explain(self.count)
                self._steps.foreign |= rewritten
            self._records.raise_at_once(self._identities.take_alarms())
            alarms = [replace(a, certain=False) if self._mixes_processes(a) else a for a in alarms]
        self._records.raise_at_once(alarms)
        if self._first is not None:
            self._boundary.attempt(LAWS, self._read_without_call)
        self._steps.note_step_call()
        if not self._steps.stepped and self._audits is not None:
            self._boundary.attempt(AUDIT, self._audits.forget)
        accounted = self._accounts_for(self.count) and not self._skip
        if self._known is not None:
            with self._times.spent_on("account"):
                self._boundary.attempt(ACCOUNT, self._settle, accounted)
        if accounted and (self._known is None or self._boundary.off(ACCOUNT)):
            self._records.send_readings(self.count, self._step_readings(), skipped=not self._steps.stepped)
        self._records.receive(self._audits, wait=False)

    def _hears_optimizers(self) -> bool:
        """Return whether the hooks on optimizer steps are still where they were put."""
        dicts = [(handle.id, handle.hooks_dict_ref()) for handle in self._optimizer_hooks]
        return all(hooks is not None and key in hooks for key, hooks in dicts)

    def _read_without_call(self) -> None:
        """Infer the laws from made-up inputs if no forward pass was seen; after some steps they must be known."""
        assert self._first is not None
        self._unseen += 1
        if self._unseen >= _UNSEEN and self._steps.gradient_mark() is not None:
            # Laws of the whole model are not those of a program that calls parts of it.
            self._first.close()
            self._first = None
            self._boundary.turn_off(LAWS, "the model was never called as a whole; pass laws= if it has known ones")
        elif self._unseen >= _UNSEEN:
            self._infer()
        elif not self._first.listens_elsewhere and self._steps.gradient_mark() is None:
            with suppress(NoExampleError):
                self._infer()

    def _settle(self, accounted: bool) -> None:
        """Send the account of the step, or leave out a step that was missed or that the loop changed."""
        account = self._known
        assert account is not None
        try:
            missed = account.watch.missed()
            if missed:
                self._boundary.remark("loop", missed)
            if self._steps.moved_without_step():
                missed = "parameters changed and no step of their optimizer was seen, as if it were compiled"
                self._boundary.remark("loop", missed)
            elif not self._steps.ever_stepped:
                # A loop that writes to `p.data` leaves no version behind.
                missed = "no step of an optimizer was seen, so the loop updates its weights by itself"
                self._boundary.remark("loop", missed)
            if missed or self._steps.foreign or self._changes_gradients or not accounted:
                account.leave_out_step()
                return
            used = self._precisions | self._steps.autocast
            if used:
                account.use_precision(coarsest(*used))
            with self._peers.together():
                confirm_together("account of the step")
                causes, numbers = account.settle()
            account.transfer.send(self.count, causes, numbers, self._step_readings(), not account.watch.stepped)
        finally:
            account.forget_step()

    def _step_readings(self) -> dict[str, Tensor | float]:
        """Return the readings of this step: those of gauges, and those that were noted."""
        readings: dict[str, Tensor | float] = {}
        with torch.no_grad():
            for name, gauge in self._config.gauges.items():
                value = self._boundary.attempt(f"reading {name}", gauge)
                if value is not None:
                    readings[name] = value
        readings |= self._readings
        self._readings = {}
        return readings

    def _take_times(self) -> None:
        """Record the times of the step, and add hooks for the next one if it is audited."""
        looked, waited, watching = self._budget.due(self.count), 0.0, 0.0
        if self._audits is not None:
            waited, self._audits.waited = self._audits.waited, 0.0
            looked = looked or (self._audit_every == "auto" and self._audits.last_step == self.count)
            if looked and self._budget.first > 1:
                watching = self._audits.watching.seconds()
        self._times.end_step(self.count, looked=looked, waited=waited, watching=watching)
        if self._budget.revises(self.count):
            self._budget.interval = self._largest_interval(self._budget.wanted())
        if self._audits is not None:
            self._boundary.attempt(AUDIT, self._audits.after_step, self.count)

    def _largest_interval(self, wanted: int) -> int:
        """Return the largest number of steps between looks that any process wants."""
        agreement = self._peers.agreement
        if agreement is None:
            return wanted
        return self._boundary.attempt(AUDIT, agreement.reduce, "interval", wanted, max) or self._budget.interval

    def _forget_step(self) -> None:
        self._looked, self._skip, self._unexplained = False, False, False
        self._times.forget_step()
        self._boundary.attempt(STEP, self._steps.end_step)
        self._objective.end_step()

    def note(self, **readings: float) -> None:
        """Keep further numbers with the next record, such as a loss that is known later than the step.

        Args:
            **readings: the numbers, by the name they are stored under.
        """
        self._readings |= readings

    def before_clipping(self) -> None:
        """Tell clipping by value or by tensor apart from a wrong gradient: call it between backward and clipping.

        Clipping all gradients by one factor, as `clip_grad_norm_` does, moves laws at second order only.
        With a gradient scaler, call it after `unscale_`.
        """
        # What is clipped by value satisfies no identity: the audit of this step is now.
        self.look_at_gradients()
        if self._known is not None and self._sampled():
            self._boundary.attempt(ACCOUNT, self._known.note_unclipped)

    # Ending, and going on

    def flush(self) -> None:
        """Wait for pending records of the device, and pass them to the sinks."""
        self._records.receive(self._audits, wait=True)
        self._records.drain()

    def close(self) -> None:
        """Flush records, close the sinks, and remove all hooks from the model, the optimizers and torch."""
        if self._identities is not None:
            self._leave(self._identities.close)
            alarms = self._identities.take_alarms()
            if not self._boundary.off(STEP):
                # Steps that identities do not know of look like outside writes.
                self._leave(self._records.raise_at_once, alarms)
        self._leave(self._records.raise_at_once, self._waiting)
        self._waiting = ()
        self._leave(self.flush)
        self._leave(self._relay_alarms)
        self._withdraw(STEP)
        for undo in self._undo():
            self._leave(undo)
        self._hooks.clear()
        self._records.close()
        if self._opened and is_first_process():
            self._boundary.attempt(LINES, lambda: say(closing_line(self)))
        self._opened = False

    def _leave(self, undo: Callable[..., Any], *args: Any) -> None:
        """Call a part of closing, whether or not others have failed."""
        self._boundary.turn_on(CLOSING)
        self._boundary.attempt(CLOSING, undo, *args)

    def _undo(self) -> list[Any]:
        """Return the calls that remove the monitor's hooks. Each is tried even if others fail."""
        undo = [hook.remove for hook in self._hooks]
        if self._audits is not None:
            undo.append(self._audits.disarm)
        if self._first is not None:
            undo.append(self._first.close)
        return [*undo, partial(forget_model, self.model)]

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run needs to resume from a checkpoint: references, sums, the number of the step."""
        self.flush()
        laws = {} if self._lawless else self._account.state()
        state = {"format": FORMAT, "count": self.count, "run": self._records.run} | laws
        identities = (
            None if self._identities is None else self._boundary.attempt(IDENTITIES, self._identities.state_dict)
        )
        return state if identities is None else state | {"identities": identities}

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
            raise ValueError(
                f"Expected a monitor's state in format {FORMAT!r}, got {state.get('format')!r}. Pass a state_dict()."
            )
        if self._first is not None:
            self._restored = state
            return
        if self._known is not None and "laws" in state:
            self._known.check_state(state)
        if self._records.started:
            raise RuntimeError(
                "Expected a monitor before its first step, got one whose sinks have started another run. Load "
                "its state first."
            )
        self.count, self._records.run = int(state["count"]), str(state["run"])
        if self._identities is not None and "identities" in state:
            self._identities.load_state_dict(state["identities"])
        if self._audits is not None:
            self._audits.expect("the first after a resume")
        if self._known is not None and "laws" in state:
            self._known.load(state)

    def _sampled(self) -> bool:
        return self._accounts_for(self.count + 1)

    def _accounts_for(self, step: int) -> bool:
        """Return whether step number `step` is accounted for."""
        return step % self._every == 0 if isinstance(self._every, int) else self._budget.due(step)

    def _go_on_converted(self, names: Sequence[str]) -> None:
        """Continue the account from the converted values after parameters changed their type between two steps."""
        assert self._known is not None
        kind = str(self._known.theta[names[0]].dtype).removeprefix("torch.")
        LOGGER.warning(
            "%s and %d other parameters became %s after step %d. The account goes on from the converted values.",
            *(names[0], len(names) - 1, kind, self.count),
        )
        if self._audits is not None:
            self._audits.expect("the precision of parameters changed")
        self._known.go_on_converted()


def _changed_on_purpose(alarm: Alarm, names: Sequence[str]) -> Alarm:
    """Return an alarm about gradients that the program changes by itself as a statement."""
    if alarm.code not in ("gradient", "hardware"):
        return alarm
    headline = f"The program changes the gradient of {name_tensors(list(names))} after it was computed."
    return replace(alarm, code="gradient", certain=False, headline=headline)


def _allowance_of_identities(budget: TimeBudget) -> float:
    """Return half of what hooks and free checks leave of the budget; the other half is for laws."""
    return max((budget.allowance - budget.base) / 2, budget.allowance / _LEAST_SHARE)


def _largest_repeats(model: nn.Module) -> bool:
    """Return whether several entries of gradients have the largest magnitude, as clipping by value leaves them."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse and p.grad.numel()]
    largest = max((float(gradient.abs().max()) for gradient in gradients), default=0.0)
    return sum(int((gradient.abs() == largest).sum()) for gradient in gradients) > 1


def _computes_gradients(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a step gets a closure: its gradients are not there yet when the step begins."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def _check_arguments(model: nn.Module, every: int | Literal["auto"]) -> None:
    """Raise for arguments that no run can be watched with."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected a torch.nn.Module as `model`, got {type(model).__name__}. Pass the model that is trained."
        )
    if every != "auto" and not (isinstance(every, int) and every >= 1):
        raise ValueError(
            f'Expected `every` to be "auto" or a number of steps of at least 1, got {every!r}. Pass one of them.'
        )
