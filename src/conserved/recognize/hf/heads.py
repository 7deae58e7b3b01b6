"""Task heads of the transformers library: what reads the end of a model, and the shift cross-entropy cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserved.laws import Dropped
from conserved.recognize.embeddings import class_shift
from conserved.recognize.hf.decoder import FAMILIES
from conserved.recognize.hf.opt import final_norm as final_norm_of_opt
from conserved.recognize.hf.opt import projected_pair
from conserved.recognize.hf.parts import config_of, named
from conserved.recognize.norms import gain
from conserved.recognize.registry import Component, component_of, register
from conserved.recognize.site import Site, Unreadable
from conserved.symmetry import Symmetry

_FINAL_NORM = {
    "model": ("norm",),
    "transformer": ("norm", "ln_f"),
    "gpt_neox": ("final_layer_norm",),
    "vit": ("layernorm",),
}
"""Where the last norm of a model is, by the name under which a head holds the model."""


def _final_norm(site: Site) -> Site | None:
    """The norm whose output the head reads; None if something stands between the two."""
    for name, norms in _FINAL_NORM.items():
        base = site.optional(name)
        if base is None:
            continue
        if component_of(base.module) is None:
            raise Unreadable(f"{base.path} ({type(base.module).__name__}) is not known, so what its end is like is not")
        decoder = base.optional("decoder")
        if decoder is not None:
            return final_norm_of_opt(decoder)
        return next((base.child(norm) for norm in norms if base.optional(norm) is not None), None)
    return None


def head(site: Site, name: str) -> Iterator[Symmetry | Dropped]:
    """A linear head on the final norm."""
    reader = site.child(name)
    outputs = site.linear(name).outputs()
    norm = _final_norm(site)
    if norm is not None:
        yield from gain(norm, [reader])
    if site.optional("model") is not None and site.child("model").optional("decoder") is not None:
        yield from projected_pair(site.child("model.decoder"), reader)
    if not site.is_whole_model:
        return
    if getattr(config_of(site), "final_logit_softcapping", None) is None:
        yield from class_shift(reader, outputs)
    elif site.loss == "cross_entropy":
        yield Dropped(reader.join("class_shift"), "logits are capped, which a shift common to all of them changes")


def _language(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from head(site, "lm_head")


def _score(site: Site) -> Iterator[Symmetry | Dropped]:
    yield from head(site, "score")


def _classifier(site: Site) -> Iterator[Symmetry | Dropped]:
    module: Any = site.module
    if component_of(module.classifier) is not None and type(module.classifier).__name__ != "Identity":
        yield from head(site, "classifier")


for _family, _prefix in (FAMILIES | {"deepseek_v3": "DeepseekV3"}).items():
    register(Component(type=named(_family, f"{_prefix}ForCausalLM"), laws=_language))
for _name in ("gpt2.GPT2LMHeadModel", "gpt_neox.GPTNeoXForCausalLM", "opt.OPTForCausalLM"):
    register(Component(type=named(*_name.split(".")), laws=_language))
for _name in (
    "gpt2.GPT2ForSequenceClassification",
    "gpt_neox.GPTNeoXForSequenceClassification",
    "opt.OPTForSequenceClassification",
):
    register(Component(type=named(*_name.split(".")), laws=_score))
for _name in ("GenericForSequenceClassification", "GenericForTokenClassification"):
    register(Component(type=f"transformers.modeling_layers.{_name}", laws=_score))
for _name in (
    "gpt2.GPT2ForTokenClassification",
    "gpt_neox.GPTNeoXForTokenClassification",
    "vit.ViTForImageClassification",
):
    register(Component(type=named(*_name.split(".")), laws=_classifier))
