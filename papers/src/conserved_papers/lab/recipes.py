"""Recipes of training runs: the paper's set-ups (Appendix D), small versions of them, and the blog's layer.

A recipe is plain data made by a function, so that it travels to other processes and machines as it is. The paper does
not say how texts are cut into tokens; here the most frequent 10,000 words are, as in Penn Treebank. It names Qwen-3,
which normalises queries and keys and then has other laws than the ones tracked; the decoders here have no such norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from conserved_papers.blocks import DecoderLM, ReluAttention, VisionTransformer
from conserved_papers.blocks.experts import Gate
from conserved_papers.lab.data import Examples, open_images, open_text
from conserved_papers.lab.data.examples import UnusableDataError
from conserved_papers.lab.data.sources import DIGITS, LIBRARY, kind_of
from conserved_papers.lab.schedule import Schedule

Architecture = Literal["vision", "decoder", "relu_attention"]
Precision = Literal["float64", "float32", "bfloat16"]

_MODELS: dict[Architecture, Callable[..., nn.Module]] = {
    "vision": VisionTransformer,
    "decoder": DecoderLM,
    "relu_attention": ReluAttention,
}
_WORDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One experiment: a model, data, and gradient descent at several step sizes from several seeds.

    `batch` is None for gradient descent on all examples. Gradients are computed in `precision`, weights are kept in
    `weights`: at the paper's step sizes a step is so small that float32 weights would round more than laws drift, and
    for its decoders, at 1e-6 to 1e-5, float32 gradients would too.
    """

    name: str
    title: str
    scale: Literal["small", "full"]
    architecture: Architecture
    sizes: Mapping[str, Any]
    data: str
    """An embedded source, or what a source given by the user stands in for."""
    examples: int
    length: int = 0
    """Tokens of a sequence, for texts."""
    batch: int | None
    steps: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    schedule: Schedule
    precision: Precision = "float64"
    weights: Precision = "float64"

    @property
    def wants(self) -> Literal["images", "text"]:
        """The kind of data it is trained on."""
        return "text" if self.architecture == "decoder" else "images"

    @property
    def embedded(self) -> bool:
        """Whether its data is at hand everywhere."""
        return self.data in (DIGITS, LIBRARY)


def build(recipe: Recipe, seed: int) -> nn.Module:
    """Return the recipe's model with the weights of a seed, in float32; the global seed is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MODELS[recipe.architecture](**recipe.sizes)


def examples_of(recipe: Recipe, source: str | None = None, *, device: str = "cpu") -> Examples:
    """Return the recipe's data, from a source in its place if one is given; all images where there are fewer than
    asked.

    Images are resized on the device they will be used on, which for large ones saves minutes.
    """
    if source is None and not recipe.embedded:
        raise UnusableDataError(f"{recipe.name} is trained on {recipe.data}: give where it is with --data PATH.")
    given = recipe.data if source is None else source
    if kind_of(given) not in (recipe.wants, "either"):
        raise UnusableDataError(f"{recipe.name} is trained on {recipe.wants}; {given} holds {kind_of(given)}.")
    if recipe.architecture == "decoder":
        return open_text(given, vocabulary=recipe.sizes["vocab"]).examples(recipe.examples, length=recipe.length)
    if recipe.architecture == "relu_attention":
        side = recipe.sizes["dim"]
        rows = open_images(given, size=side, limit=recipe.examples)
        return rows.rows(min(recipe.examples, len(rows)), side=side)
    size, channels, classes = (recipe.sizes[name] for name in ("image", "channels", "classes"))
    images = open_images(given, size=size, limit=recipe.examples).to(device)
    return images.examples(min(recipe.examples, len(images)), size=size, channels=channels, classes=classes)


def cifar() -> Recipe:
    """Appendix D, CIFAR-10: a vision transformer, ten batches of 5,000 accumulated to the whole set, 300 epochs."""
    return Recipe(
        name="cifar",
        title="ViT on CIFAR-10, full batch",
        scale="full",
        architecture="vision",
        sizes=_vision(32, 4, 256, 6, 1024, classes=10),
        data="CIFAR-10",
        examples=50_000,
        batch=None,
        steps=300,
        rates=(1e-4, 4e-4, 7e-4),
        seeds=tuple(range(10)),
        schedule=Schedule(kind="linear"),
        precision="float32",
    )


def imagenet() -> Recipe:
    """Appendix D, ImageNet-1K: 5 epochs of 1,281,167 images in batches of 1,024."""
    return replace(
        cifar(),
        name="imagenet",
        title="ViT on ImageNet-1K, mini-batches",
        sizes=_vision(224, 16, 192, 12, 768, classes=1000),
        data="ImageNet-1K",
        examples=10_000,
        batch=1024,
        steps=5 * (1_281_167 // 1024),
        rates=(1e-3, 2e-3, 3e-3),
    )


def penn(gate: Gate = "softmax", top_k: int | None = None) -> Recipe:
    """Appendix D, Penn Treebank: 18 batches of 192 sequences accumulated to nearly the whole text, 300 epochs."""
    return replace(
        cifar(),
        name=_variant("penn", gate, top_k),
        title=f"decoder with {_gating(gate, top_k)} on Penn Treebank, full batch",
        architecture="decoder",
        sizes=_decoder(gate, top_k, vocab=_WORDS, dim=192, depth=12, heads=3, hidden=768, max_length=256),
        data="Penn Treebank",
        examples=192 * 18,
        length=256,
        rates=(5e-6, 1e-5, 5e-5) if gate == "softmax" else (0.01, 0.02, 0.05),
        precision="float64",
    )


def wikitext(gate: Gate = "softmax", top_k: int | None = None) -> Recipe:
    """Appendix D, WikiText-103: 15,000 steps of 48 sequences."""
    return replace(
        penn(gate, top_k),
        name=_variant("wikitext", gate, top_k),
        title=f"decoder with {_gating(gate, top_k)} on WikiText-103, mini-batches",
        data="WikiText-103",
        examples=100_000,
        batch=48,
        steps=15_000,
        rates=(2e-6, 5e-6, 1e-5) if gate == "softmax" else (0.01, 0.02, 0.05),
    )


def _vision(image: int, patch: int, dim: int, depth: int, hidden: int, *, classes: int) -> dict[str, Any]:
    sizes = {"image": image, "patch": patch, "dim": dim, "depth": depth, "heads": 4, "hidden": hidden}
    return {**sizes, "channels": 3, "classes": classes}


def _decoder(gate: Gate, top_k: int | None, **sizes: int) -> dict[str, Any]:
    return {**sizes, "experts": 4, "gate": gate, "top_k": top_k}


def _variant(stem: str, gate: Gate, top_k: int | None) -> str:
    return stem + ("" if top_k is None else "-sparse") + ("" if gate == "softmax" else "-sigmoid")


def _gating(gate: Gate, top_k: int | None) -> str:
    return f"{'dense' if top_k is None else f'top-{top_k}'} {gate} gating"


def small_images(batch: int | None = None) -> Recipe:
    """Return the vision experiments for two cores: handwritten digits, all at once or in batches."""
    return Recipe(
        name="digits" if batch is None else "digits-sgd",
        title=f"small ViT on digits, {'full batch' if batch is None else 'mini-batches'}",
        scale="small",
        architecture="vision",
        sizes={"image": 8, "patch": 2, "dim": 16, "depth": 2, "heads": 2, "hidden": 24, "channels": 1, "classes": 10},
        data=DIGITS,
        examples=48 if batch is None else 1024,
        batch=batch,
        steps=64,
        rates=(0.0001, 0.0002, 0.0004),
        seeds=tuple(range(5)),
        schedule=Schedule(kind="constant"),
    )


def small_text(batch: int | None = None, gate: Gate = "softmax", top_k: int | None = None) -> Recipe:
    """Return the language experiments for two cores: the bytes of the standard library, all at once or in batches."""
    return replace(
        small_images(batch),
        name=_variant("bytes" if batch is None else "bytes-sgd", gate, top_k),
        title=f"small decoder with {_gating(gate, top_k)}, {'full batch' if batch is None else 'mini-batches'}",
        architecture="decoder",
        sizes=_decoder(gate, top_k, vocab=256, dim=16, depth=2, heads=2, hidden=16, max_length=24),
        data=LIBRARY,
        examples=8 if batch is None else 512,
        length=24,
    )


def relu_attention() -> Recipe:
    """Return the blog's layer, relu(x W_QK xᵀ) x W_V, on digits read as sequences of rows, with the square loss."""
    return replace(
        small_images(),
        name="relu-attention",
        title="ReLU attention of the blog on rows of digits",
        architecture="relu_attention",
        sizes={"dim": 8, "out": 1},
        examples=256,
        rates=(1e-6, 2e-6, 4e-6),
    )


def decaying() -> Recipe:
    """Return the small vision experiment with steps that fall as 1/(k+1): equation (9) then bounds the drift for all
    times.
    """
    return replace(
        small_images(),
        name="digits-decaying",
        title="small ViT on digits, step τ₀/(k+1)",
        rates=(0.005, 0.01, 0.02),
        schedule=Schedule(kind="inverse"),
    )


SMALL: tuple[Recipe, ...] = (
    small_images(),
    small_images(32),
    small_text(),
    small_text(8),
    small_text(gate="sigmoid"),
    small_text(8, gate="sigmoid"),
    small_text(top_k=2),
    small_text(gate="sigmoid", top_k=2),
    decaying(),
    relu_attention(),
)
"""The recipes of a small reproduction."""

FULL: tuple[Recipe, ...] = (
    cifar(),
    imagenet(),
    penn(),
    wikitext(),
    penn("sigmoid"),
    wikitext("sigmoid"),
    penn(top_k=2),
    wikitext(top_k=2),
    penn("sigmoid", 2),
    wikitext("sigmoid", 2),
)
"""The recipes of the paper."""


def named(name: str) -> Recipe:
    """Return a recipe by its name."""
    known = {recipe.name: recipe for recipe in (*SMALL, *FULL)}
    if name not in known:
        raise KeyError(f"There is no recipe {name!r}. There are: {', '.join(known)}.")
    return known[name]
