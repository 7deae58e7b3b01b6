"""Vision transformers: patches and a class token with learned positions, LayerNorm before branches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from conserved.kind import Translation
from conserved.laws import Dropped
from conserved.recognize.feedforward import neurons
from conserved.recognize.heads import Heads, query_key, value_output
from conserved.recognize.hf.parts import named, softmax_attention
from conserved.recognize.norms import Writer
from conserved.recognize.registry import Component, register, require
from conserved.recognize.residual import Branch, pre_norm_layer, pre_norm_stack
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


def _attention(site: Site) -> Iterator[Symmetry]:
    module: Any = softmax_attention(site).module
    heads, width = module.num_attention_heads, module.head_dim
    queries, keys, values = (Heads.row(site.linear(name), heads, width) for name in ("q_proj", "k_proj", "v_proj"))
    yield from query_key(site, queries, keys)
    yield from value_output(site, values, Heads.row(site.linear("o_proj"), heads, width, side="inputs"))


def _reads_attention(site: Site) -> list[View]:
    return [view for name in ("q_proj", "k_proj", "v_proj") for view in site.linear(name).inputs()]


def _writes_attention(site: Site) -> list[View]:
    return site.linear("o_proj").outputs()


def _feedforward(site: Site) -> Iterator[Symmetry]:
    module: Any = site.module
    yield from neurons(site, site.linear("fc1").outputs(), site.linear("fc2").inputs(), module.activation_fn)


def _reads_feedforward(site: Site) -> list[View]:
    return site.linear("fc1").inputs()


def _writes_feedforward(site: Site) -> list[View]:
    return site.linear("fc2").outputs()


def _branches(layer: Site) -> list[Branch]:
    module: Any = layer.module
    pairs = (("layernorm_before", "attention"), ("layernorm_after", "mlp"))
    return [Branch(norm=layer.child(norm), body=layer.child(body), dropout=module.dropout.p) for norm, body in pairs]


def _layer(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from pre_norm_layer(site, _branches(site))


def patch_writers(
    site: Site, patches: Site, cls_token: str | None, positions: str, *, dropout: float = 0.0
) -> tuple[list[Writer], list[Symmetry]]:
    """What starts the stream of a vision transformer, and the vectors that can move into its learned positions.

    Position 0 belongs to the class token, if there is one, and the others to the patches, which share the bias of
    their projection.
    """
    require(patches, nn.Conv2d)
    shape = site.view(positions, axes=0).shape
    table = site.view(positions, axes=2, shape=shape)
    patch_weight = patches.view("weight", axes=0)
    patch_bias = [patches.view("bias", axes=0)] if patches.has("bias") else []
    views = [patch_weight, *patch_bias, table]
    shifts: list[Symmetry] = []
    first = 0
    if cls_token is not None:
        views.append(site.view(cls_token, axes=2))
        first = 1
        rows = [site.view(cls_token, axes=1), site.view(positions, axes=1, pick={1: (0, 1)})]
        shifts.append(site.symmetry("positions", Translation(), plus=rows[:1], minus=rows[1:], part=cls_token))
    if patch_bias:
        bias = patches.view("bias", grid=(1, *patch_bias[0].shape))
        rest = site.view(positions, axes=1, pick={1: (first, shape[1])})
        shifts.append(site.symmetry("positions", Translation(), plus=[bias], minus=[rest], part="patches"))
    return [Writer(views=views, shiftable=[] if dropout else views, dropout=dropout)], shifts


def _model(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    embeddings = site.child("embeddings")
    try:
        require(embeddings, named("vit", "ViTEmbeddings"))
        if embeddings.has("mask_token"):
            raise Unreadable(f"{embeddings.path} has a mask token, which replaces patches that are not named here")
        sources, shifts = patch_writers(
            embeddings,
            embeddings.child("patch_embeddings.projection"),
            "cls_token",
            "position_embeddings",
            dropout=module.embeddings.dropout.p,
        )
        layers = [require(layer, named("vit", "ViTLayer")) for layer in site.children("layers")]
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))
        return
    yield from shifts
    branches = [branch for layer in layers for branch in _branches(layer)]
    yield from pre_norm_stack(site, sources, branches, site.child("layernorm"))


register(Component(type=named("vit", "ViTPatchEmbeddings"), part=True))
register(Component(type=named("vit", "ViTEmbeddings"), part=True))
register(Component(type=named("vit", "ViTPooler"), part=True))
register(
    Component(type=named("vit", "ViTAttention"), laws=_attention, reads=_reads_attention, writes=_writes_attention)
)
register(
    Component(type=named("vit", "ViTMLP"), laws=_feedforward, reads=_reads_feedforward, writes=_writes_feedforward)
)
register(Component(type=named("vit", "ViTLayer"), laws=_layer))
register(Component(type=named("vit", "ViTModel"), laws=_model))
