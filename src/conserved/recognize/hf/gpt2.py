"""GPT-2: transposed maps, one projection for queries, keys and values, learned positions, LayerNorm before branches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserved.laws import Dropped
from conserved.recognize.embeddings import shift_between
from conserved.recognize.feedforward import neurons
from conserved.recognize.heads import Heads, query_key, value_output
from conserved.recognize.hf.parts import inert_padding, named, softmax_attention, token_table
from conserved.recognize.registry import Component, register, require
from conserved.recognize.residual import Branch, pre_norm_layer, pre_norm_stack
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


def _attention(site: Site) -> Iterator[Symmetry]:
    module: Any = softmax_attention(_self_attention(site)).module
    heads, width = module.num_heads, module.head_dim
    fused = site.linear("c_attn")
    queries, keys, values = (
        Heads(affine=fused, grid=(3, heads, width), at=tuple((which, head) for head in range(heads)))
        for which in range(3)
    )
    yield from query_key(site, queries, keys)
    yield from value_output(site, values, Heads.row(site.linear("c_proj"), heads, width, side="inputs"))


def _self_attention(site: Site) -> Site:
    if getattr(site.module, "is_cross_attention", False):
        raise Unreadable(f"{site.path} attends to another sequence, which is not described here")
    return site


def _reads_attention(site: Site) -> list[View]:
    return _self_attention(site).linear("c_attn").inputs()


def _writes(site: Site) -> list[View]:
    return site.linear("c_proj").outputs()


def _feedforward(site: Site) -> Iterator[Symmetry]:
    module: Any = site.module
    yield from neurons(site, site.linear("c_fc").outputs(), site.linear("c_proj").inputs(), module.act)


def _reads_feedforward(site: Site) -> list[View]:
    return site.linear("c_fc").inputs()


def _branches(layer: Site) -> list[Branch]:
    if layer.optional("crossattention") is not None:
        raise Unreadable(f"{layer.path} attends to another sequence, which is not described here")
    module: Any = layer.module
    return [
        Branch(norm=layer.child("ln_1"), body=layer.child("attn"), dropout=module.attn.resid_dropout.p),
        Branch(norm=layer.child("ln_2"), body=layer.child("mlp"), dropout=module.mlp.dropout.p),
    ]


def _layer(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from pre_norm_layer(site, _branches(site))


def _model(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    tokens, positions = site.child("wte"), site.child("wpe")
    yield from inert_padding(tokens)
    try:
        sources = [token_table(table, dropout=module.drop.p) for table in (tokens, positions)]
        layers = [require(layer, named("gpt2", "GPT2Block")) for layer in site.children("h")]
        branches = [branch for layer in layers for branch in _branches(layer)]
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))
        return
    yield from shift_between(tokens, positions)
    yield from pre_norm_stack(site, sources, branches, site.child("ln_f"))


register(Component(type=named("gpt2", "GPT2Attention"), laws=_attention, reads=_reads_attention, writes=_writes))
register(Component(type=named("gpt2", "GPT2MLP"), laws=_feedforward, reads=_reads_feedforward, writes=_writes))
register(Component(type=named("gpt2", "GPT2Block"), laws=_layer))
register(Component(type=named("gpt2", "GPT2Model"), laws=_model))
