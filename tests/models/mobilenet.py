"""Depthwise-separable and inverted-residual convolutions with ReLU6, squeeze-excitation and a dense block."""

import torch
import torch.nn as nn


def conv_bn(inp, oup, kernel, stride, groups=1, act=nn.ReLU6):
    return nn.Sequential(
        nn.Conv2d(inp, oup, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(oup),
        act(),
    )


class MobileNet(nn.Module):
    def __init__(self, width, classes, act):
        super().__init__()

        def conv_dw(inp, oup, stride):
            return nn.Sequential(conv_bn(inp, inp, 3, stride, groups=inp, act=act), conv_bn(inp, oup, 1, 1, act=act))

        self.model = nn.Sequential(
            conv_bn(1, width, 3, 2, act=act), conv_dw(width, 2 * width, 1), nn.AdaptiveAvgPool2d(1)
        )
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.model(x)
        x = x.view(-1, x.shape[1])
        return self.fc(x)


class InvertedResidual(nn.Module):
    def __init__(self, dim, expand):
        super().__init__()
        hidden = dim * expand
        self.conv = nn.Sequential(
            conv_bn(dim, hidden, 1, 1),
            conv_bn(hidden, hidden, 3, 1, groups=hidden),
            nn.Conv2d(hidden, dim, 1, 1, 0, bias=False),
            nn.BatchNorm2d(dim),
        )

    def forward(self, x):
        return x + self.conv(x)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduced):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.fc1 = nn.Conv2d(channels, reduced, 1)
        self.fc2 = nn.Conv2d(reduced, channels, 1)
        self.conv2 = nn.Conv2d(channels, 2, 3, padding=1)

    def forward(self, x):
        x = self.conv1(x)
        scale = x.mean((2, 3), keepdim=True)
        scale = torch.sigmoid(self.fc2(torch.relu(self.fc1(scale))))
        return self.conv2(x * scale)


class DenseBlock(nn.Module):
    def __init__(self, channels, growth, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + i * growth), nn.ReLU(), nn.Conv2d(channels + i * growth, growth, 3, padding=1)
            )
            for i in range(layers)
        )
        self.classifier = nn.Linear(channels + layers * growth, 3)

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.classifier(torch.cat(features, 1).mean((2, 3)))


class ShuffleUnit(nn.Module):
    """Grouped convolutions with a channel shuffle between them."""

    def __init__(self, channels, groups):
        super().__init__()
        self.groups = groups
        self.conv1 = nn.Conv2d(channels, channels, 1, groups=groups)
        self.depth = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.conv2 = nn.Conv2d(channels, channels, 1, groups=groups)

    def forward(self, x):
        b, c, h, w = x.shape
        y = torch.relu(self.conv1(x))
        y = y.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).contiguous().view(b, c, h, w)
        return x + self.conv2(self.depth(y))


def build(width=3, act=nn.ReLU6):
    return MobileNet(width, 3, act).eval(), (torch.randn(2, 1, 6, 6),), {}


def build_relu(width=3):
    return build(width, nn.ReLU)


def build_inverted(width=2):
    return InvertedResidual(width, 2).eval(), (torch.randn(2, width, 4, 4),), {}


def build_excite(width=4):
    return SqueezeExcite(width, 2), (torch.randn(2, 1, 4, 4),), {}


def build_dense(width=2):
    return DenseBlock(width, 2, 2).eval(), (torch.randn(2, width, 4, 4),), {}


def build_shuffle(width=4):
    return ShuffleUnit(width, 2), (torch.randn(2, width, 4, 4),), {}
