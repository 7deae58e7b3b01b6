"""OPT: LayerNorm before branches (or, in one size, after them), learned positions, a ReLU network inside the layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserved.kind import GeneralLinear, Translation
from conserved.laws import Dropped
from conserved.recognize.embeddings import shift_between
from conserved.recognize.feedforward import neurons
from conserved.recognize.heads import Heads, query_key, value_output
from conserved.recognize.hf.parts import inert_padding, named, softmax_attention, token_table
from conserved.recognize.norms import Writer, gain, norm_at
from conserved.recognize.registry import Component, reads, register, require, stranger_above, writes
from conserved.recognize.residual import Branch, post_norm_sum, pre_norm_layer, pre_norm_stack
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


def _attention(site: Site) -> Iterator[Symmetry]:
    module: Any = softmax_attention(site).module
    heads, width = module.num_heads, module.head_dim
    queries, keys, values = (Heads.row(site.linear(name), heads, width) for name in ("q_proj", "k_proj", "v_proj"))
    yield from query_key(site, queries, keys)
    yield from value_output(site, values, Heads.row(site.linear("out_proj"), heads, width, side="inputs"))


def _reads_attention(site: Site) -> list[View]:
    return [view for name in ("q_proj", "k_proj", "v_proj") for view in site.linear(name).inputs()]


def _writes_attention(site: Site) -> list[View]:
    return site.linear("out_proj").outputs()


def _reads_feedforward(layer: Site) -> list[View]:
    return layer.linear("fc1").inputs()


def _writes_feedforward(layer: Site) -> list[View]:
    return layer.linear("fc2").outputs()


def _branches(layer: Site) -> list[Branch]:
    module: Any = layer.module
    return [
        Branch(norm=layer.child("self_attn_layer_norm"), body=layer.child("self_attn"), dropout=module.dropout),
        Branch(
            norm=layer.child("final_layer_norm"),
            body=layer,
            dropout=module.dropout,
            reads=_reads_feedforward,
            writes=_writes_feedforward,
        ),
    ]


def _layer(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    yield from neurons(site, site.linear("fc1").outputs(), site.linear("fc2").inputs(), module.activation_fn)
    if module.do_layer_norm_before:
        yield from pre_norm_layer(site, _branches(site))
    else:
        yield from _post_norm_sums(site, [])


def _post_norm_sums(layer: Site, before: list[View]) -> Iterator[Symmetry | Dropped]:
    """Both sums of a layer with norms behind its branches; `before` is what makes its input."""
    module: Any = layer.module
    first, second = (norm_at(layer.child(name)) for name in ("self_attn_layer_norm", "final_layer_norm"))
    attention = layer.child("self_attn")
    attends = Writer.made_by(writes(attention), dropout=module.dropout)
    yield from post_norm_sum(layer, before, reads(attention), attends, first, part="attention")
    if not before:
        feeds = Writer.made_by(_writes_feedforward(layer), dropout=module.dropout)
        start = first.gain() + first.bias()
        yield from post_norm_sum(layer, start, _reads_feedforward(layer), feeds, second, part="feedforward")


def _model(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    tokens, positions = site.child("embed_tokens"), site.child("embed_positions")
    yield from inert_padding(tokens)
    yield from _unused_positions(positions)
    projection = site.optional("project_in")
    try:
        if module.layerdrop:
            raise Unreadable(f"layers are left out at random with probability {module.layerdrop:g}")
        require(positions, named("opt", "OPTLearnedPositionalEmbedding"))
        layers = [require(layer, named("opt", "OPTDecoderLayer")) for layer in site.children("layers")]
        table = token_table(tokens)
        if projection is None:
            sources = [table]
        else:
            into = site.linear("project_in")
            yield tokens.symmetry("linear_pair", GeneralLinear(), plus=table.views, minus=into.inputs())
            sources = [Writer.made_by(into.outputs())]
        sources.append(Writer.made_by([positions.view("weight", axes=1)]))
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))
        return
    if projection is None:
        yield from shift_between(tokens, positions)
    final = site.optional("final_layer_norm")
    if final is not None:
        branches = [branch for layer in layers for branch in _branches(layer)]
        yield from pre_norm_stack(site, sources, branches, final)
        if site.optional("project_out") is not None:
            yield from gain(final, [site.child("project_out")])
    elif not module.config.do_layer_norm_before:
        stranger = stranger_above(site)
        if stranger:
            yield Dropped(site.join("sum_scale"), stranger)
        yield from _chained(site, layers, [] if stranger else [v for source in sources for v in source.views])


def final_norm(decoder: Site) -> Site | None:
    """The norm at the end of the decoder, if its output is what comes out."""
    if decoder.optional("project_out") is not None:
        return None
    final = decoder.optional("final_layer_norm")
    layers = list(decoder.children("layers"))
    behind = final is None and layers and not getattr(layers[-1].module, "do_layer_norm_before", True)
    return layers[-1].child("final_layer_norm") if behind else final


def projected_pair(decoder: Site, head: Site) -> Iterator[Symmetry]:
    """Where the decoder ends with a projection, it and the head are two linear maps in a row."""
    if decoder.optional("project_out") is not None:
        outputs = decoder.linear("project_out").outputs()
        yield head.symmetry("linear_pair", GeneralLinear(), plus=outputs, minus=reads(head))


def _unused_positions(positions: Site) -> Iterator[Symmetry]:
    """Positions are looked up from `offset` on; the row before that belongs to padding, which is masked."""
    module: Any = positions.module
    shape = tuple(positions.view("weight").shape)
    view = positions.view("weight", grid=(1, *shape), pick={1: (0, module.offset)})
    yield positions.symmetry("unused", Translation(), plus=[view], minus=[])


def _chained(site: Site, layers: list[Site], start: list[View]) -> Iterator[Symmetry | Dropped]:
    """Norms behind branches: the sum of each layer's first branch starts with what the layer before ends with."""
    for layer in layers:
        for item in _post_norm_sums(layer, start):
            if isinstance(item, Dropped) or item.family == "sum_scale":
                yield item
        last = norm_at(layer.child("final_layer_norm"))
        start = last.gain() + last.bias()


register(Component(type=named("opt", "OPTLearnedPositionalEmbedding"), part=True))
register(
    Component(type=named("opt", "OPTAttention"), laws=_attention, reads=_reads_attention, writes=_writes_attention)
)
register(Component(type=named("opt", "OPTDecoderLayer"), laws=_layer))
register(Component(type=named("opt", "OPTDecoder"), laws=_model))
register(Component(type=named("opt", "OPTModel")))
