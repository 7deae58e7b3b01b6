"""Small feedforward networks: squared ReLU, maxout, gated spatial units, highway, bilinear, flow layers."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SquaredReLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.c_fc = nn.Linear(dim, hidden, bias=False)
        self.c_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.c_proj(F.relu(self.c_fc(x)).square())


class Maxout(nn.Module):
    def __init__(self, inputs, hidden, pieces, outputs):
        super().__init__()
        self.lin = nn.Linear(inputs, hidden * pieces)
        self.out = nn.Linear(hidden, outputs)
        self.hidden, self.pieces = hidden, pieces

    def forward(self, x):
        z = self.lin(x).view(*x.shape[:-1], self.hidden, self.pieces)
        return self.out(z.max(-1)[0])


class SpatialGating(nn.Module):
    """gMLP: half of the channels are mixed over tokens and gate the other half."""

    def __init__(self, dim, ffn, length):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.channel_in = nn.Linear(dim, 2 * ffn)
        self.sgu_norm = nn.LayerNorm(ffn)
        self.spatial = nn.Conv1d(length, length, kernel_size=1)
        self.channel_out = nn.Linear(ffn, dim)

    def forward(self, x):
        u, v = F.gelu(self.channel_in(self.norm(x))).chunk(2, dim=-1)
        v = self.spatial(self.sgu_norm(v))
        return x + self.channel_out(u * v)


class Highway(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        h = F.relu(self.transform(x))
        t = torch.sigmoid(self.gate(x))
        return self.head(h * t + x * (1 - t))


class BilinearPool(nn.Module):
    """Two streams meet in a bilinear form and in a factorised one."""

    def __init__(self, a, b, rank, outputs):
        super().__init__()
        self.bilinear = nn.Bilinear(a, b, outputs)
        self.u, self.v = nn.Linear(a, rank, bias=False), nn.Linear(b, rank, bias=False)
        self.p = nn.Linear(rank, outputs, bias=False)

    def forward(self, x, y):
        return self.bilinear(x, y) + self.p(self.u(x) * self.v(y))


class Coupling(nn.Module):
    """Two affine coupling layers of a normalising flow; returns the image and the log-determinant."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.s1 = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.Tanh())
        self.t1 = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        s = self.s1(a)
        b = b * torch.exp(s) + self.t1(a)
        return torch.cat((b, a), dim=-1), s.sum(-1)


class DeepLinear(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class FactorisationMachine(nn.Module):
    def __init__(self, fields, width):
        super().__init__()
        self.w0 = nn.Parameter(torch.zeros(1))
        self.w = nn.Parameter(torch.randn(fields))
        self.v = nn.Parameter(torch.randn(fields, width))

    def forward(self, x):
        pairs = 0.5 * ((x @ self.v).pow(2) - x.pow(2) @ self.v.pow(2)).sum(-1)
        return self.w0 + x @ self.w + pairs


class PReLUNet(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
        self.act1, self.act2 = nn.PReLU(hidden), nn.PReLU()

    def forward(self, x):
        return self.c(self.act2(self.b(self.act1(self.a(x)))))


class DuelingQ(nn.Module):
    """A dueling value network: state value plus centred advantages."""

    def __init__(self, inputs, hidden, actions):
        super().__init__()
        self.feature = nn.Linear(inputs, hidden)
        self.value = nn.Linear(hidden, 1)
        self.advantage = nn.Linear(hidden, actions)

    def forward(self, x):
        h = F.relu(self.feature(x))
        a = self.advantage(h)
        return self.value(h) + a - a.mean(dim=1, keepdim=True)


def build(width=4):
    return SquaredReLU(width, 3), (torch.randn(4, width),), {}


def build_maxout(width=3):
    return Maxout(3, width, 2, 2), (torch.randn(4, 3),), {}


def build_gmlp(width=4):
    return SpatialGating(width, 3, 3), (torch.randn(2, 3, width),), {}


def build_highway(width=3):
    return Highway(width, 2), (torch.randn(4, width),), {}


def build_bilinear(width=3):
    return BilinearPool(width, 2, 3, 2), (torch.randn(4, width), torch.randn(4, 2)), {}


def build_flow(width=2):
    return Coupling(width, 3), (torch.randn(4, 2 * width),), {}


def build_deep_linear(width=3):
    return DeepLinear((4, width, width, 2)), (torch.randn(4, 4),), {}


def build_fm(width=3):
    return FactorisationMachine(4, width), (torch.randn(5, 4),), {}


def build_prelu(width=3):
    return PReLUNet(3, width, 2), (torch.randn(4, 3),), {}


def build_dueling(width=3):
    return DuelingQ(3, width, 3), (torch.randn(4, 3),), {}
