"""Decoders shaped like Llama: rotary grouped attention, gated feed-forward networks, RMS norms around both.

Mistral, Qwen 2 (biases), Qwen 3 (query/key norm), Gemma 2 and 3 (norms on both sides of a branch, capped scores) and
Phi-3 (fused projections, heads turned in part) differ in what their modules hold, which is read off them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserved.laws import Dropped
from conserved.recognize.feedforward import gated_neurons
from conserved.recognize.heads import Heads, forgotten_scales, query_key, query_key_gain, value_output
from conserved.recognize.hf.parts import (
    config_of,
    inert_padding,
    named,
    softmax_attention,
    token_table,
    turned_features,
)
from conserved.recognize.norms import norm_at
from conserved.recognize.registry import Component, register, require
from conserved.recognize.residual import Branch, pre_norm_layer, pre_norm_stack
from conserved.recognize.site import Linear, Site, Unreadable, qualified_name
from conserved.symmetry import Symmetry
from conserved.view import View

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
}
"""The families whose attention is described here, and the prefix of their class names."""

STACKS = {family: f"{prefix}Model" for family, prefix in FAMILIES.items()} | {
    "gemma3": "Gemma3TextModel",
    "deepseek_v3": "DeepseekV3Model",
}
"""Those whose stack is, with the name of the class that holds it."""


def _attention(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = softmax_attention(site).module
    width, repeat = module.head_dim, module.num_key_value_groups
    output = site.linear("o_proj")
    heads = output.shape[1] // width
    queries, keys, values = _projections(site, heads, heads // repeat, width)
    norms = [site.optional(name) for name in ("q_norm", "k_norm")]
    turned = _turned(site, width)
    if norms == [None, None]:
        capped = getattr(module, "attn_logit_softcapping", None) is not None
        yield from query_key(site, queries, keys, turned=turned, shift_seen=capped)
    elif norms[0] is not None and norms[1] is not None and turned == width:
        query_norm, key_norm = norm_at(norms[0]), norm_at(norms[1])
        yield from forgotten_scales(site, "query_scale", queries, query_norm)
        yield from forgotten_scales(site, "key_scale", keys, key_norm)
        yield from query_key_gain(site, query_norm, key_norm, "half")
    else:
        yield Dropped(site.join("query_key"), "queries and keys are not normalised and turned alike")
    yield from value_output(site, values, Heads.row(output, heads, width, groups=heads // repeat, side="inputs"))


def _projections(site: Site, heads: int, groups: int, width: int) -> tuple[Heads, Heads, Heads]:
    """Queries, keys and values: three maps, or the rows of one."""
    if site.optional("qkv_proj") is None:
        queries = Heads.row(site.linear("q_proj"), heads, width, groups=groups)
        keys, values = (Heads.row(site.linear(name), groups, width) for name in ("k_proj", "v_proj"))
        return queries, keys, values
    fused = site.linear("qkv_proj")
    grid = (heads + 2 * groups, width)
    queries, keys, values = (
        Heads(affine=fused, grid=grid, at=tuple((start + head,) for head in range(count)))
        for start, count in ((0, heads), (heads, groups), (heads + groups, groups))
    )
    return queries, keys, values


def _turned(site: Site, width: int) -> int:
    """How many features of a head carry rotary positions: all of them, but in Phi-3 the fraction its config has."""
    if qualified_name(type(site.module)) != named("phi3", "Phi3Attention"):
        return width
    parameters = getattr(config_of(site), "rope_parameters", None) or {}
    return turned_features(width, parameters.get("partial_rotary_factor", 1.0))


def _reads_attention(site: Site) -> Iterator[View]:
    names = ("q_proj", "k_proj", "v_proj") if site.optional("qkv_proj") is None else ("qkv_proj",)
    for name in names:
        yield from site.linear(name).inputs()


def _writes_attention(site: Site) -> list[View]:
    return site.linear("o_proj").outputs()


def _activation(site: Site) -> object:
    for name in ("act_fn", "activation_fn"):
        if hasattr(site.module, name):
            return getattr(site.module, name)
    raise Unreadable(f"{site.path} has no activation where one was expected")


def _gate_and_up(site: Site) -> tuple[list[View], list[View]]:
    """The two branches by neuron: two maps, or the two halves of one."""
    if site.optional("gate_up_proj") is None:
        return site.linear("gate_proj").outputs(), site.linear("up_proj").outputs()
    fused = site.linear("gate_up_proj")
    halves = (2, fused.shape[0] // 2)
    return fused.outputs(halves, 1, {0: 0}), fused.outputs(halves, 1, {0: 1})


def _gated(site: Site) -> Iterator[Symmetry]:
    gate, up = _gate_and_up(site)
    yield from gated_neurons(site, gate, up, site.linear("down_proj").inputs(), _activation(site))


def _reads_gated(site: Site) -> Iterator[View]:
    names = ("gate_proj", "up_proj") if site.optional("gate_up_proj") is None else ("gate_up_proj",)
    for name in names:
        yield from site.linear(name).inputs()


def _writes_gated(site: Site) -> list[View]:
    down: Linear = site.linear("down_proj")
    return down.outputs()


def _branches(layer: Site) -> list[Branch]:
    """Norm, branch and, where the layer has one, the norm behind the branch."""
    sandwich = layer.optional("pre_feedforward_layernorm") is not None
    second = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    return [
        Branch(
            norm=layer.child("input_layernorm"),
            body=layer.child("self_attn"),
            after=layer.child("post_attention_layernorm") if sandwich else None,
            dropout=_dropout(layer, "resid_attn_dropout"),
        ),
        Branch(
            norm=layer.child(second),
            body=layer.child("mlp"),
            after=layer.child("post_feedforward_layernorm") if sandwich else None,
            dropout=_dropout(layer, "resid_mlp_dropout"),
        ),
    ]


def _dropout(layer: Site, name: str) -> float:
    return float(getattr(getattr(layer.module, name, None), "p", 0.0))


def _layer(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from pre_norm_layer(site, _branches(site))


def _model(site: Site) -> Iterator[Symmetry | Dropped]:
    tokens = site.child("embed_tokens")
    yield from inert_padding(tokens)
    try:
        layers = [require(layer, *_LAYERS) for layer in site.children("layers")]
        source = token_table(tokens)
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))
        return
    branches = [branch for layer in layers for branch in _branches(layer)]
    yield from pre_norm_stack(site, [source], branches, site.child("norm"))


_LAYERS = [named(family, f"{prefix}DecoderLayer") for family, prefix in FAMILIES.items()] + [
    named("deepseek_v3", "DeepseekV3DecoderLayer")
]

for _family, _prefix in FAMILIES.items():
    register(
        Component(
            type=named(_family, f"{_prefix}Attention"),
            laws=_attention,
            reads=_reads_attention,
            writes=_writes_attention,
        )
    )
for _family, _prefix in (FAMILIES | {"deepseek_v3": "DeepseekV3"}).items():
    if _family != "mixtral":
        register(Component(type=named(_family, f"{_prefix}MLP"), laws=_gated, reads=_reads_gated, writes=_writes_gated))
for _name in _LAYERS:
    register(Component(type=_name, laws=_layer))
for _family, _class in STACKS.items():
    register(Component(type=named(_family, _class), laws=_model))
