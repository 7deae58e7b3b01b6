"""The transformer layers of torch.nn, with norms in front of their branches or behind them, and stacks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from conserved.laws import Dropped
from conserved.recognize.feedforward import neurons
from conserved.recognize.norms import Writer, gain_against, norm_at, residual_stream
from conserved.recognize.registry import Component, register, require
from conserved.recognize.residual import Branch, post_norm_sum, pre_norm_layer
from conserved.recognize.site import Site, Unreadable
from conserved.recognize.torch_nn.multihead import reads_from, reads_itself
from conserved.recognize.torch_nn.multihead import writes as writes_attention
from conserved.symmetry import Symmetry
from conserved.view import View


def _reads_cross(site: Site) -> list[View]:
    return reads_from(site, 0)


def _reads_feedforward(layer: Site) -> list[View]:
    return layer.linear("linear1").inputs()


def _writes_feedforward(layer: Site) -> list[View]:
    return layer.linear("linear2").outputs()


@dataclass(frozen=True, slots=True)
class _Step:
    """One branch of a layer: its norm, the module it is (none for the feed-forward network), its dropout."""

    norm: str
    body: str
    dropout: str
    reads: Callable[[Site], Iterable[View]]
    writes: Callable[[Site], Iterable[View]]


_SELF = _Step("norm1", "self_attn", "dropout1", reads_itself, writes_attention)
_STEPS = {
    nn.TransformerEncoderLayer: (
        _SELF,
        _Step("norm2", "", "dropout2", _reads_feedforward, _writes_feedforward),
    ),
    nn.TransformerDecoderLayer: (
        _SELF,
        _Step("norm2", "multihead_attn", "dropout2", _reads_cross, writes_attention),
        _Step("norm3", "", "dropout3", _reads_feedforward, _writes_feedforward),
    ),
}


def _branches(layer: Site) -> list[Branch]:
    require(layer, *_STEPS)
    steps = next(steps for cls, steps in _STEPS.items() if isinstance(layer.module, cls))
    for step in steps:
        if step.body:
            require(layer.child(step.body), nn.MultiheadAttention)
    return [
        Branch(
            norm=layer.child(step.norm),
            body=layer.child(step.body) if step.body else layer,
            dropout=float(getattr(layer.module, step.dropout).p),
            reads=step.reads,
            writes=step.writes,
        )
        for step in steps
    ]


def _layer(site: Site) -> Iterator[Symmetry | Dropped]:
    module = site.module
    assert isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
    up, down = site.linear("linear1").outputs(), site.linear("linear2").inputs()
    yield from neurons(site, up, down, module.activation)
    branches = _branches(site)
    if module.norm_first:
        yield from pre_norm_layer(site, branches)
    else:
        yield from _sums(site, branches, [])


def _sums(layer: Site, branches: list[Branch], start: list[View]) -> Iterator[Symmetry | Dropped]:
    """Every sum of a layer with norms behind its branches; `start` is what makes the layer's input, if it is known."""
    for branch in branches:
        norm, readers = norm_at(branch.norm), list(branch.reads(branch.body))
        part = branch.norm.path.rpartition(".")[2]
        yield from post_norm_sum(layer, start, readers, branch.writer(), norm, part=part)
        start = norm.gain() + norm.bias()


def _stack(site: Site) -> Iterator[Symmetry | Dropped]:
    """Layers in a row: what comes in is from outside, so the stream cannot be rescaled, only shifted by its writers."""
    try:
        layers = [require(layer, *_STEPS) for layer in site.children("layers")]
        branches = [_branches(layer) for layer in layers]
        before: list[View] = []
        for layer, parts in zip(layers, branches, strict=True):
            if not layer.module.norm_first:
                for item in _sums(layer, parts[:1], before):
                    if isinstance(item, Symmetry) and item.family == "sum_scale":
                        yield item
                last = norm_at(parts[-1].norm)
                before = last.gain() + last.bias()
        final = site.optional("norm")
        if final is not None and all(layer.module.norm_first for layer in layers):
            every = [branch for parts in branches for branch in parts]
            norms = [*(norm_at(branch.norm) for branch in every), norm_at(final)]
            writers: list[Writer] = [branch.writer() for branch in every]
            yield from residual_stream(site, writers, norms, fixed=True)
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))


def _memory(site: Site) -> Iterator[Symmetry | Dropped]:
    """What the encoder ends with is read by the keys and values of every decoder layer's cross-attention."""
    encoder, decoder = (require(site.child(name), *_STACKS) for name in ("encoder", "decoder"))
    norm = encoder.optional("norm")
    if norm is not None:
        layers = [require(layer, nn.TransformerDecoderLayer) for layer in decoder.children("layers")]
        yield from gain_against(
            norm, lambda: [v for one in layers for v in reads_from(one.child("multihead_attn"), 1, 2)]
        )


_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)

for _type in _STEPS:
    register(Component(type=_type, laws=_layer))
register(Component(type=nn.TransformerEncoder, laws=_stack))
register(Component(type=nn.TransformerDecoder, laws=_stack))
register(Component(type=nn.Transformer, laws=_memory))
