"""Small language models as people write them by hand, for tables over parallel stacks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder."""

    vocabulary: int = 64
    width: int = 32
    heads: int = 4
    key_heads: int = 2
    hidden: int = 64
    layers: int = 2
    length: int = 16


class Attention(nn.Module):
    """Causal attention with grouped key heads and rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.head_width, bias=False)
        self.wk = nn.Linear(config.width, config.key_heads * self.head_width, bias=False)
        self.wv = nn.Linear(config.width, config.key_heads * self.head_width, bias=False)
        self.wo = nn.Linear(config.heads * self.head_width, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Attend from every token to those before it."""
        batch, length, _ = x.shape
        # Heads are counted by what is there: a process may hold some of them only.
        q, k, v = (w(x).view(batch, length, -1, self.head_width) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return w2(silu(w1 x) · w3 x)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer of a decoder."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Add attention and the feed-forward layer to the stream."""
        h = x + self.attention(self.attention_norm(x), angles)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    """A decoder whose first and last parts may be missing, as they are in a stage of a pipeline."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleDict({str(n): Block(config) for n in range(config.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.width, eps=1e-5)
        self.output: nn.Linear | None = nn.Linear(config.width, config.vocabulary, bias=False)
        self.register_buffer("angles", rotary_angles(config), persistent=False)

    angles: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every next token."""
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        angles = self.angles[: tokens.shape[1]]
        for layer in self.layers.values():
            h = layer(h, angles)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def rotary_angles(config: DecoderConfig) -> Tensor:
    """Return the angle of every position and pair of channels."""
    pairs = config.width // config.heads // 2
    frequencies = 10000.0 ** (-torch.arange(pairs) / pairs)
    return torch.outer(torch.arange(config.length), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (j, j + half) of channels by the angle of their position."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def make_decoder(config: DecoderConfig | None = None, seed: int = 0) -> Decoder:
    """Return a decoder with seeded weights; gains are moved off one."""
    torch.manual_seed(seed)
    model = Decoder(config or DecoderConfig())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def make_tokens(config: DecoderConfig, *, step: int, rank: int = 0, batch: int = 2) -> Tensor:
    """Return tokens of one step and rank, with one more than the length."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, config.vocabulary, (batch, config.length + 1), generator=generator)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of next tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_pieces_of_whole(model: nn.Module) -> None:
    """Give every DTensor its part of one whole random tensor, of the spread that it has.

    Processes that are seeded alike fill their pieces with the same numbers on a processor, so that partial sums of
    gradients come out alike, which they do in no real run.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.to_local().numel() < 2:
            continue
        values = parameter.full_tensor().detach()
        spread = float(values.std())
        if spread == 0:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = spread * torch.randn(values.shape, generator=generator)
        with torch.no_grad():
            pieces = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(pieces.to_local())
