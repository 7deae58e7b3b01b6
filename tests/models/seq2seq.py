"""An encoder–decoder transformer with cross-attention, post-norm and sinusoidal positions, shared embeddings."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def attention(query, key, value, mask=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(scores.softmax(dim=-1), value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x = attention(query, key, value, mask=mask)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_2(self.w_1(x).relu())


class EncoderLayer(nn.Module):
    def __init__(self, size, h, d_ff):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, size)
        self.feed_forward = FeedForward(size, d_ff)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x):
        x = self.norm1(x + self.self_attn(x, x, x))
        return self.norm2(x + self.feed_forward(x))


class DecoderLayer(nn.Module):
    def __init__(self, size, h, d_ff):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, size)
        self.src_attn = MultiHeadedAttention(h, size)
        self.feed_forward = FeedForward(size, d_ff)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(size), nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x, memory, mask):
        x = self.norm1(x + self.self_attn(x, x, x, mask))
        x = self.norm2(x + self.src_attn(x, memory, memory))
        return self.norm3(x + self.feed_forward(x))


class EncoderDecoder(nn.Module):
    def __init__(self, vocab, d_model, h, d_ff, length):
        super().__init__()
        self.src_embed = nn.Embedding(vocab, d_model)
        self.tgt_embed = nn.Embedding(vocab, d_model)
        self.encoder = EncoderLayer(d_model, h, d_ff)
        self.decoder = DecoderLayer(d_model, h, d_ff)
        self.generator = nn.Linear(d_model, vocab)
        self.scale = math.sqrt(d_model)
        position = torch.arange(0, length).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe = torch.zeros(length, d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, src, tgt):
        mask = torch.tril(torch.ones(1, 1, tgt.size(1), tgt.size(1)))
        memory = self.encoder(self.src_embed(src) * self.scale + self.pe[:, : src.size(1)])
        x = self.tgt_embed(tgt) * self.scale + self.pe[:, : tgt.size(1)]
        return F.log_softmax(self.generator(self.decoder(x, memory, mask)), dim=-1)


def build(width=4):
    model = EncoderDecoder(5, width, 2, 3, 4)
    return model, (torch.arange(6).reshape(2, 3) % 5, torch.arange(8).reshape(2, 4) % 5), {}
