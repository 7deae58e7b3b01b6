"""Mixtures of experts that are stored as three-dimensional tensors, their routers, and experts that all tokens use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserved.recognize.experts import router_laws
from conserved.recognize.feedforward import gated_neurons
from conserved.recognize.hf.parts import config_of, named
from conserved.recognize.registry import Component, reads, register, require, writes
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View

_FAMILIES = {
    "mixtral": ("MixtralExperts", "MixtralTopKRouter", "MixtralSparseMoeBlock"),
    "qwen3_moe": ("Qwen3MoeExperts", "Qwen3MoeTopKRouter", "Qwen3MoeSparseMoeBlock"),
    "deepseek_v3": ("DeepseekV3Experts", "DeepseekV3TopkRouter", "DeepseekV3MoE"),
}
_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", None)


def _experts(site: Site) -> Iterator[Symmetry]:
    """gate_up_proj is (E, 2h, d), gates first; down_proj is (E, d, h)."""
    module: Any = _stored_plainly(site).module
    experts, width, hidden = module.num_experts, module.hidden_dim, module.intermediate_dim
    for expert in range(experts):
        gate, up = (
            site.view(
                "gate_up_proj",
                grid=(experts, 2, hidden, width),
                axes=2,
                pick={0: expert, 1: half},
                shape=(experts, 2 * hidden, width),
            )
            for half in (0, 1)
        )
        down = site.view("down_proj", axes=2, pick={0: expert}, shape=(experts, width, hidden))
        yield from gated_neurons(site, [gate], [up], [down], module.act_fn, part=str(expert))


def _stored_plainly(site: Site) -> Site:
    module: Any = site.module
    implementation = getattr(config_of(site), "_experts_implementation", None)
    if implementation not in _IMPLEMENTATIONS:
        raise Unreadable(f"{site.path} computes experts with {implementation!r}, which is not known here")
    if module.is_transposed or module.has_bias or not module.is_concatenated or not module.has_gate:
        raise Unreadable(f"{site.path} stores its experts in another way than is described here")
    return site


def _block(site: Site) -> Iterator[Symmetry]:
    """Softmax over all experts, its top k renormalised unless told otherwise; or scores by sigmoid.

    With an auxiliary loss on its logits even the router of a single active expert is trained.
    """
    router = require(site.child("gate"), *_ROUTERS)
    module: Any = router.module
    alone = getattr(module, "norm_topk_prob", True) and not getattr(
        config_of(site.child("experts")), "output_router_logits", False
    )
    yield from router_laws(
        router,
        [router.view("weight", axes=0)],
        active=module.top_k if alone else None,
        softmax="e_score_correction_bias" not in module._buffers,
    )


def _reads(site: Site) -> Iterator[View]:
    router = require(site.child("gate"), *_ROUTERS)
    yield router.view("weight", axes=1)
    experts = _stored_plainly(require(site.child("experts"), *_EXPERTS))
    yield experts.view("gate_up_proj", axes=2)
    shared = site.optional("shared_experts")
    if shared is not None:
        yield from reads(shared)


def _writes(site: Site) -> Iterator[View]:
    experts = _stored_plainly(require(site.child("experts"), *_EXPERTS))
    yield experts.view("down_proj", axes=1)
    shared = site.optional("shared_experts")
    if shared is not None:
        yield from writes(shared)


_EXPERTS = [named(family, names[0]) for family, names in _FAMILIES.items()]
_ROUTERS = [named(family, names[1]) for family, names in _FAMILIES.items()]

for _family, _names in _FAMILIES.items():
    register(Component(type=named(_family, _names[0]), laws=_experts))
    register(Component(type=named(_family, _names[1]), part=True))
    register(Component(type=named(_family, _names[2]), laws=_block, reads=_reads, writes=_writes))
