"""Does the loss take what the model gives? Probabilities given to a loss that makes probabilities of them again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.boundary import Boundary, Hook
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, tensors_in

_STEPS = 2
"""Steps in which outputs are looked at."""

_EQUAL = 2e-3
"""How far numbers that are the same weight may differ, relatively; gradients in bfloat16 are left out."""

_ROWS = 4096
"""Rows of outputs that are looked at."""


class OutputLoss(StepIdentity):
    """Compares the gradient of outputs that are probabilities with that of a loss that applies softmax or sigmoid.

    Such a loss of an output p has the gradient w (softmax(p) − y), with one weight w for a row and y = 0 but for one
    class. A loss of probabilities has another one: −y / p, or 2 (p − y).
    """

    name = "outputs"
    question = "Does the loss take what the model gives?"

    def __init__(self) -> None:
        self._found = ""
        self._steps = 0
        self._handles: list[Any] = []

    def after_forward(self, step: TrainingStep, module: nn.Module, outputs: Any) -> None:
        if self._steps >= _STEPS or not torch.is_grad_enabled():
            return
        for one in list(tensors_in(outputs))[:4]:
            kind = _probabilities(one)
            if kind:
                watched = partial(self._compare, kind, one.detach()[:_ROWS])
                self._handles.append(one.register_hook(Hook(Boundary(logs=False), "outputs", watched)))

    def _compare(self, kind: str, outputs: Tensor, gradient: Tensor) -> None:
        twice = _softmax_twice if kind == "softmax" else _sigmoid_twice
        if twice(outputs.double(), gradient.detach()[:_ROWS].double()):
            self._found = kind

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._steps += 1
        self.close(step)
        found, self._found = self._found, ""
        if found:
            self._steps = _STEPS
            loss = "cross_entropy" if found == "softmax" else "binary_cross_entropy_with_logits"
            step.report(
                StepFinding(
                    code="probabilities",
                    message=f"The model gives probabilities, and the loss applies {found} to them "
                    "again: its gradient at "
                    f"the outputs is that of {found} of a {found}. Give {loss} the numbers from before the {found}.",
                )
            )

    def close(self, step: TrainingStep) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _probabilities(outputs: Tensor) -> str:
    """Return which function made probabilities of these outputs; empty if they are none."""
    fine = outputs.dtype in (torch.float32, torch.float64) and outputs.requires_grad and outputs.numel() > 1
    if not fine or outputs.ndim == 0:
        return ""
    with torch.no_grad():
        low, high = torch.aminmax(outputs)
        if float(low) < 0 or float(high) > 1 or float(low) == float(high):
            return ""
        if outputs.ndim > 1 and outputs.shape[-1] > 1:
            sums = outputs.sum(-1)
            if bool(((sums - 1).abs() < 1e-4).all()):
                return "softmax"
    return "sigmoid" if "Sigmoid" in type(outputs.grad_fn).__name__ else ""


def _softmax_twice(outputs: Tensor, gradient: Tensor) -> bool:
    """Return whether every row of a gradient is w (softmax(p) − y) with y one class."""
    p, g = outputs.flatten(0, -2), gradient.flatten(0, -2)
    rows = g.abs().amax(-1) > 0
    if p.shape != g.shape or not bool(rows.any()):
        return False
    weights = g[rows] / p[rows].softmax(-1)
    target = weights.argmin(-1, keepdim=True)
    others = weights.scatter(-1, target, torch.nan)
    negative = bool((weights.gather(-1, target) < 0).all()) and bool((others.nan_to_num(1.0) > 0).all())
    # With two classes there is one other, and rows are compared.
    spread = others if others.shape[-1] > 2 else others.nansum(-1)[None]
    high, low = spread.nan_to_num(-torch.inf).amax(-1), spread.nan_to_num(torch.inf).amin(-1)
    several = others.shape[-1] > 2 or others.shape[0] > 3
    return negative and several and bool((high - low <= _EQUAL * high).all())


def _sigmoid_twice(outputs: Tensor, gradient: Tensor) -> bool:
    """Return whether every entry of a gradient is w (sigmoid(p) − y) with y zero or one."""
    p, g = outputs.flatten(), gradient.flatten()
    used = g != 0
    p, g = p[used].sigmoid(), g[used]
    if len(g) < 4 or bool((g > 0).all()) or bool((g < 0).all()):
        return False
    weights = torch.where(g > 0, g / p, -g / (1 - p))
    return bool(weights.amax() - weights.amin() <= _EQUAL * weights.amax())
