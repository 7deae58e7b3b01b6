"""All identities of a step, asked in turn, each within its own stage of the boundary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from conserved.alarm import Alarm
from conserved.boundary import Boundary
from conserved.inference import being_followed
from conserved.tracking.identities.declared_modes import DeclaredModes
from conserved.tracking.identities.equal_replicas import EqualReplicas
from conserved.tracking.identities.finite_statistics import FiniteStatistics
from conserved.tracking.identities.followed_averages import FollowedAverages
from conserved.tracking.identities.gradient_reach import GradientReach
from conserved.tracking.identities.gradient_sizes import GradientSizes
from conserved.tracking.identities.gradient_underflow import GradientUnderflow
from conserved.tracking.identities.held_parameters import HeldParameters
from conserved.tracking.identities.kept_inputs import KeptInputs
from conserved.tracking.identities.kept_state import KeptState
from conserved.tracking.identities.learnable_starts import LearnableStarts
from conserved.tracking.identities.loop_order import LoopOrder
from conserved.tracking.identities.output_loss import OutputLoss
from conserved.tracking.identities.outside_writes import OutsideWrites
from conserved.tracking.identities.own_gradients import OwnGradients
from conserved.tracking.identities.reduced_gradients import ReducedGradients
from conserved.tracking.identities.registered_tensors import RegisteredTensors
from conserved.tracking.identities.restored_state import RestoredState
from conserved.tracking.identities.settings_in_effect import SettingsInEffect
from conserved.tracking.identities.shared_tables import SharedTables
from conserved.tracking.identities.spectral_vectors import SpectralVectors
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    is_outermost_step,
    tensors_in,
)
from conserved.tracking.identities.tied_stages import TiedStages
from conserved.tracking.identities.token_labels import TokenLabels
from conserved.tracking.identities.update_rule import UpdateRule

FORWARD = "passes of identities"
"""The stage that tells identities of forward passes and loaded weights."""

CLOSING = "closing"
"""The stage of leaving nothing behind; it is turned on again after every failure."""

FIRST = 8
"""Steps that are looked at in full whatever that costs: errors of a new program show in them."""

SECONDS = 0.001
"""Seconds a step that they may take besides, where no budget is given."""


_MOMENTS = (
    "begin", "before_forward", "after_forward", "before_optimizer", "with_gradients", "after_optimizer", "after_step",
    "weights_given", "weights_loaded", "before_laws",
)  # fmt: skip
"""The methods of an identity that are called at a moment of a step."""


class StepIdentities:
    """Asks every identity of a step its question, at the moments of the step, and collects what they find."""

    def __init__(
        self,
        model: nn.Module,
        called: nn.Module,
        optimizers: Sequence[Optimizer],
        boundary: Boundary,
        identities: Sequence[StepIdentity] | None = None,
        *,
        allowance: Callable[[], float] = lambda: SECONDS,
    ) -> None:
        self.step = TrainingStep(model=model, called=called, optimizers=list(optimizers))
        self.identities = list(standard_identities() if identities is None else identities)
        self._asked = {moment: list(_overriding(self.identities, moment)) for moment in _MOMENTS}
        """By moment of a step, the identities that it concerns: their methods, and the stages these run in."""
        self.seconds = dict.fromkeys((item.name for item in self.identities), 0.0)
        """Seconds that each identity took so far."""
        self.spoiled = False
        """Whether the gradients of the step under way do not belong to it, so that no law of theirs can hold."""
        self._under_way: dict[int, Optimizer] = {}
        """Optimizers that are stepping with a closure and whose gradients were not looked at yet."""
        self._boundary, self._allowance, self._earned = boundary, allowance, 0.0
        self._paid = 0.0
        """Seconds of identities that the budget pays for: those that are not free."""
        self._handles = [
            called.register_forward_pre_hook(boundary.hook(FORWARD, self._before_forward), with_kwargs=True),
            # Also after a pass that raised, so that what was started before it ends.
            called.register_forward_hook(boundary.hook(FORWARD, self._after_forward), always_call=True),
            model.register_load_state_dict_pre_hook(boundary.hook(FORWARD, self._weights_given)),
            model.register_load_state_dict_post_hook(boundary.hook(FORWARD, self._weights_loaded)),
            *(
                item.register_load_state_dict_post_hook(boundary.hook(FORWARD, self._state_loaded))
                for item in optimizers
            ),
        ]
        self._ask("begin")

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not being_followed() and not self.step.paused:
            if torch.is_grad_enabled():
                self.step.note_inputs(tuple(tensors_in((args, kwargs))))
                self.step.arguments = (args, kwargs)
            self._ask("before_forward", module)

    def _after_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if not being_followed() and not self.step.paused:
            self._ask("after_forward", module, outputs)

    def _weights_given(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if not prefix:
            self._ask("weights_given", state)

    def _weights_loaded(self, module: nn.Module, incompatible: Any) -> None:
        self._ask("weights_loaded", incompatible.missing_keys, incompatible.unexpected_keys)
        self.restart()

    def _state_loaded(self, optimizer: Optimizer) -> None:
        self.restart()

    def before_optimizer(self, optimizer: Optimizer, *, closure: bool) -> None:
        """An optimizer is about to step."""
        if is_outermost_step(optimizer):
            self._boundary.attempt(FORWARD, self.step.look_at_structure)
            self.step.closure, self.step.thorough = closure, self._within_budget()
            self._ask("before_optimizer", optimizer)
            if closure:
                self._under_way[id(optimizer)] = optimizer
            else:
                self._ask("with_gradients", optimizer)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which passes of the model are the monitor's own."""
        self.step.paused = True
        try:
            yield
        finally:
            self.step.paused = False

    def before_laws(self) -> None:
        """Laws were read and are about to be watched."""
        self._ask("before_laws")

    def gradients_ready(self) -> None:
        """Gradients were computed inside the step under way, by a closure that is called once."""
        while self._under_way:
            self._ask("with_gradients", self._under_way.popitem()[1])

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if is_outermost_step(optimizer):
            self._under_way.pop(id(optimizer), None)
            self._ask("after_optimizer", optimizer)

    def after_step(self) -> bool | None:
        """Record that the loop called `Monitor.step`.

        Returns:
            Whether the program writes to weights besides its optimizers, as it means to; None if nothing was written.
        """
        self._ask("after_step")
        self.step.receive()
        rewritten = self.step.rewritten
        while self.step.remarks:
            self._boundary.remark(*self.step.remarks.pop())
        self._earned = (self._paid if self.step.number <= FIRST else self._earned) + self._allowance()
        self.step.number += 1
        self.step.passes, self.spoiled, self.step.rewritten = 0, False, None
        self.step.inputs, self.step.differentiable, self.step.batches, self.step.shapes = (), False, [], set()
        self.step.call_sites, self.step.arguments = [], ((), {})
        self._under_way.clear()
        return rewritten

    def restart(self) -> None:
        """Forget what was remembered of the weights, because others were loaded."""
        for identity in self.identities:
            self._boundary.attempt(stage(identity), identity.restart)

    def take_alarms(self) -> tuple[Alarm, ...]:
        """Return the alarms of what was found since the last call."""
        findings, self.step.findings = self.step.findings, []
        # Two identities may see one defect.
        distinct = {(item.code, item.tensor, item.step, item.ranks): item for item in reversed(findings)}
        return tuple(finding.alarm(self.step.rank) for finding in reversed(distinct.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return fingerprints of what a resume has to restore."""
        return RestoredState.state(self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the next step against the fingerprints of a checkpoint."""
        for identity in self.identities:
            if isinstance(identity, RestoredState):
                identity.load(state)

    def close(self) -> None:
        """Leave nothing on the model or the optimizers."""
        self.step.receive(wait=True)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for identity in self.identities:
            # Also of one that failed in mid-run: its hooks are still there.
            self._boundary.turn_on(CLOSING)
            self._boundary.attempt(CLOSING, identity.close, self.step)
        self.step.receive(wait=True)

    def line(self) -> str:
        """Return the names of the identities that are on."""
        return ", ".join(identity.name for identity in self.identities if not self._boundary.off(stage(identity)))

    def _ask(self, moment: str, *args: Any) -> None:
        asked = self._asked[moment]
        if not asked:
            return
        findings, attempt, step = self.step.findings, self._boundary.attempt, self.step
        clock = time.perf_counter
        # Time of this thread: a busy machine does not make the checks dearer. Its clock is a call of the system, so it
        # is read once for all, and the clock of the wall divides it.
        computed, began = time.thread_time(), clock()
        ended = [began]
        for identity, method, own_stage in asked:
            count = len(findings)
            attempt(own_stage, method, step, *args)
            ended.append(clock())
            self.spoiled = self.spoiled or (identity.spoils and len(findings) > count)
        share = (time.thread_time() - computed) / max(ended[-1] - began, 1e-9)
        for (identity, _, _), start, end in zip(asked, ended, ended[1:], strict=False):
            seconds = share * (end - start) + identity.device_seconds()
            self.seconds[identity.name] += seconds
            if not identity.free:
                self._paid += seconds

    def _within_budget(self) -> bool:
        return self.step.number <= FIRST or self._paid <= self._earned


def _overriding(
    identities: Iterable[StepIdentity], moment: str
) -> Iterator[tuple[StepIdentity, Callable[..., None], str]]:
    """Yield the identities that do something at a moment."""
    for identity in identities:
        if getattr(type(identity), moment) is not getattr(StepIdentity, moment):
            yield identity, getattr(identity, moment), stage(identity)


def stage(identity: StepIdentity) -> str:
    """Return the stage of the boundary in which an identity runs."""
    return f"identity of {identity.name}"


def standard_identities() -> list[StepIdentity]:
    """Return the identities that every monitor asks by default."""
    return [
        OwnGradients(),
        LoopOrder(),
        FollowedAverages(),
        HeldParameters(),
        DeclaredModes(),
        EqualReplicas(),
        SharedTables(),
        TiedStages(),
        ReducedGradients(),
        RestoredState(),
        GradientReach(),
        GradientSizes(),
        GradientUnderflow(),
        FiniteStatistics(),
        LearnableStarts(),
        OutputLoss(),
        KeptInputs(),
        RegisteredTensors(),
        SpectralVectors(),
        TokenLabels(),
        SettingsInEffect(),
        OutsideWrites(),
        KeptState(),
        UpdateRule(),
    ]
