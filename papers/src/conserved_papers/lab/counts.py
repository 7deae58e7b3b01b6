"""How many laws each component has: counted by the rank of its Lie closure, beside what is recognised in its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from conserved.discovery import discover
from conserved.inference import recognize
from conserved_papers.blocks import Attention, FeedForward, MixtureOfExperts, ReluAttention, SwiGLU
from conserved_papers.lab.task import Documents, Task

KIND = "count"

COMPONENTS: Mapping[str, tuple[str, Callable[[], nn.Module], tuple[int, int], int]] = {
    "gelu": ("GELU network", lambda: FeedForward(3, 4, "gelu"), (5, 3), 0),
    "silu": ("SiLU network", lambda: FeedForward(3, 4, "silu"), (5, 3), 0),
    "relu": ("ReLU network", lambda: FeedForward(3, 4, "relu"), (5, 3), 4),
    "linear": ("two linear maps", lambda: FeedForward(3, 2, "linear"), (5, 3), 3),
    "swiglu": ("SwiGLU", lambda: SwiGLU(3, 4), (5, 3), 4),
    "attention": ("attention", lambda: Attention(4, 2), (5, 4), 12),
    "rotary": ("attention, rotary", lambda: Attention(4, 2, rotary=True), (5, 4), 8),
    "grouped": ("attention, shared keys", lambda: Attention(4, 2, kv_heads=1), (5, 4), 6),
    "softmax": ("softmax mixture", lambda: MixtureOfExperts(3, 2, 3), (4, 3), 9),
    "sparse": ("top-2 softmax mixture", lambda: MixtureOfExperts(3, 2, 3, top_k=2), (4, 3), 9),
    "sigmoid": ("sigmoid mixture", lambda: MixtureOfExperts(3, 2, 3, gate="sigmoid"), (4, 3), 9),
    "relu_attention": ("ReLU attention", lambda: ReluAttention(3), (4, 3), 1),
}
"""By name: a title, how to build it, the shape of an input, and the number of laws its source gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(Task):
    """The laws of one component."""

    kind: ClassVar[str] = KIND
    component: str

    @property
    def results(self) -> tuple[str, ...]:
        return (self.component,)

    def perform(self, checkpoint: Path | None = None) -> Documents:
        title, make, shape, claimed = COMPONENTS[self.component]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make().double()
        discovery = discover(model, torch.zeros(shape, dtype=torch.float64))
        content: dict[str, Any] = {
            "title": title,
            "parameters": discovery.parameters,
            "counted": discovery.count,
            "recognised": recognize(model, torch.zeros(shape, dtype=torch.float64)).independent(),
            "claimed": claimed,
            "gap": discovery.gap,
            "complete": discovery.complete,
            "status": discovery.verdict.status.value,
        }
        return {self.component: content}
