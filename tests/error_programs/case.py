"""A silent error: a small program that is wrong or right, and what a default monitor should say of the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor

Program = Callable[..., Monitor]
"""Called with `wrong`, and with the rank where it needs two processes; returns the monitor of the run, closed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One silent error."""

    name: str
    program: Program
    kinds: tuple[str, ...]
    """The kinds of alarm that name the cause rightly."""
    words: str
    """A regular expression that the alarm's message matches if it names the cause."""
    at: int
    """The step in which the error happens."""
    source: str = ""
    """Where it was reported; TrainCheck's name for its own."""
    processes: int = 1
    how: str = "default"
    """Seen by "default", by a "call", or not to be seen ("intent", "outside")."""
    line: str = ""
    """What the line at the start or at the end says of it, if it is a matter of intent."""
    why: str = ""
    """Why a tool that looks at weights, gradients, updates, replicas and modes cannot see it."""


CASES: list[Case] = []


def case(name: str, *kinds: str, words: str = "", at: int = 1, **options: Any) -> Callable[[Program], Program]:
    """Add a program to the table."""

    def add(program: Program) -> Program:
        CASES.append(Case(name, program, kinds, words, at, **options))
        return program

    return add


def mlp(width: int = 12, *, drop: float = 0.0) -> Any:
    """Return a small classifier of vectors."""
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Dropout(drop), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4)
    )


class TinyLM(nn.Module):
    """A language model with an embedding and a head that may be tied."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + F.gelu(self.mix(x)))).flatten(0, 1)


def batch(kind: str = "vectors") -> tuple[Tensor, Tensor]:
    """Return inputs and labels."""
    if kind == "tokens":
        return torch.randint(11, (3, 5)), torch.randint(11, (15,))
    if kind == "images":
        return torch.randn(4, 1, 6, 6), torch.randint(4, (4,))
    return torch.randn(8, 6), torch.randint(4, (8,))


def backward(model: nn.Module, kind: str = "vectors") -> Tensor:
    """Run a forward and a backward pass on a fresh batch."""
    x, y = batch(kind)
    loss = F.cross_entropy(model(x).float(), y)
    loss.backward()
    return loss
