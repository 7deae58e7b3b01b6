"""Chains of plain layers in torch.nn.Sequential: each map against the next, through what keeps scales apart.

Walking along the chain, a `_Source` remembers what makes the features at this place and what they went through since.
The next map reads them: between two maps with nothing but linear operations in between all of GL cancels, through a
homogeneous activation only positive scalings do, and a norm forgets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from conserved.kind import GeneralLinear, OneScale, Scaling, Translation
from conserved.laws import Dropped
from conserved.recognize.activation import degree, is_linear
from conserved.recognize.embeddings import class_shift
from conserved.recognize.norms import Writer, centre
from conserved.recognize.registry import Component, component_of, reads, register, writes
from conserved.recognize.site import Site, Unreadable, own_forward
from conserved.symmetry import Leg, Symmetry
from conserved.view import View

_SCALE_FREE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_MEANS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What makes the features at a place of the chain: by feature, and through what they have come since.

    `linear`: only maps that act on all features alike. `power`: the degree of the activations. `flattened`: each
    feature has become a run of neighbouring ones. `spatial`: features are channels, with positions beside them.
    """

    views: list[View]
    linear: bool
    power: int = 1
    flattened: bool = False
    spatial: bool = False


def _plain(module: nn.Module, *types: type[nn.Module]) -> bool:
    return type(module) in types and not own_forward(module)


def _links(site: Site) -> Iterator[Site]:
    """The layers of a chain in order, inner chains unrolled."""
    for name, child in site.module._modules.items():
        if child is None:
            continue
        here = site.child(name)
        if _plain(child, nn.Sequential):
            yield from _links(here)
        else:
            yield here


def _chain(site: Site) -> Iterator[Symmetry | Dropped]:
    source: _Source | None = None
    links = list(_links(site))
    for here in links:
        component = component_of(here.module)
        if _passes(here.module, source):
            source = _passed(here.module, source)
        elif _plain(here.module, *_BATCH_NORMS):
            yield from _batch_norm(here, source)
            source = _gain(here, spatial=source is not None and source.spatial)
        elif component is not None and component.norm is not None:
            yield from _norm(here, source)
            source = _gain(here)
        else:
            yield from _joint(here, source)
            source = _made(here)
    if links and site.is_whole_model and _plain(links[-1].module, nn.Linear):
        yield from class_shift(links[-1], writes(links[-1]))


def _passes(module: nn.Module, source: _Source | None) -> bool:
    """Whether a module hands every feature on by itself; pooling and flattening do so with channels only."""
    if degree(module) is not None or _plain(module, *_SCALE_FREE):
        return True
    return source is not None and source.spatial and (_plain(module, *_MAXIMA, *_MEANS) or _flattens(module))


def _passed(module: nn.Module, source: _Source | None) -> _Source | None:
    """What the source has become behind such a module."""
    if source is None or is_linear(module) or _plain(module, *_MEANS):
        return source
    if _flattens(module):
        return replace(source, flattened=True, spatial=False)
    return replace(source, linear=False, power=source.power * (degree(module) or 1))


def _flattens(module: nn.Module) -> bool:
    return _plain(module, nn.Flatten) and getattr(module, "start_dim", 0) == 1 and getattr(module, "end_dim", 0) == -1


def _made(here: Site) -> _Source | None:
    """What this module's output is made by; None if that is not known."""
    try:
        return _Source(views=writes(here), linear=True, spatial=_plain(here.module, *_CONVOLUTIONS))
    except Unreadable:
        return None


def _gain(here: Site, *, spatial: bool = False) -> _Source | None:
    """A norm's gain and bias make what comes out of it."""
    try:
        views = [here.view(name, axes=0) for name in ("weight", "bias") if here.has(name)]
    except Unreadable:
        return None
    return _Source(views=views, linear=False, spatial=spatial) if views else None


def _joint(here: Site, source: _Source | None) -> Iterator[Symmetry]:
    """A map that reads what the source makes: scaled or mixed in the one, undone in the other."""
    if source is None:
        return
    try:
        columns = reads(here)
    except Unreadable:
        return
    n = source.views[0].n
    if source.spatial != _plain(here.module, *_CONVOLUTIONS):
        return  # One of the two acts on positions and not on channels.
    one_position = all(view.n == n for view in columns)
    if source.flattened and not one_position:
        columns = [_runs(view, n) for view in columns if view.n % n == 0]
    if not columns or any(view.n != n for view in columns):
        return
    if source.linear and source.power == 1 and (one_position or not source.flattened):
        yield here.symmetry("linear_pair", GeneralLinear(), plus=source.views, minus=columns)
        return
    legs = tuple([Leg(view) for view in source.views] + [Leg(view, -source.power) for view in columns])
    yield Symmetry(block=here.path, family="neurons", kind=Scaling(), legs=legs)


def _runs(view: View, channels: int) -> View:
    """The columns of a map that reads flattened channels, by channel."""
    return View.of(view.parameter, view.shape, grid=(view.shape[0], channels, view.n // channels), axes=1)


def _norm(here: Site, source: _Source | None) -> Iterator[Symmetry | Dropped]:
    """A norm over features forgets the scale of what is before it and, right behind a linear map, its mean."""
    component = component_of(here.module)
    if source is None or source.spatial or source.flattened or component is None or component.norm is None:
        return
    try:
        norm = component.norm(here)
    except Unreadable as problem:
        yield Dropped(here.join("forgotten_scale"), str(problem))
        return
    yield here.symmetry("forgotten_scale", OneScale(), plus=source.views, minus=[], epsilon=norm.epsilon)
    if norm.centres and source.linear:
        yield from centre(here, [Writer.made_by(source.views)])


def _batch_norm(here: Site, source: _Source | None) -> Iterator[Symmetry]:
    """Statistics of the batch forget each channel's scale and shift; running statistics forget nothing."""
    module: Any = here.module
    if source is None or source.flattened or not (module.training or not module.track_running_stats):
        return
    yield here.symmetry("forgotten_scales", Scaling(), plus=source.views, minus=[], epsilon=module.eps)
    if source.linear:
        for bias in source.views:
            if len(bias.shape) == 1:
                row = View.of(bias.parameter, bias.shape, grid=(1, *bias.shape))
                yield here.symmetry("inert_bias", Translation(), plus=[row], minus=[])


def _reads_convolution(site: Site) -> list[View]:
    return [_ungrouped(site).view("weight", axes=1)]


def _writes_convolution(site: Site) -> list[View]:
    return [_ungrouped(site).view(name, axes=0) for name in ("weight", "bias") if site.has(name)]


def _ungrouped(site: Site) -> Site:
    module: Any = site.module
    if module.groups != 1:
        raise Unreadable(f"{site.path} is a convolution in {module.groups} groups, which is not described here")
    return site


for _type in _CONVOLUTIONS:
    register(Component(type=_type, reads=_reads_convolution, writes=_writes_convolution, part=True))
for _norm_type in _BATCH_NORMS:
    register(Component(type=_norm_type, part=True))
register(Component(type=nn.Sequential, laws=_chain))
