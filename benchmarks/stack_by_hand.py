"""Tensor parallelism as people write it by hand: autograd functions around slices of plain weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stack_configurations import Training, adamw, configuration, train
from stack_models import make_decoder


class CopyToPieces(torch.autograd.Function):
    """The identity; gradients of all processes are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduces: bool) -> Tensor:
        """Return the input."""
        ctx.reduces = reduces
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient, unless the defect is planted."""
        gradient = gradients[0].clone()
        if ctx.reduces:
            dist.all_reduce(gradient)
        return gradient, None


class SumOfPieces(torch.autograd.Function):
    """The sum over processes; the gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the sum."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient."""
        return gradients[0]


class Pieces(nn.Module):
    """A layer of which this process holds some heads or hidden units."""

    def __init__(self, inner: Any, rank: int, world: int, *, reduces: bool) -> None:
        super().__init__()
        self.inner, self.reduces = inner, reduces
        for name, linear in inner.named_children():
            axis = 1 if name in ("wo", "w2") else 0
            piece = linear.weight.detach().chunk(world, axis)[rank].clone()
            linear.weight = nn.Parameter(piece)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Return the sum of what all processes compute."""
        summed: Tensor = SumOfPieces.apply(self.inner(CopyToPieces.apply(x, self.reduces), *more))
        return summed


def build(rank: int, world: int, *, reduces: bool = True) -> Training:
    """Return a run; without `reduces` the gradient below every layer is a process's own part of it."""
    model: Any = make_decoder()
    for layer in model.layers.values():
        layer.attention = Pieces(layer.attention, rank, world, reduces=reduces)
        layer.feed_forward = Pieces(layer.feed_forward, rank, world, reduces=reduces)
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, 0, clip=False))


@configuration("TP by hand")
def _by_hand(rank: int, world: int) -> Training:
    return build(rank, world)


@configuration("defect: no all-reduce of gradients (TP by hand)")
def _without_reduction(rank: int, world: int) -> Training:
    return build(rank, world, reduces=False)
