"""The model of the demonstration, its text, and a copy of it with a defect that real kernels have had."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.blocks import DecoderLM
from conserved.lab.data import VOCABULARY, sequences

LENGTH = 48


def decoder(seed: int) -> DecoderLM:
    """Grouped rotary attention and gated experts in float64, small enough for two cores."""
    torch.manual_seed(seed)
    return DecoderLM(
        VOCABULARY, 32, 2, 4, 48, max_length=64, kv_heads=2, experts=4, top_k=2, positions="rotary-half", norm="rms"
    ).double()


def text(seed: int) -> Tensor:
    """Stretches of the standard library's source, as bytes."""
    return sequences(8, LENGTH, seed=seed)


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of each byte given the bytes before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


DEFECT = "layers.0.norm1"
"""The norm that `plant_defect` breaks."""


def plant_defect(model: DecoderLM) -> str:
    """Make one norm's backward pass sum the gradient of its gain over half of the sequences only; say so in words.

    Fused norms reduce that gradient block by block, and have lost blocks. The forward pass is what it was.
    """
    norm = model.get_submodule(DEFECT)
    assert isinstance(norm, nn.RMSNorm)
    gain = norm.weight

    def forward(x: Tensor) -> Tensor:
        normed = F.rms_norm(x, norm.normalized_shape, None, norm.eps)
        kept = len(x) // 2
        return torch.cat([normed[:kept] * gain, normed[kept:] * gain.detach()])

    norm.forward = forward  # type: ignore[method-assign]
    return f"the gain of {DEFECT} gets the gradient of half of the batch"
