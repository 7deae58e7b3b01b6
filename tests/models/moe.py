"""Mixtures of experts in the ways people write them: index_add loop, gathered weights, grouped bmm, dense einsum."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LoopMoE(nn.Module):
    """Tokens are picked expert by expert and added back in place."""

    def __init__(self, dim, hidden, experts, top_k):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(experts)])
        self.top_k = top_k

    def forward(self, hidden_states):
        batch, length, dim = hidden_states.shape
        x = hidden_states.view(-1, dim)
        routing = F.softmax(self.gate(x), dim=1)
        routing, selected = torch.topk(routing, self.top_k, dim=-1)
        routing = routing / routing.sum(dim=-1, keepdim=True)
        final = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            idx, top_x = torch.where(mask[i])
            current = expert(x[top_x]) * routing[top_x, idx, None]
            final.index_add_(0, top_x, current)
        return final.reshape(batch, length, dim)


class GatherMoE(nn.Module):
    """Every token gathers the weight matrices of the experts it is sent to."""

    def __init__(self, dim, hidden, experts, top_k):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden))
        self.w3 = nn.Parameter(torch.randn(experts, hidden, dim))
        self.top_k = top_k

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        scores, index = torch.topk(self.gate(x), self.top_k, dim=-1)
        weights = F.softmax(scores, dim=-1)
        w1, w2, w3 = self.w1[index], self.w2[index], self.w3[index]
        h = F.silu(torch.einsum("ti,taoi->tao", x, w1)) * torch.einsum("ti,taoi->tao", x, w3)
        out = torch.einsum("tao,taio->tai", h, w2)
        return torch.einsum("tai,ta->ti", out, weights).reshape(shape)


class GroupedMoE(nn.Module):
    """Tokens are sorted into buffers of fixed capacity, one bmm runs all experts, and results are scattered back."""

    def __init__(self, dim, hidden, experts):
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, dim))
        self.up_bias = nn.Parameter(torch.zeros(experts, 1, hidden))

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        n, d = x.shape
        probabilities = F.softmax(self.router(x), dim=-1)
        gate, chosen = probabilities.max(dim=-1)
        one_hot = F.one_hot(chosen, self.experts)
        index = (one_hot.cumsum(0) * one_hot).sum(-1) - 1
        slot = chosen * n + index
        buffers = torch.zeros(self.experts * n, d, dtype=x.dtype).index_copy(0, slot, x).view(self.experts, n, d)
        h = torch.relu(torch.bmm(buffers, self.up) + self.up_bias)
        out = torch.bmm(h, self.down).reshape(self.experts * n, d)[slot]
        return (out * gate.unsqueeze(-1)).reshape(shape)


class DenseMoE(nn.Module):
    """All experts see all tokens; one einsum each, mixed by a softmax gate."""

    def __init__(self, dim, hidden, experts, relu=False):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.w_in = nn.Parameter(torch.randn(experts, dim, hidden))
        self.b_in = nn.Parameter(torch.zeros(experts, hidden))
        self.w_out = nn.Parameter(torch.randn(experts, hidden, dim))
        self.act = F.relu if relu else F.gelu

    def forward(self, x):
        g = self.gate(x).softmax(-1)
        h = self.act(torch.einsum("bnd,edh->bneh", x, self.w_in) + self.b_in)
        y = torch.einsum("bneh,ehd->bned", h, self.w_out)
        return torch.einsum("bned,bne->bnd", y, g)


def build(width=4, top_k=2):
    return LoopMoE(width, 2, 3, top_k), (torch.randn(2, 4, width),), {}


def build_top1(width=4):
    return build(width, 1)


def build_gather(width=4):
    return GatherMoE(width, 2, 3, 2), (torch.randn(2, 4, width),), {}


def build_grouped(width=4):
    return GroupedMoE(width, 2, 3), (torch.randn(2, 4, width),), {}


def build_dense(width=4, relu=False):
    return DenseMoE(width, 3, 3, relu), (torch.randn(2, 4, width),), {}
