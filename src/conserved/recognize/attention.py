"""The attention blocks of this package."""

from __future__ import annotations

from collections.abc import Iterator

from conserved.blocks.attention import Attention, ReluAttention
from conserved.kind import OneScale
from conserved.laws import Dropped
from conserved.recognize.heads import Heads, forgotten_scales, query_key, query_key_gain, value_output
from conserved.recognize.norms import norm_at
from conserved.recognize.registry import Component, register
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


def _attention(site: Site) -> Iterator[Symmetry | Dropped]:
    module = site.module
    assert isinstance(module, Attention)
    heads, groups, width = module.heads, module.kv_heads, module.head_dim
    queries = Heads.row(site.linear("q"), heads, width, groups=groups)
    keys, values = (Heads.row(site.linear(name), groups, width) for name in ("k", "v"))
    outputs = Heads.row(site.linear("o"), heads, width, groups=groups, side="inputs")
    pairing = module.rotary
    norms = [site.optional(name) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        yield from query_key(site, queries, keys, turned=width if pairing else 0, pairing=pairing or "half")
    elif norms[0] is not None and norms[1] is not None:
        query_norm, key_norm = norm_at(norms[0]), norm_at(norms[1])
        if query_norm.centres or key_norm.centres:
            raise Unreadable(f"{site.path or 'the model'} centres its queries or keys, which is not described here")
        yield from forgotten_scales(site, "query_scale", queries, query_norm)
        yield from forgotten_scales(site, "key_scale", keys, key_norm)
        yield from query_key_gain(site, query_norm, key_norm, pairing)
    else:
        yield Dropped(site.join("query_key"), "only one of queries and keys is normalised")
    yield from value_output(site, values, outputs)


def _relu_attention(site: Site) -> Iterator[Symmetry]:
    """relu(x W xᵀ) is homogeneous in W, so one scale moves between W_QK and W_V (the blog's law)."""
    whole = [site.view(name, axes=(0, 1)) for name in ("qk", "v")]
    yield site.symmetry("scores_value", OneScale(), plus=whole[:1], minus=whole[1:])


def _reads(site: Site) -> Iterator[View]:
    for name in ("q", "k", "v"):
        yield from site.linear(name).inputs()


def _writes(site: Site) -> list[View]:
    return site.linear("o").outputs()


register(Component(type=Attention, laws=_attention, reads=_reads, writes=_writes))
register(Component(type=ReluAttention, laws=_relu_attention))
