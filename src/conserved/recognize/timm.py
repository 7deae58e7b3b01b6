"""Vision transformers of timm: fused queries, keys and values, and a learned scale behind each branch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from conserved.kind import Scaling
from conserved.laws import Dropped
from conserved.recognize.embeddings import class_shift
from conserved.recognize.feedforward import neurons
from conserved.recognize.heads import Heads, forgotten_scales, query_key, query_key_gain, value_output
from conserved.recognize.hf.vit import patch_writers
from conserved.recognize.norms import Writer, gain, layer_norm, norm_at, residual_stream
from conserved.recognize.registry import Component, register, require
from conserved.recognize.residual import Branch, pre_norm_layer
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View

ATTENTION = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
BLOCK = "timm.models.vision_transformer.Block"
SCALES = ("timm.layers.layer_scale.LayerScale", "timm.models.vision_transformer.LayerScale")
PATCHES = "timm.layers.patch_embed.PatchEmbed"


def _attention(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = _plain_attention(site).module
    heads, width = module.num_heads, module.head_dim
    fused = site.linear("qkv")
    queries, keys, values = (
        Heads(affine=fused, grid=(3, heads, width), at=tuple((which, head) for head in range(heads)))
        for which in range(3)
    )
    norms = [site.child(name) for name in ("q_norm", "k_norm")]
    if all(type(norm.module) is nn.Identity for norm in norms):
        yield from query_key(site, queries, keys)
    else:
        query_norm, key_norm = (norm_at(norm) for norm in norms)
        if query_norm.centres or key_norm.centres:
            yield Dropped(site.join("query_key"), "queries and keys are centred, which is not described here")
        else:
            yield from forgotten_scales(site, "query_scale", queries, query_norm)
            yield from forgotten_scales(site, "key_scale", keys, key_norm)
            yield from query_key_gain(site, query_norm, key_norm, None)
    yield from value_output(site, values, Heads.row(site.linear("proj"), heads, width, side="inputs"))


def _plain_attention(site: Site) -> Site:
    """Attention without a norm or a gate between values and projection."""
    if type(getattr(site.module, "norm", nn.Identity())) is not nn.Identity or site.optional("gate") is not None:
        raise Unreadable(f"{site.path} has a norm or a gate before its projection, which is not described here")
    return site


def _reads_attention(site: Site) -> list[View]:
    return _plain_attention(site).linear("qkv").inputs()


def _writes_attention(site: Site) -> list[View]:
    return site.linear("proj").outputs()


def _feedforward(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    norm = site.child("norm")
    if type(norm.module) is nn.Identity:
        yield from neurons(site, site.linear("fc1").outputs(), site.linear("fc2").inputs(), module.act)
    else:
        yield from gain(norm, [site.child("fc2")])


def _reads_feedforward(site: Site) -> list[View]:
    return site.linear("fc1").inputs()


def _writes_feedforward(site: Site) -> list[View]:
    return site.linear("fc2").outputs()


def _branches(layer: Site) -> list[Branch]:
    module: Any = layer.module
    drops = (module.attn.proj_drop.p, module.mlp.drop2.p)
    return [
        Branch(norm=layer.child(norm), body=layer.child(body), dropout=max(drop, _dropped_paths(layer, path)))
        for norm, body, drop, path in (
            ("norm1", "attn", drops[0], "drop_path1"),
            ("norm2", "mlp", drops[1], "drop_path2"),
        )
    ]


def _dropped_paths(layer: Site, name: str) -> float:
    return float(getattr(getattr(layer.module, name), "drop_prob", 0.0) or 0.0)


def _scales(layer: Site) -> list[Site | None]:
    """The learned scale behind each branch, where there is one."""
    found = [layer.child(name) for name in ("ls1", "ls2")]
    return [None if type(one.module) is nn.Identity else require(one, *SCALES) for one in found]


def _block(site: Site) -> Iterator[Symmetry | Dropped]:
    branches, scales = _branches(site), _scales(site)
    if scales == [None, None]:
        yield from pre_norm_layer(site, branches)
        return
    for branch, scale in zip(branches, scales, strict=True):
        yield from gain(branch.norm, [branch.body])
        if scale is not None:
            made = list(branch.writes(branch.body))
            yield scale.symmetry("layer_scale", Scaling(), plus=[scale.view("gamma", axes=0)], minus=made)


def _model(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    try:
        yield from _stream(site)
    except Unreadable as problem:
        yield Dropped(site.join("stream"), str(problem))
    if type(module.head) is nn.Identity or getattr(module, "attn_pool", None) is not None:
        return
    last = "fc_norm" if type(module.fc_norm) is not nn.Identity else "norm"
    if type(getattr(module, last)) is not nn.Identity:
        yield from gain(site.child(last), [site.child("head")])
    if site.is_whole_model:
        yield from class_shift(site.child("head"), site.linear("head").outputs())


def _stream(site: Site) -> Iterator[Symmetry | Dropped]:
    """From patches to the final norm, which may read the stream through a pool over tokens."""
    module: Any = site.module
    for name in ("norm_pre", "patch_drop"):
        if type(getattr(module, name)) is not nn.Identity:
            raise Unreadable(f"{site.join(name)} is not described here")
    if module.reg_token is not None or module.no_embed_class or module.pos_embed is None or module.dynamic_img_size:
        raise Unreadable("register tokens and positions that are absent, resized or not added to the class token")
    patches = require(site.child("patch_embed"), PATCHES)
    if type(patches.module.norm) is not nn.Identity:
        raise Unreadable(f"{patches.path} has a norm of its own")
    token = "cls_token" if module.cls_token is not None else None
    sources, shifts = patch_writers(site, patches.child("proj"), token, "pos_embed", dropout=module.pos_drop.p)
    yield from shifts
    layers = [require(layer, BLOCK) for layer in site.children("blocks")]
    writers = list(sources)
    for layer in layers:
        for branch, scale in zip(_branches(layer), _scales(layer), strict=True):
            if scale is None:
                writers.append(branch.writer())
            else:
                writers.append(Writer(views=[scale.view("gamma", axes=0)], shiftable=[]))
    final = site.child("norm" if type(module.norm) is not nn.Identity else "fc_norm")
    norms = [norm_at(branch.norm) for layer in layers for branch in _branches(layer)] + [norm_at(final)]
    yield from residual_stream(site, writers, norms)


for _name in ATTENTION:
    register(Component(type=_name, laws=_attention, reads=_reads_attention, writes=_writes_attention))
for _name in SCALES:
    register(Component(type=_name, part=True))
register(Component(type="timm.layers.norm.LayerNorm", part=True, norm=layer_norm))
register(Component(type=PATCHES, part=True))
register(Component(type="timm.layers.mlp.Mlp", laws=_feedforward, reads=_reads_feedforward, writes=_writes_feedforward))
register(Component(type=BLOCK, laws=_block))
register(Component(type="timm.models.vision_transformer.VisionTransformer", laws=_model))
