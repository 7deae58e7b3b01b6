"""ConvNeXt blocks: depthwise convolution, channels-last layer norm, pointwise MLP as linear layers, layer scale."""

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps
        self.data_format = data_format
        self.shape = (dim,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self, dim, layer_scale=1e-6):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim)
        self.norm = LayerNorm(dim)
        self.pwconv1 = nn.Linear(dim, 2 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(2 * dim, dim)
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim), requires_grad=True)

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return input + x


class ConvNeXt(nn.Module):
    def __init__(self, channels, classes, dims):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, dims[0], kernel_size=2, stride=2), LayerNorm(dims[0], data_format="channels_first")
        )
        self.stage0 = Block(dims[0])
        self.down = nn.Sequential(
            LayerNorm(dims[0], data_format="channels_first"), nn.Conv2d(dims[0], dims[1], kernel_size=2, stride=2)
        )
        self.stage1 = Block(dims[1])
        self.norm = nn.LayerNorm(dims[1], eps=1e-6)
        self.head = nn.Linear(dims[1], classes)

    def forward(self, x):
        x = self.stage0(self.stem(x))
        x = self.stage1(self.down(x))
        return self.head(self.norm(x.mean([-2, -1])))


def build(width=3):
    return ConvNeXt(1, 3, (width, width + 1)), (torch.randn(2, 1, 8, 8),), {}
