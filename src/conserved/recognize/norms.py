"""Normalisation: gains and biases against the maps that read them, and sums that only norms read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from conserved.kind import OneScale, Scaling, Translation
from conserved.laws import Dropped
from conserved.recognize.registry import Component, component_of, reads, register, writes
from conserved.recognize.site import Norm, Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


def norm_at(site: Site) -> Norm:
    """A site that must hold a norm over the last axis."""
    component = component_of(site.module)
    if component is None or component.norm is None:
        raise Unreadable(
            f"{site.path or 'the model'} ({type(site.module).__name__}) is not known to compute what LayerNorm "
            "or RMSNorm does"
        )
    return component.norm(site)


def gain(norm: Site, readers: Iterable[Site]) -> Iterator[Symmetry | Dropped]:
    """γ_j and β_j can be scaled against column j of every map that reads the norm's output."""
    yield from gain_against(norm, lambda: [view for reader in readers for view in reads(reader)])


def gain_against(norm: Site, columns: Callable[[], Iterable[View]]) -> Iterator[Symmetry | Dropped]:
    """The same, for readers that are given as views."""
    try:
        found = norm_at(norm)
        plus = found.gain() + found.bias()
        minus = list(columns())
    except Unreadable as problem:
        yield Dropped(norm.join("gain"), str(problem))
        return
    if plus:
        yield norm.symmetry("gain", Scaling(), plus=plus, minus=minus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """What a module adds to a sum: the views that make it, and those of them to which a constant may be added.

    Not to a gain, which multiplies, and not where dropout follows: it would hit the constant differently by feature.
    """

    views: list[View]
    shiftable: list[View]
    dropout: float = 0.0

    @staticmethod
    def of(site: Site, *, dropout: float = 0.0) -> Writer:
        """What the module at `site` writes."""
        component = component_of(site.module)
        if component is not None and component.norm is not None:
            norm = component.norm(site)
            return Writer(views=norm.gain() + norm.bias(), shiftable=norm.bias())
        return Writer.made_by(writes(site), dropout=dropout)

    @staticmethod
    def made_by(views: list[View], *, dropout: float = 0.0) -> Writer:
        """What these views write."""
        return Writer(views=views, shiftable=[] if dropout else views, dropout=dropout)


def centre(model: Site, writers: Iterable[Writer]) -> Iterator[Symmetry | Dropped]:
    """A centring norm does not see c·**1** in what it reads: for each writer, the sum over features is conserved."""
    for writer in writers:
        for view in writer.shiftable:
            block, _, name = view.parameter.rpartition(".")
            site = Site(model.module, block, model.loss)
            yield site.symmetry("centre", Translation(), plus=[view], minus=[], part=name)
        if writer.dropout:
            block = writer.views[0].parameter.rpartition(".")[0]
            reason = f"dropout of {writer.dropout:g} acts between it and the norm that would not see its mean"
            yield Dropped(f"{block}.centre", reason)


def residual_stream(
    model: Site, writers: Sequence[Writer], norms: Sequence[Norm], *, fixed: bool = False
) -> Iterator[Symmetry | Dropped]:
    """A stream that is read through norms only: each norm forgets its scale, and a centring norm its mean.

    `fixed` says that something untrained is added to the stream (sinusoidal positions); then it cannot be rescaled.
    """
    if all(norm.centres for norm in norms):
        yield from centre(model, writers)
    if not fixed:
        views = [view for writer in writers for view in writer.views]
        largest = max(norm.epsilon for norm in norms)
        yield model.symmetry("stream_scale", OneScale(), plus=views, minus=[], epsilon=largest)


def layer_norm(site: Site) -> Norm:
    """How to read torch.nn.LayerNorm, and classes that compute the same."""
    module = site.module
    assert isinstance(module, nn.LayerNorm)
    _one_axis(site, module.normalized_shape)
    return Norm(site=site, centres=True, epsilon=module.eps)


def _rms_norm(site: Site) -> Norm:
    """torch takes the ε of the input's precision where none is given."""
    module = site.module
    assert isinstance(module, nn.RMSNorm)
    _one_axis(site, module.normalized_shape)
    if module.eps is not None:
        return Norm(site=site, centres=False, epsilon=module.eps)
    precision = module.weight.dtype if module.weight is not None else torch.get_default_dtype()
    return Norm(site=site, centres=False, epsilon=torch.finfo(precision).eps)


def _one_axis(site: Site, shape: Sequence[int]) -> None:
    if len(shape) != 1:
        raise Unreadable(f"{site.path} normalises over {len(shape)} axes at once")


register(Component(type=nn.LayerNorm, part=True, norm=layer_norm))
register(Component(type=nn.RMSNorm, part=True, norm=_rms_norm))
