"""Layers whose weight is computed: weight norm by parametrisation, by hand, weight standardisation, spectral scale."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm


class HandWeightNorm(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.v = nn.Parameter(torch.randn(outputs, inputs))
        self.g = nn.Parameter(torch.ones(outputs, 1))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        w = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        return F.linear(x, w, self.bias)


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = w - w.mean(dim=(1, 2, 3), keepdim=True)
        w = w / (w.pow(2).mean(dim=(1, 2, 3), keepdim=True) + 1e-8).sqrt()
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class CosineClassifier(nn.Module):
    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.body = nn.Linear(inputs, hidden)
        self.prototypes = nn.Parameter(torch.randn(classes, hidden))
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, x):
        z = F.normalize(torch.relu(self.body(x)), dim=-1)
        return self.scale * z @ F.normalize(self.prototypes, dim=-1).t()


def build(width=4):
    model = nn.Sequential(weight_norm(nn.Linear(3, width)), nn.ReLU(), weight_norm(nn.Linear(width, 2)))
    return model, (torch.randn(4, 3),), {}


def build_hand(width=4):
    return nn.Sequential(HandWeightNorm(3, width), nn.Tanh(), HandWeightNorm(width, 2)), (torch.randn(4, 3),), {}


def build_standardised(width=3):
    model = nn.Sequential(
        StandardisedConv(1, width, 3), nn.ReLU(), nn.Conv2d(width, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return model, (torch.randn(2, 1, 5, 5),), {}


def build_cosine(width=4):
    return CosineClassifier(3, width, 3), (torch.randn(4, 3),), {}
