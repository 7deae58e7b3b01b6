"""Watches the laws of a model while it trains: after every optimizer step, an exact account of what it did to each."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from conserved.alarm import Alarm
from conserved.auditing import Audit, GradientsDoNotConserve
from conserved.boundary import LAWS, Boundary, Condition, Hook
from conserved.inference import FirstCall, NoExample, being_followed
from conserved.inference.live import forget_model, parts_of
from conserved.laws import Dropped, LawSet, Reference
from conserved.laws.identities import coarsest
from conserved.store import Sink, opened
from conserved.store.step_record import By, Entry, StepRecord
from conserved.symmetry import Tensors
from conserved.tracking import run_summary
from conserved.tracking.account_stride import LEAST, SHARE_ON_CPU, SHARE_ON_GPU, AccountStride
from conserved.tracking.law_account import LawAccount
from conserved.tracking.loss_graph import reaches_beside
from conserved.tracking.monitor_config import MonitorConfig
from conserved.tracking.optimizer_watch import ACCOUNT
from conserved.tracking.run_audits import BUDGET, AuditEntry, Audits, Cadence, alarms_of, pace
from conserved.tracking.run_records import RunRecords
from conserved.tracking.status_lines import closing_line, opening_line, say
from conserved.tracking.theory import AngularMomentum, Decay, DriftBound
from conserved.tracking.watched_laws import NoLaw, Where, optimizers_of, unwrapped

LOGGER = logging.getLogger("conserved")

FORMAT = "conserved/monitor/1"

AUDIT = "audits"
"""The stage that tests gradients before an optimizer uses them."""

STEP = "monitor"
"""Everything that is no stage of its own."""

PRECISION = "precision of passes"
"""The stage that notices autocast."""

LINES = "status lines"
"""The stage that says what is watched."""

PASSES = "passes"
"""The stage that tells backward passes of a step apart."""

_UNSEEN = 3
"""Steps without a call of the model after which its laws are no longer waited for."""

OBJECTIVE = (
    "the loss sees weights or features beside the outputs of the model, so that its laws are not those of training"
)
"""What is said of a weight penalty or a distillation of features in the loss."""

_PASSES_KEPT = 64
"""Outputs of passes of one step that are kept until its loss is known."""

_SAMPLED = 8
"""Parameters that are asked whether they were written to; what moves weights back and forth moves all of them."""

_READ_AGAIN = 8
"""How often the laws may be read anew in a run, because parameters were frozen, unfrozen or replaced."""


class Monitor:
    """Watches the laws of a model while its optimizer trains it, and accounts for every change by cause.

    Call `step()` right after `optimizer.step()`, before gradients are cleared. Nothing is written to the model, and
    besides the laws themselves no memory is held, except where an optimizer's rule needs the parameters from before
    (`memory()` says how much). On a GPU nothing waits for the device; records reach the sinks a step or two later.

    Whatever fails inside turns a part of the monitor off and never reaches the training loop: `state` says what it is
    doing. `MonitorConfig(strict=True)` raises instead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        laws: LawSet | None = None,
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
        """Begin to watch; the laws as they are now are the reference.

        Gradients are audited before optimizers use them; the first backward pass always is.

        Args:
            model: the model, as it is called in training: compiled, sharded, wrapped.
            optimizer: the optimizer of its parameters; a sequence if there are several.
            laws: the laws to watch. By default they are inferred at the first forward pass from the inputs that come,
                and the reference is taken then; if something about them is asked for before, they are inferred from
                made-up inputs.
            every: number of steps from one record to the next; "auto" chooses it so that the monitor stays within
                `budget`.
            sinks: where records go: sinks, or paths of stores (.db, .jsonl).
            where: which laws are watched: patterns of their names, or a function that says it of a symmetry.
            loss: the loss the model is trained with, where laws are inferred; as for `conserved.recognize`.
            audit: "auto" audits as often as takes at most the share `budget` of the time of the run (and three seconds
                in all), but at least every hundred steps; a number fixes how often, None does without.
            budget: the share of the time of the run that the monitor may take; by default 0.01 on an accelerator and
                0.05, or 2 ms a step if that is more, on a CPU. Reading the laws, once, is not part of it.
            stop: whether a step whose gradients are refuted is not taken: GradientsDoNotConserve is raised before it.
            run: the name of the run in its sinks; by default the date and time.
            config: all further settings.

        Raises:
            TypeError: `model` is not a module, or `optimizer` holds something that is not an optimizer.
            ValueError: `every` is less than one, `audit` no cadence, or `budget` no share; or `where` selects none of
                the given laws.
        """
        config = config or MonitorConfig()
        _check_arguments(model, every)
        pace(audit, BUDGET if budget is None else budget)
        self.model, self.count = unwrapped(model), 0
        self.records: deque[StepRecord] = deque(maxlen=config.keep)
        self._called, self._optimizers = model, optimizers_of(optimizer)
        self._config, self._where, self._loss = config, where, loss
        self._boundary = Boundary(
            strict=config.strict, passing=(GradientsDoNotConserve,) if stop else (), told=_writes()
        )
        self._stop, self._budget, self._audit_every = stop, budget, audit
        self._stride = self._made_stride(every)
        self._known: LawAccount | None = None
        self._audits: Audits | None = None
        self._first: FirstCall | None = None
        self._restored: Mapping[str, Any] | None = None
        self._hooks: list[Any] = []
        name = run or time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + f" {id(self):x}"
        self._records = RunRecords(
            name, opened(sinks) if _writes() else (), config, self._boundary, self.records, every=every, told=_writes()
        )
        self._readings: dict[str, Tensor | float] = {}
        self._precisions: set[torch.dtype] = set()
        """The precisions of autocast regions that passes of the model ran in."""
        self._passes = 0
        """Forward passes so far."""
        self._written: tuple[int, ...] | None = None
        """How often some parameters had been written to at the last `step()`."""
        self._opened = False
        """Whether the line at the start was said, and that at the end was not."""
        self._compiled = hasattr(model, "_orig_mod")
        """Whether calls of the model run compiled code, in which hooks are not heard."""
        self._clip: float | None = None
        """The value that gradients are clipped at, once that was seen."""
        self._held: list[Alarm] = []
        """Alarms of audits, until `step` knows the loss that the gradients are of."""
        self._outputs: list[Any]
        """Ends of the graphs of this step's passes."""
        self._loss_seen = False
        self._versions: tuple[int, ...] | None = None
        """How often some parameters had been written to at the last forward pass."""
        self._looked = self._stepped = False
        self._forget_step()
        self._unstepped: tuple[int, int, int] | None = None
        self._within: Optimizer | None = None
        """The optimizer whose step is running, if it began before the laws were known."""
        self._skip = False
        """Whether the laws became known inside the last step, which cannot be accounted for then."""
        self._unseen, self._read_again = 0, 0
        self._signature: tuple[Any, ...] | None = None
        """The parameters whose laws are watched."""
        self._clock, self._inside = time.perf_counter(), 0.0
        self._boundary.attempt(STEP, self._listen)
        if laws is None:
            self._wait_for_call()
        else:
            self._check_filter(laws)
            self._boundary.attempt(LAWS, self._watch_laws, laws)

    # Setting up

    def _made_stride(self, every: int | Literal["auto"]) -> AccountStride:
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        on_host = device in ("cpu", "meta")
        share = self._budget or (SHARE_ON_CPU if on_host else SHARE_ON_GPU)
        return AccountStride(None if every == "auto" else every, share=share, least=LEAST if on_host else 0.0)

    def _check_filter(self, laws: LawSet) -> None:
        """Raise ValueError if `where` selects none of the laws that were given."""
        from conserved.tracking.watched_laws import selector

        if self._where is not None and len(laws) and not len(laws.select(selector(self._where))):
            raise ValueError(f"Expected `where` to select a law, got {self._where!r}. There are {len(laws)} laws.")

    def _listen(self) -> None:
        """Put the hooks that need no laws on the optimizers and the model."""
        hook = self._boundary.hook
        for one in self._optimizers:
            self._hooks.append(one.register_step_pre_hook(hook(STEP, self._before_optimizer)))
            self._hooks.append(one.register_step_post_hook(hook(STEP, self._after_optimizer)))
        self._hooks.append(self._called.register_forward_pre_hook(hook(STEP, self._count_pass)))
        self._hooks.append(self._called.register_forward_hook(hook("loss", self._note_outputs)))
        # The outermost module may be called outside autocast and enter it within, as accelerate does; compiled parts
        # run no hooks, so that it is asked as well.
        leaves = (
            m
            for m in self.model.modules()
            if m is not self._called
            and not any(True for _ in m.children())
            and any(True for _ in m.parameters(recurse=False))
        )
        asked = (self._called, *islice(leaves, 2))
        self._hooks += [one.register_forward_pre_hook(hook(PRECISION, self._note_autocast)) for one in asked]

        trained = [p for p in self.model.parameters() if p.requires_grad and p.is_leaf]
        # Weakly: Python does not see what hooks of a parameter hold, so that monitor and model would stay for ever.
        kept = weakref.ref(self)
        for parameter in dict.fromkeys((*trained[:1], *trained[-1:])):
            noticed = Hook(Boundary(told=False), PASSES, partial(_notice_accumulation, kept))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(noticed))

    def _notice_accumulation(self, parameter: Tensor) -> None:
        """Notice gradients that were thrown away since the last backward pass of this step.

        A pass for an adversarial input, a penalty or the other network of a pair leaves gradients that are cleared
        before the pass of the step. A gradient that is added to stays one tensor and is written to once.
        """
        gradient = parameter.grad
        if gradient is None or being_followed():
            return
        key, now = id(parameter), (id(gradient), gradient._version)
        before, self._accumulated[key] = self._accumulated.get(key), now
        if before is not None and before not in (now, (now[0], now[1] - 1)) and self._audits is not None:
            self._audits.distrust_listening()

    def _wait_for_call(self) -> None:
        """Read the laws off the next forward pass."""
        self._first = self._boundary.attempt(LAWS, FirstCall, self._called, self.model, loss=self._loss)
        if self._first is not None:
            self._first.came.append(partial(self._infer, running=True))

    def _infer(self, *, running: bool = False) -> None:
        """Watch the laws of the model as it is called; `running`: in a forward pass that has just begun."""
        if self._first is None:
            return
        began, call = time.perf_counter(), self._first.call
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        # Reading laws runs the model: its random numbers are those of the run.
        with torch.random.fork_rng(devices=devices):
            laws = self._first.laws()
        if time.perf_counter() - began > 1:
            LOGGER.info("conserved: reading the laws took %.1f s.", time.perf_counter() - began)
        self.watch(laws)
        if self._audits is not None:
            self._audits.passes += running
            if running and call is not None:
                self._audits.begin_pass(*call)

    def _watch_laws(self, found: LawSet) -> None:
        """Bind the laws to the optimizers, and take the reference."""
        self._signature, self._written = self._parameters_now(), self._versions_now()
        try:
            self._known = LawAccount(
                self.model,
                self._optimizers,
                found,
                where=self._where,
                config=self._config,
                boundary=self._boundary,
                sampled=self._sampled,
                converted=self._go_on_converted,
            )
        except NoLaw as reason:
            # A model without laws is watched for what needs none: gradients that are missing or not finite.
            self._boundary.turn_off(LAWS, str(reason))
        else:
            self._records.watch(self._known)
            if self._within is not None:
                self._known.watch.before_step(self._within)
        self._boundary.attempt(AUDIT, self._begin_audits, found)

    def _begin_audits(self, found: LawSet) -> None:
        self._audits = Audits(
            self.model,
            self._optimizers,
            found,
            compiled=self._compiled,
            called=self._called,
            every=self._audit_every,
            budget=self._stride.share if self._budget is None else self._budget,
            precision=self._config.precision,
        )
        self._audits.arm()

    def watch(self, laws: LawSet) -> None:
        """Give the laws to a monitor that waits for the first forward pass to infer them; the reference is taken now.

        Args:
            laws: the laws of its model.

        Raises:
            RuntimeError: the monitor has its laws already.
        """
        if self._first is None:
            raise RuntimeError("This monitor has its laws already.")
        first, self._first = self._first, None
        self._compiled = self._compiled or first.listens_elsewhere
        first.close()
        self._watch_laws(laws)
        if self._restored is not None:
            state, self._restored = self._restored, None
            self.load_state_dict(state)

    # Hooks

    def _count_pass(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not being_followed():
            self._passes += 1
            self._versions = self._versions_now()
            if self._audits is not None:
                self._audits.passes += 1

    def _note_autocast(self, module: nn.Module, args: Any) -> None:
        device = next((p.device.type for p in module.parameters()), "cpu")
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self._precisions.add(torch.get_autocast_dtype(device))

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to use the gradients: audit them, once for all optimizers of a step."""
        if self._first is not None:
            self._boundary.attempt(LAWS, self._before_first_step, optimizer)
        if not self._looked:
            self._boundary.attempt(STEP, self._notice_new_parameters)
        if self._known is not None:
            self._boundary.attempt(ACCOUNT, self._known.watch.before_step, optimizer)
        self._notice_order()
        if not _computes_gradients(args, kwargs) and not self._foreign_gradients():
            self.look_at_gradients()

    def look_at_gradients(self) -> None:
        """Audit the gradients as they are now, once a step: for loops whose optimizers get a closure.

        Without a closure the monitor does it by itself, just before an optimizer uses them.
        """
        if not self._looked:
            self._looked = True
            self._boundary.attempt(AUDIT, self._audit, self.count + 1)

    def _foreign_gradients(self) -> bool:
        """Whether the gradients were taken at other weights than those the optimizer starts from.

        Sharpness-aware optimizers take them at perturbed weights and move back. No identity holds between such weights
        and such gradients, and a step from them cannot be split by cause. A second step with old gradients is another
        matter: there the weights were written by an optimizer that is watched.
        """
        if self._stepped or self._versions is None or self._versions == self._versions_now():
            return False
        self._foreign = True
        self._boundary.remark("gradients", "they were taken at other weights than those of the step, as by SAM")
        return True

    def _versions_now(self) -> tuple[int, ...]:
        """How often the first parameters were written to; those of the optimizer, as sharding replaces the model's."""
        held = (p for one in self._optimizers for group in one.param_groups for p in group["params"])
        return tuple(p._version for p in islice(held, _SAMPLED))

    def _before_first_step(self, optimizer: Optimizer) -> None:
        """A step that computes its gradients itself runs the first forward pass when it is too late to copy weights."""
        assert self._first is not None
        self._first.look_for_compiled()
        if not self._first.listens_elsewhere and self._gradient_mark() is None:
            with suppress(NoExample):
                self._infer()
                return
        self._within = optimizer

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True
        if self._known is not None:
            self._boundary.attempt(ACCOUNT, self._known.watch.after_step, optimizer)
        if self._within is not None and self._first is None and self._known is not None:
            LOGGER.info("conserved: the laws became known inside the first step, which is not accounted for.")
            self._skip = True
            self._boundary.attempt(ACCOUNT, self._known.take_reference)
        self._within = None

    def _audit(self, step: int) -> None:
        if self._audits is None:
            return
        began = time.perf_counter()
        try:
            found = self._audits.before_step(step)
        finally:
            self._auditing += time.perf_counter() - began
        if found is None:
            return
        self._readings |= self._audits.series[-1].readings()
        # Losses in single precision on a double precision model, and autocast that hooks did not see, show in the bits.
        self._precisions.add(found.precision)
        alarms = tuple(alarms_of(found, step))
        if found.clipped is not None:
            self._clip = found.clipped
        elif alarms and self._clip is not None and self._largest_gradient() == self._clip:
            # Gradients of this step are clipped at the same value, though too few entries to be seen by themselves.
            return
        if self._stop and alarms:
            self._records.raise_at_once(alarms)
            raise GradientsDoNotConserve(found)
        self._held += alarms

    def _largest_gradient(self) -> float:
        """The largest magnitude of a gradient's entry."""
        slopes = [p.grad for p in self.model.parameters() if p.grad is not None and not p.grad.is_sparse]
        return max((float(one.abs().max()) for one in slopes if one.numel()), default=0.0)

    def _notice_order(self) -> None:
        """An optimizer steps with gradients that `step()` has seen without any step: it was called too early."""
        if self._unstepped is not None and self._unstepped == self._gradient_mark():
            message = (
                "Monitor.step() was called before optimizer.step(): the account of a step is made after it. Call "
                "optimizer.step(), then monitor.step(), then zero_grad()."
            )
            alarm = Alarm(step=self.count, code="order", law="", value=1.0, limit=0.0, message=message, family="order")
            self._records.raise_at_once((alarm,))
        self._unstepped = None

    def _gradient_mark(self) -> tuple[int, int, int] | None:
        """Identity of the current gradients, used to detect `step()` before `optimizer.step()`."""
        parameters = (p for one in self._optimizers for group in one.param_groups for p in group["params"])
        first = next((p.grad for p in parameters if p.grad is not None), None)
        return None if first is None else (id(first), first._version, self._passes)

    def _parameters_now(self) -> tuple[Any, ...]:
        """Which parameters the model has, which of them are trained, and their shapes: laws depend on all of it."""
        parameters = parts_of(self.model).parameters
        return tuple((id(p), p.requires_grad, p.shape) for p in parameters)

    def _notice_new_parameters(self) -> None:
        """Parameters were frozen, unfrozen, replaced or reshaped: read the laws of the model as it is now."""
        if self._signature is None or self._first is not None:
            return
        now = self._parameters_now()
        if now == self._signature:
            return
        self._notice_orphans()
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

    def _notice_orphans(self) -> None:
        """Raise an alarm if an optimizer steps tensors that the model had and has no longer."""
        assert self._signature is not None
        had, has = {key for key, *_ in self._signature}, {id(p) for p in self.model.parameters()}
        held = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        orphans = (had - has) & held
        if not orphans:
            return
        fresh = [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in held]
        trained = (
            f", while nothing trains {fresh[0]}" + (f" and {len(fresh) - 1} more" if fresh[1:] else "") if fresh else ""
        )
        message = (
            f"The optimizer steps {len(orphans)} tensor{'s' if len(orphans) > 1 else ''} that the model does not have "
            f"any more{trained}. Parameters were replaced or tied after the optimizer was made; make it again."
        )
        step = self.count + 1
        alarm = Alarm(step=step, code="replaced", law="", value=1.0, limit=0.0, message=message, family="replaced")
        self._records.raise_at_once((alarm,))

    def _let_go_of_laws(self) -> None:
        if self._audits is not None:
            self._audits.disarm()
        self._known, self._audits = None, None
        self._records.watch(None)

    # What training loops call

    def step(self, *, loss: Tensor | float | None = None) -> None:
        """Account for the step the optimizer has just made.

        Args:
            loss: the loss of the step, to be kept beside the account; a tensor is not waited for. Of several numbers
                their mean is kept.
        """
        self.count += 1
        self._boundary.step = self.count
        if loss is not None:
            self._boundary.attempt("loss", self._note_loss, loss)
            self._boundary.attempt("loss", self._look_at_loss, loss)
        self._boundary.attempt(STEP, self._step)
        self._boundary.attempt(STEP, self._take_times)
        if not self._opened:
            self._boundary.attempt(LINES, self._open)
        self._forget_step()

    def _open(self) -> None:
        """Say once what is watched, as soon as the laws are known."""
        if self.waiting and not self._boundary.off(LAWS):
            return
        self._opened = True
        if _writes():
            names = sorted(str(one).removeprefix("torch.") for one in self._precisions)
            say(opening_line(self, self._optimizers, " and ".join(names)))

    def _note_loss(self, loss: Any) -> None:
        if isinstance(loss, Tensor):
            value = loss.detach()
            self._readings["loss"] = value if value.numel() == 1 else value.double().mean()
        else:
            self._readings["loss"] = float(loss)

    def _look_at_loss(self, loss: Any) -> None:
        """Once: see whether the loss reaches parameters on another way than through the outputs of the model."""
        outputs, self._outputs = self._outputs, []
        if self._loss_seen or not outputs or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        self._loss_seen = True
        if reaches_beside(loss, outputs, self.model.parameters()):
            self._held.clear()
            self._let_go_of_laws()
            self._boundary.turn_off(LAWS, OBJECTIVE)
            self._boundary.attempt(AUDIT, self._begin_audits, LawSet(symmetries=()))

    def _note_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the ends of the graph of a pass, until the loss of the step is known."""
        if not self._loss_seen and torch.is_grad_enabled() and not being_followed():
            leaves = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.grad_fn is not None]
            self._outputs = [*self._outputs, *(one.grad_fn for one in leaves)][-_PASSES_KEPT:]

    def _step(self) -> None:
        held, self._held = self._held, []
        self._records.raise_at_once(held)
        if self._first is not None:
            self._boundary.attempt(LAWS, self._read_without_call)
        self._unstepped = None if self._stepped else self._gradient_mark()
        if not self._stepped and self._audits is not None:
            self._boundary.attempt(AUDIT, self._audits.forget)
        accounted = self._stride.due(self.count) and not self._skip
        if self._known is not None:
            self._boundary.attempt(ACCOUNT, self._settle, accounted)
        if accounted and (self._known is None or self._boundary.off(ACCOUNT)):
            self._records.send_readings(self.count, self._gauged(), skipped=not self._stepped)
        self._records.receive(self._audits, wait=False)
        if self._audits is not None:
            self._boundary.attempt(AUDIT, self._audits.after_step, self.count)

    def _read_without_call(self) -> None:
        """Infer the laws from made-up inputs if no forward pass was seen; after some steps they must be known."""
        assert self._first is not None
        self._unseen += 1
        if self._unseen >= _UNSEEN and self._gradient_mark() is not None:
            # Laws of the whole model are not those of a program that calls parts of it.
            self._first.close()
            self._first = None
            self._boundary.turn_off(LAWS, "the model was never called as a whole; pass laws= if it has known ones")
        elif self._unseen >= _UNSEEN:
            self._infer()
        elif not self._first.listens_elsewhere and self._gradient_mark() is None:
            with suppress(NoExample):
                self._infer()

    def _settle(self, accounted: bool) -> None:
        """Account for the step, or leave it out."""
        account = self._known
        assert account is not None
        try:
            missed = account.watch.missed()
            if missed:
                self._boundary.remark("loop", missed)
            if not self._stepped and self._written not in (None, self._versions_now()):
                missed = "parameters changed and no step of their optimizer was seen, as if it were compiled"
                self._boundary.remark("loop", missed)
            if missed or self._foreign or not accounted:
                account.leave_out_step()
                return
            if self._precisions:
                account.use_precision(coarsest(*self._precisions))
            causes, numbers = account.settle()
            account.transfer.send(self.count, causes, numbers, self._gauged(), not account.watch.stepped)
        finally:
            self._written = self._versions_now()
            account.forget_step()

    def _gauged(self) -> dict[str, Tensor | float]:
        """The readings of this step: those of gauges, and those that were noted."""
        found: dict[str, Tensor | float] = {}
        with torch.no_grad():
            for name, gauge in self._config.gauges.items():
                value = self._boundary.attempt(f"reading {name}", gauge)
                if value is not None:
                    found[name] = value
        found |= self._readings
        self._readings = {}
        return found

    def _take_times(self) -> None:
        """Choose the stride of the account by what the steps and the monitor take."""
        now, inside = time.perf_counter(), self._boundary.seconds
        spent = inside - self._inside
        accounted = self._stride.due(self.count)
        run = max(now - self._clock - spent, 0.0)
        self._stride.note(self.count, inside=max(spent - self._auditing, 0.0), run=run, accounted=accounted)
        self._clock, self._inside = now, inside
        if self._stride.revises(self.count):
            self._stride.steps = self._agreed(self._stride.wanted())

    def _agreed(self, wanted: int) -> int:
        """The largest stride that any process wants, where they read the laws of sharded parameters together."""
        sharded = next((p for p in self.model.parameters() if hasattr(p, "full_tensor")), None)
        if sharded is None or not (dist.is_available() and dist.is_initialized()):
            return wanted
        found = torch.tensor([wanted], device=sharded.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def _forget_step(self) -> None:
        self._looked, self._stepped, self._skip, self._auditing = False, False, False, 0.0
        self._foreign, self._versions, self._outputs = False, None, []
        self._accumulated: dict[int, tuple[int, int]] = {}
        """By parameter, the gradient tensor that the last backward pass of this step wrote, and its version."""

    def note(self, **readings: float) -> None:
        """Keep further numbers with the next record, such as a loss that is known later than the step.

        Args:
            **readings: the numbers, by the name they are stored under.
        """
        self._readings |= readings

    def before_clipping(self) -> None:
        """Tell clipping by value or by tensor apart from a wrong gradient: call it between backward and clipping.

        Clipping all gradients by one factor, as `clip_grad_norm_` does, moves no law to first order and needs no call.
        With a gradient scaler, call it after `unscale_`.
        """
        # What is clipped by value satisfies no identity: the audit of this step is now.
        self.look_at_gradients()
        if self._known is not None and self._sampled():
            self._boundary.attempt(ACCOUNT, self._known.note_unclipped)

    # What can be asked

    @property
    def every(self) -> int:
        """Number of steps from one record to the next, as it is now."""
        return self._stride.steps

    @property
    def state(self) -> str:
        """What the monitor is doing: "watching", or which parts of it are off, since when and why."""
        off = {condition.stage for condition in self.conditions if condition.off}
        texts = [str(condition) for condition in self.conditions]
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
        """What depends on the laws: there from the first forward pass on; asked for before, they are inferred now."""
        if self._known is None and self._first is not None:
            self._infer()
        if self._known is None:
            raise NoLaw(self.state)
        return self._known

    @property
    def laws(self) -> LawSet:
        """The laws that are watched; none if the monitor is not watching."""
        return LawSet(symmetries=()) if self._lawless else self._account.laws

    @property
    def _lawless(self) -> bool:
        return self._known is None and self._first is None

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
        return self._records.alarms.all

    @property
    def audits(self) -> list[AuditEntry]:
        """The audits of the run, in a few numbers each; the last one whole is `last_audit`."""
        return self._audits.series if self._audits is not None else []

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings about the precision of the run, which are not wrong gradients."""
        return () if self._audits is None else tuple(self._audits.notes)

    @property
    def last_audit(self) -> Audit | None:
        """The latest audit; None before the first."""
        return self._audits.last if self._audits is not None else None

    @property
    def pending(self) -> bool:
        """Whether an optimizer has made a step that `step()` has not accounted for."""
        return self._stepped

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
        return {} if self._lawless else self._account.errors(parameters, by)

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
        known = "laws not known yet" if self.waiting else f"{len(self.laws)} laws"
        return f"<Monitor: {known}, {self.count} steps, {len(self.audits)} audits, {len(self.alarms)} alarms>"

    def _repr_html_(self) -> str:
        """The summary for notebooks, alarms first."""
        return run_summary.panel(self)

    def bounds(self) -> list[DriftBound]:
        """Equation (9) for every law, with C_h and C_L from the run, beside the observed and the predicted drift."""
        return [] if self._lawless else self._account.bounds()

    def decay(self) -> list[Decay]:
        """The decay law e^{−2λt} for every law whose legs decay alike."""
        return [] if self._lawless else self._account.decay()

    def angular_momenta(self) -> list[AngularMomentum]:
        """The conserved angular momenta of a heavy-ball run, for every law that has rotations among its generators."""
        return [] if self._lawless else self._account.angular_momenta()

    def memory(self) -> dict[str, int]:
        """Bytes held between steps: by the laws, and by copies of parameters that an optimizer's rule asks for."""
        watched = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        held = {"laws": 0, "copies": 0} if self._lawless else self._account.memory()
        return held | {"parameters": watched}

    # Ending, and going on

    def flush(self) -> None:
        """Wait for all records on their way from the device, and hand them to the sinks."""
        self._records.receive(self._audits, wait=True)
        self._records.drain()

    def close(self) -> None:
        """Flush, close the sinks, and leave nothing on the model, the optimizers or torch."""
        self._boundary.attempt("closing", self.flush)
        for undo in self._undo():
            self._boundary.attempt("closing", undo)
            self._boundary.turn_on("closing")
        self._hooks.clear()
        self._records.close()
        if self._opened and _writes():
            self._boundary.attempt(LINES, lambda: say(closing_line(self)))
        self._opened = False

    def _undo(self) -> list[Any]:
        """All that takes something of the monitor away, each to be tried whatever became of the others."""
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
        """Everything a run needs to go on from a checkpoint: references, sums, the number of the step."""
        self.flush()
        laws = {} if self._lawless else self._account.state()
        return {"format": FORMAT, "count": self.count, "run": self._records.run} | laws

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
        if self._known is not None and "laws" in state:
            self._known.check_state(state)
        if self._records.begun:
            raise RuntimeError("Load a monitor's state before its first step; its sinks have begun another run.")
        self.count, self._records.run = int(state["count"]), str(state["run"])
        if self._audits is not None:
            self._audits.expect("the first after a resume")
        if self._known is not None and "laws" in state:
            self._known.load(state)

    def _sampled(self) -> bool:
        return self._stride.due(self.count + 1)

    def _go_on_converted(self, names: Sequence[str]) -> None:
        """Parameters were converted to another type between two steps: that is no step, and rounding is another."""
        assert self._known is not None
        kind = str(self._known.theta[names[0]].dtype).removeprefix("torch.")
        LOGGER.warning(
            "%s and %d other parameters became %s after step %d. The account goes on from the converted values.",
            *(names[0], len(names) - 1, kind, self.count),
        )
        if self._audits is not None:
            self._audits.expect("the precision of parameters changed")
        self._known.go_on_converted()


def _notice_accumulation(monitor: weakref.ref[Monitor], parameter: Tensor) -> None:
    found = monitor()
    if found is not None:
        found._boundary.attempt(PASSES, found._notice_accumulation, parameter)


def _computes_gradients(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step gets a closure: its gradients are not there yet when the step begins."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def _check_arguments(model: nn.Module, every: int | Literal["auto"]) -> None:
    """Raise for arguments that no run can be watched with."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module as `model`, got {type(model).__name__}.")
    if every != "auto" and not (isinstance(every, int) and every >= 1):
        raise ValueError(f'Expected `every` to be "auto" or a number of steps of at least 1, got {every!r}.')


def _writes() -> bool:
    """Whether this process writes to sinks and logs: of several, only the first does."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
