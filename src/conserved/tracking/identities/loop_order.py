"""Does the loop do what a loop does? A step after every backward pass, a scaler and a scheduler that belong to it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import version_of
from conserved.symmetry.view import local
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.run_objects import RunObjects, parameter_ids, wrapped_ids
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    grouped_parameters,
    is_plain,
    on_host,
)

_SCALED = 100.0
"""A gradient norm above which a scaler is looked for whose factor is still in it."""

_FAST = 2
"""Steps in a row in which a scheduler was stepped more than once, after which it is reported."""

_ENDS = ("T_max", "T_0", "total_steps", "total_iters", "step_size", "milestones", "step_size_up")
"""Attributes of schedulers that count steps: whoever wrote them down had a number of steps of the optimizer in mind.

A function of the count may as well be one of micro-batches or samples.
"""

_FRACTIONAL = (torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,)
"""Schedulers that take fractions of an epoch."""

_INFINITE, _SEARCH = 3, 20
"""Steps in a row that a scaler may skip: at scales below one, and while it looks for its scale."""

_SKIPPED = 2
"""Steps in a row without an optimizer step, gradients cleared in between, after which it is reported."""

_ENTRIES = 16
"""Entries of each weight that say whether it moved."""

_COUNTED = 4
"""Steps whose passes are counted."""

_RESTS = 3
"""Steps in a row without one of an optimizer whose tensors are frozen, after which it is remarked."""

_COUNTS = 8
"""Tensors whose step count is read."""

_HIGH_SCALE = 256
"""A scaler's factor from which on a clipped gradient says whether the factor was in it."""

_CLIPPED_ENTRIES = 3
"""Entries of one magnitude, the largest, that clipping by value leaves."""

_UNSTEPPED = 8
"""Steps after which a run says at its end that a scheduler was never stepped."""

_RATELESS = 2
"""Steps in a row at a rate of exactly zero after which it is reported; a warm-up has one."""

_NO_RATE, _EARLY_STEPS = 1e-9, 32
"""A falling rate at which steps move next to no weight in float32, and the steps in which no schedule is that far."""

_PAST_END = 1.25
"""Calls of a cosine schedule, over its T_max, from which on its rate rises again for sure."""

_WRITES_RATE = (
    torch.optim.lr_scheduler.LambdaLR,
    torch.optim.lr_scheduler.OneCycleLR,
    torch.optim.lr_scheduler.CyclicLR,
    torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,
)
"""Schedulers that compute the rate from its first value, whatever others have made of it."""


class LoopOrder(StepIdentity):
    """Follows the calls of a loop: optimizer steps, their counts and rates, scalers and schedulers."""

    name = "order of the loop"

    def __init__(self) -> None:
        self._stepped: set[int] = set()
        self._missed = 0
        self._counts: dict[int, tuple[int, float]] = {}
        """By optimizer, how many tensors have state, and the largest step count."""
        self._settings: dict[int, _Settings] = {}
        self._rateless: dict[int, int] = {}
        self._rates: dict[int, float] = {}
        """By optimizer, the largest rate of its last step."""
        self._reported: set[int] = set()
        """Indices of schedulers that were reported."""
        self._advance: dict[int, int] = {}
        self._gradients: tuple[int, ...] = ()
        self._pace: dict[int, tuple[int, int]] = {}
        """By scheduler, its count, and steps in a row in which it was stepped more than once."""
        self._at_pass: dict[int, int] = {}
        """By scheduler, its count when the pass of the step began."""
        self._fractional: set[int] = set()
        """Schedulers that were given something else than whole epochs."""
        self._infinite = 0
        """Steps in a row that a scaler skipped because of gradients that are not finite."""
        self._rivals: dict[int, int] = {}
        """By scheduler of an optimizer that has several, its count after the last step."""
        self._early: dict[int, int] = {}
        """By scheduler, steps in a row in which it was stepped between the pass and the optimizer's step."""
        self._factors: dict[int, tuple[float, int]] = {}
        """By scheduler, the largest factor it has set, and steps in a row at the first rate squared."""
        self._rest: dict[int, int] = {}
        """By optimizer that has stepped, steps in a row that it did not."""
        self._ever: set[int] = set()
        """Optimizers that have stepped."""
        self._fresh: dict[int, weakref.ref[Tensor] | None] = {}
        """By optimizer, a gradient at the last step that any optimizer made."""
        self._ungiven: dict[int, weakref.ref[Tensor] | None] = {}
        """By optimizer that never stepped, a gradient at the last step of another one."""
        self._unused: dict[int, int] = {}
        """By optimizer that never stepped, steps in a row with a gradient of its own that came after all steps."""
        self._succeeded = False
        """Whether another optimizer that steps the weights was searched for."""
        self._loaded_after = 0
        """The last step before which weights were loaded."""
        self._noted_attack = False
        self._noted_more = False
        """Whether a step with more passes than those before it was noted."""
        self._usual_passes = (0, 0)
        """Passes of the last step, and steps in a row that had as many."""
        self._passes: list[int] = []
        """Passes with gradients of every step, of the first few."""
        self._weights: Tensor | None = None
        """Some entries of the weights at the last step that no optimizer made."""

    def begin(self, step: TrainingStep) -> None:
        self._weights = _some_weights(step)

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        if step.differentiable and step.passes == 2 and torch.is_grad_enabled() and not self._noted_attack:
            self._look_at_attack(step)
        if step.objects is not None and torch.is_grad_enabled() and step.objects.schedulers:
            self._at_pass = self._scheduler_counts(step)

    def _look_at_attack(self, step: TrainingStep) -> None:
        """Remark that a pass for the gradient of its inputs has left gradients of weights to a pass without."""
        optimized = (p for optimizer in step.optimizers for p in grouped_parameters(optimizer))
        if not any(x.requires_grad for x in step.inputs) and any(p.grad is not None for p in optimized):
            self._noted_attack = True
            step.notes.append("a pass whose inputs need a gradient, as of an attack, is part of the step's gradient")

    def _scheduler_counts(self, step: TrainingStep) -> dict[int, int]:
        assert step.objects is not None
        counts = {i: getattr(ref(), "_step_count", None) for i, ref in enumerate(step.objects.schedulers)}
        return {index: count for index, count in counts.items() if isinstance(count, int)}

    def weights_given(self, step: TrainingStep, state: Mapping[str, Any]) -> None:
        # A loop that goes back to earlier weights goes back to an earlier or an empty state as well.
        self._loaded_after = step.number

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._look_at_state(step, optimizer)
        if self._at_pass and step.passes == 1:
            self._look_at_early_schedulers(step, optimizer)
        self._at_pass = {}

    def _look_at_early_schedulers(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Report a scheduler that is stepped between the pass and the optimizer's step, twice in a row."""
        assert step.objects is not None
        for index, count in self._scheduler_counts(step).items():
            scheduler = step.objects.schedulers[index]()
            if id(optimizer) not in wrapped_ids(getattr(scheduler, "optimizer", None)):
                continue
            early = count > self._at_pass.get(index, count)
            self._early[index] = self._early.get(index, 0) + 1 if early else 0
            if self._early[index] == _FAST:
                step.report(
                    StepFinding(
                        code="rate",
                        step=step.number - _FAST,
                        message=f"{type(scheduler).__name__}.step() is called before {type(optimizer).__name__}.step():"
                        " the first value of the schedule is never used. Step the scheduler after the optimizer.",
                    )
                )

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._look_at_scale(step, optimizer)

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._stepped.add(id(optimizer))
        self._ever.add(id(optimizer))
        self._fresh = {id(other): _first_gradient(other) for other in step.optimizers if id(other) not in self._ever}
        self._counts[id(optimizer)] = _progress(optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group and _readable(group["lr"])]
        largest = max(rates, default=math.inf)
        vanishing = largest <= _NO_RATE and largest < self._rates.get(id(optimizer), 0.0) and step.number < _EARLY_STEPS
        self._rates[id(optimizer)] = largest
        zero = largest == 0 or vanishing
        self._look_at_group_rates(step, optimizer, largest)
        self._settings[id(optimizer)] = _Settings.of(optimizer)
        self._rateless[id(optimizer)] = self._rateless.get(id(optimizer), 0) + 1 if zero else 0
        if self._rateless[id(optimizer)] == _RATELESS:
            step.report(
                StepFinding(
                    code="rate",
                    step=step.number - _RATELESS + 1,
                    message=f"The learning rate of {type(optimizer).__name__} is "
                    f"{'zero' if largest == 0 else format(largest, '.2g')} since step "
                    f"{step.number - _RATELESS + 1}: steps move nothing. "
                    + (
                        "Is the schedule shorter than the run, or never stepped?"
                        if largest == 0
                        else "Is the rate multiplied in every step by a factor that was meant for its first value?"
                    ),
                )
            )

    def _look_at_group_rates(self, step: TrainingStep, optimizer: Optimizer, largest: float) -> None:
        """Report groups with gradients whose rate is zero from the first step on while that of others is not."""
        if step.number != _RATELESS or largest in (0.0, math.inf):
            return
        names = step.names()
        still = [
            names[id(p)]
            for group in optimizer.param_groups
            if "lr" in group and _readable(group["lr"]) and float(group["lr"]) == 0
            for p in group["params"]
            if p.grad is not None
        ]
        if still:
            step.report(
                StepFinding(
                    code="rate",
                    tensor=still[0],
                    others=tuple(still[1:]),
                    step=1,
                    message=f"The learning rate of {name_tensors(still)} in {type(optimizer).__name__} is zero, and "
                    "that of others is not: they have gradients and never move. Is a factor of the rate rounded "
                    "to zero?",
                )
            )

    def after_step(self, step: TrainingStep) -> None:
        self._look_at_missing_steps(step)
        self._look_at_passes(step)
        self._look_at_idle_optimizers(step)
        if step.objects is None and self._stepped:
            step.objects = RunObjects.search(step.model)
            # A network that is not trained, as of a perceptual loss, has gradients in eval mode; it may be meant.
            shapes = [tuple(p.shape) for ref in step.objects.unheld if (p := ref()) is not None]
            if shapes:
                known = ", ".join(map(str, shapes[:2])) + (" …" if len(shapes) > 2 else "")
                step.notes.append(
                    f"{len(shapes)} parameters outside of the model have a gradient and no optimizer: {known}"
                )
        if step.objects is not None:
            self._look_at_schedulers(step, step.objects)
            self._look_at_rivals(step, step.objects)
            self._look_at_pace(step, step.objects)
        self._stepped = set()

    def _look_at_idle_optimizers(self, step: TrainingStep) -> None:
        """Report an optimizer that never steps though passes for it come after the step of another.

        A loop that steps the other one several times for one of this has no pass after that step.
        """
        for optimizer in step.optimizers if self._stepped and len(step.optimizers) > 1 else ():
            tensors = grouped_parameters(optimizer)
            rest = id(optimizer) in self._ever and id(optimizer) not in self._stepped
            self._rest[id(optimizer)] = self._rest.get(id(optimizer), 0) + 1 if rest else 0
            if self._rest[id(optimizer)] == _RESTS and not any(p.requires_grad for p in tensors):
                step.notes.append(
                    f"{type(optimizer).__name__} of {_names_of(step, optimizer)} made no step since step "
                    f"{step.number - _RESTS}, and its tensors are frozen"
                )
            if step.number > _SEARCH:
                continue
            if id(optimizer) in self._ever or id(optimizer) not in self._fresh:
                continue
            before, now = self._fresh[id(optimizer)], _first_gradient(optimizer)
            new = now is not None and (before is None or before() is not now())
            self._look_at_unstepped(step, optimizer, before)
            # A gradient that is accumulated over steps is one tensor.
            count = self._unused[id(optimizer)] = self._unused.get(id(optimizer), 0) + 1 if new else 0
            if count == _SKIPPED:
                step.report(
                    StepFinding(
                        code="no step",
                        step=step.number - _SKIPPED + 1,
                        message=f"{type(optimizer).__name__} of {_names_of(step, optimizer)} never made a step: "
                        "backward() gives its tensors gradients after the other optimizer has stepped, and they are "
                        "cleared. Is its step() called?",
                    )
                )

    def _look_at_unstepped(
        self, step: TrainingStep, optimizer: Optimizer, gradient: weakref.ref[Tensor] | None
    ) -> None:
        """Report an optimizer that does not step though the one pass of every step gives its tensors gradients anew."""
        alone = gradient is not None and step.passes == 1
        last, self._ungiven[id(optimizer)] = self._ungiven.get(id(optimizer)), gradient if alone else None
        # A gradient that is accumulated over steps is one tensor.
        renewed = last is not None and gradient is not None and last() is not gradient()
        if alone and renewed and step.number == _SKIPPED:
            step.report(
                StepFinding(
                    code="no step",
                    step=1,
                    message=f"{type(optimizer).__name__} of {_names_of(step, optimizer)} made no step: the backward "
                    "pass gives its tensors gradients, another optimizer steps, and they are cleared. Is its "
                    "step() called?",
                )
            )

    def _look_at_passes(self, step: TrainingStep) -> None:
        """Remark steps with an unusual number of passes.

        The first has one and all others several where a count begins at zero; one has more than those before it where
        the rest of an epoch stays in the gradient.
        """
        if len(self._passes) < _COUNTED and self._stepped and step.passes:
            self._passes.append(step.passes)
            first, *others = self._passes
            if len(self._passes) == _COUNTED and first == 1 < min(others) == max(others):
                step.notes.append(f"the first step has one pass and those after it have {others[0]}")
        if self._stepped and step.passes and not self._noted_more:
            usual, count = self._usual_passes
            # A step that has fewer is the last of an epoch, as it should be.
            if count > 1 and usual < step.passes < 2 * usual:
                self._noted_more = True
                step.notes.append(
                    f"step {step.number} has the gradients of {step.passes} passes and those before it have {usual}"
                )
            self._usual_passes = (step.passes, count + 1 if step.passes == usual else 1)

    def _look_at_missing_steps(self, step: TrainingStep) -> None:
        """Report backward passes whose gradients are cleared without any step."""
        if self._stepped:
            self._missed, self._gradients, self._weights, self._infinite = 0, (), None, 0
            return
        before, self._weights = self._weights, _some_weights(step)
        if before is not None and not torch.equal(before, self._weights):
            self._look_at_successors(step)
        # Compiled steps run no hooks, and a loop may write its updates itself.
        stayed = before is None or torch.equal(before, self._weights)
        gradients = [p.grad for o in step.optimizers for p in grouped_parameters(o) if p.grad is not None]
        now = tuple(id(g) for g in gradients[:4])
        plain = [g for g in gradients[:4] if is_plain(g) and on_host(g)]
        finite = all(bool(torch.isfinite(local(g)).all()) for g in plain)
        useful = bool(plain) and finite and any(bool(local(g).any()) for g in plain)
        self._look_at_skipped_steps(step, finite=finite)
        # Gradients that are accumulated stay the same tensors; a scaler skips steps with infinities.
        renewed = not self._gradients or now != self._gradients
        self._missed = self._missed + 1 if useful and step.passes and renewed and stayed else 0
        self._gradients = now
        if self._missed == _SKIPPED:
            step.report(
                StepFinding(
                    code="no step",
                    # A loop that has stepped before may leave out some steps.
                    certain=not self._ever,
                    step=step.number - _SKIPPED + 1,
                    message="No optimizer made a step: backward() gives gradients, they are cleared, "
                    "and the weights stay "
                    "as they are. Is optimizer.step() called, with its parentheses, and on the "
                    "optimizer that the monitor "
                    "was given?",
                )
            )

    def _look_at_successors(self, step: TrainingStep) -> None:
        """Report another optimizer that steps the weights, such as one that the loop makes anew; once in a run."""
        if self._succeeded:
            return
        self._succeeded = True
        own, optimized = {id(optimizer) for optimizer in step.optimizers}, step.optimized_ids()
        for other in RunObjects.optimizers():
            shared = not optimized.isdisjoint(parameter_ids(other))
            if shared and id(other) not in own and any(other.state.values() or [not other.defaults.get("momentum", 1)]):
                step.report(
                    StepFinding(
                        code="state lost",
                        message=f"The {type(other).__name__} that steps the weights is another one than the monitor "
                        "was given: it was made anew, and its averages and step counts began again. Make the optimizer "
                        "once, before the loop.",
                    )
                )
                return

    def _look_at_skipped_steps(self, step: TrainingStep, *, finite: bool) -> None:
        """Report a scaler that skips every step, beyond the few in which it finds its scale."""
        if step.objects is None:
            step.objects = RunObjects.search(step.model)
        scaler = self._scaler(step)
        self._infinite = self._infinite + 1 if scaler is not None and not finite else 0
        low = scaler is not None and on_host(scaler._scale) and float(scaler.get_scale()) < 1
        if self._infinite == (_INFINITE if low else _SEARCH):
            step.report(
                StepFinding(
                    code="no step",
                    certain=True,
                    step=step.number - self._infinite + 1,
                    message=f"The gradient scaler has skipped {self._infinite} steps in a row, as gradients are not "
                    "finite at any scale: the weights stay as they are. Look for a square root, a logarithm or a "
                    "division at zero.",
                )
            )

    def _look_at_state(self, step: TrainingStep, optimizer: Optimizer) -> None:
        before, now = self._counts.get(id(optimizer)), _progress(optimizer)
        if before is None or self._loaded_after == step.number:
            return
        former = self._settings.get(id(optimizer))
        if now[0] == 0 < before[0] and former is not None and former.begins_anew(_Settings.of(optimizer)):
            step.restarted = step.number
            step.notes.append(f"step {step.number} is a restart, with a new state of {type(optimizer).__name__}")
        elif (now[0] < before[0] and now[0] == 0) or now[1] < before[1]:
            step.report(
                StepFinding(
                    code="state lost",
                    value=now[1],
                    limit=before[1],
                    message=f"The state of {type(optimizer).__name__} was lost before step "
                    f"{step.number}: its step count "
                    f"went from {before[1]:g} to {now[1]:g}. Averages and bias corrections begin again.",
                )
            )

    def _look_at_scale(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Report gradients with a scaler's factor in them, and gradients that were clipped with it in them."""
        if not step.thorough and self._scaler(step) is None:
            return
        gradients = [p.grad for p in grouped_parameters(optimizer) if p.grad is not None and is_plain(p.grad)]
        if not gradients or not on_host(gradients[0]) or getattr(optimizer, "grad_scale", None) is not None:
            return
        norm = float(nn.utils.get_total_norm([local(g) for g in gradients]))
        if not math.isfinite(norm) or norm == 0:
            return
        scaler = self._scaler(step)
        if scaler is None and norm > _SCALED and step.objects is None:
            step.objects = RunObjects.search(step.model)
            scaler = self._scaler(step)
        if scaler is None:
            return
        scale = float(scaler.get_scale())
        states = getattr(scaler, "_per_optimizer_states", {})
        unscaled = states.get(id(optimizer), {}).get("found_inf_per_device") if id(optimizer) in states else None
        if not unscaled and norm > _SCALED and scale > 1:
            step.report(
                StepFinding(
                    code="scaled gradient",
                    value=norm,
                    limit=_SCALED,
                    message=f"{type(optimizer).__name__} steps with gradients that still have the scaler's factor "
                    f"{scale:g} in them (norm {norm:.3g}). Call scaler.step(optimizer), or "
                    "scaler.unscale_(optimizer) first.",
                )
            )
        elif unscaled and scale >= _HIGH_SCALE:
            bounds = {"norm": norm, "largest entry": _repeated_bound([local(g) for g in gradients])}
            for what, bound in bounds.items():
                if bound and _is_round(bound * scale) and not _is_round(bound):
                    step.report(
                        StepFinding(
                            code="clipped while scaled",
                            value=bound,
                            message=f"Gradients were clipped while the scaler's factor {scale:g} was in them: their "
                            f"{what} is {bound:.3g}, which times the factor is {bound * scale:.4g}. Call "
                            "scaler.unscale_(optimizer) before clipping.",
                        )
                    )
                    return

    def _scaler(self, step: TrainingStep) -> Any:
        return None if step.objects is None else step.objects.scaler

    def close(self, step: TrainingStep) -> None:
        """Note schedulers of these optimizers that were there from the start and never stepped."""
        own = {id(optimizer) for optimizer in step.optimizers}
        alive = [] if step.objects is None else [ref() for ref in step.objects.schedulers]
        idle = [
            type(scheduler).__name__
            for scheduler in alive
            if getattr(scheduler, "_step_count", 0) == 1
            and not own.isdisjoint(wrapped_ids(getattr(scheduler, "optimizer", None)))
            and not any(scheduler in getattr(other, "_schedulers", ()) for other in alive)
        ]
        if idle and step.number > _UNSTEPPED:
            step.notes.append(f"{idle[0]} was never stepped in {step.number - 1} steps, and sets no rate")

    def _look_at_schedulers(self, step: TrainingStep, objects: RunObjects) -> None:
        """Report a scheduler that advances, of an optimizer that holds this model and does not step."""
        if not objects.schedulers:
            return
        own = {id(optimizer) for optimizer in step.optimizers}
        optimized = step.optimized_ids() | {id(p) for p in step.structure.parameters.values()}
        for index, reference in enumerate(objects.schedulers):
            scheduler = reference()
            other = getattr(scheduler, "optimizer", None)
            if scheduler is None or not isinstance(other, Optimizer) or not own.isdisjoint(wrapped_ids(other)):
                continue
            count = int(scheduler.last_epoch) if isinstance(scheduler.last_epoch, int) else 0
            before = self._advance.get(index)
            self._advance[index] = count
            idle = not any(state for state in other.state.values())
            if before is not None and count > before and idle and parameter_ids(other) & optimized:
                step.report(
                    StepFinding(
                        code="rate",
                        message=f"{type(scheduler).__name__} sets the learning rate of another "
                        f"{type(other).__name__} than the one that steps: the rate of this run does "
                        "not follow it. Make "
                        "the scheduler from the optimizer that is used.",
                    )
                )

    def _look_past_end(self, step: TrainingStep, index: int, scheduler: Any) -> None:
        """Report a cosine schedule that was called more often than its half period has steps."""
        if type(scheduler) is not torch.optim.lr_scheduler.CosineAnnealingLR or index in self._reported:
            return
        if scheduler.last_epoch > max(_PAST_END * scheduler.T_max, scheduler.T_max + 1):
            self._reported.add(index)
            step.report(
                StepFinding(
                    code="rate",
                    message=f"CosineAnnealingLR was stepped {scheduler.last_epoch} times and its T_max is "
                    f"{scheduler.T_max}: the learning rate rises again. Is T_max a number of epochs, and the "
                    "scheduler stepped for every batch?",
                )
            )

    def _look_at_factor(self, step: TrainingStep, index: int, scheduler: Any) -> None:
        """Report a function of a schedule that returns the rate itself, so that the rate is squared.

        Warm-ups pass through that factor, and a decay by ten may reach it from above: neither stays there from below.
        """
        if type(scheduler) is not torch.optim.lr_scheduler.LambdaLR or index in self._reported:
            return
        group, base = scheduler.optimizer.param_groups[0], float(scheduler.base_lrs[0])
        if not _readable(group["lr"]) or base <= 0 or base >= 1:
            return
        factor = float(group["lr"]) / base
        largest, count = self._factors.get(index, (0.0, 0))
        same = abs(factor - base) <= 1e-6 * base and largest <= base * (1 + 1e-6)
        self._factors[index] = (max(largest, factor), count + 1 if same else 0)
        if same and count + 1 == _FAST:
            self._reported.add(index)
            step.report(
                StepFinding(
                    code="rate",
                    step=step.number - _FAST + 1,
                    message=f"The function of LambdaLR returns {base:g}, which is the rate and not a factor of it: "
                    f"steps are made at {base:g} × {base:g}. Return 1.0 for the rate that the optimizer was given.",
                )
            )

    def _look_at_rivals(self, step: TrainingStep, objects: RunObjects) -> None:
        """Report two schedulers of one optimizer of which one overwrites what the other has set."""
        own = {id(optimizer) for optimizer in step.optimizers}
        alive = [(i, scheduler) for i, ref in enumerate(objects.schedulers) if (scheduler := ref()) is not None]
        parts = {id(part) for _, scheduler in alive for part in getattr(scheduler, "_schedulers", ())}
        alive = [
            (i, scheduler)
            for i, scheduler in alive
            if id(scheduler) not in parts and not own.isdisjoint(wrapped_ids(getattr(scheduler, "optimizer", None)))
        ]
        if len(alive) < 2 or self._reported.issuperset(i for i, _ in alive):
            return
        counts = {i: getattr(scheduler, "_step_count", 0) for i, scheduler in alive}
        before, self._rivals = self._rivals, counts
        stepped = [(i, scheduler) for i, scheduler in alive if i in before and counts[i] > before[i]]
        for i, scheduler in stepped:
            for j, other in stepped:
                now = [group["lr"] for group in other.optimizer.param_groups]
                own_rates = getattr(scheduler, "_last_lr", now)
                if i == j or type(other) not in _WRITES_RATE or list(map(float, own_rates)) == list(map(float, now)):
                    continue
                if list(map(float, getattr(other, "_last_lr", ()))) == list(map(float, now)):
                    self._reported |= {i, j}
                    step.report(
                        StepFinding(
                            code="rate",
                            message=f"Two schedulers set the learning rate of one {type(other.optimizer).__name__}: "
                            f"what {type(scheduler).__name__} sets, {type(other).__name__} overwrites before any step "
                            "uses it. Put them into SequentialLR, or multiply their factors.",
                        )
                    )
                    return

    def _look_at_pace(self, step: TrainingStep, objects: RunObjects) -> None:
        """Report a scheduler that is stepped several times for every step of its optimizer."""
        stepped = {id(optimizer) for optimizer in step.optimizers} & self._stepped
        for index, reference in enumerate(objects.schedulers):
            scheduler = reference()
            count = getattr(scheduler, "_step_count", None)
            if not isinstance(count, int) or stepped.isdisjoint(wrapped_ids(getattr(scheduler, "optimizer", None))):
                continue
            epoch = getattr(scheduler, "last_epoch", 0)
            if isinstance(epoch, float) and not epoch.is_integer() and not isinstance(scheduler, _FRACTIONAL):
                self._pace[index] = (count, _FAST)
                if index not in self._fractional:
                    self._fractional.add(index)
                    step.report(
                        StepFinding(
                            code="rate",
                            message=f"{type(scheduler).__name__}.step() was given {epoch:.4g} as its epoch: the rate "
                            "follows that number. Call it without arguments; only ReduceLROnPlateau takes the loss.",
                        )
                    )
                continue
            self._look_past_end(step, index, scheduler)
            self._look_at_factor(step, index, scheduler)
            before, fast = self._pace.get(index, (count, 0))
            fast = fast + 1 if count - before > 1 else 0
            self._pace[index] = (count, fast)
            if fast == _FAST and not any(hasattr(scheduler, end) for end in _ENDS):
                step.remark(
                    "learning rate",
                    f"{type(scheduler).__name__}.step() is called {count - before} times for one step of the optimizer",
                )
            elif fast == _FAST:
                step.report(
                    StepFinding(
                        code="rate",
                        step=step.number - _FAST + 1,
                        message=f"{type(scheduler).__name__}.step() was called {count - before} times "
                        "for one step of the "
                        "optimizer, again and again: the learning rate runs ahead of the steps. Call it once, after "
                        "optimizer.step().",
                    )
                )


def _first_gradient(optimizer: Optimizer) -> weakref.ref[Tensor] | None:
    """Return the first gradient of an optimizer that is not zero."""
    for p in grouped_parameters(optimizer):
        if p.grad is not None and is_plain(p.grad) and (not on_host(p.grad) or bool(local(p.grad).any())):
            return weakref.ref(p.grad)
    return None


def _repeated_bound(gradients: list[Tensor]) -> float:
    """Return the largest magnitude of the gradients if several entries have it, as after clipping by value; else 0."""
    bound = float(torch.stack(torch._foreach_norm(gradients, torch.inf)).max())
    count = sum(int((gradient.abs() == bound).sum()) for gradient in gradients)
    return bound if count >= _CLIPPED_ENTRIES else 0.0


def _names_of(step: TrainingStep, optimizer: Optimizer) -> str:
    """Return the names of some tensors of an optimizer."""
    names = step.names()
    return name_tensors([names.get(id(p), "a tensor") for p in grouped_parameters(optimizer)], 2)


def _some_weights(step: TrainingStep) -> Tensor:
    """Return a few entries of each weight that optimizers hold and the host can read."""
    weights = [p.detach() for o in step.optimizers for p in grouped_parameters(o) if is_plain(p) and on_host(p)]
    samples = [local(p).flatten()[:_ENTRIES].double() for p in weights]
    return torch.cat(samples) if samples else torch.zeros(0, dtype=torch.float64)


def _readable(rate: Any) -> bool:
    return not isinstance(rate, Tensor) or on_host(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Settings that a restart changes besides the state of an optimizer: its rate, its parameters, or their values."""

    rate: float
    parameters: tuple[int, ...]
    versions: tuple[int, ...]

    @staticmethod
    def of(optimizer: Optimizer) -> _Settings:
        """Read them off the first groups and parameters."""
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group and _readable(group["lr"])]
        some = list(islice(grouped_parameters(optimizer), _COUNTS))
        return _Settings(
            rate=max(rates, default=0.0),
            parameters=tuple(id(p) for group in optimizer.param_groups for p in _ends(group["params"])),
            versions=tuple(version_of(p) for p in some),
        )

    def begins_anew(self, now: _Settings) -> bool:
        """Return whether training begins again: at a higher rate, of other parameters, or from weights just written."""
        written = all(a != b for a, b in zip(self.versions, now.versions, strict=False))
        return now.rate > 1.5 * self.rate or now.parameters != self.parameters or written


def _ends(parameters: list[Tensor]) -> list[Tensor]:
    return [*parameters[:1], *parameters[-1:]]


def _progress(optimizer: Optimizer) -> tuple[int, float]:
    """Return how many tensors of an optimizer have state, and the largest step count of the first of them."""
    largest = 0.0
    # Counts are lost together, and reading those of all tensors takes milliseconds at every step.
    for state in islice(optimizer.state.values(), _COUNTS):
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1 and on_host(count)):
            largest = max(largest, float(count))
    return len(optimizer.state), largest


_ROUND = tuple(mantissa * 10.0**power for power in (-3, -2, -1, 0, 1, 2) for mantissa in (1, 1.5, 2, 2.5, 3, 4, 5, 8))


def _is_round(norm: float) -> bool:
    """Return whether a norm is a number that people clip at, up to the 1e-6 that clipping adds."""
    return any(abs(norm / value - 1) < 2e-4 for value in _ROUND)
