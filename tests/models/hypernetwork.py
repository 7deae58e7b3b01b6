"""A hypernetwork: one network writes the weights of another, layer by layer, from a learned embedding or a context."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class HyperNetwork(nn.Module):
    def __init__(self, context, inputs, hidden, outputs):
        super().__init__()
        self.inputs, self.hidden, self.outputs = inputs, hidden, outputs
        self.body = nn.Sequential(nn.Linear(context, 5), nn.Tanh())
        self.w1 = nn.Linear(5, hidden * inputs)
        self.b1 = nn.Linear(5, hidden)
        self.w2 = nn.Linear(5, outputs * hidden)

    def forward(self, context, x):
        z = self.body(context)
        w1 = self.w1(z).view(-1, self.hidden, self.inputs)
        b1 = self.b1(z)
        w2 = self.w2(z).view(-1, self.outputs, self.hidden)
        h = F.relu(torch.bmm(w1, x.unsqueeze(-1)).squeeze(-1) + b1)
        return torch.bmm(w2, h.unsqueeze(-1)).squeeze(-1)


class ModulatedNet(nn.Module):
    """Feature-wise affine modulation of a ReLU network by a condition."""

    def __init__(self, condition, inputs, hidden, outputs):
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.film = nn.Linear(condition, 2 * hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, condition, x):
        gamma, beta = self.film(condition).chunk(2, dim=-1)
        return self.fc2(F.relu(gamma * self.fc1(x) + beta))


def build(width=3):
    return HyperNetwork(2, 3, width, 2), (torch.randn(4, 2), torch.randn(4, 3)), {}


def build_film(width=4):
    return ModulatedNet(2, 3, width, 2), (torch.randn(4, 2), torch.randn(4, 3)), {}
