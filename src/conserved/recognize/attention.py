"""Attention: queries against keys, values against the output projection, head by head."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from conserved.blocks.attention import Attention, ReluAttention
from conserved.kind import ComplexScaling, GeneralLinear, OneScale, Scaling, Translation
from conserved.laws import Dropped
from conserved.recognize.norms import epsilon
from conserved.recognize.registry import Component, register, require
from conserved.recognize.site import Linear, Site
from conserved.symmetry import Symmetry
from conserved.view import View


def _attention(site: Site) -> Iterator[Symmetry | Dropped]:
    module = site.module
    assert isinstance(module, Attention)
    norms = [getattr(module, name) is not None for name in ("q_norm", "k_norm")]
    if not any(norms):
        yield from _query_key(site, module)
    elif all(norms):
        yield from _normalised_query_key(site, module)
    else:
        yield Dropped(site.join("query_key"), "only one of queries and keys is normalised")
    yield from _value_output(site, module)


def _query_key(site: Site, module: Attention) -> Iterator[Symmetry]:
    """Scores see q·k only, so any g with its g^{-T} cancels; rotary leaves the g that commute with its phases.

    A key head that several query heads share is one leg against all of theirs.
    """
    groups, repeat, width = module.kv_heads, module.heads // module.kv_heads, module.head_dim
    rows, axes = _pairs(width, module.rotary)
    kind = ComplexScaling() if module.rotary else GeneralLinear()
    query, key = site.linear("q"), site.linear("k")
    query_axes, key_axes = tuple(2 + axis for axis in axes), tuple(1 + axis for axis in axes)
    for group in range(groups):
        queries = [query.outputs((groups, repeat, *rows), query_axes, {0: group, 1: one}) for one in range(repeat)]
        yield site.symmetry(
            "query_key",
            kind,
            plus=[view for views in queries for view in views],
            minus=key.outputs((groups, *rows), key_axes, {0: group}),
            part=str(group),
        )
    if not module.rotary and key.site.has("bias"):
        # q·b_k is the same for every key, and softmax does not see a shift of a whole row: b_k has no gradient.
        yield key.site.symmetry(
            "inert_bias", Translation(), plus=[key.site.view("bias", grid=(1, groups * width), axes=0)], minus=[]
        )


def _normalised_query_key(site: Site, module: Attention) -> Iterator[Symmetry]:
    """A norm forgets each head's scale, up to its ε; what is left between q and k are the two gains.

    With rotary a gain may only be scaled plane by plane: turning it does not commute with the entrywise product.
    """
    width = module.head_dim
    for name, family, heads in (("q", "query_scale", module.heads), ("k", "key_scale", module.kv_heads)):
        small = epsilon(require(site.child(f"{name}_norm"), nn.RMSNorm))
        for head in range(heads):
            legs = site.linear(name).outputs((heads, width), 1, {0: head})
            yield site.symmetry(family, OneScale(), plus=legs, minus=[], part=str(head), epsilon=small)
    rows, axes = _pairs(width, module.rotary)
    planes = axes[:1]
    gains = [site.child(name).view("weight", grid=rows, axes=planes, shape=(width,)) for name in ("q_norm", "k_norm")]
    yield site.symmetry("query_key_gain", Scaling(), plus=gains[:1], minus=gains[1:])


def _value_output(site: Site, module: Attention) -> Iterator[Symmetry]:
    """Between values and output projection there are only linear maps and sums, so all of GL(head_dim) cancels."""
    groups, repeat, width = module.kv_heads, module.heads // module.kv_heads, module.head_dim
    value, output = site.linear("v"), site.linear("o")
    for group in range(groups):
        yield site.symmetry(
            "value_output",
            GeneralLinear(),
            plus=value.outputs((groups, width), 1, {0: group}),
            minus=[v for one in range(repeat) for v in output.inputs((groups, repeat, width), 2, {0: group, 1: one})],
            part=str(group),
        )


def _pairs(width: int, rotary: str | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How a head's rows split into rotary planes, and the order that puts the two rows of a plane side by side."""
    if rotary is None:
        return (width,), (0,)
    return ((width // 2, 2), (0, 1)) if rotary == "interleaved" else ((2, width // 2), (1, 0))


def _relu_attention(site: Site) -> Iterator[Symmetry]:
    """relu(x W xᵀ) is homogeneous in W, so one scale moves between W_QK and W_V (the blog's law)."""
    whole = [site.view(name, axes=(0, 1)) for name in ("qk", "v")]
    yield site.symmetry("scores_value", OneScale(), plus=whole[:1], minus=whole[1:])


def _reads(site: Site) -> Iterator[View]:
    for name in ("q", "k", "v"):
        yield from site.linear(name).inputs()


def _writes(site: Site) -> list[View]:
    projection: Linear = site.linear("o")
    return projection.outputs()


register(Component(type=Attention, laws=_attention, reads=_reads, writes=_writes))
register(Component(type=ReluAttention, laws=_relu_attention))
