"""Whole transformers made of the blocks of this package."""

from __future__ import annotations

from collections.abc import Iterator

from conserved.blocks.transformer import DecoderLM, SinusoidalPositions, TransformerBlock, VisionTransformer
from conserved.laws import Dropped
from conserved.recognize.embeddings import class_shift, shift_into_positions
from conserved.recognize.norms import Writer, gain
from conserved.recognize.registry import Component, register, require
from conserved.recognize.residual import Branch, pre_norm_layer, pre_norm_stack
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry


def _branches(layer: Site) -> list[Branch]:
    pairs = (("norm1", "attention"), ("norm2", "feedforward"))
    return [Branch(norm=layer.child(norm), body=layer.child(body)) for norm, body in pairs]


def _block(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from pre_norm_layer(site, _branches(site))


def _model(site: Site, token_parameter: str) -> Iterator[Symmetry | Dropped]:
    """A stack of pre-norm blocks between an embedding and a head that reads through the final norm."""
    embedding, positions, norm, head = (site.child(name) for name in ("embedding", "positions", "norm", "head"))
    yield from gain(norm, [head])
    try:
        yield from shift_into_positions(embedding, token_parameter, positions)
        layers = [require(layer, TransformerBlock) for layer in site.children("layers")]
        sources = [Writer.of(embedding), Writer.of(positions)]
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))
    else:
        branches = [branch for layer in layers for branch in _branches(layer)]
        fixed = isinstance(positions.module, SinusoidalPositions)
        yield from pre_norm_stack(site, sources, branches, norm, fixed=fixed)
    if site.is_whole_model:
        yield from class_shift(head, site.linear("head").outputs())


def _decoder(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from _model(site, token_parameter="weight")


def _vision(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from _model(site, token_parameter="bias")


register(Component(type=TransformerBlock, laws=_block))
register(Component(type=DecoderLM, laws=_decoder))
register(Component(type=VisionTransformer, laws=_vision))
