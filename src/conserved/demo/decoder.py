"""The model of the demonstration on its text, and a copy of it with a defect that real kernels have had."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.lab import demo
from conserved.lab.data import Examples
from conserved.lab.recipes import build, examples_of


def decoder(seed: int) -> nn.Module:
    """Grouped rotary attention and gated experts in float64, small enough for two cores."""
    return build(demo.decoder(seed, steps=1), seed).double()


def text(seed: int) -> Examples:
    """Stretches of the standard library's source, as bytes."""
    return examples_of(demo.decoder(seed, steps=1))


def next_byte_loss(model: nn.Module, examples: Examples) -> Tensor:
    """Cross-entropy of each byte given the bytes before it."""
    return F.cross_entropy(model(examples.inputs).flatten(0, 1), examples.targets.flatten())


DEFECT = "layers.0.norm1"
"""The norm that `plant_defect` breaks."""


def plant_defect(model: nn.Module) -> str:
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
