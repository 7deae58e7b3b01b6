"""Low-rank adapters by hand: a frozen base with trained factors, and the same where everything is trained."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, inputs, outputs, rank, alpha=2.0, freeze=True):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) * 0.3)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))
        self.scaling = alpha / rank
        if freeze:
            self.linear.weight.requires_grad_(False)
            self.linear.bias.requires_grad_(False)

    def forward(self, x):
        return self.linear(x) + (x @ self.lora_a.t() @ self.lora_b.t()) * self.scaling


class DoRALinear(LoRALinear):
    """The direction is adapted by low-rank factors and normalised, the magnitude is a vector of its own."""

    def __init__(self, inputs, outputs, rank):
        super().__init__(inputs, outputs, rank)
        self.magnitude = nn.Parameter(torch.ones(outputs))

    def forward(self, x):
        w = self.linear.weight + self.lora_b @ self.lora_a * self.scaling
        w = self.magnitude[:, None] * w / w.norm(dim=1, keepdim=True)
        return F.linear(x, w, self.linear.bias)


class Adapted(nn.Module):
    def __init__(self, width, layer, **options):
        super().__init__()
        self.first = layer(3, width, 2, **options)
        self.second = layer(width, 2, 2, **options)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def build(width=4):
    return Adapted(width, LoRALinear), (torch.randn(4, 3),), {}


def build_all(width=4):
    return Adapted(width, LoRALinear, freeze=False), (torch.randn(4, 3),), {}


def build_dora(width=4):
    return Adapted(width, DoRALinear), (torch.randn(4, 3),), {}
