"""Normalisation: gains and biases against the maps that read them, and residual streams that only norms read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from conserved.kind import OneScale, Scaling, Translation
from conserved.laws import Dropped
from conserved.recognize.registry import Component, reads, register, require, writes
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry


def norm_at(site: Site) -> Site:
    """A site that must hold a LayerNorm or an RMSNorm over the last axis."""
    require(site, nn.LayerNorm, nn.RMSNorm)
    shape = getattr(site.module, "normalized_shape", ())
    if len(shape) != 1:
        raise Unreadable(f"{site.path} normalises over {len(shape)} axes at once")
    return site


def epsilon(norm: Site) -> float:
    """The ε of a norm; torch takes that of the input's precision where none is given."""
    module = norm.module
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    if module.eps is not None:
        return module.eps
    return torch.finfo(module.weight.dtype if module.weight is not None else torch.get_default_dtype()).eps


def gain(norm: Site, readers: Iterable[Site]) -> Iterator[Symmetry | Dropped]:
    """γ_j and β_j can be scaled against column j of every map that reads the norm's output."""
    try:
        plus = [norm_at(norm).view(name, axes=0) for name in ("weight", "bias") if norm.has(name)]
        minus = [view for reader in readers for view in reads(reader)]
    except Unreadable as problem:
        yield Dropped(norm.join("gain"), str(problem))
        return
    if plus:
        yield norm.symmetry("gain", Scaling(), plus=plus, minus=minus)


def bias_centre(block: Site, first: Site, between: Site, second: Site) -> Iterator[Symmetry | Dropped]:
    """Two branches in a row add constants to the stream; the norm between them forgets their mean.

    So c·**1** can move from the bias of the one to the bias of the other, whatever reads the stream afterwards.
    """
    try:
        if not isinstance(norm_at(between).module, nn.LayerNorm):
            return
        biases = [[view for view in writes(branch) if len(view.shape) == 1] for branch in (first, second)]
    except Unreadable as problem:
        yield Dropped(block.join("bias_centre"), str(problem))
        return
    if all(len(found) == 1 for found in biases):
        yield block.symmetry("bias_centre", Translation(), plus=biases[0], minus=biases[1])


def residual_stream(
    model: Site, writers: Iterable[Site], norms: Iterable[Site], *, fixed: bool
) -> Iterator[Symmetry | Dropped]:
    """A stream that is read through norms only: each norm forgets its scale, and a centring norm its mean.

    `fixed` says that something untrained is added to the stream (sinusoidal positions); then it cannot be rescaled.
    """
    try:
        forgetting = [norm_at(norm) for norm in norms]
        views = [view for writer in writers for view in writes(writer)]
    except Unreadable as problem:
        yield Dropped(model.join("stream"), str(problem))
        return
    if all(isinstance(norm.module, nn.LayerNorm) for norm in forgetting):
        for view in views:
            block, _, name = view.parameter.rpartition(".")
            yield Site(model.module, block, model.loss).symmetry(
                "centre", Translation(), plus=[view], minus=[], part=name
            )
    if not fixed:
        largest = max(epsilon(norm) for norm in forgetting)
        yield model.symmetry("stream_scale", OneScale(), plus=views, minus=[], epsilon=largest)


register(Component(type=nn.LayerNorm, part=True))
register(Component(type=nn.RMSNorm, part=True))
