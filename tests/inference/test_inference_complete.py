"""Small programs whose laws of degree one and two are listed to the last one, and none that is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import discover, recognize
from law_checks import NEARLY_ZERO, check, subject
from reference.quadratic_laws import quadratic_laws

Function = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A program of parameters p and an input x, and how many independent laws it has."""

    name: str
    run: Function
    shapes: tuple[tuple[int, ...], ...]
    input: Tensor
    laws: int
    loss: str = "regression"

    def build(self) -> tuple[nn.Module, tuple[Tensor], dict[str, Tensor]]:
        return Program(self), (self.input,), {}


class Program(nn.Module):
    """A function of its parameters as a module."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.written = written
        self.p = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in written.shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.written.run(x, *self.p)


def program(name: str, run: Function, *shapes: tuple[int, ...], x: Tensor, laws: int, loss: str = "") -> Written:
    return Written(name=name, run=run, shapes=shapes, input=x, laws=laws, loss=loss or "regression")


def hand_norm(x: Tensor, eps: float = NEARLY_ZERO) -> Tensor:
    """A norm as people write it, with x − mean(x) twice."""
    variance = (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + eps)


def by_head(x: Tensor, width: int = 3) -> Tensor:
    return x.view(*x.shape[:-1], -1, width)


VECTORS = torch.randn(2, 4, 3)
TOKENS = torch.arange(8).reshape(2, 4) % 5
KEYS = torch.randn(2, 2, 4, 4)
OUT = torch.randn(5, 6)

PROGRAMS = [
    # Each head's rows sum to something a norm over the head does not see: 2 heads × 3 columns, and a scale each.
    program(
        "a norm over each head", lambda x, w: F.layer_norm(by_head(F.linear(x, w)), (3,)), (6, 3), x=VECTORS, laws=8
    ),
    program(
        "a group norm over each head",
        lambda x, w: F.group_norm(F.linear(x, w).reshape(8, 6), 2),
        *((6, 3),),
        x=VECTORS,
        laws=8,
    ),
    program(
        "mixed along the sequence, a norm over each head",
        lambda x, w: F.layer_norm(KEYS.to(x.dtype) @ by_head(F.linear(x, w)).transpose(1, 2), (3,)),
        *((6, 3),),
        x=VECTORS,
        laws=8,
    ),
    program(
        "rows of a fused map, one part normed by head",
        lambda x, w: F.layer_norm(by_head(F.linear(x, w)[..., :6]), (3,)).flatten(-2) * F.linear(x, w)[..., 6:].tanh(),
        *((12, 3),),
        x=VECTORS,
        laws=8,
    ),
    # A norm over heads and places sees data that differs between places.
    program(
        "a group norm over places too",
        lambda x, w: F.group_norm(F.linear(x, w).transpose(1, 2), 2),
        *((6, 3),),
        x=VECTORS,
        laws=2,
    ),
    program(
        "a kink before the norm",
        lambda x, w: F.layer_norm(by_head(F.linear(x, w).relu()), (3,)),
        *((6, 3),),
        x=VECTORS,
        laws=2,
    ),
    program(
        "data within the head before the norm",
        lambda x, w: F.layer_norm(by_head(F.linear(x, w)) * x.unsqueeze(-2), (3,)),
        *((6, 3),),
        x=VECTORS,
        laws=2,
    ),
    # Every row has a length and a sum of its own that no norm sees.
    program("a table added to", lambda x, e, b: hand_norm(F.embedding(x, e) + b), (5, 4), (4,), x=TOKENS, laws=10),
    program("a table and a map", lambda x, e, w: F.linear(F.embedding(x, e), w), (5, 4), (2, 4), x=TOKENS, laws=10),
    # What a norm centres has no part along a row's sum: its readers do not see that either, unless a gain comes first.
    program("a tied table", lambda x, e: F.linear(F.layer_norm(F.embedding(x, e), (4,)), e), (5, 4), x=TOKENS, laws=5),
    program(
        "a tied table, the norm by hand",
        lambda x, e: F.linear(hand_norm(F.embedding(x, e)), e),
        *((5, 4),),
        x=TOKENS,
        laws=5,
        loss="cross_entropy",
    ),
    program(
        "a tied table, a gain after the norm by hand",
        lambda x, e, g: F.linear(g * hand_norm(F.embedding(x, e)), e),
        *((5, 4), (4,)),
        x=TOKENS,
        laws=2,
        loss="cross_entropy",
    ),
    program("a bias, the norm by hand", lambda x, w, b: hand_norm(F.linear(x, w, b)), (4, 3), (4,), x=VECTORS, laws=5),
    # Values of two layers that are mixed share one space.
    program(
        "mixed maps",
        lambda x, a, b, c: F.linear(torch.lerp(F.linear(x, a), F.linear(x.tanh(), b), 0.3), c),
        *((2, 3), (2, 3), (2, 2)),
        x=VECTORS,
        laws=3,
    ),
    program(
        "maps mixed by a learned share",
        lambda x, a, b, c, w: F.linear(torch.lerp(F.linear(x, a), F.linear(x.tanh(), b), F.linear(x, w).sigmoid()), c),
        *((2, 3), (2, 3), (2, 2), (1, 3)),
        x=VECTORS,
        laws=3,
    ),
    program(
        "quotients of all pairs",
        lambda x, w: (F.linear(x, w).unsqueeze(-1) / F.linear(x, w).unsqueeze(-2)).tanh(),
        *((2, 3),),
        x=VECTORS,
        laws=1,
    ),
]


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_all_laws_of_degree_two_are_listed_and_no_other(case: Written) -> None:
    model, args, _ = case.build()
    laws = recognize(model, *args, loss=case.loss)
    case_subject = subject(case.build, loss=case.loss)
    assert check(laws, case_subject).wrong == {}
    assert (laws.independent(case_subject.theta) if len(laws) else 0) == case.laws
    there = quadratic_laws(case_subject, laws)
    assert (there.count, there.missing) == (case.laws, 0)


class Switch(nn.Module):
    """Top-1 routing in the ways people write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.router = nn.Linear(4, 3, bias=False)
        ups = [nn.Linear(4, 3, bias=False) for _ in range(3)]
        self.experts = nn.ModuleList(nn.Sequential(up, nn.ReLU(), nn.Linear(3, 4, bias=False)) for up in ups)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        weight, chosen = probabilities.max(-1)
        if self.way in ("loop", "index_add"):
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                (mine,) = torch.where(chosen == number)
                part = weight[mine, None] * expert(x[mine])
                if self.way == "loop":
                    y[mine] = part
                else:
                    y = y.index_add(0, mine, part)
            return y
        if self.way == "scatter":
            shares = torch.zeros_like(probabilities).scatter(-1, chosen[:, None], weight[:, None])
        else:
            shares = probabilities * F.one_hot(chosen, 3).to(x.dtype)
        parts = [shares[:, number, None] * expert(x) for number, expert in enumerate(self.experts)]
        if self.way == "where":
            parts = [torch.where((chosen == n)[:, None], part, 0.0) for n, part in enumerate(parts)]
        return torch.stack(parts).sum(0)


@pytest.mark.parametrize("way", ["mask", "loop", "index_add", "scatter", "where"])
def test_top_1_routing_has_the_laws_of_its_experts_and_the_sum_of_the_routers_rows(way: str) -> None:
    model, x = Switch(way).double(), torch.randn(12, 4, dtype=torch.float64)
    laws = recognize(model, x)
    assert laws.independent() == discover(model, x).count == 3 * 3 + 4
    assert {symmetry.source for symmetry in laws} == {"typed"}
