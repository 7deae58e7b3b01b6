"""Every model the inference is measured on, by name: how to build it, its loss, and where it comes from."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from law_checks import Subject, subject

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model: `build` makes it with its arguments; `source` says who wrote it."""

    name: str
    source: str
    build: Callable[[], Built]
    loss: str = "regression"
    constant: tuple[int | str, ...] = ()
    countable: bool = True
    """Whether its laws can be counted: a function that draws random numbers has no Lie closure to take."""
    reason: str = ""
    """Why it cannot be counted."""

    def subject(self, *, seed: int = 0) -> Subject:
        """The model in float64 at random parameters, ready for the checks."""
        return subject(self.build, loss=self.loss, seed=seed, constant=self.constant)


def hand(name: str, index: str, loss: str = "regression", **options: Any) -> Entry:
    """A model of the package `models`; `place` is file.builder with the builder's arguments as options."""
    own = {key: options.pop(key) for key in ("constant", "countable", "reason") if key in options}
    file, _, function = index.partition(".")

    def build() -> Built:
        return getattr(importlib.import_module(f"models.{file}"), function or "build")(**options)

    return Entry(name=name, source="by hand", build=build, loss=loss, **own)


CE = "cross_entropy"

BY_HAND: list[Entry] = [
    hand("nanoGPT", "nanogpt", CE),
    hand("nanoGPT, width 4", "nanogpt", CE, width=4),
    hand("nanoGPT, mask", "nanogpt", CE, width=4, flash=False),
    hand("nanoGPT, no biases", "nanogpt", CE, width=4, bias=False),
    hand("nanoGPT, two layers", "nanogpt", CE, width=4, n_layer=2),
    hand("minGPT", "mingpt", CE),
    hand("minGPT, width 4", "mingpt", CE, width=4),
    hand("llama2.c", "llama2c", CE),
    hand("llama2.c, width 4", "llama2c", CE, width=4),
    hand("llama2.c, mask, untied", "llama2c", CE, width=4, flash=False, tie=False),
    hand("ResNet, batch norm in training", "resnet", CE, width=2),
    hand("ResNet, batch norm in use", "resnet", CE, width=2, train=False),
    hand("ResNet, bottleneck", "resnet.build_bottleneck", CE),
    hand("U-Net, batch norm", "unet"),
    hand("U-Net, group norm", "unet", norm="group"),
    hand("VAE", "vae"),
    hand("VAE, own noise", "vae.build_random", countable=False, reason="draws random numbers"),
    hand("DiT, adaLN-zero", "dit"),
    hand("ViT by hand", "vit", CE),
    hand("MLP-Mixer", "mixer", CE),
    hand("MLP-Mixer, ReLU", "mixer.build_relu", CE),
    hand("ConvNeXt", "convnext", CE),
    hand("LSTM", "recurrent", CE),
    hand("LSTM, tied", "recurrent", CE, tie_weights=True),
    hand("GRU", "recurrent.build_gru", CE),
    hand("LSTM cell by hand", "recurrent.build_hand", CE),
    hand("ReLU recurrence", "recurrent.build_relu"),
    hand("Mamba scan", "mamba", CE),
    hand("retention", "retention", width=6),
    hand("gated linear attention", "retention.build_gated"),
    hand("kernel attention", "retention.build_linear"),
    hand("experts, index_add loop", "moe"),
    hand("experts, loop, top 1", "moe.build_top1"),
    hand("experts, gathered weights", "moe.build_gather"),
    hand("experts, grouped bmm", "moe.build_grouped"),
    hand("experts, dense einsum", "moe.build_dense"),
    hand("experts, dense einsum, ReLU", "moe.build_dense", relu=True),
    hand("encoder–decoder", "seq2seq", CE),
    hand("graph convolution", "graph", CE, constant=(1,)),
    hand("graph attention", "graph.build_gat", constant=(1,)),
    hand("GraphSAGE by scatter", "graph.build_scatter", constant=(1,)),
    hand("hypernetwork", "hypernetwork"),
    hand("FiLM", "hypernetwork.build_film"),
    hand("weight norm", "reparametrised"),
    hand("weight norm by hand", "reparametrised.build_hand"),
    hand("weight standardisation", "reparametrised.build_standardised"),
    hand("cosine classifier", "reparametrised.build_cosine", CE),
    hand("tied autoencoder", "tied"),
    hand("tied autoencoder, ReLU", "tied.build_relu"),
    hand("W Wᵀ", "tied.build_pure"),
    hand("siamese", "tied.build_siamese"),
    hand("two towers", "tied.build_two_tower"),
    hand("one block thrice", "tied.build_universal"),
    hand(
        "tied through .data",
        "tied.build_shared_data",
        countable=False,
        reason="two parameters on one storage: the function of two free weights is another",
    ),
    hand("DCGAN generator", "dcgan"),
    hand("DCGAN generator in training", "dcgan", train=True),
    hand("DCGAN discriminator", "dcgan.build_discriminator"),
    hand("MobileNet", "mobilenet", CE),
    hand("MobileNet, ReLU", "mobilenet.build_relu", CE),
    hand("inverted residual", "mobilenet.build_inverted"),
    hand("squeeze-excitation", "mobilenet.build_excite"),
    hand("dense block", "mobilenet.build_dense", CE),
    hand("channel shuffle", "mobilenet.build_shuffle"),
    hand("Deep Sets", "sets"),
    hand("Deep Sets, max", "sets.build_max"),
    hand("PointNet", "sets.build_pointnet", CE),
    hand("slot attention", "sets.build_slots"),
    hand("WaveNet", "wavenet"),
    hand("gated convolution", "wavenet.build_glu", CE),
    hand("LoRA by hand", "lora"),
    hand("LoRA by hand, all trained", "lora.build_all"),
    hand("DoRA by hand", "lora.build_dora"),
    hand("attention, stacked heads", "attentions"),
    hand("attention, grouped, QK norm, rotary", "attentions.build_grouped"),
    hand("attention, ALiBi, multi-query", "attentions.build_alibi"),
    hand("attention, relative bias (T5)", "attentions.build_relative"),
    hand("attention, latent (MLA)", "attentions.build_latent"),
    hand("attention, perceiver", "attentions.build_perceiver"),
    hand("attention, sink logits", "attentions.build_sinks"),
    hand("attention, soft cap", "attentions.build_softcap"),
    hand("RWKV", "rwkv", CE),
    hand("squared ReLU", "mlps"),
    hand("maxout", "mlps.build_maxout"),
    hand("gMLP", "mlps.build_gmlp"),
    hand("highway", "mlps.build_highway"),
    hand("bilinear", "mlps.build_bilinear"),
    hand("coupling flow", "mlps.build_flow"),
    hand("deep linear", "mlps.build_deep_linear"),
    hand("factorisation machine", "mlps.build_fm"),
    hand("PReLU", "mlps.build_prelu"),
    hand("dueling values", "mlps.build_dueling"),
    hand("torch encoder, pre-norm", "torch_layers", CE),
    hand("torch encoder, post-norm", "torch_layers.build_post", CE),
    hand("torch transformer", "torch_layers.build_translator"),
    hand("torch cross-attention", "torch_layers.build_cross"),
]
"""Written for this comparison, without a thought of its laws."""


def _transformers() -> list[Entry]:
    """The families of the test zoo and further architectures of the transformers library."""
    import hf_more
    import hf_zoo

    result = []
    for family in hf_zoo.FAMILIES:

        def build(family: hf_zoo.Family = family) -> Built:
            options = {"add_pooling_layer": False} if family.model in ("BertModel", "ViTModel") else {}
            model = getattr(transformers, family.model)(family.configured(use_cache=False), **options).eval()
            return model, (), _example(family)

        result.append(Entry(name=family.name, source="transformers", build=build, loss=family.loss))
    result += [
        Entry(name=f"{one.name}, transformers", source="transformers", build=one.build, loss=one.loss)
        for one in hf_more.MORE
    ]
    return result


def _example(family: Any) -> dict[str, Tensor]:
    """An input that shows the range of its tokens, which a sampler imitates."""
    size = family.options.get("image_size")
    if size is not None:
        return {"pixel_values": torch.randn(max(family.batch, 2), 1, size, size)}
    first = 0 if family.options.get("pad_token_id") is None else 1
    tokens = {"input_ids": torch.tensor([[first, 4, 2, 3]])}
    return tokens | ({"token_type_ids": torch.tensor([[0, 1, 1, 0]])} if "type_vocab_size" in family.options else {})


def _packages() -> list[Entry]:
    """Models of packages nobody here wrote; building one raises ImportError where its package is missing."""
    import third_party

    def built(name: str) -> Callable[[], Built]:
        def build() -> Built:
            model, args, kwargs = third_party.BUILDERS[name][2]()
            return model.train(name not in third_party.EVALUATED), args, kwargs

        return build

    return [
        Entry(
            name=name,
            source=package,
            build=built(name),
            loss=loss,
            constant=(1,) if package == "torch-geometric" else (),
            countable=name not in third_party.RANDOM,
            reason=third_party.RANDOM.get(name, ""),
        )
        for name, (package, loss, _) in third_party.BUILDERS.items()
    ]


def _blocks() -> list[Entry]:
    """This package's own blocks, and the layers of torch.nn that the first recognisers knew."""
    import torch_zoo
    import zoo

    def built(case: zoo.Case) -> Callable[[], Built]:
        def build() -> Built:
            x = case.sample(torch.Generator().manual_seed(0))
            return case.build().eval(), (x.float() if x.is_floating_point() else x,), {}

        return build

    return [
        Entry(name=f"{case.name} ({source})", source=source, build=built(case), loss=case.loss)
        for source, cases in (("blocks", zoo.CASES), ("torch.nn", torch_zoo.TORCH_CASES))
        for case in cases
    ]


def entries() -> list[Entry]:
    """Everything there is, in one order: by hand, packages, transformers, blocks."""
    return [*BY_HAND, *_packages(), *_transformers(), *_blocks()]


def named(name: str) -> Entry:
    """An entry by its name."""
    return next(entry for entry in entries() if entry.name == name)
