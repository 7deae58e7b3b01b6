"""torch.nn.MultiheadAttention: packed or separate projections, extra keys that are learned or zero."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from conserved.kind import GeneralLinear, Translation
from conserved.recognize.heads import Heads
from conserved.recognize.registry import Component, register
from conserved.recognize.site import Site
from conserved.symmetry import Symmetry
from conserved.view import View

_PACKED = ("q", "k", "v")


def _module(site: Site) -> nn.MultiheadAttention:
    assert isinstance(site.module, nn.MultiheadAttention)
    return site.module


def _head(site: Site, which: int, head: int) -> list[View]:
    """Rows of one head of the queries, keys or values: of the weight, and of the bias all three share."""
    module = _module(site)
    heads, width, wide = module.num_heads, module.head_dim, module.embed_dim
    if module.in_proj_weight is not None:
        grid, shape = (3, heads, width, wide), (3 * wide, wide)
        views = [site.view("in_proj_weight", grid=grid, axes=2, pick={0: which, 1: head}, shape=shape)]
    else:
        name = f"{_PACKED[which]}_proj_weight"
        columns = site.view(name).m
        views = [site.view(name, grid=(heads, width, columns), axes=1, pick={0: head}, shape=(wide, columns))]
    if site.has("in_proj_bias"):
        views.append(site.view("in_proj_bias", grid=(3, heads, width), axes=2, pick={0: which, 1: head}))
    extra = {1: "bias_k", 2: "bias_v"}.get(which)
    if extra is not None and site.has(extra):
        views.append(site.view(extra, grid=(heads, width), axes=1, pick={0: head}))
    return views


def _attention(site: Site) -> Iterator[Symmetry]:
    """A learned extra key and value move with the others; an extra key and value of zeros stay zero."""
    module = _module(site)
    output = Heads.row(site.linear("out_proj"), module.num_heads, module.head_dim, side="inputs")
    for head in range(module.num_heads):
        query, key, value = (_head(site, which, head) for which in range(3))
        yield site.symmetry("query_key", GeneralLinear(), plus=query, minus=key, part=str(head))
        yield site.symmetry("value_output", GeneralLinear(), plus=value, minus=output.views(head), part=str(head))
    if site.has("in_proj_bias") and not module.add_zero_attn:
        # q·b is the same for every key if every key gets b: then softmax does not see it.
        wide = module.embed_dim
        rows = [site.view("in_proj_bias", grid=(1, 3, wide), pick={1: 1})]
        if site.has("bias_k"):
            rows.append(site.view("bias_k", grid=(1, wide)))
        yield site.symmetry("inert_bias", Translation(), plus=rows, minus=[])


def reads_from(site: Site, *which: int) -> list[View]:
    """By input feature, the weights through which queries (0), keys (1) and values (2) are read."""
    module = _module(site)
    wide = module.embed_dim
    if module.in_proj_weight is None:
        return [site.view(f"{_PACKED[one]}_proj_weight", axes=1) for one in which]
    if which == (0, 1, 2):
        return [site.view("in_proj_weight", axes=1)]
    return [site.view("in_proj_weight", grid=(3, wide, wide), axes=2, pick={0: one}) for one in which]


def reads_itself(site: Site) -> list[View]:
    """Self-attention: all three read the same input."""
    return reads_from(site, 0, 1, 2)


def writes(site: Site) -> list[View]:
    """What makes the output."""
    return site.linear("out_proj").outputs()


register(Component(type=nn.MultiheadAttention, laws=_attention, writes=writes))
