"""Correct programs of other packages with a default monitor: none may end, raise an alarm, or have another loss.

    python benchmarks/harmless_others.py --packages FOLDER --steps 45 --out benchmarks/results

FOLDER holds the packages, installed with `pip install --no-deps --target FOLDER`; a program whose package is missing
is listed as such. Every program runs twice in one process, with a monitor and without, step by step in turns, so that
a noisy moment hits both. Each has random numbers of its own.
"""
# ruff: noqa: D103, E731
# Programs are named after what they run.

from __future__ import annotations

import argparse
import io
import logging
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from measure import commit, machine, save

Step = Callable[[], Any]
Program = tuple[nn.Module, Any, Step]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(build: Callable[[], Program]) -> Callable[[], Program]:
    """Register a program under the name of its function."""
    PROGRAMS[build.__name__] = build
    return build


def supervised(
    model: nn.Module,
    inputs: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    optimizer: Any = None,
    *,
    clip: float | None = None,
    autocast: bool = False,
) -> Program:
    """Build the usual loop around a model."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        given = inputs()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(**given) if isinstance(given, dict) else model(*given)
            value = loss(out)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return value

    return model, optimizer, step


def images(size: int, batch: int = 4, channels: int = 3) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(batch, channels, size, size),)


def tokens(vocabulary: int, length: int = 64, batch: int = 4) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randint(0, vocabulary, (batch, length)),)


def classes(out: Any) -> Tensor:
    out = getattr(out, "logits", out)
    return F.cross_entropy(out, torch.arange(len(out)) % out.shape[-1])


def next_token(out: Any) -> Tensor:
    out = getattr(out, "logits", out)
    return F.cross_entropy(out.flatten(0, 1), torch.arange(out.shape[0] * out.shape[1]) % out.shape[-1])


def square(out: Any) -> Tensor:
    out = out[0] if isinstance(out, tuple) else out
    return (getattr(out, "sample", out).float() - 0.5).pow(2).mean()


# timm


def timm_model(name: str, size: int = 64, **options: Any) -> Program:
    import timm

    model = timm.create_model(name, num_classes=10, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return supervised(model, images(size), classes, optimizer)


@program
def timm_resnet() -> Program:
    return timm_model("resnet18")


@program
def timm_convnext() -> Program:
    return timm_model("convnext_atto")


@program
def timm_vit() -> Program:
    return timm_model("vit_tiny_patch16_224", img_size=64)


@program
def timm_mobilenet_drop_path() -> Program:
    return timm_model("mobilenetv3_small_050", drop_rate=0.2, drop_path_rate=0.2)


@program
def timm_mixup_ema() -> Program:
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import ModelEmaV2

    model = timm.create_model("resnet10t", num_classes=10)
    average = ModelEmaV2(model)
    mixup = Mixup(mixup_alpha=0.8, num_classes=10)
    from timm.optim import create_optimizer_v2

    optimizer = create_optimizer_v2(model, "lamb", lr=1e-3, weight_decay=0.02)
    objective = SoftTargetCrossEntropy()

    def step() -> Tensor:
        x, y = mixup(torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,)))
        loss = objective(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        return loss

    return model, optimizer, step


# torchvision


def vision_model(name: str, size: int, **options: Any) -> Program:
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=10, **options)
    return supervised(model, images(size), classes, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


@program
def torchvision_shufflenet() -> Program:
    return vision_model("shufflenet_v2_x0_5", 64)


@program
def torchvision_swin() -> Program:
    import torchvision

    made = torchvision.models.swin_transformer.SwinTransformer(
        [4, 4], 24, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.1, num_classes=10
    )
    return supervised(made, images(64), classes)


@program
def torchvision_densenet() -> Program:
    import torchvision

    made = torchvision.models.DenseNet(8, (2, 2, 2), 16, num_classes=10)
    return supervised(made, images(64), classes)


# Graphs


def graph() -> tuple[Tensor, Tensor]:
    return torch.randn(60, 16), torch.randint(0, 60, (2, 240))


def geometric(layer: str, **options: Any) -> Program:
    import torch_geometric.nn as geometry

    model = getattr(geometry, layer)(16, 32, num_layers=3, out_channels=7, dropout=0.1, **options)
    return supervised(model, graph, classes, torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4))


@program
def geometric_gcn() -> Program:
    return geometric("GCN", norm="batch_norm")


@program
def geometric_gat() -> Program:
    return geometric("GAT", heads=4)


@program
def geometric_graphsage() -> Program:
    return geometric("GraphSAGE")


@program
def geometric_gin() -> Program:
    return geometric("GIN")


@program
def egnn() -> Program:
    from egnn_pytorch import EGNN

    model = nn.ModuleList([EGNN(dim=32), EGNN(dim=32)])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, feats: Tensor, coors: Tensor) -> Tensor:
            for layer in self.layers:
                feats, coors = layer(feats, coors)
            return feats

    return supervised(Both(), lambda: (torch.randn(2, 12, 32), torch.randn(2, 12, 3)), square)


@program
def e3nn_network() -> Program:
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct("8x0e+4x1o", "1x0e+1x1o", "8x0e+4x1o", shared_weights=False)
            self.weights = FullyConnectedNet([4, 16, self.product.weight_numel], torch.nn.functional.silu)
            self.last = o3.Linear("8x0e+4x1o", "1x0e")

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return self.last(self.product(x, y, self.weights(z)))

    return supervised(Convolution(), lambda: (torch.randn(16, 20), torch.randn(16, 4), torch.randn(16, 4)), square)


# Language models


def hugging(config: str, model: str, inputs: Callable[[], Any], loss: Any, **options: Any) -> Program:
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    made.train()
    return supervised(made, inputs, loss, torch.optim.AdamW(made.parameters(), lr=5e-4, fused=True), clip=1.0)


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def with_labels(vocabulary: int) -> Callable[[], dict[str, Tensor]]:
    def given() -> dict[str, Tensor]:
        ids = torch.randint(3, vocabulary, (4, 48))
        return {"input_ids": ids, "labels": ids}

    return given


def own_loss(out: Any) -> Tensor:
    return out.loss


@program
def transformers_gpt2() -> Program:
    options = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return hugging("GPT2Config", "GPT2LMHeadModel", with_labels(512), own_loss, **options)


@program
def transformers_llama_8m() -> Program:
    options = SMALL | {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 688, "num_key_value_heads": 2}
    return hugging("LlamaConfig", "LlamaForCausalLM", with_labels(8000), own_loss, **options)


@program
def transformers_bert_classifier() -> Program:
    options = SMALL | {"vocab_size": 512, "num_labels": 5}
    return hugging("BertConfig", "BertForSequenceClassification", tokens(512), classes, **options)


@program
def transformers_t5() -> Program:
    options = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    options |= {"decoder_start_token_id": 0}
    return hugging("T5Config", "T5ForConditionalGeneration", with_labels(512), own_loss, **options)


@program
def transformers_mamba() -> Program:
    options = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
    return hugging("MambaConfig", "MambaForCausalLM", with_labels(512), own_loss, **options)


@program
def transformers_mixtral() -> Program:
    options = SMALL | {
        "vocab_size": 512,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "output_router_logits": True,
    }
    return hugging("MixtralConfig", "MixtralForCausalLM", with_labels(512), own_loss, **options)


@program
def transformers_wav2vec2() -> Program:
    options = SMALL | {
        "conv_dim": (32, 32),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2,
    }
    options |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_labels": 4}
    options |= {"mask_time_prob": 0.0, "layerdrop": 0.0, "classifier_proj_size": 32}
    given = lambda: (torch.randn(2, 1600),)
    return hugging("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", given, classes, **options)


@program
def transformers_llama_checkpointed_autocast() -> Program:
    import transformers

    config = transformers.LlamaConfig(**SMALL, vocab_size=512)
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.train()
    return supervised(model, with_labels(512), own_loss, clip=1.0, autocast=True)


@program
def peft_lora() -> Program:
    import peft
    import transformers

    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=512))
    settings = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(base, settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return supervised(model, with_labels(512), own_loss, optimizer)


@program
def accelerate_accumulation() -> Program:
    import transformers
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    options = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, plain)
    given = with_labels(512)

    def step() -> Tensor:
        for _ in range(2):
            with accelerator.accumulate(model):
                loss = model(**given()).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    return model, plain, step


@program
def x_transformers_decoder() -> Program:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, rotary_pos_emb=True, ff_glu=True, attn_flash=False)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=512, max_seq_len=64, attn_layers=layers))
    return supervised(model, tokens(512), lambda loss: loss, clip=0.5)


@program
def litgpt_pythia() -> Program:
    from litgpt import GPT, Config

    model = GPT(Config(n_layer=2, n_head=4, n_embd=64, block_size=64, padded_vocab_size=512, bias=True))
    return supervised(model, tokens(512), next_token, clip=1.0)


@program
def performer() -> Program:
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=256, max_seq_len=64, dim=64, depth=2, heads=4, causal=False)
    return supervised(model, tokens(256), next_token)


@program
def linformer_language() -> Program:
    from linformer import LinformerLM

    model = LinformerLM(num_tokens=256, dim=64, seq_len=64, depth=2, heads=4, k=16)
    return supervised(model, tokens(256), next_token)


@program
def mambapy_model() -> Program:
    from mambapy.mamba import Mamba, MambaConfig

    model = Mamba(MambaConfig(d_model=32, n_layers=2))
    return supervised(model, lambda: (torch.randn(2, 32, 32),), square)


@program
def sentence_transformers_contrastive() -> Program:
    import transformers

    encoder = transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=512))
    encoder.train()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=5e-4)

    def step() -> Tensor:
        left = encoder(torch.randint(0, 512, (8, 16))).last_hidden_state.mean(1)
        right = encoder(torch.randint(0, 512, (8, 16))).last_hidden_state.mean(1)
        scores = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T * 20
        loss = F.cross_entropy(scores, torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return encoder, optimizer, step


# Vision


@program
def vit_pytorch_cait() -> Program:
    from vit_pytorch.cait import CaiT

    model = CaiT(
        image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, cls_depth=1, heads=4, mlp_dim=128, dropout=0.1
    )
    return supervised(model, images(32), classes)


@program
def vit_pytorch_masked_autoencoder() -> Program:
    from vit_pytorch import MAE, ViT

    encoder = ViT(image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128)
    model = MAE(encoder=encoder, masking_ratio=0.75, decoder_dim=64, decoder_depth=1)
    return supervised(model, images(32), lambda loss: loss)


@program
def vit_pytorch_distillation() -> Program:
    from vit_pytorch.distill import DistillableViT, DistillWrapper

    torch.manual_seed(7)
    import torchvision

    teacher = torchvision.models.resnet18(num_classes=10)
    student = DistillableViT(image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128)
    wrapper = DistillWrapper(student=student, teacher=teacher, temperature=3, alpha=0.5)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    def step() -> Tensor:
        loss = wrapper(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return student, optimizer, step


@program
def mlp_mixer() -> Program:
    from mlp_mixer_pytorch import MLPMixer

    model = MLPMixer(image_size=32, channels=3, patch_size=8, dim=64, depth=2, num_classes=10)
    return supervised(model, images(32), classes)


@program
def perceiver() -> Program:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=4,
        max_freq=8.0,
        depth=2,
        num_latents=16,
        latent_dim=32,
        num_classes=10,
        latent_heads=2,
        weight_tie_layers=True,
    )
    return supervised(model, lambda: (torch.randn(2, 12, 12, 3),), classes)


@program
def segmentation_unet() -> Program:
    import segmentation_models_pytorch as segmentation

    model = segmentation.Unet("resnet18", encoder_weights=None, classes=3)
    objective = segmentation.losses.DiceLoss("multiclass")
    return supervised(model, images(64, 2), lambda out: objective(out, torch.ones(2, 64, 64, dtype=torch.long)))


@program
def monai_unet() -> Program:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
        dropout=0.1,
    )
    objective = DiceCELoss(to_onehot_y=True, softmax=True)
    given = lambda: (torch.randn(1, 1, 16, 16, 16),)
    return supervised(model, given, lambda out: objective(out, torch.ones(1, 1, 16, 16, 16)))


@program
def diffusers_unet() -> Program:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    schedule = DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        clean, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
        times = torch.randint(0, 1000, (2,))
        loss = F.mse_loss(model(schedule.add_noise(clean, noise, times), times).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return model, optimizer, step


@program
def diffusers_autoencoder() -> Program:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        x = torch.randn(2, 3, 16, 16)
        posterior = model.encode(x).latent_dist
        loss = F.mse_loss(model.decode(posterior.sample()).sample, x) + 1e-6 * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


@program
def open_clip_model() -> Program:
    import open_clip
    from open_clip.loss import ClipLoss

    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 16}
    text = {"context_length": 16, "vocab_size": 512, "width": 64, "heads": 4, "layers": 2}
    model = open_clip.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text)
    objective = ClipLoss()
    given = lambda: (torch.randn(4, 3, 32, 32), torch.randint(0, 512, (4, 16)))
    return supervised(model, given, lambda out: objective(*out[:3]))


@program
def kornia_vit_augmented() -> Program:
    import kornia

    model = kornia.contrib.VisionTransformer(image_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4)
    augment = kornia.augmentation.RandomHorizontalFlip(p=0.5)
    head = nn.Linear(64, 10)
    both = nn.Sequential(model, head)
    return supervised(both, lambda: (augment(torch.randn(4, 3, 32, 32)),), lambda out: classes(out[:, 0]))


@program
def byol() -> Program:
    import torchvision
    from byol_pytorch import BYOL

    network = torchvision.models.resnet18(num_classes=10)
    learner = BYOL(network, image_size=32, hidden_layer="avgpool", projection_size=32, projection_hidden_size=64,
        augment_fn=nn.Identity(), augment_fn2=nn.Identity())  # fmt: skip
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-4)

    def step() -> Tensor:
        loss = learner(torch.randn(4, 3, 32, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.update_moving_average()
        return loss

    return learner, optimizer, step


@program
def metric_learning() -> Program:
    from pytorch_metric_learning import losses, miners

    model = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 169, 32))
    objective, miner = losses.TripletMarginLoss(margin=0.1), miners.BatchEasyHardMiner()

    def loss(out: Tensor) -> Tensor:
        labels = torch.arange(len(out)) % 4
        return objective(out, labels, miner(out, labels))

    return supervised(model, images(28, 16, 1), loss)


@program
def vector_quantised() -> Program:
    from vector_quantize_pytorch import VectorQuantize

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(32, 16), nn.Linear(16, 32)
            self.quantise = VectorQuantize(dim=16, codebook_size=32, decay=0.8, commitment_weight=1.0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            codes, _, commitment = self.quantise(self.encoder(x))
            return self.decoder(codes), commitment

    return supervised(Autoencoder(), lambda: (torch.randn(4, 8, 32),), lambda out: square(out[0]) + out[1].sum())


# Tables, series, physics, probability


@program
def tab_transformer() -> Program:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(categories=(5, 3, 4), num_continuous=6, dim=32, dim_out=1, depth=2, heads=4)
    return supervised(model, lambda: (torch.randint(0, 3, (16, 3)), torch.randn(16, 6)), square)


@program
def tabnet() -> Program:
    from pytorch_tabnet.tab_network import TabNet

    groups = torch.eye(12)
    model = TabNet(12, 3, n_d=8, n_a=8, n_steps=3, group_attention_matrix=groups)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return supervised(model, lambda: (torch.randn(64, 12),), lambda out: classes(out[0]) - 1e-3 * out[1], optimizer)


@program
def rtdl_resnet() -> Program:
    from rtdl_revisiting_models import ResNet

    model = ResNet(
        d_in=12, d_out=1, n_blocks=2, d_block=32, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.2, dropout2=0.1
    )
    return supervised(model, lambda: (torch.randn(32, 12),), square)


@program
def gaussian_process() -> Program:
    import gpytorch

    x = torch.linspace(0, 1, 50)
    y = torch.sin(x * 6.28) + 0.1 * torch.randn(50)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Exact(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, at: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))

    model = Exact()
    model.train()
    likelihood.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return supervised(model, lambda: (x,), lambda out: -objective(out, y), optimizer)


@program
def neural_ode() -> Program:
    from torchdiffeq import odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y**3)

    model = Field()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        out = odeint_adjoint(model, torch.randn(4, 2), torch.linspace(0, 1, 5), method="rk4")
        loss = out.abs().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


@program
def neural_sde() -> Program:
    import torchsde

    class Field(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(3, 3), nn.Linear(3, 3)

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            return self.drift(y)

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            return torch.sigmoid(self.spread(y))

    model = Field()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = torchsde.sdeint(model, torch.randn(4, 3), torch.linspace(0, 1, 4), dt=0.25).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


@program
def normalising_flow() -> Program:
    import zuko

    flow = zuko.flows.MAF(3, 2, transforms=2, hidden_features=(32, 32))
    given = lambda: (torch.randn(32, 2),)
    return supervised(flow, given, lambda out: -out.log_prob(torch.ones(32, 3)).mean())


@program
def spline_flow() -> Program:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform as Affine
    from nflows.transforms.base import CompositeTransform
    from nflows.transforms.permutations import ReversePermutation

    parts = [ReversePermutation(4), Affine(features=4, hidden_features=16)]
    flow = Flow(CompositeTransform(parts), StandardNormal([4]))
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = -flow.log_prob(inputs=torch.randn(32, 4)).mean()
        loss.backward()
        optimizer.step()
        return loss

    return flow, optimizer, step


@program
def kolmogorov_arnold() -> Program:
    from mambapy.mamba import RMSNorm
    from rtdl_num_embeddings import PeriodicEmbeddings

    model = nn.Sequential(PeriodicEmbeddings(6, 8, lite=False), nn.Flatten(), RMSNorm(48), nn.Linear(48, 1))
    return supervised(model, lambda: (torch.randn(32, 6),), square)


@program
def temporal_convolutions() -> Program:
    from pytorch_tcn import TCN

    model = TCN(num_inputs=3, num_channels=[8, 8, 8], kernel_size=3, dropout=0.1)
    return supervised(model, lambda: (torch.randn(4, 3, 32),), square)


@program
def fourier_operator() -> Program:
    from neuralop.models import FNO

    model = FNO(n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2)
    return supervised(model, images(16, 4, 1), square)


@program
def conformer_block() -> Program:
    from conformer import ConformerBlock

    model = ConformerBlock(dim=32, dim_head=8, heads=4, attn_dropout=0.1, ff_dropout=0.1, conv_dropout=0.1)
    return supervised(model, lambda: (torch.randn(2, 24, 32),), square)


@program
def soft_mixture() -> Program:
    from soft_moe_pytorch import SoftMoE

    return supervised(SoftMoE(dim=32, seq_len=24, num_experts=4), lambda: (torch.randn(2, 24, 32),), square)


@program
def sparse_mixture() -> Program:
    from st_moe_pytorch import MoE

    model = MoE(dim=32, num_experts=4, gating_top_n=2)

    def loss(out: Any) -> Tensor:
        return square(out[0]) + out[1]

    return supervised(model, lambda: (torch.randn(2, 24, 32),), loss)


# Optimizers of others


def other_optimizer(make: Callable[[Any], Any]) -> Program:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    )
    return supervised(model, lambda: (torch.randn(32, 16),), classes, make(model.parameters()))


@program
def lion() -> Program:
    from lion_pytorch import Lion

    return other_optimizer(lambda p: Lion(p, lr=1e-4, weight_decay=1e-2))


@program
def prodigy() -> Program:
    from prodigyopt import Prodigy

    return other_optimizer(lambda p: Prodigy(p, lr=1.0))


@program
def schedule_free() -> Program:
    from schedulefree import AdamWScheduleFree

    def made(parameters: Any) -> Any:
        optimizer = AdamWScheduleFree(parameters, lr=1e-3)
        optimizer.train()
        return optimizer

    return other_optimizer(made)


@program
def adabelief() -> Program:
    from adabelief_pytorch import AdaBelief

    return other_optimizer(lambda p: AdaBelief(p, lr=1e-3, print_change_log=False))


@program
def d_adaptation() -> Program:
    from dadaptation import DAdaptAdam

    return other_optimizer(lambda p: DAdaptAdam(p, lr=1.0))


# Reinforcement learning


@program
def torchrl_policy_gradient() -> Program:
    import gymnasium

    environment = gymnasium.make("CartPole-v1")
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        state, _ = environment.reset(seed=random.randrange(1000))
        terms, rewards = [], []
        for _ in range(20):
            choice = torch.distributions.Categorical(logits=model(torch.as_tensor(state)))
            action = choice.sample()
            state, reward, done, _, _ = environment.step(int(action))
            terms.append(choice.log_prob(action))
            rewards.append(float(reward))
            if done:
                break
        loss = -torch.stack(terms).sum() * sum(rewards) / 20
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


class Random:
    """The states of all random numbers of a process, kept while another program runs."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.keep()

    def keep(self) -> None:
        self.states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(self.states[0])
        random.setstate(self.states[1])
        np.random.set_state(self.states[2])


class Run:
    """A program in training, with a monitor or without."""

    def __init__(self, build: Callable[[], Program], *, watched: bool) -> None:
        self.random = Random(0)
        model, optimizer, self.advance = build()
        self.parameters = list(model.parameters())
        self.monitor = Monitor(model, optimizer) if watched else None
        self.random.keep()
        self.losses: list[Tensor] = []
        self.times: list[float] = []

    def step(self) -> None:
        self.random.restore()
        began = time.process_time()
        loss = self.advance()
        if self.monitor is not None:
            self.monitor.step(loss=loss)
        self.times.append(time.process_time() - began)
        self.random.keep()
        self.losses.append(loss.detach().clone())


def equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.nan_to_num(), right.nan_to_num())


def compare(name: str, steps: int) -> dict[str, Any]:
    """Run one program with a monitor and without, in turns."""
    text = io.StringIO()
    try:
        with redirect_stdout(text):
            plain = Run(PROGRAMS[name], watched=False)
            plain.step()
    except Exception as problem:
        return {"program": name, "did not run": f"{type(problem).__name__}: {problem}"[:300]}
    lines = io.StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(lines):
            watched = Run(PROGRAMS[name], watched=True)
            watched.step()
            for _ in range(steps - 1):
                plain.step()
                watched.step()
    except Exception as problem:
        where = "".join(traceback.format_tb(problem.__traceback__)[-4:])
        return {"program": name, "ended": f"{type(problem).__name__}: {problem} {where}"[-900:]}
    monitor = watched.monitor
    assert monitor is not None
    added = [b - a for a, b in zip(plain.times[1:], watched.times[1:], strict=True)]
    row = {
        "program": name,
        "steps": steps,
        "losses equal": all(map(equal, plain.losses, watched.losses)),
        "weights equal": all(map(equal, plain.parameters, watched.parameters)),
        "state": monitor.state,
        "laws": 0 if monitor.waiting else len(monitor.laws),
        "alarms": [f"{alarm.kind} {alarm.code}: {alarm.message}"[:400] for alarm in monitor.alarms],
        "every": monitor.every,
        "step, ms": 1e3 * median(plain.times[1:]),
        "median ratio": median(watched.times[1:]) / median(plain.times[1:]),
        "mean ratio": sum(watched.times[1:]) / sum(plain.times[1:]),
        "added, ms (mean)": 1e3 * sum(added) / len(added),
        "first step, s": plain.times[0],
        "first watched step, s": watched.times[0],
    }
    monitor.close()
    return row


def verdict(row: dict[str, Any]) -> str:
    if "did not run" in row:
        return "did not run"
    if "ended" in row:
        return "ended"
    if row["alarms"]:
        return "alarmed"
    return "clean" if row["losses equal"] and row["weights equal"] else "changed"


def main() -> None:
    """Run all programs, print a line of each, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.packages is not None:
        sys.path.append(str(given.packages))
        sys.path.append(str(given.packages.parent))
    warnings.simplefilter("ignore")
    logging.getLogger("conserved").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for name in PROGRAMS:
        if not any(part in name for part in given.only.split(",")):
            continue
        row = compare(name, given.steps)
        rows.append(row)
        detail = row.get("did not run") or row.get("ended") or (
            f"laws={row['laws']} step={row['step, ms']:.2f}ms median x{row['median ratio']:.2f}"
            f" mean x{row['mean ratio']:.2f} +{row['added, ms (mean)']:.2f}ms"
            f" first {row['first watched step, s']:.2f}s | {row['state']} {row['alarms'] or ''}"
        )  # fmt: skip
        print(f"{verdict(row):11} {name:30} {detail}", flush=True)
    counts = {kind: sum(verdict(row) == kind for row in rows) for kind in sorted({verdict(row) for row in rows})}
    print(counts)
    if given.out is not None:
        record = {"steps": given.steps, "counts": counts, "load": os.getloadavg(), "rows": rows}
        print(save("harmless_others", {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
