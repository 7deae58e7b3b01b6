"""A U-Net: double convolutions, max-pool down, transposed convolution up, skip connections by concatenation."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels, norm):
        super().__init__()

        def normed():
            return nn.BatchNorm2d(out_channels) if norm == "batch" else nn.GroupNorm(2, out_channels)

        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            normed(),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            normed(),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels, norm):
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels, norm)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        diff_y = x2.size()[2] - x1.size()[2]
        diff_x = x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes, width, norm="batch"):
        super().__init__()
        self.inc = DoubleConv(n_channels, width, norm)
        self.down = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width, norm))
        self.up = Up(2 * width, width, norm)
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down(x1)
        return self.outc(self.up(x2, x1))


def build(width=2, norm="batch", train=False):
    return UNet(1, 2, width, norm).train(train), (torch.randn(2, 1, 5, 5),), {}
