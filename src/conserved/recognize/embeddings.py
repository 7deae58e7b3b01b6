"""Embeddings, positions and output heads: the maps at the two ends of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from conserved.blocks.transformer import LearnedPositions, SinusoidalPositions
from conserved.kind import Translation
from conserved.laws import Dropped
from conserved.recognize.registry import Component, register, require, stranger_above
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


def shift_into_positions(tokens: Site, name: str, positions: Site) -> Iterator[Symmetry]:
    """Every token gets one embedding and one position, so a vector can move from all of one into all of the other.

    `name` is the parameter of `tokens` each token gets exactly one row of: the embedding table, or a patch bias.
    """
    if not isinstance(positions.module, LearnedPositions) or not tokens.has(name):
        return
    require(positions, LearnedPositions)
    _table_writes(tokens) if isinstance(tokens.module, nn.Embedding) else require(tokens, nn.Linear)
    table = tokens.view(name)
    rows = tokens.view(name, grid=(1, *table.shape)) if len(table.shape) == 1 else table
    yield tokens.symmetry("positions", Translation(), plus=[rows], minus=[positions.view("weight")])


def shift_between(tokens: Site, others: Site) -> Iterator[Symmetry | Dropped]:
    """Two tables that give every token exactly one row each: a vector can move from all of one into the other."""
    part = others.path.rpartition(".")[2]
    stranger = stranger_above(tokens)
    if stranger:
        yield Dropped(f"{tokens.join('positions')}[{part}]", stranger)
        return
    yield tokens.symmetry(
        "positions", Translation(), plus=[tokens.view("weight")], minus=[others.view("weight")], part=part
    )


def class_shift(head: Site, outputs: list[View]) -> Iterator[Symmetry]:
    """Cross-entropy does not see a shift common to all logits: the sum over classes of weights and of biases."""
    if head.loss == "cross_entropy":
        for view in outputs:
            part = view.parameter.rpartition(".")[2]
            yield head.symmetry("class_shift", Translation(), plus=[view], minus=[], part=part)


def _linear_reads(site: Site) -> list[View]:
    return [site.view("weight", axes=1)]


def _linear_writes(site: Site) -> list[View]:
    return [site.view(name, axes=0) for name in ("weight", "bias") if site.has(name)]


def _table_writes(site: Site) -> list[View]:
    require(site, nn.Embedding, LearnedPositions)
    trained_as_looked_up(site)
    return [site.view("weight", axes=1)]


def trained_as_looked_up(site: Site) -> Site:
    """The same site, unless its table is trained differently from how it is used; padding is for `lookups` to judge."""
    module = site.module
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise Unreadable(f"{site.path} has max_norm, which changes how its rows are trained")
        if module.scale_grad_by_freq:
            raise Unreadable(f"{site.path} has scale_grad_by_freq, which changes how its rows are trained")
    return site


def _writes_nothing(site: Site) -> list[View]:
    return []


register(Component(type=nn.Linear, reads=_linear_reads, writes=_linear_writes, part=True))
register(Component(type=nn.Embedding, writes=_table_writes, part=True))
register(Component(type=LearnedPositions, writes=_table_writes, part=True))
register(Component(type=SinusoidalPositions, writes=_writes_nothing, part=True))
register(Component(type=nn.Identity, writes=_writes_nothing, part=True))
