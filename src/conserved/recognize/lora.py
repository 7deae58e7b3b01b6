"""Low-rank updates of PEFT: the two factors against each other, and a map with such an update as one affine map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserved.kind import GeneralLinear
from conserved.laws import Dropped
from conserved.recognize.registry import Component, register
from conserved.recognize.site import AFFINE, Linear, Site, Unreadable, affine
from conserved.symmetry import Symmetry
from conserved.view import View

_LAYERS = "peft.tuners.lora.layer"
_DORA = ("DoraLinearVariant", "DoraEmbeddingVariant")
"""Variants in which the two factors still appear as their product only; their magnitudes are spoken for by nobody."""


def _adapters(site: Site, factors: str) -> Iterator[tuple[str, str]]:
    """The adapters that take part in the forward pass, each with the name of its variant."""
    module: Any = site.module
    if module.disable_adapters or module.merged:
        raise Unreadable(f"{site.path} has its adapters merged or disabled, so its factors are not used")
    for name in module.active_adapters:
        if name in getattr(module, factors):
            variant = module.lora_variant.get(name)
            yield name, "" if variant is None else getattr(variant, "__name__", type(variant).__name__)


def _factors(site: Site, plus: list[View], minus: list[View], adapter: str, variant: str) -> Symmetry | Dropped:
    """Only the product B·A is used, so g can pass from one factor to the other: A Aᵀ − Bᵀ B."""
    if variant and variant not in _DORA:
        return Dropped(site.join("low_rank"), f"the variant {variant} of adapter {adapter} is not known here")
    return site.symmetry("low_rank", GeneralLinear(), plus=plus, minus=minus, part=adapter)


def _linear(site: Site) -> Iterator[Symmetry | Dropped]:
    for adapter, variant in _adapters(site, "lora_A"):
        into, out = site.linear(f"lora_A.{adapter}"), site.linear(f"lora_B.{adapter}")
        yield _factors(site, into.outputs(), out.inputs(), adapter, variant)


def _embedding(site: Site) -> Iterator[Symmetry | Dropped]:
    for adapter, variant in _adapters(site, "lora_embedding_A"):
        into = site.child("lora_embedding_A").view(adapter, axes=0)
        out = site.child("lora_embedding_B").view(adapter, axes=1)
        yield _factors(site, [into], [out], adapter, variant)


def _updated(site: Site) -> Linear:
    """W + Σ B A: g moves the rows of W and of every B, or the columns of W and of every A."""
    base = affine(site.child("base_layer"))
    updates = []
    for adapter, variant in _adapters(site, "lora_A"):
        if variant:
            raise Unreadable(f"{site.path} is not linear in its weights ({variant})")
        updates.append((site.linear(f"lora_A.{adapter}"), site.linear(f"lora_B.{adapter}")))
    return Linear(base.site, base.shape, base.weight, base.bias, base.transposed, tuple(updates))


def _reads(site: Site) -> list[View]:
    return _updated(site).inputs()


def _writes(site: Site) -> list[View]:
    return _updated(site).outputs()


AFFINE[f"{_LAYERS}.Linear"] = _updated
register(Component(type=f"{_LAYERS}.Linear", laws=_linear, reads=_reads, writes=_writes))
register(Component(type=f"{_LAYERS}.Embedding", laws=_embedding))
