"""Gated dilated causal convolutions with skip connections, as in WaveNet, and a temporal convolution with residuals."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResidualLayer(nn.Module):
    def __init__(self, channels, skip, dilation):
        super().__init__()
        self.dilation = dilation
        self.filter = nn.Conv1d(channels, channels, 2, dilation=dilation)
        self.gate = nn.Conv1d(channels, channels, 2, dilation=dilation)
        self.res = nn.Conv1d(channels, channels, 1)
        self.skip = nn.Conv1d(channels, skip, 1)

    def forward(self, x):
        padded = F.pad(x, (self.dilation, 0))
        z = torch.tanh(self.filter(padded)) * torch.sigmoid(self.gate(padded))
        return x + self.res(z), self.skip(z)


class WaveNet(nn.Module):
    def __init__(self, channels, skip, dilations, classes):
        super().__init__()
        self.start = nn.Conv1d(1, channels, 1)
        self.layers = nn.ModuleList(ResidualLayer(channels, skip, d) for d in dilations)
        self.end1 = nn.Conv1d(skip, skip, 1)
        self.end2 = nn.Conv1d(skip, classes, 1)

    def forward(self, x):
        x = self.start(x)
        total = 0
        for layer in self.layers:
            x, s = layer(x)
            total = total + s
        return self.end2(F.relu(self.end1(F.relu(total))))


class GatedConv(nn.Module):
    """A convolutional language model with gated linear units."""

    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.conv = nn.Conv1d(width, 2 * width, 2)
        self.proj = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        x = x + F.glu(self.conv(F.pad(x, (1, 0))), dim=1)
        return self.proj(x.transpose(1, 2))


def build(width=3):
    return WaveNet(width, 4, (1, 2), 3), (torch.randn(2, 1, 6),), {}


def build_glu(width=4):
    return GatedConv(5, width), (torch.arange(8).reshape(2, 4) % 5,), {}
