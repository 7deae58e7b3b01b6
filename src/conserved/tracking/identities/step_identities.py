"""All identities of a step, asked in turn, each within its own stage of the boundary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from conserved.alarm import Alarm
from conserved.boundary import Boundary
from conserved.inference import being_followed
from conserved.tracking.identities.declared_modes import DeclaredModes
from conserved.tracking.identities.equal_replicas import EqualReplicas
from conserved.tracking.identities.gradient_sizes import GradientSizes
from conserved.tracking.identities.held_parameters import HeldParameters
from conserved.tracking.identities.loop_order import LoopOrder
from conserved.tracking.identities.outside_writes import OutsideWrites
from conserved.tracking.identities.own_gradients import OwnGradients
from conserved.tracking.identities.restored_state import RestoredState
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_outermost_step
from conserved.tracking.identities.update_rule import UpdateRule

FORWARD = "passes of identities"
"""The stage that tells identities of forward passes and loaded weights."""

SECONDS = 0.002
"""Seconds a step that identities may take on a CPU, however short the step is."""

SHARE = 0.01
"""Share of the time of the run that they may take besides."""

CREDIT = 0.5
"""Seconds that they may take at the start, so that the first steps are looked at in full."""


class StepIdentities:
    """Asks every identity of a step its question, at the moments of the step, and collects what they find."""

    def __init__(
        self,
        model: nn.Module,
        called: nn.Module,
        optimizers: Sequence[Optimizer],
        boundary: Boundary,
        identities: Sequence[StepIdentity] | None = None,
    ) -> None:
        self.step = TrainingStep(model=model, called=called, optimizers=list(optimizers))
        self.identities = list(standard_identities() if identities is None else identities)
        self.seconds = dict.fromkeys((one.name for one in self.identities), 0.0)
        """Seconds that each identity took so far."""
        self.spoiled = False
        """Whether the gradients of the step under way do not belong to it, so that no law of theirs can hold."""
        self._boundary, self._began = boundary, time.perf_counter()
        self._handles = [
            called.register_forward_pre_hook(boundary.hook(FORWARD, self._before_forward)),
            model.register_load_state_dict_post_hook(boundary.hook(FORWARD, self._weights_loaded)),
        ]
        self._ask("begin")

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not being_followed():
            self.step.passes += torch.is_grad_enabled()
            self._ask("before_forward", module)

    def _weights_loaded(self, module: nn.Module, incompatible: Any) -> None:
        self.restart()

    def before_optimizer(self, optimizer: Optimizer, *, closure: bool) -> None:
        """An optimizer is about to step."""
        if is_outermost_step(optimizer):
            self.step.closure, self.step.thorough = closure, self._within_budget()
            self._ask("before_optimizer", optimizer)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if is_outermost_step(optimizer):
            self._ask("after_optimizer", optimizer)

    def after_step(self) -> None:
        """The loop has told the monitor of its step."""
        self._ask("after_step")
        self.step.receive()
        self.step.number += 1
        self.step.passes, self.spoiled = 0, False

    def restart(self) -> None:
        """Weights were loaded: forget what was remembered of them."""
        for identity in self.identities:
            self._boundary.attempt(stage(identity), identity.restart)

    def take_alarms(self) -> tuple[Alarm, ...]:
        """Return the alarms of what was found since the last call."""
        findings, self.step.findings = self.step.findings, []
        return tuple(finding.alarm(self.step.rank) for finding in findings)

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
        self._ask("close")
        self.step.receive(wait=True)

    def line(self) -> str:
        """Return the names of the identities that are on."""
        return ", ".join(one.name for one in self.identities if not self._boundary.off(stage(one)))

    def _ask(self, moment: str, *args: Any) -> None:
        for identity in self.identities:
            if getattr(type(identity), moment) is getattr(StepIdentity, moment):
                continue
            # Time of this thread: a busy machine does not make the checks dearer.
            began, found = time.thread_time(), len(self.step.findings)
            self._boundary.attempt(stage(identity), getattr(identity, moment), self.step, *args)
            self.seconds[identity.name] += time.thread_time() - began
            self.spoiled = self.spoiled or (identity.spoils and len(self.step.findings) > found)

    def _within_budget(self) -> bool:
        spent = sum(self.seconds[one.name] for one in self.identities if not one.free)
        run = time.perf_counter() - self._began
        return spent <= CREDIT + max(SECONDS * self.step.number, SHARE * run)


def stage(identity: StepIdentity) -> str:
    """Return the stage of the boundary in which an identity runs."""
    return f"identity of {identity.name}"


def standard_identities() -> list[StepIdentity]:
    """Return the identities that every monitor asks by default."""
    return [
        OwnGradients(),
        LoopOrder(),
        HeldParameters(),
        DeclaredModes(),
        EqualReplicas(),
        RestoredState(),
        GradientSizes(),
        OutsideWrites(),
        UpdateRule(),
    ]
