"""Whole transformers: which norm is read by what, and everything that writes into the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

from conserved.blocks.transformer import DecoderLM, SinusoidalPositions, TransformerBlock, VisionTransformer
from conserved.laws import Dropped
from conserved.recognize.embeddings import class_shift, shift_into_positions
from conserved.recognize.norms import bias_centre, gain, residual_stream
from conserved.recognize.registry import Component, register, require
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry


def _block(site: Site) -> Iterator[Symmetry | Dropped]:
    attention, feedforward, norm2 = (site.child(name) for name in ("attention", "feedforward", "norm2"))
    yield from gain(site.child("norm1"), [attention])
    yield from gain(norm2, [feedforward])
    yield from bias_centre(site, attention, norm2, feedforward)


def _model(site: Site, token_parameter: str) -> Iterator[Symmetry | Dropped]:
    """A stack of pre-norm blocks between an embedding and a head that reads through the final norm."""
    embedding, positions, norm, head = (site.child(name) for name in ("embedding", "positions", "norm", "head"))
    yield from gain(norm, [head])
    try:
        yield from shift_into_positions(embedding, token_parameter, positions)
        layers = [require(layer, TransformerBlock) for layer in site.children("layers")]
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))
    else:
        yield from residual_stream(
            site,
            writers=[embedding, positions, *(layer.child(n) for layer in layers for n in ("attention", "feedforward"))],
            norms=[norm, *(layer.child(n) for layer in layers for n in ("norm1", "norm2"))],
            fixed=isinstance(positions.module, SinusoidalPositions),
        )
    if site.is_whole_model:
        yield from class_shift(head, site.linear("head").outputs())


def _decoder(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from _model(site, token_parameter="weight")


def _vision(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from _model(site, token_parameter="bias")


register(Component(type=TransformerBlock, laws=_block))
register(Component(type=DecoderLM, laws=_decoder))
register(Component(type=VisionTransformer, laws=_vision))
