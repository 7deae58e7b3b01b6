"""Audits inside a run: when gradients are looked at, what it costs, and what a broken identity says to people."""

from __future__ import annotations

import logging
import math
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from conserved._torch_compat import children_of
from conserved.attention.precision import AttentionPrecision
from conserved.auditing import Audit, Gauge, audit
from conserved.auditing.attention_keys import keys_seen
from conserved.auditing.backward_pass import layout_with
from conserved.auditing.diagnosis import Diagnosis, Origin
from conserved.auditing.epsilon_terms import EpsilonTerms
from conserved.auditing.gradient_peaks import PeakHistory
from conserved.auditing.replay import RecordedPass, alone, random_numbers_kept
from conserved.boundary import guarded
from conserved.inference.cached_laws import cached_laws_of
from conserved.inference.derivation import Derivation
from conserved.inference.model_parts import parts_of
from conserved.inference.processes.single_process import runs_on_several
from conserved.laws import LawSet
from conserved.laws.identities import coarsest
from conserved.layout import GivenLayout, is_sharded
from conserved.rank_agreement import active_agreement, several_processes
from conserved.tracking.audit_entry import AuditEntry
from conserved.tracking.left_gradients import LeftGradients
from conserved.tracking.replayed_gradients import differs_in_one_entry, is_unrelated, repair_gradients
from conserved.tracking.time_budget import TimeBudget
from conserved.tracking.watching_cost import WatchingCost

LOGGER = logging.getLogger("conserved")

AUDIT = "audits"
"""The stage that tests gradients before an optimizer uses them."""

_COMPARED = 0.25
"""Share of the budget of audits that comparisons with reference form take: each is several passes, most in float32."""

_IRREPRODUCIBLE = "gradients were not reproducible"
"""Why a step is audited after one in which a replay gave other gradients than the run."""

Cadence = Literal["auto"] | int | None


def check_cadence(every: Cadence) -> None:
    """Raise ValueError if `every` is not a cadence of audits."""
    if not (every is None or every == "auto" or (isinstance(every, int) and every >= 1)):
        raise ValueError(
            f'Expected `audit` to be "auto", None or a number of steps of at least 1, got {every!r}. Pass one of them.'
        )


class Audits:
    """Audits the gradients of a run just before an optimizer uses them.

    With `every="auto"`, in the steps that the budget allows to look at (`TimeBudget`). The first step is always
    audited, and the first after every call of `expect`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        laws: LawSet,
        *,
        budget: TimeBudget,
        every: Cadence = "auto",
        precision: torch.dtype | None = None,
        compiled: bool = False,
        called: nn.Module | None = None,
        layout: GivenLayout | None = None,
        compare: bool = False,
        repair: bool = False,
    ) -> None:
        self.series: list[AuditEntry] = []
        self.last: Audit | None = None
        self.notes: list[str] = []
        """Findings about precision, which are not wrong gradients."""
        self.attention_precision = AttentionPrecision()
        """How much of dQ and dK of attention in half precision is rounding, by audited step, layer and head."""
        check_cadence(every)
        self.every, self.budget = every, budget
        self.watching = WatchingCost()
        self.waited = 0.0
        """Seconds that audits waited for backward passes of the run on a device, which are not theirs."""
        self._model, self._optimizers, self._laws = model, list(optimizers), laws
        self._precision, self._seen = precision, set[torch.dtype]()
        self._hooks = not compiled and not is_sharded(model)
        self._layout = layout
        if called is not None and called is not model:
            # Gradients may lie in buffers of the wrapper.
            cached_laws_of(model).wrapper = weakref.ref(called)
        self.joint = layout_with(parts_of(model), layout).joint
        """Whether processes hold pieces of one parameter, so that they audit together."""
        replayed = _without_data_parallel(model if called is None else called)
        self._pass = RecordedPass(replayed, refused=_needs_others(replayed, laws))
        self._diagnoses: dict[str, Diagnosis] = {}
        """Diagnoses from replays of earlier steps, by law."""
        self.compared: list[int] = []
        """Steps whose gradients were compared with those of the pass in reference form."""
        self._peaks = PeakHistory()
        self._compare, self._repair = compare, repair
        self.unrelated = False
        """Whether the gradients of the last audit were not those of its pass in most tensors, not even roughly."""
        self.one_entry = False
        """Whether a gradient of the last audit differs from that of the same pass run again in one entry alone."""
        self.repaired: list[int] = []
        """Steps whose gradients were replaced by those of the same pass run again."""
        self._next_comparison = -math.inf
        self._obstacles: set[str] = set()
        self._terms: EpsilonTerms | None = None
        self._gauge: Gauge | None = None
        self._armed: ExitStack | None = None
        self._following = ExitStack()
        self._left = LeftGradients(model)
        self._mixed = False
        self._unheard = False
        """Whether passes run inside compiled code: hooks do not run there, and new hooks compile it again."""
        self.last_step = 0
        """The last step whose gradients were audited."""
        self._why = "the first backward pass"
        self._next_why = ""
        """Why the step after the one under way is audited; empty if there is no reason but the budget."""
        self._groups = self._signature()
        self._last: tuple[int, float] | None = None
        """The step of the last regular audit, and when it ended."""
        self.passes = 0
        """Forward passes since the last step."""

    def expect(self, why: str) -> None:
        """Audit the next step, with everything that can be watched, because of something that happened."""
        self._why = why
        self.arm()

    def arm(self) -> None:
        """Add hooks to attention and norms for the next step, and record its pass."""
        if self._armed is not None or self.every is None or self._unheard:
            return
        self._pass.record()
        self._following = ExitStack()
        if alone():
            self._left.follow(self._following)
        if not self._hooks or _compiled(self._model):
            # Compiled code runs no hooks, and wrapping a function it calls would compile it again.
            return
        self._armed, self._gauge = ExitStack(), Gauge(precision=self._precision)
        self._armed.enter_context(keys_seen(self._model, self._gauge.see, self._gauge.attention_precision))
        if self._terms is None:
            group = layout_with(parts_of(self._model), self._layout).data_parallel
            self._terms = EpsilonTerms(self._model, self._laws, group)
        if len(self._terms):
            self._terms.watch(self._armed)
            self._gauge.terms = self._terms
        # The outermost module may be called outside autocast and enter it within, as accelerate does.
        leaves = (
            m
            for m in self._model.modules()
            if not any(True for _ in m.children()) and any(True for _ in m.parameters())
        )
        for leaf in islice(leaves, 2):
            self._armed.callback(leaf.register_forward_pre_hook(guarded(self._note)).remove)

    def untouched(self, audit: Audit) -> bool:
        """Return whether all gradients of broken identities are as the backward pass left them."""
        return self._left.are_left(_names_of_failures(audit))

    def _note(self, module: nn.Module, args: Any) -> None:
        device = next((p.device.type for p in module.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            self._seen.add(torch.get_autocast_dtype(device))

    def disarm(self) -> None:
        """Remove the hooks of the audited step."""
        self._pass.stop()
        self._following.close()
        if self._armed is not None:
            self._armed.close()
        self._armed = None

    def forget(self) -> None:
        """Discard records of passes whose gradients no optimizer used."""
        self.passes = 0
        self._pass.clear()
        if self._armed is not None:
            self.disarm()
            self.arm()

    def distrust_listening(self) -> None:
        """Audit the coming step by its gradients alone: listeners also saw a pass whose gradients were discarded."""
        self._mixed = True

    def begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a forward pass that has started already: the one whose inputs laws were inferred from."""
        self._pass.begin(args, kwargs)

    def before_step(self, step: int) -> Audit | None:
        """Return the audit of the gradients that step number `step` is about to use, if it is time for one."""
        groups = self._signature()
        if groups != self._groups:
            self._groups = groups
            self._why = "parameter groups or their precision have changed"
        self._unheard |= not self.passes and "torch._dynamo" in sys.modules
        passes, self.passes = max(self.passes, 1), 0
        if not self.due(step):
            return None
        self._wait()
        began = time.perf_counter()
        with random_numbers_kept():
            result = self._audited(step, passes)
        if result is None:
            self._last = None
        else:
            self._timed(step, began, time.perf_counter())
        self._why, self._next_why, self.last_step = self._next_why, "", step
        return result

    def due(self, step: int) -> bool:
        """Return whether the gradients of step number `step` are audited."""
        if self.every is None or self._why:
            return self.every is not None
        return self.budget.due(step) if self.every == "auto" else step >= self.last_step + self.every

    def _wait(self) -> None:
        """Wait for the backward pass, on which an audit would wait as well: that is not what an audit costs."""
        began = time.perf_counter()
        for device in {p.device for p in self._model.parameters()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.waited += time.perf_counter() - began

    def _timed(self, step: int, began: float, ended: float) -> None:
        last, self._last = self._last, (step, ended)
        if self._why or len(self.series) < 2:
            # The first audit of its kind compiles what later ones reuse.
            self.watching.start_again()
        elif last is not None and last[0] < step:
            self.watching.note(step - last[0], began - last[1])

    def after_step(self, step: int) -> None:
        """Put hooks on the next step if it is audited."""
        if self.due(step + 1):
            self.arm()

    def _audited(self, step: int, passes: int) -> Audit | None:
        gauge = None if self._mixed else self._gauge
        self.disarm()
        self._gauge, self._mixed = None, False
        if any(
            bool(torch.as_tensor(getattr(optimizer, "found_inf", None) or 0.0) > 0) for optimizer in self._optimizers
        ):
            # A scaler found infinities; a fused optimizer will leave everything as it is.
            return None
        used = self._precision or (coarsest(*self._seen) if self._seen else None)
        began = time.perf_counter()
        try:
            replay = self._pass if self._replayable() else None
            look = partial(audit, self._model, self._laws, precision=used, accumulated=passes, replay=replay)
            look = partial(look, layout=self._layout)
            # Legs are measured once, and again where limits are: what an audit can see changes slowly.
            look = partial(look, known=self._diagnoses, sized=not self.series, peaks=self._peaks)
            result = look(gauge=gauge, reference=self._compares(began))
            if result.gauge is not None and not self.joint and _of_another_pass(result):
                result = look()
            self._note_comparison(result, step, began)
            self.unrelated = (
                replay is not None and alone() and changes_all_gradients(result) and is_unrelated(self._model, replay)
            )
            self.one_entry = (
                replay is not None
                and alone()
                and breaks_in_run_alone(result, again=True)
                and differs_in_one_entry(self._model, replay, _names_of_failures(result))
            )
            if self._repair and replay is not None and passes == 1 and alone() and _irreproducible(result):
                repair_gradients(self._model, replay)
                self.repaired.append(step)
                LOGGER.warning("conserved: step %d: gradients were replaced by those of the same pass run again.", step)
        except ValueError as problem:
            # No backward pass was made; or the model is no longer the one whose laws these are.
            if any(p.grad is not None for p in self._model.parameters() if p.requires_grad):
                LOGGER.warning("conserved: step %d: gradients are not audited any more. %s", step, problem)
                self.every = None
            return None
        finally:
            self._pass.clear()
        self._remember(result)
        if gauge is not None:
            self.attention_precision.take(gauge.attention_precision, step)
        self._note_rounding(result, step)
        self.last = result
        rounding = self.attention_precision.readings(step)
        why = self._why or "regular"
        self.series.append(AuditEntry.of(result, step, time.perf_counter() - began, why, rounding))
        return result

    def changed_by_program(self, audit: Audit) -> list[str]:
        """Return the parameters of broken identities whose gradients the program changes, in hooks or in the loop."""
        return self._left.changed(_names_of_failures(audit), replayed=_is_replayed(audit))

    def changes_most(self, audit: Audit) -> bool:
        """Return whether the program changes most gradients of the model, in hooks or in the loop."""
        names = {name for name, p in self._model.named_parameters() if p.grad is not None}
        return 2 * len(self._left.changed(names, replayed=_is_replayed(audit))) > len(names)

    def changed_in_hooks(self, audit: Audit) -> list[str]:
        """Return the parameters of broken identities whose gradients hooks of the program see in every pass."""
        return self._left.hooked(_names_of_failures(audit))

    def _replayable(self) -> bool:
        """Return whether the recorded pass can be run again.

        Where parameters are sharded, all processes give the same answer.
        """
        able = not self._pass.obstacle
        if not self._pass.together or not several_processes():
            return able
        agreement = active_agreement()
        # Without an agreement nobody knows whether the other processes are about to replay as well.
        return agreement is not None and bool(agreement.reduce("replay", int(able), min))

    def _compares(self, now: float) -> bool:
        """Return whether this audit compares gradients with the reference form.

        The first audit does, and later ones as far as the budget allows.
        """
        # Sharded gradients are not compared: every process has pieces of rows.
        return self._compare and self.every is not None and now >= self._next_comparison and not self._pass.together

    def _note_comparison(self, audit: Audit, step: int, began: float) -> None:
        """Record when gradients were compared with reference form, and when they may be again."""
        if audit.comparison is None:
            return
        now = time.perf_counter()
        self._next_comparison = now + (now - began) / (self.budget.share * _COMPARED)
        if not audit.comparison.obstacle:
            self.compared.append(step)
        elif audit.comparison.obstacle not in self._obstacles:
            self._obstacles.add(audit.comparison.obstacle)
            LOGGER.info("conserved: step %d: %s", step, audit.comparison.verdict.message)

    def _note_rounding(self, audit: Audit, step: int) -> None:
        """Note once that gradients of a kernel are mostly rounding. It is a note because the backward pass is right."""
        rounded = () if audit.gauge is None else audit.gauge.rounded
        alarms = self.attention_precision.alarms
        if self.notes or not (rounded or alarms):
            return
        if alarms:
            self.notes.append(f"step {step}: {alarms[0].message}")
            LOGGER.info("conserved: precision, %s", self.notes[-1])
            return
        worst = max(rounded, key=lambda row: row.residual)
        text = (
            f"step {step}: key gradients of {len(rounded)} of {len(audit.gauge.rows if audit.gauge else ())} heads add "
            f"up to as much as {worst.residual:.0%} of their size, in {worst.name}[{worst.head}]. The attention kernel "
            "takes its softmax correction from a rounded output. The backward pass is right, its precision is low: "
            "conserved.attention.centered or the math backend mends it."
        )
        self.notes.append(text)
        LOGGER.info("conserved: precision, %s", text)

    def _remember(self, audit: Audit) -> None:
        """Keep diagnoses, so that a later audit replays only what is new.

        A residual that the same pass does not leave again, in one audit after the other, is no bit flip: something in
        the loop writes to gradients after the backward pass.
        """
        failing = {row.name for row in audit.failures}
        self._diagnoses |= audit.diagnoses
        if _irreproducible(audit) and self._why != _IRREPRODUCIBLE and alone():
            # The next step tells a bit flip, which does not come back, from a loop that changes gradients every time.
            # Of several processes this one alone would look at it, and wait for the others.
            self._next_why = _IRREPRODUCIBLE
        gone = [name for name, diagnosis in self._diagnoses.items() if diagnosis.wrong and name not in failing]
        for name in gone:
            del self._diagnoses[name]

    def _signature(self) -> tuple[Any, ...]:
        """Return what parameters optimizers step, in which precision."""
        return tuple(
            (len(group["params"]), tuple({p.dtype for p in group["params"]}))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        )


def _irreproducible(audit: Audit) -> bool:
    """Return whether gradients were not those of their pass, for the first time: a loop that changes them means to."""
    origins = {diagnosis.origin for diagnosis in audit.diagnoses.values()}
    return bool(audit.corrupted) or (Origin.TRANSIENT in origins and Origin.LOOP not in origins)


def _names_of_failures(audit: Audit) -> set[str]:
    return {name for row in audit.failures for name in row.parameters}


def _is_replayed(audit: Audit) -> bool:
    return bool(_origins_of(audit) & {Origin.TRANSIENT, Origin.LOOP})


def _origins_of(result: Audit) -> set[Origin]:
    """Return the origins of the residuals that are called wrong."""
    return {diagnosis.origin for diagnosis in result.diagnoses.values() if diagnosis.wrong}


def breaks_in_run_alone(result: Audit, *, again: bool) -> bool:
    """Return whether identities are broken in the run, and satisfied by the same pass from its outputs.

    With `again`, the last audit found the same, and residuals that are not reproducible twice are called the loop's.
    """
    origins = _origins_of(result)
    allowed = {Origin.TRANSIENT, Origin.LOOP} if again else {Origin.TRANSIENT}
    return bool(result.failures) and bool(origins) and origins <= allowed


def changes_all_gradients(result: Audit) -> bool:
    """Return whether most identities are broken in `.grad` and by no backward pass: the loop changed gradients."""
    if not result.failures or not _origins_of(result) <= {Origin.TRANSIENT, Origin.LOOP, Origin.UNKNOWN}:
        return False
    return 2 * len(result.failures) >= result.tested


def _compiled(model: nn.Module) -> bool:
    """Return whether a part of a model is compiled, in place or by a module around it."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in children_of(m) for m in model.modules())


def _of_another_pass(audit: Audit) -> bool:
    """Return whether attention saw gradients that are not finite, and parameters have none: a step that was skipped."""
    assert audit.gauge is not None
    infinite = any(not math.isfinite(row.residual) for row in audit.gauge.rows)
    return infinite and all(item.trouble != "not finite" for item in audit.findings)


def _needs_others(model: nn.Module, laws: LawSet) -> str:
    """Return why one process cannot run a pass of a model alone; empty if it can.

    A pass that waits for other processes, which do not run it again, would wait for ever.
    """
    if not several_processes():
        return ""
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        # Sharded passes are replayed by all processes together.
        return ""
    if not isinstance(laws.derivation, Derivation):
        return "whether the program exchanges tensors with other processes is not known"
    alone = not laws.derivation.typing.program.communicates and not runs_on_several(model)
    return "" if alone else "the program exchanges tensors with other processes"


def _without_data_parallel(model: nn.Module) -> nn.Module:
    """Return the module inside data-parallel wrappers: a replay must not reduce gradients over processes."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model
