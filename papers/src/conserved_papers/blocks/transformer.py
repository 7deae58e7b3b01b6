"""Transformers made of the blocks: a pre-norm block, a vision transformer and a decoder language model."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from conserved_papers.blocks.attention import Attention, Pairing, rotation_angles
from conserved_papers.blocks.experts import Gate, MixtureOfExperts
from conserved_papers.blocks.feedforward import ACTIVATIONS, FeedForward, SwiGLU

Norm = Literal["layer", "rms"]
Hidden = Literal["gelu", "silu", "relu", "linear", "swiglu"]
PositionKind = Literal["none", "sinusoidal", "learned", "rotary", "rotary-half"]


def normalization(kind: Norm, dim: int, *, bias: bool = True, eps: float = 1e-6) -> nn.LayerNorm | nn.RMSNorm:
    """Return LayerNorm, which centres, or RMSNorm, which does not."""
    if kind == "layer":
        return nn.LayerNorm(dim, eps=eps, bias=bias)
    if kind == "rms":
        return nn.RMSNorm(dim, eps=eps)
    raise ValueError(f'Expected norm to be "layer" or "rms", got {kind!r}. Pass one of them.')


class SinusoidalPositions(nn.Module):
    """Adds the fixed position vectors p of the original Transformer: x ↦ x + p."""

    def forward(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch length dim"]:
        length, dim = x.shape[-2:]
        angles = rotation_angles(length, (dim + 1) // 2, x)
        return x + torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[:, :dim].to(x.dtype)


class LearnedPositions(nn.Module):
    """Adds one trained vector per position: x ↦ x + P.

    Args:
        length: number of positions, the longest sequence.
        dim: width of the tokens.
    """

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(length, dim))

    def forward(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch length dim"]:
        length = x.shape[-2]
        if length > len(self.weight):
            raise ValueError(
                f"Expected at most {len(self.weight)} tokens, one a learned position, got {length}. Cut the sequence."
            )
        return x + self.weight[:length]


class TransformerBlock(nn.Module):
    """x ↦ y + feedforward(norm2(y)) with y = x + attention(norm1(x)).

    Args:
        attention: the attention, which also says the width of the tokens.
        feedforward: the feed-forward network or mixture.
        norm: "layer" or "rms".
        bias: whether layer norms have biases.

    Raises:
        ValueError: the norm is another word.
    """

    def __init__(
        self,
        attention: Attention,
        feedforward: FeedForward | SwiGLU | MixtureOfExperts,
        norm: Norm = "layer",
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm1 = normalization(norm, attention.dim, bias=bias)
        self.attention = attention
        self.norm2 = normalization(norm, attention.dim, bias=bias)
        self.feedforward = feedforward

    def forward(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch length dim"]:
        x = x + self.attention(self.norm1(x))
        return x + self.feedforward(self.norm2(x))


_PAIRINGS: dict[str, Pairing] = {"rotary": "interleaved", "rotary-half": "half"}


def _feedforward(dim: int, hidden: int, kind: Hidden, bias: bool) -> FeedForward | SwiGLU:
    if kind == "swiglu":
        return SwiGLU(dim, hidden, bias=bias)
    if kind not in ACTIVATIONS:
        raise ValueError(
            f"Expected feedforward to be swiglu or one of {', '.join(ACTIVATIONS)}, got {kind!r}. Pass one of them."
        )
    return FeedForward(dim, hidden, kind, bias=bias)


def _positions(kind: PositionKind, length: int, dim: int) -> nn.Module:
    if kind == "learned":
        return LearnedPositions(length, dim)
    if kind == "sinusoidal":
        return SinusoidalPositions()
    if kind in ("none", "rotary", "rotary-half"):
        return nn.Identity()
    raise ValueError(
        f"Expected positions to be none, sinusoidal, learned, rotary or rotary-half, got {kind!r}. Pass one of them."
    )


class DecoderLM(nn.Module):
    """A causal language model of pre-norm blocks: token ids to next-token logits.

    The defaults are the shape of the paper's language experiments.

    Args:
        vocab: number of tokens.
        dim: width of the tokens.
        depth: number of blocks.
        heads: query heads of each block.
        hidden: hidden units of each feed-forward network.
        max_length: the longest sequence, for learned positions.
        kv_heads: key heads of each block; by default as many as query heads.
        positions: "none", "sinusoidal", "learned", "rotary" or "rotary-half".
        norm: "layer" or "rms".
        feedforward: "swiglu", or the activation of a plain network.
        experts: number of experts of a mixture in place of each feed-forward network; 0 for none.
        gate: the gate of the mixture, "softmax" or "sigmoid".
        top_k: active experts; by default all.
        qk_norm: whether queries and keys are normalised, the Qwen-3 variant.
        bias: whether linear maps and layer norms have biases.
        tie: whether the embedding is also the output head.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        *,
        max_length: int = 256,
        kv_heads: int | None = None,
        positions: PositionKind = "rotary",
        norm: Norm = "rms",
        feedforward: Hidden = "swiglu",
        experts: int = 0,
        gate: Gate = "softmax",
        top_k: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        tie: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.positions = _positions(positions, max_length, dim)
        rotary = _PAIRINGS.get(positions, False)
        self.layers = nn.ModuleList(
            TransformerBlock(
                Attention(dim, heads, kv_heads=kv_heads, rotary=rotary, causal=True, bias=bias, qk_norm=qk_norm),
                MixtureOfExperts(dim, hidden, experts, gate, top_k)
                if experts
                else _feedforward(dim, hidden, feedforward, bias),
                norm,
                bias=bias,
            )
            for _ in range(depth)
        )
        self.norm = normalization(norm, dim, bias=bias)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Int[Tensor, "*batch length"]) -> Float[Tensor, "*batch length vocab"]:
        x = self.positions(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class VisionTransformer(nn.Module):
    """A classifier of square images: patches, pre-norm blocks, the mean over tokens, class logits.

    Args:
        image: pixels along one side.
        patch: pixels along one side of a patch.
        dim: width of the tokens.
        depth: number of blocks.
        heads: heads of each block.
        hidden: hidden units of each feed-forward network.
        channels: colours of a pixel.
        classes: number of classes.
        positions: "none", "sinusoidal", "learned", "rotary" or "rotary-half".
        norm: "layer" or "rms".
        feedforward: "swiglu", or the activation of a plain network.
        qk_norm: whether queries and keys are normalised.
        bias: whether linear maps and layer norms have biases.

    Raises:
        ValueError: the image does not divide into patches.
    """

    def __init__(
        self,
        image: int,
        patch: int,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        *,
        channels: int = 3,
        classes: int = 10,
        positions: PositionKind = "learned",
        norm: Norm = "layer",
        feedforward: Hidden = "swiglu",
        qk_norm: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(
                f"Expected an image side that is a multiple of the patch, got {image} and {patch}. Pass other sizes."
            )
        self.patch, self.image, self.channels = patch, image, channels
        self.embedding = nn.Linear(channels * patch * patch, dim)
        self.positions = _positions(positions, (image // patch) ** 2, dim)
        rotary = _PAIRINGS.get(positions, False)
        self.layers = nn.ModuleList(
            TransformerBlock(
                Attention(dim, heads, rotary=rotary, bias=bias, qk_norm=qk_norm),
                _feedforward(dim, hidden, feedforward, bias),
                norm,
                bias=bias,
            )
            for _ in range(depth)
        )
        self.norm = normalization(norm, dim, bias=bias)
        self.head = nn.Linear(dim, classes)

    @property
    def example_input_array(self) -> Float[Tensor, "batch channels height width"]:
        """Images of the size it takes, by the name under which Lightning looks for an example."""
        weight = self.head.weight
        return torch.zeros(2, self.channels, self.image, self.image, dtype=weight.dtype, device=weight.device)

    def patches(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch tokens pixels"]:
        """Return non-overlapping patches of images, row by row: (batch, tokens, pixels of a patch)."""
        size = self.patch
        tiles = images.unfold(2, size, size).unfold(3, size, size)
        return tiles.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        x = self.positions(self.embedding(self.patches(images)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))
