"""Parts that the families of the transformers library share: norms, transposed maps, token tables, attention kernels.

Classes are named, not imported. What a module does is read off the live module and its config, never off its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from conserved.kind import Translation
from conserved.recognize.embeddings import trained_as_looked_up
from conserved.recognize.norms import Writer
from conserved.recognize.registry import Component, register, require
from conserved.recognize.site import AFFINE, Linear, Norm, Site, Unreadable, qualified_name
from conserved.symmetry import Symmetry
from conserved.view import View

_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Implementations that compute softmax(scores)·values, and nothing else, from what a module gives them."""


def named(family: str, name: str) -> str:
    """The qualified name of a class in a family's modelling file."""
    return f"transformers.models.{family}.modeling_{family}.{name}"


def config_of(site: Site) -> Any:
    """The config a module was built from and reads while it runs."""
    config = getattr(site.module, "config", None)
    if config is None:
        raise Unreadable(f"{site.path or 'the model'} has no config to be read")
    return config


def softmax_attention(site: Site) -> Site:
    """The same site, if its attention is computed by an implementation known to be softmax attention."""
    implementation = getattr(config_of(site), "_attn_implementation", "eager") or "eager"
    if implementation not in _ATTENTION:
        raise Unreadable(f"{site.path} computes attention with {implementation!r}, which is not known here")
    return site


def turned_features(width: int, fraction: float) -> int:
    """How many features of a head carry rotary positions: two for each frequency, of which there are ⌈n/2⌉."""
    return 2 * ((int(width * fraction) + 1) // 2)


def rms_norm(epsilon: str, offset: float = 0.0) -> Callable[[Site], Norm]:
    """How to read an RMS norm whose ε is the attribute `epsilon`, with `offset` added to its weight."""

    def read(site: Site) -> Norm:
        return Norm(site=site, centres=False, epsilon=float(getattr(site.module, epsilon)), offset=offset)

    return read


def _conv1d(site: Site) -> Linear:
    """GPT-2's linear map, stored (in, out)."""
    module: Any = site.module
    return Linear(site, (module.nf, module.nx), transposed=True)


def token_table(site: Site, *, dropout: float = 0.0) -> Writer:
    """A table of token embeddings as a writer into the stream.

    The row of `padding_idx` is looked up but not trained: `inert_padding` says that it stays what it is, and laws that
    span it hold while it is zero (`lookups`).
    """
    require(site, nn.Embedding, *_SCALED)
    trained_as_looked_up(site)
    views = [site.view("weight", axes=1)]
    return Writer(views=views, shiftable=[] if dropout else views, dropout=dropout)


def inert_padding(site: Site) -> Iterator[Symmetry]:
    """The row of the padding token, which gets no gradient."""
    row = getattr(site.module, "padding_idx", None)
    if row is not None:
        view = site.view("weight", axes=0, pick={0: (row, row + 1)})
        yield site.symmetry("inert_padding", Translation(), plus=[view], minus=[])


def _affine_reads(site: Site) -> list[View]:
    return AFFINE[qualified_name(type(site.module))](site).inputs()


def _affine_writes(site: Site) -> list[View]:
    return AFFINE[qualified_name(type(site.module))](site).outputs()


_SCALED = (named("gemma2", "Gemma2TextScaledWordEmbedding"), named("gemma3", "Gemma3TextScaledWordEmbedding"))

AFFINE["transformers.pytorch_utils.Conv1D"] = _conv1d
register(Component(type="transformers.pytorch_utils.Conv1D", reads=_affine_reads, writes=_affine_writes, part=True))
for _scaled in _SCALED:
    register(Component(type=_scaled, part=True))
for _family, _prefix in (
    ("llama", "Llama"),
    ("mistral", "Mistral"),
    ("qwen2", "Qwen2"),
    ("qwen3", "Qwen3"),
    ("phi3", "Phi3"),
    ("mixtral", "Mixtral"),
    ("qwen3_moe", "Qwen3Moe"),
    ("deepseek_v3", "DeepseekV3"),
):
    register(Component(type=named(_family, f"{_prefix}RMSNorm"), part=True, norm=rms_norm("variance_epsilon")))
for _family, _prefix in (("gemma2", "Gemma2"), ("gemma3", "Gemma3")):
    register(Component(type=named(_family, f"{_prefix}RMSNorm"), part=True, norm=rms_norm("eps", offset=1.0)))
