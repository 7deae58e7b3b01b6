"""GPT-NeoX: queries, keys and values interleaved by head, heads turned in part, branches side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserved.laws import Dropped
from conserved.recognize.feedforward import neurons
from conserved.recognize.heads import Heads, query_key, value_output
from conserved.recognize.hf.parts import inert_padding, named, softmax_attention, token_table, turned_features
from conserved.recognize.registry import Component, register, require
from conserved.recognize.residual import Branch, pre_norm_layer, pre_norm_stack
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


def _attention(site: Site) -> Iterator[Symmetry]:
    module: Any = softmax_attention(site).module
    width = module.head_size
    fused, output = site.linear("query_key_value"), site.linear("dense")
    heads = output.shape[1] // width
    queries, keys, values = (
        Heads(affine=fused, grid=(heads, 3, width), at=tuple((head, which) for head in range(heads)))
        for which in range(3)
    )
    turned = turned_features(width, module.rotary_ndims / width)
    yield from query_key(site, queries, keys, turned=turned)
    yield from value_output(site, values, Heads.row(output, heads, width, side="inputs"))


def _reads_attention(site: Site) -> list[View]:
    return site.linear("query_key_value").inputs()


def _writes_attention(site: Site) -> list[View]:
    return site.linear("dense").outputs()


def _feedforward(site: Site) -> Iterator[Symmetry]:
    module: Any = site.module
    up, down = site.linear("dense_h_to_4h"), site.linear("dense_4h_to_h")
    yield from neurons(site, up.outputs(), down.inputs(), module.act)


def _reads_feedforward(site: Site) -> list[View]:
    return site.linear("dense_h_to_4h").inputs()


def _writes_feedforward(site: Site) -> list[View]:
    return site.linear("dense_4h_to_h").outputs()


def _branches(layer: Site) -> list[Branch]:
    module: Any = layer.module
    return [
        Branch(
            norm=layer.child("input_layernorm"),
            body=layer.child("attention"),
            dropout=module.post_attention_dropout.p,
        ),
        Branch(
            norm=layer.child("post_attention_layernorm"), body=layer.child("mlp"), dropout=module.post_mlp_dropout.p
        ),
    ]


def _layer(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    yield from pre_norm_layer(site, _branches(site), parallel=module.use_parallel_residual)


def _model(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    tokens = site.child("embed_in")
    yield from inert_padding(tokens)
    try:
        source = token_table(tokens, dropout=module.emb_dropout.p)
        layers = [require(layer, named("gpt_neox", "GPTNeoXLayer")) for layer in site.children("layers")]
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))
        return
    branches = [branch for layer in layers for branch in _branches(layer)]
    yield from pre_norm_stack(site, [source], branches, site.child("final_layer_norm"))


register(
    Component(
        type=named("gpt_neox", "GPTNeoXAttention"), laws=_attention, reads=_reads_attention, writes=_writes_attention
    )
)
register(
    Component(
        type=named("gpt_neox", "GPTNeoXMLP"), laws=_feedforward, reads=_reads_feedforward, writes=_writes_feedforward
    )
)
register(Component(type=named("gpt_neox", "GPTNeoXLayer"), laws=_layer))
register(Component(type=named("gpt_neox", "GPTNeoXModel"), laws=_model))
