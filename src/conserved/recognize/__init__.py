"""From a model to its symmetries: the registry, and one recogniser file per family of components."""

from conserved.recognize import (
    attention,
    embeddings,
    experts,
    feedforward,
    hf,
    lora,
    norms,
    timm,
    torch_nn,
    transformer,
)
from conserved.recognize.registry import Component, component_of, components, reads, recognize, register, writes
from conserved.recognize.site import Linear, Site, Unreadable

__all__ = [
    "Component",
    "Linear",
    "Site",
    "Unreadable",
    "attention",
    "component_of",
    "components",
    "embeddings",
    "experts",
    "feedforward",
    "hf",
    "lora",
    "norms",
    "reads",
    "recognize",
    "register",
    "timm",
    "torch_nn",
    "transformer",
    "writes",
]
