"""Do gradients reach what is trained? Parts of a model that run in every pass and never get a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.boundary import Boundary, Hook
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, grouped_parameters

_SEEN, _MISSING = 2, 2
"""Steps in a row in which a parameter had a gradient, and steps in a row without one after which it is reported."""

_SHARE = 0.25
"""Share of an optimizer's entries without a gradient from which on a part is not just an output that nobody uses."""


class GradientReach(StepIdentity):
    """Follows parameters that an optimizer holds and that have no gradient in the first step, or none any more.

    Nothing is put on the model if all have one. Otherwise their modules are listened to in the second step. A head
    whose output is not used may have none on purpose; a part that runs with gradients disabled, or a large part that
    runs and is cut off, has not.
    """

    name = "reach"

    def __init__(self) -> None:
        self._suspects: dict[int, tuple[str, Tensor, nn.Module]] = {}
        """By parameter without a gradient in the first step: name, tensor, module."""
        self._handles: list[Any] = []
        self._graded = False
        """Whether the pass under way was started with gradients."""
        self._ran: set[int] = set()
        """Modules of suspects that ran in such a pass."""
        self._disabled: set[int] = set()
        """Those of them that ran with gradients disabled."""
        self._steps: dict[int, int] = {}
        self._had: dict[int, int] = {}
        """By parameter, the steps in a row in which it had a gradient; -1 once it was without."""
        self._lost: dict[int, int] = {}
        """By optimizer, the steps in a row in which parameters that always had a gradient have none."""

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        self._graded = torch.is_grad_enabled()

    def after_forward(self, step: TrainingStep, module: nn.Module, outputs: Any) -> None:
        self._graded = False

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        count = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        optimized = {id(p) for p in grouped_parameters(optimizer)}
        if count == 1:
            self._suspect(step, optimized)
        elif count == 2:
            self._decide(step, optimizer, optimized)
        self._follow(step, optimizer)

    def close(self, step: TrainingStep) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _suspect(self, step: TrainingStep, optimized: set[int]) -> None:
        owners = {id(p): m for m in step.model.modules() for p in m.parameters(recurse=False)}
        trained = [(name, p) for name, p in step.structure.parameters.items() if p.requires_grad and id(p) in optimized]
        missing = {id(p): (name, p, owners[id(p)]) for name, p in trained if p.grad is None}
        if len(missing) == len(trained):
            # Nothing has a gradient: the step itself is at fault, not a part of the model.
            return
        self._suspects |= missing
        if missing:
            step.notes.append(f"no gradient for {name_tensors([name for name, _, _ in missing.values()], 2)}")
        hook = Hook(Boundary(logs=False), "reach", self._note)
        for module in {id(m): m for _, _, m in missing.values()}.values():
            self._handles.append(module.register_forward_hook(hook))

    def _follow(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Report parameters that had a gradient in every step, run in every pass, and have none any more."""
        parameters = [p for p in grouped_parameters(optimizer) if p.requires_grad]
        with_gradient = [p for p in parameters if p.grad is not None]
        for p in with_gradient:
            former_count = self._had.get(id(p), 0)
            self._had[id(p)] = former_count + 1 if former_count >= 0 else former_count
        lost = [p for p in parameters if p.grad is None and self._had.get(id(p), 0) >= _SEEN]
        for p in parameters:
            if p.grad is None and self._had.get(id(p), 0) < _SEEN:
                self._had[id(p)] = -1
        count = self._lost[id(optimizer)] = self._lost.get(id(optimizer), 0) + 1 if lost and with_gradient else 0
        if count == 1:
            names = {id(p): (name, p) for name, p in step.structure.parameters.items()}
            owners = {id(p): m for m in step.model.modules() for p in m.parameters(recurse=False)}
            self._ran, self._disabled = set(), set()
            hook = Hook(Boundary(logs=False), "reach", self._note)
            self._suspects = {id(p): (*names[id(p)], owners[id(p)]) for p in lost if id(p) in names}
            for module in {id(m): m for _, _, m in self._suspects.values()}.values():
                self._handles.append(module.register_forward_hook(hook))
        elif count >= _MISSING or (count == 0 and self._suspects and self._steps[id(optimizer)] > _MISSING):
            suspects, self._suspects = self._suspects, {}
            self.close(step)
            for key in suspects:
                self._had[key] = -1
            ran = [
                name for name, p, m in suspects.values() if id(m) in self._ran and p.requires_grad and p.grad is None
            ]
            # A head whose loss is switched off after some steps is small, and none of them is disabled.
            disabled = all(id(m) in self._disabled for _, _, m in suspects.values())
            entries = sum(p.numel() for _, p, _ in suspects.values())
            large = entries >= _SHARE * sum(p.numel() for p in parameters)
            if count >= _MISSING and step.passes and len(ran) == len(suspects) > 0 and (disabled or large):
                step.report(
                    StepFinding(
                        code="no gradient",
                        tensor=ran[0],
                        others=tuple(ran[1:]),
                        step=step.number - 1,
                        message=f"{name_tensors(ran)} had a gradient in every step up to {step.number - 2} and "
                        f"{'has' if len(ran) == 1 else 'have'} none since, though they run in every pass. What they "
                        "compute is detached: was a hook added that returns detached outputs, or is a part run "
                        "inside torch.no_grad()?",
                    )
                )

    def _note(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._graded:
            self._ran.add(id(module))
            if not torch.is_grad_enabled():
                self._disabled.add(id(module))

    def _decide(self, step: TrainingStep, optimizer: Optimizer, optimized: set[int]) -> None:
        suspects, self._suspects = self._suspects, {}
        self.close(step)
        ran = [
            (name, p, module)
            for key, (name, p, module) in suspects.items()
            if key in optimized and p.grad is None and p.requires_grad and id(module) in self._ran
        ]
        disabled = [row for row in ran if id(row[2]) in self._disabled]
        entries = sum(p.numel() for p in grouped_parameters(optimizer))
        cut = ran if sum(p.numel() for _, p, _ in ran) >= _SHARE * entries else []
        names = [name for name, _, _ in disabled or cut]
        if not names or not step.passes:
            return
        cause = (
            "Their modules run inside torch.no_grad()."
            if disabled
            else "What they compute is detached, or passes through something that autograd does not follow."
        )
        step.report(
            StepFinding(
                code="no gradient",
                tensor=names[0],
                others=tuple(names[1:]),
                step=step.number - 1,
                message=f"{name_tensors(names)} run in every pass, {type(optimizer).__name__} holds them, and they "
                f"never get a gradient. {cause} Set requires_grad=False if that is meant.",
            )
        )
