"""Can every tensor learn from where it starts? Tensors stuck at zero, and units that are copies of each other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from conserved.symmetry.view import local
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, grouped_parameters, is_plain

_STEPS = 2
"""Steps that are looked at: a factor next to a zero has no gradient in the first, and has one in the second."""


class LearnableStarts(StepIdentity):
    """Looks at weights and gradients of the first two steps.

    A matrix of zeros whose gradient is zero twice never moves. Units with equal weights and equal gradients stay
    equal for ever, so that a layer has one unit many times.
    """

    name = "starts"

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._stuck: dict[str, int] = {}
        self._equal: dict[str, int] = {}

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        count = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if count > _STEPS:
            return
        optimized = {id(p) for p in grouped_parameters(optimizer)}
        rows = [
            (name, local(p.detach()), local(p.grad.detach()))
            for name, p in step.structure.parameters.items()
            if id(p) in optimized and p.grad is not None and is_plain(p) and is_plain(p.grad)
        ]
        rows = [(name, p, g) for name, p, g in rows if p.ndim > 1 and p.shape[0] > 1 and p.numel() > p.shape[0]]
        if rows:
            names, number = [name for name, _, _ in rows], step.number
            numbers = torch.stack([_measure(p, g) for _, p, g in rows])
            step.read(numbers, lambda arrived: self._judge(names, arrived, number))

    def _judge(self, names: list[str], numbers: Tensor, number: int) -> Iterator[StepFinding]:
        for name, (stuck, equal, moves) in zip(names, numbers.tolist(), strict=True):
            self._stuck[name] = self._stuck.get(name, 0) + int(stuck and not moves)
            self._equal[name] = self._equal.get(name, 0) + int(equal and moves)
        if not any(row[2] for row in numbers.tolist()):
            return
        stuck = [name for name in names if self._stuck[name] == _STEPS]
        if stuck:
            yield StepFinding(
                code="stuck",
                tensor=stuck[0],
                others=tuple(stuck[1:]),
                step=number - 1,
                message=f"{name_tensors(stuck)} started at zero and its gradient is exactly zero as "
                "well: it will never "
                "move. Of two factors, only one may start at zero.",
            )
        equal = [name for name in names if self._equal[name] == _STEPS]
        if equal:
            yield StepFinding(
                code="stuck",
                certain=True,
                tensor=equal[0],
                others=tuple(equal[1:]),
                step=number - 1,
                message=f"All units of {name_tensors(equal)} are equal and have equal gradients: they "
                "stay copies of each "
                "other. Start from random weights.",
            )


def _measure(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return whether a matrix is zero, whether its rows and those of its gradient are equal, and whether it moves."""
    equal = (weight == weight[:1]).all() & (gradient == gradient[:1]).all()
    return torch.stack((~weight.any(), equal, gradient.any())).double()
