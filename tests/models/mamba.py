"""A selective state-space language model in plain torch: causal depthwise convolution, softplus steps, a time loop."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class MambaBlock(nn.Module):
    def __init__(self, d_model, d_inner, d_state, dt_rank, d_conv):
        super().__init__()
        self.d_inner, self.d_state, self.dt_rank = d_inner, d_state, dt_rank
        self.in_proj = nn.Linear(d_model, d_inner * 2, bias=False)
        self.conv1d = nn.Conv1d(d_inner, d_inner, d_conv, bias=True, groups=d_inner, padding=d_conv - 1)
        self.x_proj = nn.Linear(d_inner, dt_rank + d_state * 2, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner, bias=True)
        A = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(d_inner, 1)
        self.A_log = nn.Parameter(torch.log(A))
        self.D = nn.Parameter(torch.ones(d_inner))
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)

    def forward(self, x):
        _, length, _ = x.shape
        x, res = self.in_proj(x).split(split_size=[self.d_inner, self.d_inner], dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
        x = F.silu(x)
        y = self.ssm(x) * F.silu(res)
        return self.out_proj(y)

    def ssm(self, x):
        A = -torch.exp(self.A_log)
        x_dbl = self.x_proj(x)
        delta, B, C = x_dbl.split(split_size=[self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        return self.selective_scan(x, delta, A, B, C, self.D)

    def selective_scan(self, u, delta, A, B, C, D):
        b, length, d_in = u.shape
        delta_a = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        delta_b_u = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        x = torch.zeros((b, d_in, self.d_state), dtype=u.dtype, device=u.device)
        ys = []
        for i in range(length):
            x = delta_a[:, i] * x + delta_b_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", x, C[:, i, :]))
        return torch.stack(ys, dim=1) + u * D


class Mamba(nn.Module):
    def __init__(self, vocab, d_model, n_layer):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.norms = nn.ModuleList(RMSNorm(d_model) for _ in range(n_layer))
        self.layers = nn.ModuleList(MambaBlock(d_model, d_model + 1, 2, 2, 3) for _ in range(n_layer))
        self.norm_f = RMSNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for norm, layer in zip(self.norms, self.layers):
            x = layer(norm(x)) + x
        return self.lm_head(self.norm_f(x))


def build(width=4):
    return Mamba(5, width, 1), (torch.arange(8).reshape(2, 4) % 5,), {}
