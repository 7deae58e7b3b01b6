"""Attention with its weights stored in every order people use; the function is the same, only the parameters differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = Callable[[Any], Sequence[Tensor]]
"""From the module: queries, keys, values and outputs, each (heads, d, d_h)."""


class Stored(nn.Module):
    """Attention over (length, d) whose weights are made from its parameters by `weights`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], weights: Weights, scores: str = "softmax") -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.weights, self.scores = weights, scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o = self.weights(self)
        queries, keys, values = (torch.einsum("td,hde->hte", x, w) for w in (q, k, v))
        if self.scores.startswith("rotary"):
            queries, keys = (rotated(z, interleaved=self.scores == "rotary pairs") for z in (queries, keys))
        keys, values = (z.repeat_interleave(len(queries) // len(z), 0) for z in (keys, values))
        logits = torch.einsum("hte,hse->hts", queries, keys) / math.sqrt(q.shape[-1])
        outputs = o.repeat_interleave(len(queries) // len(o), 0)
        return torch.einsum("hts,hse,hde->td", attended(logits, self.scores), values, outputs)


def rotated(z: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary positions on (heads, length, d_h)."""
    half = z.shape[-1] // 2
    angle = torch.arange(z.shape[1])[:, None] * 0.7 ** torch.arange(half)
    cos, sin = angle.cos().to(z), angle.sin().to(z)
    a, b = (z[..., 0::2], z[..., 1::2]) if interleaved else (z[..., :half], z[..., half:])
    pair = a * cos - b * sin, a * sin + b * cos
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def attended(logits: Tensor, scores: str) -> Tensor:
    """What becomes of scores."""
    if scores == "linear":
        return logits
    if scores == "sigmoid":
        return logits.sigmoid()
    if scores == "alibi":
        heads, length = logits.shape[:2]
        indices = torch.arange(length)
        grads = 2.0 ** -torch.arange(1.0, heads + 1)
        return F.softmax(logits - (grads[:, None, None] * (indices[:, None] - indices).abs()).to(logits), -1)
    return F.softmax(logits, -1)


def stacked(order: str, heads: int = 2, width: int = 4, head: int = 2, scores: str = "softmax") -> Stored:
    """One parameter for each of the four, its axes (heads h, width d, head width e) in some order."""
    sizes = {"h": heads, "d": width, "e": head}
    shape = tuple(sizes[axis] for axis in order)
    back = [order.index(axis) for axis in "hde"]
    return Stored(
        dict.fromkeys("qkvo", shape),
        lambda m: (m.q.permute(back), m.k.permute(back), m.v.permute(back), m.o.permute(back)),
        scores,
    )


def tied(scores: str = "softmax") -> Stored:
    """Keys are queries."""
    return Stored(dict.fromkeys("qvo", (2, 4, 2)), lambda m: (m.q, m.q, m.v, m.o), scores)


def grouped() -> Stored:
    """One key and value head for two query heads."""
    shapes = {"q": (2, 4, 2), "k": (1, 4, 2), "v": (1, 4, 2), "o": (2, 4, 2)}
    return Stored(shapes, lambda m: (m.q, m.k, m.v, m.o))


def _fused(weight: Tensor) -> tuple[Tensor, ...]:
    return tuple(weight.unbind(0))


def _split(m: Any) -> Sequence[Tensor]:
    return torch.cat((m.q0, m.q1), 1), m.k, torch.cat((m.v0, m.v1), 0), m.o


def _flat(m: Any) -> Sequence[Tensor]:
    q, k, v = m.qkv.view(3, 2, 4, 2)
    return q, k, v, m.o.view(4, 2, 2).transpose(0, 1)


LAYOUTS: dict[str, Callable[[], Stored]] = {
    **{f"stacked {order}": partial(stacked, order) for order in ("hde", "hed", "dhe", "deh", "ehd", "edh")},
    "fused, stacked": lambda: Stored({"qkv": (3, 2, 4, 2), "o": (2, 4, 2)}, lambda m: (*_fused(m.qkv), m.o)),
    "fused with the output": lambda: Stored({"w": (4, 2, 4, 2)}, lambda m: _fused(m.w)),
    "fused along the head width": lambda: Stored(
        {"qkv": (2, 4, 6), "o": (2, 4, 2)}, lambda m: (*m.qkv.split(2, -1), m.o)
    ),
    "heads below each other": lambda: Stored(
        dict.fromkeys("qkvo", (8, 2)), lambda m: tuple(w.view(2, 4, 2) for w in (m.q, m.k, m.v, m.o))
    ),
    "heads side by side": lambda: Stored(
        dict.fromkeys("qkvo", (4, 4)), lambda m: tuple(w.view(4, 2, 2).transpose(0, 1) for w in (m.q, m.k, m.v, m.o))
    ),
    "heads interleaved": lambda: Stored(
        dict.fromkeys("qkvo", (4, 4)), lambda m: tuple(w.view(4, 2, 2).permute(2, 0, 1) for w in (m.q, m.k, m.v, m.o))
    ),
    "flattened": lambda: Stored({"qkv": (48,), "o": (16,)}, _flat),
    "split": lambda: Stored(
        {"q0": (2, 1, 2), "q1": (2, 3, 2), "k": (2, 4, 2), "v0": (1, 4, 2), "v1": (1, 4, 2), "o": (2, 4, 2)}, _split
    ),
}
"""Attention of width 4 with two heads of two: 12 laws, GL(2) for queries and keys and for values and outputs."""
