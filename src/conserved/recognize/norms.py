"""Normalisation: gains and biases against the maps that read them, and residual streams that only norms read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from conserved.kind import OneScale, Scaling, Translation
from conserved.laws import Dropped
from conserved.recognize.registry import Component, reads, register, writes
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry


def gain(norm: Site, readers: Iterable[Site]) -> Iterator[Symmetry | Dropped]:
    """γ_j and β_j can be scaled against column j of every map that reads the norm's output."""
    plus = [norm.view(name, axes=0) for name in ("weight", "bias") if norm.has(name)]
    if not plus:
        return
    try:
        minus = [view for reader in readers for view in reads(reader)]
    except Unreadable as problem:
        yield Dropped(norm.join("gain"), str(problem))
    else:
        yield norm.symmetry("gain", Scaling(), plus=plus, minus=minus)


def bias_centre(block: Site, first: Site, between: Site, second: Site) -> Iterator[Symmetry]:
    """Two branches in a row add constants to the stream; the norm between them forgets their mean.

    So c·**1** can move from the bias of the one to the bias of the other, whatever reads the stream afterwards.
    """
    if not isinstance(between.module, nn.LayerNorm):
        return
    try:
        biases = [[view for view in writes(branch) if view.m == 1] for branch in (first, second)]
    except Unreadable:
        return  # `gain` has already said that the branch is not known
    if all(len(found) == 1 for found in biases):
        yield block.symmetry("bias_centre", Translation(), plus=biases[0], minus=biases[1])


def residual_stream(
    model: Site, writers: Iterable[Site], norms: Iterable[Site], *, fixed: bool
) -> Iterator[Symmetry | Dropped]:
    """A stream that is read through norms only: each norm forgets its scale, and a centring norm its mean.

    `fixed` says that something untrained is added to the stream (sinusoidal positions); then it cannot be rescaled.
    """
    norms = list(norms)
    try:
        views = [view for writer in writers for view in writes(writer)]
    except Unreadable as problem:
        yield Dropped(model.join("stream"), str(problem))
        return
    if all(isinstance(norm.module, nn.LayerNorm) for norm in norms):
        for view in views:
            block, _, name = view.parameter.rpartition(".")
            yield Site(model.module, block, model.loss).symmetry(
                "centre", Translation(), plus=[view], minus=[], part=name
            )
    if not fixed:
        epsilon = max(_epsilon(norm.module) for norm in norms)
        yield model.symmetry("stream_scale", OneScale(), plus=views, minus=[], epsilon=epsilon)


def _epsilon(norm: nn.Module) -> float:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    return torch.finfo(torch.float64).eps if norm.eps is None else norm.eps


register(Component(type=nn.LayerNorm, part=True))
register(Component(type=nn.RMSNorm, part=True))
