"""Time mixing and channel mixing in the manner of RWKV-4, as a loop in plain torch: token shift and decay."""

import torch
import torch.nn as nn


def shifted(x):
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


class TimeMix(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.time_decay = nn.Parameter(torch.randn(dim))
        self.time_first = nn.Parameter(torch.randn(dim))
        self.time_mix_k = nn.Parameter(torch.rand(1, 1, dim))
        self.time_mix_v = nn.Parameter(torch.rand(1, 1, dim))
        self.time_mix_r = nn.Parameter(torch.rand(1, 1, dim))
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        xx = shifted(x)
        k = self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))
        v = self.value(x * self.time_mix_v + xx * (1 - self.time_mix_v))
        r = torch.sigmoid(self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r)))
        w = -torch.exp(self.time_decay)
        num = torch.zeros_like(k[:, 0])
        den = torch.zeros_like(k[:, 0])
        out = []
        for t in range(x.shape[1]):
            first = torch.exp(self.time_first + k[:, t])
            out.append((num + first * v[:, t]) / (den + first))
            e = torch.exp(k[:, t])
            num = torch.exp(w) * num + e * v[:, t]
            den = torch.exp(w) * den + e
        return self.output(r * torch.stack(out, dim=1))


class ChannelMix(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.time_mix_k = nn.Parameter(torch.rand(1, 1, dim))
        self.time_mix_r = nn.Parameter(torch.rand(1, 1, dim))
        self.key = nn.Linear(dim, hidden, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        xx = shifted(x)
        k = self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))
        k = torch.square(torch.relu(k))
        r = self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r))
        return torch.sigmoid(r) * self.value(k)


class RWKV(nn.Module):
    def __init__(self, vocab, dim, hidden):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.ln0, self.ln1, self.ln2, self.ln_out = (nn.LayerNorm(dim) for _ in range(4))
        self.att = TimeMix(dim)
        self.ffn = ChannelMix(dim, hidden)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.ln0(self.emb(idx))
        x = x + self.att(self.ln1(x))
        x = x + self.ffn(self.ln2(x))
        return self.head(self.ln_out(x))


def build(width=4):
    return RWKV(5, width, 3), (torch.arange(8).reshape(2, 4) % 5,), {}
