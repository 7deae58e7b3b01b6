"""An MLP-Mixer: a convolutional stem, token mixing over the transposed stream, channel mixing, global mean."""

import torch
from torch import nn


class MixerBlock(nn.Module):
    def __init__(self, tokens, channels, hidden, act):
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.token = nn.Sequential(nn.Linear(tokens, hidden), act(), nn.Linear(hidden, tokens))
        self.norm2 = nn.LayerNorm(channels)
        self.channel = nn.Sequential(nn.Linear(channels, hidden), act(), nn.Linear(hidden, channels))

    def forward(self, x):
        y = self.norm1(x).transpose(1, 2)
        x = x + self.token(y).transpose(1, 2)
        return x + self.channel(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, image, patch, channels, width, hidden, depth, classes, act):
        super().__init__()
        self.stem = nn.Conv2d(channels, width, patch, stride=patch)
        tokens = (image // patch) ** 2
        self.blocks = nn.Sequential(*[MixerBlock(tokens, width, hidden, act) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x))
        return self.head(x.mean(dim=1))


def build(width=5, act=nn.GELU):
    return Mixer(4, 2, 1, width, 3, 1, 3, act), (torch.randn(2, 1, 4, 4),), {}


def build_relu(width=5):
    return build(width, nn.ReLU)
