"""DeepSeek-V3's latent attention: heads made from two normalised latents, and one rotary key for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from conserved.kind import OneScale
from conserved.laws import Dropped
from conserved.recognize.heads import Heads, Pairing, scores, value_output
from conserved.recognize.hf.parts import named, softmax_attention
from conserved.recognize.norms import gain, norm_at
from conserved.recognize.registry import Component, register
from conserved.recognize.site import Site
from conserved.symmetry import Symmetry
from conserved.view import View


def _attention(site: Site) -> Iterator[Symmetry | Dropped]:
    """Queries and keys have a part without positions and a rotary one, whose key all heads share."""
    module: Any = softmax_attention(site).module
    heads, plain, rotary, wide = module.num_heads, module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    direct = module.q_lora_rank is None
    queries = Heads.row(site.linear("q_proj" if direct else "q_b_proj"), heads, plain + rotary)
    latent = Heads.row(site.linear("kv_b_proj"), heads, plain + wide)
    compressed = Heads.row(site.linear("kv_a_proj_with_mqa"), 1, module.kv_lora_rank + rotary)
    pairing: Pairing = "interleaved" if module.config.rope_interleave else "half"
    yield from scores(site, queries.within(0, plain), latent.within(0, plain), None)
    shared = compressed.within(module.kv_lora_rank, module.kv_lora_rank + rotary)
    yield from scores(site, queries.within(plain, plain + rotary), shared, pairing, family="query_key_rotary")
    outputs = Heads.row(site.linear("o_proj"), heads, wide, side="inputs")
    yield from value_output(site, latent.within(plain, plain + wide), outputs)
    yield from _latent(site, replace(compressed, span=(0, module.kv_lora_rank)), "kv_a_layernorm", "kv_b_proj")
    if not direct:
        yield from _latent(site, Heads.row(site.linear("q_a_proj"), 1, module.q_lora_rank), "q_a_layernorm", "q_b_proj")


def _latent(site: Site, made: Heads, norm: str, reader: str) -> Iterator[Symmetry | Dropped]:
    """A latent is normalised, which forgets its scale, and read by one map."""
    scale = norm_at(site.child(norm)).epsilon
    yield made.affine.site.symmetry("latent_scale", OneScale(), plus=made.views(0), minus=[], epsilon=scale)
    yield from gain(site.child(norm), [site.child(reader)])


def _reads(site: Site) -> list[View]:
    module: Any = site.module
    first = "q_proj" if module.q_lora_rank is None else "q_a_proj"
    return [view for name in (first, "kv_a_proj_with_mqa") for view in site.linear(name).inputs()]


def _writes(site: Site) -> list[View]:
    return site.linear("o_proj").outputs()


register(Component(type=named("deepseek_v3", "DeepseekV3Attention"), laws=_attention, reads=_reads, writes=_writes))
