"""Networks that use one weight in several places: tied autoencoders, siamese and triplet towers, a shared block."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TiedAutoencoder(nn.Module):
    def __init__(self, inputs, hidden, act=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, inputs))
        self.b = nn.Parameter(torch.zeros(hidden))
        self.c = nn.Parameter(torch.zeros(inputs))
        self.act = act

    def forward(self, x):
        h = F.linear(x, self.weight, self.b)
        if self.act is not None:
            h = self.act(h)
        return F.linear(h, self.weight.t(), self.c)


class PureTied(nn.Module):
    """x ↦ W Wᵀ x, with nothing else."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, hidden))

    def forward(self, x):
        return x @ self.weight @ self.weight.t()


class Siamese(nn.Module):
    def __init__(self, inputs, hidden, embed):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, embed))
        self.head = nn.Linear(embed, 1)

    def forward(self, a, b):
        return self.head(torch.abs(self.tower(a) - self.tower(b)))


class TwoTower(nn.Module):
    """Users against items: a dot product of two different towers."""

    def __init__(self, users, items, width):
        super().__init__()
        self.user = nn.Embedding(users, width)
        self.item = nn.Embedding(items, width)
        self.project = nn.Linear(width, width, bias=False)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)

    def forward(self, u, i):
        score = (self.project(self.user(u)) * self.item(i)).sum(-1)
        return score + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1)


class UniversalBlock(nn.Module):
    """One block applied several times."""

    def __init__(self, width, hidden, steps):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.head = nn.Linear(width, 2)
        self.steps = steps

    def forward(self, x):
        for _ in range(self.steps):
            x = x + self.down(F.relu(self.up(self.norm(x))))
        return self.head(x)


class SharedByData(nn.Module):
    """Two layers whose weights are one storage under two parameters: tied through .data."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight.data = self.first.weight.data

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def build(width=3):
    return TiedAutoencoder(4, width), (torch.randn(4, 4),), {}


def build_relu(width=3):
    return TiedAutoencoder(4, width, F.relu), (torch.randn(4, 4),), {}


def build_pure(width=3):
    return PureTied(4, width), (torch.randn(4, 4),), {}


def build_siamese(width=4):
    return Siamese(3, width, 3), (torch.randn(4, 3), torch.randn(4, 3)), {}


def build_two_tower(width=3):
    return TwoTower(4, 5, width), (torch.arange(8) % 4, torch.arange(8) % 5), {}


def build_universal(width=4):
    return UniversalBlock(width, 3, 3), (torch.randn(4, width),), {}


def build_shared_data(width=3):
    return SharedByData(width), (torch.randn(4, width),), {}
