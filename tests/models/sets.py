"""Functions of sets: Deep Sets with a sum, a max and a mean pool, PointNet with an input transform, slot attention."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class DeepSets(nn.Module):
    def __init__(self, inputs, hidden, outputs, pool="sum"):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.rho = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
        self.pool = pool

    def forward(self, x):
        z = self.phi(x)
        z = z.sum(1) if self.pool == "sum" else z.max(1)[0] if self.pool == "max" else z.mean(1)
        return self.rho(z)


class PointNet(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.tconv = nn.Conv1d(2, width, 1)
        self.tfc = nn.Linear(width, 4)
        self.conv1 = nn.Conv1d(2, width, 1)
        self.conv2 = nn.Conv1d(width, width, 1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        t = F.relu(self.tconv(x)).max(dim=2)[0]
        t = self.tfc(t).view(-1, 2, 2) + torch.eye(2, dtype=x.dtype)
        x = torch.bmm(x.transpose(1, 2), t).transpose(1, 2)
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc(torch.max(x, 2)[0])


class SlotAttention(nn.Module):
    def __init__(self, slots, dim, iterations):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, slots, dim))
        self.norm_input, self.norm_slots = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.gru = nn.GRUCell(dim, dim)
        self.iterations, self.scale = iterations, dim**-0.5

    def forward(self, inputs):
        b, _, d = inputs.shape
        slots = self.slots.expand(b, -1, -1)
        inputs = self.norm_input(inputs)
        k, v = self.to_k(inputs), self.to_v(inputs)
        for _ in range(self.iterations):
            before = slots
            q = self.to_q(self.norm_slots(slots))
            attn = (torch.einsum("bid,bjd->bij", q, k) * self.scale).softmax(dim=1)
            attn = attn / attn.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(updates.reshape(-1, d), before.reshape(-1, d)).reshape(b, -1, d)
        return slots


def build(width=4, pool="sum"):
    return DeepSets(3, width, 2, pool), (torch.randn(2, 5, 3),), {}


def build_max(width=3):
    return build(width, "max")


def build_pointnet(width=4):
    return PointNet(width, 3), (torch.randn(2, 2, 5),), {}


def build_slots(width=4):
    return SlotAttention(2, width, 2), (torch.randn(2, 3, width),), {}
