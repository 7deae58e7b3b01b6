"""Random programs with a wrong backward: what the check does not see.

A program of `compositions` gets a backward of its own, which computes the right gradients and then spoils one of them.
The check must refute every such target; those that it verifies are misses.
"""

from __future__ import annotations

import torch

from campaign.compositions import random_program
from campaign.target import Target, evaluate

DEFECTS = {
    "x times 1.01": "dx * 1.01",
    "x times 0.5": "dx * 0.5",
    "w times 1.01": "dw * 1.01",
    "last index of x dropped": "torch.cat([dx[:-1], torch.zeros_like(dx[-1:])])",
    "one entry of x dropped": "dx.flatten().index_fill(0, torch.argmax(dx.abs().flatten()), 0).view_as(dx)",
    "two rows of x exchanged": "dx[[1, 0, *range(2, len(dx))]]",
    "x clipped at its 90 % quantile": "dx.clamp(-q, q)",
    "large inputs dropped": "torch.where(x.abs() > 2, 0, dx)",
    "negative inputs times 1.02": "torch.where(x < 0, 1.02 * dx, dx)",
    "mean of x added": "dx + 0.02 * dx.abs().mean()",
    "rounded to eight bits": "dx.bfloat16().to(dx.dtype)",
}
"""Expressions for a wrong gradient, of the right ones `dx` and `dw`, the input `x` and a quantile `q` of |dx|."""

_WRAPPED = """
program = f

class Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return program(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            dx, dw = torch.autograd.grad(program(x, w), (x, w), g, materialize_grads=True)
        x, q = x.detach(), dx.abs().float().quantile(0.9).to(dx)
        return {dx}, {dw}

f = Wrapped.apply
"""


def targets_of(seed: int, dtypes: tuple[torch.dtype, ...]) -> list[Target]:
    """Return one program with each defect in turn."""
    program = random_program(seed, 2 + seed % 3)
    dtype = dtypes[seed % len(dtypes)]
    targets = []
    for defect, expression in DEFECTS.items():
        spoils_x = not defect.startswith("w")
        wrapped = _WRAPPED.format(dx=expression if spoils_x else "dx", dw="dw" if spoils_x else expression)
        name = f"program {seed}, {defect}"
        target = Target(name=name, group=defect, source=program.source + wrapped, dtype=dtype)
        if _differs(target):
            targets.append(target)
    return targets


def _differs(target: Target) -> bool:
    """Return whether the spoiled gradients are other ones, by more than the rounding of their precision."""
    namespace = evaluate(target.source)
    tensors = [tensor.double().requires_grad_() for tensor in namespace["make"](target.dtype, "cpu")]
    spoiled, right = (
        torch.autograd.grad(function(*tensors).square().sum(), tensors, materialize_grads=True)
        for function in (namespace["f"], namespace["program"])
    )
    limit = 2 * torch.finfo(target.dtype).eps
    return any(float((a - b).norm()) > limit * float(b.norm()) for a, b in zip(spoiled, right, strict=True))
