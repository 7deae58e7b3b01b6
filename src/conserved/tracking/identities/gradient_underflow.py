"""Do gradients underflow? Entries below what float16 can hold, in passes that nothing scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.symmetry.view import local
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.run_objects import RunObjects
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, grouped_parameters, is_plain

_SMALLEST = torch.finfo(torch.float16).smallest_normal
"""Below it, float16 loses bits; below a thousandth of it, everything."""


_BITS = 64
"""Entries of each gradient whose last bits are looked at."""


class GradientUnderflow(StepIdentity):
    """Looks at the typical size of gradients whose passes ran in float16, as the optimizer is about to use them.

    Gradients that a scaler has unscaled were larger when they were computed: runs with a scaler are left alone.
    """

    name = "underflow"
    spoils = True

    def __init__(self) -> None:
        self._half = False
        self._reported = self._looked = self._coarse = False
        """Whether an underflow was reported, bits were looked at, and a pass ran in an autocast region."""

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        if self._reported or not torch.is_grad_enabled():
            return
        first = next((p for p in module.parameters() if p.is_floating_point()), None)
        if first is not None:
            kind = first.device.type
            cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
            self._half = (torch.get_autocast_dtype(kind) if cast else first.dtype) == torch.float16
            self._coarse |= cast

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        if not self._looked and not self._coarse:
            self._look_at_bits(step)
        half, self._half = self._half, False
        if not half or self._reported:
            return
        pairs = [
            (name, p.grad)
            for name, p in step.structure.parameters.items()
            if p.grad is not None and p.ndim > 1 and is_plain(p.grad) and local(p.grad).numel()
        ]
        optimized = {id(p) for p in grouped_parameters(optimizer)}
        if pairs and any(id(p) in optimized for p in step.structure.parameters.values()):
            names = [name for name, _ in pairs]
            numbers = torch.stack([_typical(local(g.detach())) for _, g in pairs])
            step.read(numbers, lambda arrived: self._judge(names, arrived))

    def _look_at_bits(self, step: TrainingStep) -> None:
        """Note gradients in float32 that have the bits of bfloat16 only, though all passes run in float32."""
        self._looked = True
        gradients = [
            local(p.grad) for p in step.structure.parameters.values() if p.grad is not None and is_plain(p.grad)
        ]
        fine = [g.detach().flatten()[:_BITS] for g in gradients if g.dtype == torch.float32 and g.ndim > 1]
        if fine:
            some = torch.cat([g.to(fine[0].device) for g in fine])
            numbers = torch.stack([(some == some.bfloat16().float()).all(), some.any()])
            step.read(numbers.double(), lambda arrived: self._note_bits(step, arrived))

    def _note_bits(self, step: TrainingStep, numbers: Tensor) -> Iterator[StepFinding]:
        if bool(numbers.all()):
            step.notes.append("gradients of float32 weights are rounded to bfloat16 before they are used")
        yield from ()

    def _judge(self, names: list[str], numbers: Tensor) -> Iterator[StepFinding]:
        small = [(value, name) for value, name in zip(numbers.tolist(), names, strict=True) if value < _SMALLEST]
        if 2 * len(small) > len(names):
            self._reported = True
            if any(
                scaler is not None and scaler.is_enabled() for scaler in (ref() for ref in RunObjects.search().scalers)
            ):
                return
            value, worst = min(small)
            yield StepFinding(
                code="underflow",
                tensor=worst,
                others=tuple(name for _, name in small if name != worst),
                value=value,
                limit=_SMALLEST,
                message="Gradients underflow: passes run in float16, and half of the entries of the "
                f"gradient of {worst} "
                f"are below {max(value, 1e-8):.1e}, where float16 has lost their bits. Use torch.amp.GradScaler, or "
                "bfloat16.",
            )


def _typical(gradient: Tensor) -> Tensor:
    """Return the median size of entries in the rows of a gradient that are not all zero."""
    rows = gradient.float().abs().flatten(1)
    used = rows[rows.amax(1) > 0]
    return (used if len(used) else rows).median().double()
