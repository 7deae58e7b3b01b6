"""Does the loop do what a loop does? A step after every backward pass, a scaler and a scheduler that belong to it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from conserved.symmetry.view import local
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.run_objects import RunObjects, parameter_ids
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    grouped_parameters,
    is_plain,
    on_host,
)

_SCALED = 100.0
"""A gradient norm above which a scaler is looked for whose factor is still in it."""

_SKIPPED = 2
"""Steps in a row without an optimizer step, gradients cleared in between, after which it is said."""

_ENTRIES = 16
"""Entries of each weight that say whether it moved."""

_RATELESS = 2
"""Steps in a row at a rate of exactly zero, after steps at another, after which it is said."""


class LoopOrder(StepIdentity):
    """Follows the calls of a loop: optimizer steps, their counts and rates, scalers, schedulers and averages."""

    name = "order of the loop"
    question = "Does the loop do what a loop does?"

    def __init__(self) -> None:
        self._stepped: set[int] = set()
        self._missed = 0
        self._counts: dict[int, tuple[int, float]] = {}
        """By optimizer, how many tensors have state, and the largest step count."""
        self._rated: dict[int, bool] = {}
        self._rateless: dict[int, int] = {}
        self._objects: RunObjects | None = None
        self._advance: dict[int, int] = {}
        self._averaged: dict[int, tuple[int, float]] = {}
        self._gradients: tuple[int, ...] = ()
        self._weights: Tensor | None = None
        """Some entries of the weights at the last step that no optimizer made."""

    def begin(self, step: TrainingStep) -> None:
        self._weights = _some_weights(step)

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._look_at_state(step, optimizer)
        if not step.closure:
            self._look_at_scale(step, optimizer)

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._stepped.add(id(optimizer))
        self._counts[id(optimizer)] = _progress(optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group and _readable(group["lr"])]
        zero = bool(rates) and not any(rates)
        self._rateless[id(optimizer)] = self._rateless.get(id(optimizer), 0) + 1 if zero else 0
        if rates and any(rates):
            self._rated[id(optimizer)] = True
        if self._rateless[id(optimizer)] == _RATELESS and self._rated.get(id(optimizer)):
            step.report(
                StepFinding(
                    code="rate",
                    step=step.number - _RATELESS + 1,
                    message=f"The learning rate of {type(optimizer).__name__} is zero since step "
                    f"{step.number - _RATELESS + 1}: steps move nothing. Is the schedule shorter than the run?",
                )
            )

    def after_step(self, step: TrainingStep) -> None:
        self._look_at_missing_steps(step)
        if self._objects is None and self._stepped:
            self._objects = RunObjects.search()
        if self._objects is not None:
            self._look_at_schedulers(step, self._objects)
            self._look_at_averages(step, self._objects)
        self._stepped = set()

    def _look_at_missing_steps(self, step: TrainingStep) -> None:
        """Report backward passes whose gradients are cleared without any step."""
        if self._stepped:
            self._missed, self._gradients, self._weights = 0, (), None
            return
        before, self._weights = self._weights, _some_weights(step)
        # Compiled steps run no hooks, and a loop may write its updates itself.
        stayed = before is None or torch.equal(before, self._weights)
        gradients = [p.grad for o in step.optimizers for p in grouped_parameters(o) if p.grad is not None]
        now = tuple(id(g) for g in gradients[:4])
        plain = [g for g in gradients[:4] if is_plain(g) and on_host(g)]
        finite = all(bool(torch.isfinite(local(g)).all()) for g in plain)
        useful = bool(plain) and finite and any(bool(local(g).any()) for g in plain)
        # Gradients that are accumulated stay the same tensors; a scaler skips steps with infinities.
        renewed = not self._gradients or now != self._gradients
        self._missed = self._missed + 1 if useful and step.passes and renewed and stayed else 0
        self._gradients = now
        if self._missed == _SKIPPED:
            step.report(
                StepFinding(
                    code="no step",
                    step=step.number - _SKIPPED + 1,
                    message="No optimizer made a step: backward() gives gradients, they are cleared, "
                    "and the weights stay "
                    "as they are. Is optimizer.step() called, with its parentheses, and on the "
                    "optimizer that the monitor "
                    "was given?",
                )
            )

    def _look_at_state(self, step: TrainingStep, optimizer: Optimizer) -> None:
        before, now = self._counts.get(id(optimizer)), _progress(optimizer)
        if before is None:
            return
        if (now[0] < before[0] and now[0] == 0) or now[1] < before[1]:
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
        gradients = [p.grad for p in grouped_parameters(optimizer) if p.grad is not None and is_plain(p.grad)]
        if not gradients or not on_host(gradients[0]) or getattr(optimizer, "grad_scale", None) is not None:
            return
        norm = float(torch.stack([torch.linalg.vector_norm(local(g)).double() for g in gradients]).norm())
        if not math.isfinite(norm) or norm == 0:
            return
        scaler = self._scaler()
        if scaler is None and norm > _SCALED and self._objects is None:
            self._objects = RunObjects.search()
            scaler = self._scaler()
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
        elif unscaled and _is_round(norm * scale) and not _is_round(norm) and scale >= 256:
            step.report(
                StepFinding(
                    code="clipped while scaled",
                    value=norm,
                    message=f"Gradients were clipped while the scaler's factor {scale:g} was in them: their norm is "
                    f"{norm:.3g}, which times the factor is {norm * scale:.4g}. Call "
                    "scaler.unscale_(optimizer) before clipping.",
                )
            )

    def _scaler(self) -> Any:
        scalers = [] if self._objects is None else [ref() for ref in self._objects.scalers]
        return next((one for one in scalers if one is not None and one.is_enabled() and one._scale is not None), None)

    def _look_at_schedulers(self, step: TrainingStep, objects: RunObjects) -> None:
        """Report a scheduler that advances, of an optimizer that holds this model and does not step."""
        own = {id(optimizer) for optimizer in step.optimizers}
        held = step.held() | {id(p) for p in step.model.parameters()}
        for index, reference in enumerate(objects.schedulers):
            scheduler = reference()
            other = getattr(scheduler, "optimizer", None)
            if scheduler is None or not isinstance(other, Optimizer) or id(other) in own:
                continue
            count = int(scheduler.last_epoch) if isinstance(scheduler.last_epoch, int) else 0
            before = self._advance.get(index)
            self._advance[index] = count
            idle = not any(state for state in other.state.values())
            if before is not None and count > before and idle and parameter_ids(other) & held:
                step.report(
                    StepFinding(
                        code="rate",
                        message=f"{type(scheduler).__name__} sets the learning rate of another "
                        f"{type(other).__name__} than the one that steps: the rate of this run does "
                        "not follow it. Make "
                        "the scheduler from the optimizer that is used.",
                    )
                )

    def _look_at_averages(self, step: TrainingStep, objects: RunObjects) -> None:
        """Report an averaged model that is updated and does not move though this model does."""
        for index, reference in enumerate(objects.averages):
            average = reference()
            if average is None or not hasattr(average, "n_averaged"):
                continue
            pairs = list(zip(average.module.parameters(), step.model.parameters(), strict=False))
            if not pairs or any(a.shape != b.shape for a, b in pairs) or not on_host(pairs[0][0]):
                continue
            count = int(average.n_averaged)
            total = float(sum(a.detach().double().abs().sum() for a, _ in pairs))
            before = self._averaged.get(index)
            self._averaged[index] = (count, total)
            if before is not None and count > before[0] >= 1 and total == before[1] and self._stepped:
                apart = any(not torch.equal(a, b) for a, b in pairs)
                if apart:
                    step.report(
                        StepFinding(
                            code="average",
                            message=f"The averaged model was updated in step {step.number} and did "
                            "not move, though the "
                            "model did. Is its decay 1, or is it averaged with itself?",
                        )
                    )


def _some_weights(step: TrainingStep) -> Tensor:
    """Return a few entries of each weight that optimizers hold and the host can read."""
    weights = [p.detach() for o in step.optimizers for p in grouped_parameters(o) if is_plain(p) and on_host(p)]
    samples = [local(p).flatten()[:_ENTRIES].double() for p in weights]
    return torch.cat(samples) if samples else torch.zeros(0, dtype=torch.float64)


def _readable(rate: Any) -> bool:
    return not isinstance(rate, Tensor) or on_host(rate)


def _progress(optimizer: Optimizer) -> tuple[int, float]:
    """Return how many tensors of an optimizer have state, and the largest step count that the host can read."""
    largest = 0.0
    for state in optimizer.state.values():
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1 and on_host(count)):
            largest = max(largest, float(count))
    return len(optimizer.state), largest


_ROUND = tuple(mantissa * 10.0**power for power in (-3, -2, -1, 0, 1, 2) for mantissa in (1, 1.5, 2, 2.5, 3, 4, 5, 8))


def _is_round(norm: float) -> bool:
    """Return whether a norm is a number that people clip at, up to the 1e-6 that clipping adds."""
    return any(abs(norm / value - 1) < 2e-4 for value in _ROUND)
