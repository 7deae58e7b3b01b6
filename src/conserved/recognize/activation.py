"""Which activations are homogeneous: f(s·z) = s^k f(z) for s > 0, so that a neuron's scale can pass through."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from conserved.recognize.site import own_forward, qualified_name

_DEGREES: dict[str, int] = {
    "torch.nn.modules.activation.ReLU": 1,
    "torch.nn.modules.activation.LeakyReLU": 1,
    "torch.nn.modules.linear.Identity": 1,
    "transformers.activations.LinearActivation": 1,
    "transformers.activations.ReLUSquaredActivation": 2,
}
_FUNCTIONS = {F.relu: 1, torch.relu: 1, F.relu_: 1, torch.relu_: 1, F.leaky_relu: 1}

_LINEAR = ("torch.nn.modules.linear.Identity", "transformers.activations.LinearActivation")


def degree(activation: object) -> int | None:
    """k if the activation is known to be positively homogeneous of degree k, and None if it is not known to be."""
    if isinstance(activation, nn.Module):
        return None if own_forward(activation) else _DEGREES.get(qualified_name(type(activation)))
    return _FUNCTIONS.get(activation) if callable(activation) else None


def is_linear(activation: object) -> bool:
    """Whether it is the identity."""
    return isinstance(activation, nn.Module) and qualified_name(type(activation)) in _LINEAR and degree(activation) == 1
