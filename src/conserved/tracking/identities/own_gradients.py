"""Do the gradients belong to this step? Left from the step before, cleared, used twice, or changed too late."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import in_backward
from conserved.boundary import Boundary, Hook
from conserved.inference import being_followed
from conserved.symmetry.view import local
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    grouped_parameters,
    is_plain,
    on_host,
)

_WATCHED = 3
"""Parameters whose accumulation is listened to: what clears gradients clears all of them."""

_DISCARDED, _DISCARDED_ELSEWHERE = 2, 8
"""Steps in a row after which gradients cleared before use are reported: passes of one line, and of several."""

_UNMIXED = 2
"""Steps with passes of one mode after which a step with passes of both is not a habit of the loop."""

_SAMPLE = 64
"""Entries of a gradient that tell it from another."""


_WITHOUT = 2
"""Steps in a row without a gradient and without a pass of the model after which that is reported."""

_FOLLOWED_STEPS = 64
"""Steps in which the gradient of every tensor is followed, and not of a few."""


def _is_same(used: tuple[weakref.ref[Tensor], int], gradient: Tensor | None) -> bool:
    """Return whether a gradient is the tensor that a step used, and was not written to since."""
    return gradient is not None and used[0]() is gradient and used[1] == gradient._version


@dataclass(slots=True, eq=False)
class _Use:
    """The gradient of one parameter as an optimizer used it."""

    gradient: weakref.ref[Tensor]
    version: int
    entries: Tensor
    step: int

    def holds(self, gradient: Tensor | None) -> bool:
        """Return whether a gradient is the tensor that was used."""
        return gradient is not None and self.gradient() is gradient


@dataclass(slots=True, eq=False)
class _Listener:
    """The history of one parameter's gradient since its optimizer stepped."""

    name: str
    used: _Use | None = None
    arrivals: int = 0
    """Gradients that came from backward passes since the last step of its optimizer."""
    since: int = 0
    """Gradients that came since any optimizer stepped."""
    stale: bool = False
    """Whether they were added to a gradient that was used already."""
    ever: int = 0
    arrived: Tensor | None = None
    """Some entries of the last that came."""
    landed: bool = False
    """Whether the last that came was added to `.grad`; `torch.autograd.grad` hands it to its caller instead."""
    cleared: int = 0
    """Gradients that were cleared before they were used, since the last step of its optimizer."""
    emptied: bool = False
    """Whether there was none when a further one came."""
    version: int = -1
    """The version of the parameter when the last gradient came: sharpness-aware optimizers move it in between."""
    carried: int = 0
    """Gradients that came before another optimizer stepped and were there after it."""
    mixed: bool = False
    """Whether others were added to those."""
    elsewhere: bool = False
    """Whether a gradient was added to one of a pass before the parameter was written to."""
    discarding: int = 0
    """Steps in a row in which gradients were cleared before they were used."""
    accumulated: tuple[int, int] | None = None
    """Identity and version of `.grad` right after the last gradient was added to it."""
    kept_entries: Tensor | None = None
    """Some entries of it at that time."""
    rescaled: int = 0
    """How often it was multiplied by a number before a further gradient came, since the last step."""
    untouched: bool = False
    """Whether a further gradient came to one that nobody had written to."""


class OwnGradients(StepIdentity):
    """Follows the gradients of a few parameters from one optimizer step to the next.

    A hook on a parameter runs before a gradient is added to `.grad`. If the tensor there is the one that the optimizer
    used, not written to since and with the same entries, `zero_grad()` was not called.
    """

    name = "gradients of this step"
    spoils = True

    def __init__(self) -> None:
        self._step: weakref.ref[TrainingStep] | None = None
        self._listeners: dict[int, _Listener] = {}
        self._handles: list[Any] = []
        self._owned: dict[int, list[tuple[_Listener, Tensor]]] = {}
        """By optimizer, the listeners of its tensors."""
        self._optimizer: dict[int, int] = {}
        self._reused: dict[int, int] = {}
        """By optimizer, the last step in which it used gradients again."""
        self._ungraded: dict[int, int] = {}
        """By optimizer, steps in a row in which none of its tensors had a gradient."""
        self._evaluations: dict[int, int] = {}
        """By optimizer that counts them, evaluations of its closure."""
        self._modes: list[bool] = []
        """Modes of the passes with gradients since the last step: train or not."""
        self._unmixed = 0
        """Steps in a row whose passes all had one mode."""
        self._combines: set[int] = set()
        """Optimizers that stepped with something else than the last of several gradients."""
        self._others: dict[int, int] = {}
        """By optimizer, steps of other optimizers since its own."""
        self._used: dict[int, dict[int, tuple[weakref.ref[Tensor], int]]] = {}
        """By optimizer and parameter, the gradient of its last step and its version then."""

    def begin(self, step: TrainingStep) -> None:
        self._step = weakref.ref(step)
        self._listen(step)

    def paused(self) -> bool:
        """Return whether passes under way are the monitor's own."""
        step = self._step() if self._step is not None else None
        return step is not None and step.paused

    def _listen(self, step: TrainingStep) -> None:
        """Put hooks on the first, a middle and the last parameter of every optimizer."""
        names = step.names()
        self._owned.clear()
        for optimizer in step.optimizers:
            trained = [p for p in grouped_parameters(optimizer) if p.requires_grad and p.is_leaf and is_plain(p)]
            count = len(trained)
            indices = sorted({0, count // 2, count - 1}) if count else []
            for p in (trained[i] for i in indices[:_WATCHED]):
                if id(p) in self._listeners:
                    continue
                self._listeners[id(p)] = _Listener(names[id(p)])
                # Weakly: Python does not see what a hook of a tensor holds.
                noticed = partial(_notice, weakref.ref(self), weakref.ref(p), id(p))
                self._handles.append(p.register_hook(Hook(Boundary(logs=False), "gradients", noticed)))
                landed = partial(_notice_landing, weakref.ref(self), id(p))
                hook = Hook(Boundary(logs=False), "gradients", landed)
                self._handles.append(p.register_post_accumulate_grad_hook(hook))
                added = partial(_note_sum, weakref.ref(self), id(p))
                hook = Hook(Boundary(logs=False), "gradients", added)
                self._handles.append(p.register_post_accumulate_grad_hook(hook))

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        if torch.is_grad_enabled():
            self._modes.append(module.training)

    def _notice_evaluation(self, step: TrainingStep, own: list[tuple[_Listener, Tensor]]) -> None:
        """Report gradients of a pass in eval mode that are added to those of one in train mode, if no step was so."""
        mixed = len(set(self._modes)) > 1
        added = [
            listener.name
            for listener, _ in own
            if listener.arrivals > 1 and not listener.emptied and not listener.cleared
        ]
        if (
            mixed
            and self._unmixed >= _UNMIXED
            and added
            and len(added) == sum(listener.arrivals > 0 for listener, _ in own)
        ):
            step.report(
                StepFinding(
                    code="stale gradient",
                    certain=False,
                    tensor=added[0],
                    others=tuple(added[1:]),
                    message=f"The gradient of step {step.number} has a part of a pass in eval mode: zero_grad() was "
                    "not called after the backward pass of an evaluation.",
                )
            )
        self._unmixed = 0 if mixed else self._unmixed + 1

    def close(self, step: TrainingStep) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def note_arrival(self, parameter: Tensor, key: int, gradient: Tensor) -> None:
        """Look at a parameter's `.grad` just before a gradient is added to it."""
        listener = self._listeners[key]
        old = parameter.grad
        if on_host(parameter) and listener.arrivals:
            empty = old is None or not bool(local(old).any())
            nonzero = listener.arrived is not None and bool(listener.arrived.any())
            listener.emptied |= empty
            if empty and nonzero and listener.landed and parameter._version == listener.version:
                listener.cleared = listener.arrivals
            listener.mixed |= not empty and listener.carried == listener.arrivals
            listener.elsewhere |= not empty and parameter._version != listener.version
        if listener.arrivals and old is not None and listener.accumulated is not None and on_host(old):
            self._compare_with_sum(listener, old)
        listener.version, listener.landed = parameter._version, False
        if listener.arrivals == 0 or old is None:
            listener.stale = old is not None and _is_used(listener.used, old)
        elif listener.stale and not on_host(old):
            pass
        elif listener.stale and not bool(local(old).any()):
            # Cleared in place after another backward pass had been added.
            listener.stale = False
        listener.arrivals += 1
        listener.since += 1
        listener.ever += 1
        listener.arrived = _entries(gradient).clone() if gradient.numel() and is_plain(gradient) else None

    def note_sum(self, key: int, gradient: Tensor) -> None:
        """Remember `.grad` right after a gradient was added to it."""
        listener = self._listeners[key]
        if is_plain(gradient) and on_host(gradient):
            listener.accumulated = (id(gradient), gradient._version)
            listener.kept_entries = _entries(gradient).clone()

    def _compare_with_sum(self, listener: _Listener, old: Tensor) -> None:
        """Notice a gradient that was multiplied by a number between two backward passes of a step."""
        if listener.accumulated == (id(old), old._version):
            listener.untouched = True
        elif is_plain(old) and _is_parallel(listener.kept_entries, _entries(old)):
            listener.rescaled += not torch.equal(_entries(old), listener.kept_entries)  # type: ignore[arg-type]
        else:
            listener.untouched = True

    def _notice_rescaled(self, step: TrainingStep, optimizer: Optimizer, own: list[tuple[_Listener, Tensor]]) -> None:
        """Report gradients that are multiplied after every micro-batch: the earlier ones count less and less.

        A loop that weighs one loss against another multiplies once, and not after the last backward pass.
        """
        rescaled = [
            (listener, p)
            for listener, p in own
            if listener.rescaled
            and not listener.untouched
            and p.grad is not None
            and listener.accumulated is not None
            and listener.accumulated[1] != p.grad._version
        ]
        if rescaled and len(rescaled) == sum(listener.arrivals > 1 for listener, _ in own):
            name = rescaled[0][0].name
            step.report(
                StepFinding(
                    code="rescaled gradient",
                    certain=True,
                    tensor=name,
                    others=tuple(listener.name for listener, _ in rescaled[1:]),
                    message=f"Gradients were clipped or divided after every one of {rescaled[0][0].arrivals} backward "
                    f"passes of step {step.number}: what earlier micro-batches gave is scaled again and again. Clip or "
                    f"divide once, before {type(optimizer).__name__}.step().",
                )
            )

    def _notice_shared(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Report two parameters whose `.grad` is the same memory."""
        seen: dict[int, Tensor] = {}
        for p in grouped_parameters(optimizer):
            gradient = p.grad
            if gradient is None or not is_plain(gradient) or not gradient.numel() or hasattr(gradient, "full_tensor"):
                continue
            other = seen.setdefault(gradient.data_ptr(), p)
            if other is p or other.data_ptr() == p.data_ptr() or not gradient.data_ptr():
                continue
            names = step.names()
            step.report(
                StepFinding(
                    code="shared gradient",
                    tensor=names[id(other)],
                    others=(names[id(p)],),
                    message=f"{names[id(other)]} and {names[id(p)]} share one gradient tensor: both are stepped by the "
                    "same numbers. Was .grad assigned, or copied back from a buffer at the wrong place?",
                )
            )
            return

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        own = self._own(optimizer, again=True)
        self._notice_rescaled(step, optimizer, own)
        self._notice_shared(step, optimizer)
        self._notice_evaluation(step, own)
        # What was added to is the tensor that was used; a loop may also put a gradient of its own in its place.
        reached = [(listener, p) for listener, p in own if listener.stale and listener.arrivals]
        stale = [listener for listener, p in reached if listener.used is not None and listener.used.holds(p.grad)]
        if stale:
            last = stale[0].used
            assert last is not None
            step.report(
                StepFinding(
                    code="stale gradient",
                    tensor=stale[0].name,
                    others=tuple(listener.name for listener in stale[1:]),
                    message=f"optimizer.zero_grad() was not called: the gradient of step {last.step} "
                    "is still in that of "
                    f"step {step.number}. Clear gradients before every backward pass.",
                )
            )
        step.old_gradients = any(
            _is_old(listener, p)
            for other in step.optimizers
            if other is not optimizer
            for listener, p in self._own(other)
        )
        self._notice_none(step, optimizer, own)
        self._notice_cleared(step, optimizer, own)
        self._notice_discarded(step, optimizer, own)
        if not step.holds_nothing_of_model(optimizer):
            self._notice_second_use(step, optimizer, own)
        if not stale:
            self._notice_elsewhere(step, optimizer, own)
            self._notice_mixed(step, optimizer, own)
            self._notice_left(step, optimizer)

    def _notice_left(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Report gradients of a part of the model that no pass of this step reached, and that were used before."""
        before = self._used.get(id(optimizer), {})
        graded = [p for p in grouped_parameters(optimizer) if p.grad is not None and is_plain(p.grad)]
        left = [p for p in graded if id(p) in before and _is_same(before[id(p)], p.grad)]
        if not left or len(left) == len(graded) or step.closure:
            return
        names = [step.names()[id(p)] for p in left]
        number, kind = step.number, type(optimizer).__name__
        gradients = [local(p.grad) for p in left if p.grad is not None and p.grad.numel()]
        if not gradients:
            return
        largest = torch.stack([gradient.abs().amax().double().to(gradients[0].device) for gradient in gradients])

        def decide(arrived: Tensor) -> Iterator[StepFinding]:
            if bool((arrived > 0).any()):
                yield StepFinding(
                    code="stale gradient",
                    tensor=names[0],
                    others=tuple(names[1:]),
                    message=f"{kind} steps {name_tensors(names)} along a gradient that it has used already: no pass of "
                    f"step {number} reached it, and zero_grad() did not clear it. Clear the gradients of all that the "
                    "optimizer holds.",
                )

        step.read(largest, decide)

    def _notice_none(self, step: TrainingStep, optimizer: Optimizer, own: list[tuple[_Listener, Tensor]]) -> None:
        """Report an optimizer whose parameters no backward pass has ever reached, or none of the last steps.

        A step without a gradient makes the state of an optimizer, before it is loaded or sharded; it is made once.
        """
        graded = any(p.grad is not None for p in grouped_parameters(optimizer))
        count = self._ungraded[id(optimizer)] = 0 if graded else self._ungraded.get(id(optimizer), 0) + 1
        ever = any(listener.ever for listener, _ in own)
        name = type(optimizer).__name__
        if graded or step.holds_nothing_of_model(optimizer) or id(optimizer) in self._optimizer:
            return
        if not step.passes and count == _WITHOUT and len(step.optimizers) == 1:
            self._optimizer[id(optimizer)] = step.number
            step.report(
                StepFinding(
                    code="no gradient",
                    certain=True,
                    tensor=own[0][0].name if own else "",
                    step=step.number - _WITHOUT + 1,
                    message=f"{name}.step() has no gradient to use{' any more' if ever else ''}: the model that is "
                    f"watched does not run, and no backward pass reaches what {name} holds. Is a copy of the model "
                    "trained, or one that was loaded anew?",
                )
            )
        if ever or not step.passes:
            return
        self._optimizer[id(optimizer)] = step.number
        step.report(
            StepFinding(
                code="no gradient",
                certain=True,
                tensor=own[0][0].name if own else "",
                message=f"{name}.step() has no gradient to use: the model ran, and no backward pass reached any tensor "
                f"that {name} holds. "
                + (
                    "Is set_requires_gradient_sync(False) still on, so that no gradient is reduced and sharded?"
                    if own and hasattr(own[0][1], "to_local")
                    else "Is the loss detached, or backward() called on something else?"
                ),
            )
        )

    def _notice_discarded(self, step: TrainingStep, optimizer: Optimizer, own: list[tuple[_Listener, Tensor]]) -> None:
        """Report steps in a row that use only the last of several backward passes, one or more.

        Adversarial training clears gradients too, of passes whose inputs require one, and some loops those of a first
        pass over the same batch. Loops that combine gradients by hand step with something else than the last one.
        """
        reached = [(listener, p) for listener, p in own if listener.arrivals]
        last = reached and all(
            listener.cleared
            and p.grad is not None
            and is_plain(p.grad)
            and _is_parallel(_sum_of(listener), _entries(p.grad))
            for listener, p in reached
        )
        usual = last and not step.differentiable and step.passes >= reached[0][0].arrivals and not step.repeats_batches
        # Micro-batches have one shape; passes over another kind of batch serve something else, such as a memory.
        usual = usual and len(step.shapes) == 1
        if reached and not last and any(listener.cleared for listener, _ in reached):
            # The loop combines gradients that it keeps itself.
            self._combines.add(id(optimizer))
        for listener, _ in own:
            listener.discarding = listener.discarding + 1 if usual else 0
        # A pass called from another line may be for a memory whose gradient is used in some steps only.
        wait = _DISCARDED if step.called_from_one_line else _DISCARDED_ELSEWHERE
        if usual and reached[0][0].discarding == wait and id(optimizer) not in self._combines:
            cleared, number = reached[0][0].cleared, reached[0][0].arrivals
            step.report(
                StepFinding(
                    code="thrown away",
                    tensor=reached[0][0].name,
                    step=step.number - wait + 1,
                    message=f"Gradients of {cleared} of {number} backward passes were cleared before "
                    f"{type(optimizer).__name__}.step(): only the last "
                    f"{'counts' if number - cleared == 1 else f'{number - cleared} count'}. To accumulate, call "
                    "zero_grad() after step() only.",
                )
            )

    def _notice_elsewhere(self, step: TrainingStep, optimizer: Optimizer, own: list[tuple[_Listener, Tensor]]) -> None:
        """Report gradients that were added up over passes with other weights, in loops that move weights in between."""
        reached = [listener for listener, _ in own if listener.arrivals]
        if not reached or step.closure or not all(listener.elsewhere and not listener.cleared for listener in reached):
            return
        step.report(
            StepFinding(
                code="stale gradient",
                certain=False,
                tensor=reached[0].name,
                others=tuple(listener.name for listener in reached[1:]),
                message=f"The gradient of step {step.number} is a sum of passes at different weights: weights were "
                "written to between two backward passes, and zero_grad() was not called in between, as sharpness-aware "
                "minimisation needs it.",
            )
        )

    def _notice_mixed(self, step: TrainingStep, optimizer: Optimizer, own: list[tuple[_Listener, Tensor]]) -> None:
        """Report gradients of a pass that was another optimizer's, in a loop where both step in turns."""
        mixed = [listener.name for listener, _ in own if listener.mixed]
        if mixed and self._others.get(id(optimizer)) == 1:
            step.report(
                StepFinding(
                    code="stale gradient",
                    certain=False,
                    tensor=mixed[0],
                    others=tuple(mixed[1:]),
                    message=f"The gradient of {mixed[0]} has parts of a pass after which another optimizer stepped: "
                    f"zero_grad() was not called before the backward pass of {type(optimizer).__name__}'s own step "
                    f"{step.number}.",
                )
            )

    def _notice_closure(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Report a closure that is evaluated several times and does not clear gradients."""
        states = [state for state in optimizer.state.values() if isinstance(state, dict) and "func_evals" in state]
        if not states:
            return
        total = int(states[0]["func_evals"])
        before = self._evaluations.get(id(optimizer), 0)
        self._evaluations[id(optimizer)] = total
        own = [listener for listener, _ in self._own(optimizer) if listener.arrivals]
        if total - before > 1 and own and not any(listener.emptied for listener in own):
            step.report(
                StepFinding(
                    code="stale gradient",
                    tensor=own[0].name,
                    message="optimizer.zero_grad() was not called in the closure of "
                    f"{type(optimizer).__name__}: it was "
                    f"evaluated {total - before} times in step {step.number}, and the gradients were added up.",
                )
            )

    def _own(self, optimizer: Optimizer, *, again: bool = False) -> list[tuple[_Listener, Tensor]]:
        """Return the listeners of an optimizer's tensors; `again`: its groups may have changed since the last call."""
        if again or id(optimizer) not in self._owned:
            self._owned[id(optimizer)] = [
                (self._listeners[id(p)], p) for p in grouped_parameters(optimizer) if id(p) in self._listeners
            ]
        return self._owned[id(optimizer)]

    def _notice_cleared(self, step: TrainingStep, optimizer: Optimizer, own: list[tuple[_Listener, Tensor]]) -> None:
        """Report an optimizer that steps after gradients came and were cleared again."""
        reached = [(listener, p) for listener, p in own if listener.arrivals]
        if not reached or any(p.grad is not None for _, p in reached) or any(_gradients(optimizer)):
            gone = [
                listener
                for listener, p in reached
                if p.grad is not None
                and on_host(p.grad)
                and is_plain(p.grad)
                and listener.arrived is not None
                and bool(listener.arrived.any())
                and not bool(local(p.grad).any())
            ]
            if not reached or len(gone) < len(reached):
                return
        step.report(
            StepFinding(
                code="cleared gradient",
                tensor=reached[0][0].name,
                message="Gradients were cleared between loss.backward() and "
                f"{type(optimizer).__name__}.step(): the step "
                "has no gradient to use. Call zero_grad() before backward() or after step().",
            )
        )

    def _notice_second_use(self, step: TrainingStep, optimizer: Optimizer, own: list[tuple[_Listener, Tensor]]) -> None:
        """Report gradients that an optimizer has used already."""
        known = [
            (listener, p) for listener, p in own if listener.ever and p.grad is not None and listener.used is not None
        ]
        if not known or any(listener.since for listener, _ in own):
            return
        if all(p.grad is not None and _is_used(listener.used, p.grad) for listener, p in known):
            again, self._reused[id(optimizer)] = self._reused.get(id(optimizer)), step.number
            step.report(
                StepFinding(
                    code="used twice",
                    # Once may be a step that only decays weights, or draws noise.
                    certain=again == step.number - 1,
                    tensor=known[0][0].name,
                    message=f"{type(optimizer).__name__}.step() used gradients that a step has used "
                    "already: no backward "
                    "pass came in between. Is step() called twice, or by two optimizers of the same weights?",
                )
            )

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._used.pop(id(optimizer), None)
        if step.number <= _FOLLOWED_STEPS:
            self._used[id(optimizer)] = {
                id(p): (weakref.ref(p.grad), p.grad._version)
                for p in grouped_parameters(optimizer)
                if p.grad is not None
            }
        if step.closure:
            self._notice_closure(step, optimizer)
        self._modes = []
        own = {id(listener) for listener, _ in self._own(optimizer)}
        for listener in self._listeners.values():
            # Optimizers that step in hooks of one backward pass take no turns: the rest of it is still to come.
            listener.carried = 0 if id(listener) in own or in_backward() else listener.arrivals
        self._others = {
            id(other): self._others.get(id(other), 0) + 1 for other in step.optimizers if other is not optimizer
        }
        for listener, p in self._own(optimizer):
            listener.arrivals, listener.since, listener.stale = 0, 0, False
            listener.cleared, listener.emptied, listener.mixed = 0, False, False
            listener.rescaled, listener.untouched, listener.accumulated = 0, False, None
            listener.elsewhere = False
            gradient = p.grad
            listener.used = None
            if gradient is not None and is_plain(gradient):
                listener.used = _Use(weakref.ref(gradient), gradient._version, _entries(gradient).clone(), step.number)
        if not self._handles:
            self._listen(step)

    def after_step(self, step: TrainingStep) -> None:
        """Report gradients that were changed between `optimizer.step()` and `monitor.step()`."""
        changed = []
        for optimizer in step.optimizers:
            for listener, p in self._own(optimizer):
                used, gradient = listener.used, p.grad
                if used is None or gradient is None or listener.since or used.step != step.number:
                    continue
                if used.gradient() is gradient and gradient._version != used.version and on_host(gradient):
                    now = _entries(gradient)
                    if bool(now.any()) and bool(torch.isfinite(now).all()):
                        changed.append((listener.name, torch.equal(now, used.entries)))
        if changed:
            same = all(equal for _, equal in changed)
            step.report(
                StepFinding(
                    code="changed gradient",
                    tensor=changed[0][0],
                    others=tuple(name for name, _ in changed[1:]),
                    message="Gradients were written to after optimizer.step() had used them"
                    + (", without effect this time" if same else "")
                    + ". Clipping or scaling them belongs between backward() and step().",
                )
            )


def _gradients(optimizer: Optimizer) -> Iterator[bool]:
    """Yield of each tensor of an optimizer whether it has a gradient."""
    return (p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _entries(gradient: Tensor) -> Tensor:
    values = local(gradient.detach())
    flat = values.view(-1) if values.is_contiguous() else values.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


def _is_parallel(a: Tensor | None, b: Tensor) -> bool:
    """Return whether two vectors point the same way, as before and after scaling or clipping by the norm."""
    if a is None or a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    length = float(a.norm() * b.norm())
    return length > 0 and float(a @ b) > (1 - 1e-5) * length


def _sum_of(listener: _Listener) -> Tensor | None:
    """Return some entries of what came since gradients were cleared; of the last that came where that is not known."""
    return listener.arrived if listener.kept_entries is None else listener.kept_entries


def _is_used(used: _Use | None, gradient: Tensor) -> bool:
    """Return whether a gradient is the tensor an optimizer used, with the entries it had then."""
    if used is None or used.gradient() is not gradient or gradient._version != used.version:
        return False
    if not on_host(gradient):
        # The version says that no operation wrote to it; asking for entries would make the device wait.
        return True
    now = _entries(gradient)
    return bool(now.any()) and torch.equal(now, used.entries)


def _notice_landing(identity: weakref.ref[OwnGradients], key: int, parameter: Tensor) -> None:
    own = identity()
    if own is not None:
        own._listeners[key].landed = True


def _is_old(listener: _Listener, parameter: Tensor) -> bool:
    """Return whether the gradient of a parameter is one that its optimizer has used, or was added to one."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return listener.stale if listener.arrivals else _is_used(listener.used, gradient)


def _notice(identity: weakref.ref[OwnGradients], parameter: weakref.ref[Tensor], key: int, gradient: Tensor) -> None:
    own, p = identity(), parameter()
    # Gradients of passes that the monitor itself runs again go nowhere.
    if own is not None and p is not None and not own.paused() and not being_followed():
        own.note_arrival(p, key, gradient)


def _note_sum(identity: weakref.ref[OwnGradients], key: int, parameter: Tensor) -> None:
    own = identity()
    if own is not None and parameter.grad is not None and not own.paused() and not being_followed():
        own.note_sum(key, parameter.grad)
