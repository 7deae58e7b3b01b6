"""Random modules: what is discovered is conserved, and what was planted is discovered."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from conserved import LawSet, Leg, Symmetry, Verdict, View, discover
from conserved.laws.independence import rank_of_gradients
from conserved.symmetry import GeneralLinear, Kind, Scaling
from flow import follow
from sampling import sampled
from tolerances import FLOW

DIM = 3
GROUPS, EACH = 50, 4


@dataclass(frozen=True)
class Piece:
    """A module from R³ to R³ and the law that is in it by construction, as legs (parameter, axis, degree)."""

    module: nn.Module
    kind: Kind | None = None
    legs: tuple[tuple[str, int, int], ...] = ()


class Gated(nn.Module):
    def __init__(self, hidden: int, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(DIM, hidden), nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)
        self.squash = gate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.squash(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) ** 2


def pair(rng: random.Random, between: nn.Module, kind: Kind | None, out_degree: int = -1) -> Piece:
    hidden, bias = rng.choice((2, 3)), rng.random() < 0.5
    module = nn.Sequential(nn.Linear(DIM, hidden, bias=bias), between, nn.Linear(hidden, DIM, bias=rng.random() < 0.5))
    legs = [("0.weight", 0, 1), ("2.weight", 1, out_degree)] + ([("0.bias", 0, 1)] if bias else [])
    return Piece(module, kind, tuple(legs) if kind else ())


def gated(rng: random.Random) -> Piece:
    legs = (("down.weight", 1, 1), ("up.weight", 0, -1), ("up.bias", 0, -1))
    return Piece(Gated(rng.choice((1, 2)), rng.choice((torch.tanh, torch.sigmoid))), Scaling(), legs)


def normed(rng: random.Random) -> Piece:
    norm = nn.LayerNorm(DIM) if rng.random() < 0.5 else nn.RMSNorm(DIM, eps=1e-5)
    legs = [("0.weight", 0, 1), ("1.weight", 1, -1)] + ([("0.bias", 0, 1)] if isinstance(norm, nn.LayerNorm) else [])
    return Piece(nn.Sequential(norm, nn.Linear(DIM, DIM)), Scaling(), tuple(legs))


GRAMMAR: dict[str, Callable[[random.Random], Piece]] = {
    "relu": lambda rng: pair(rng, nn.ReLU(), Scaling()),
    "leaky": lambda rng: pair(rng, nn.LeakyReLU(0.3), Scaling()),
    "square": lambda rng: pair(rng, Square(), Scaling(), out_degree=-2),
    "linear": lambda rng: pair(rng, nn.Identity(), GeneralLinear()),
    "tanh": lambda rng: pair(rng, nn.Tanh(), None),
    "gelu": lambda rng: pair(rng, nn.GELU(), None),
    "gated": gated,
    "normed": normed,
}


def compose(seed: int) -> tuple[nn.Module, list[Symmetry], str]:
    """One to three pieces in a row, some of them with a residual, and the laws planted in them."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    planted: list[Symmetry] = []
    words: list[str] = []
    for index in range(rng.choice((1, 1, 2, 2, 3))):
        word = rng.choice(sorted(GRAMMAR))
        piece = GRAMMAR[word](rng)
        residual = rng.random() < 0.3
        layers.append(Residual(piece.module) if residual else piece.module)
        words.append(word + ("+" if residual else ""))
        prefix = f"{index}.inner." if residual else f"{index}."
        if piece.kind is not None:
            shapes = {name: tuple(p.shape) for name, p in piece.module.named_parameters()}
            legs = tuple(Leg(View.of(prefix + n, shapes[n], axes=axis), degree) for n, axis, degree in piece.legs)
            planted.append(Symmetry(block="", family="planted", part=str(index), kind=piece.kind, legs=legs))
    return nn.Sequential(*layers), planted, " ".join(words)


def drifted(laws: LawSet, model: nn.Module, theta: dict[str, Tensor], seed: int) -> dict[str, float]:
    """How far each law moves along the gradient flow of a random loss, relative to its terms."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    after = follow(lambda t: (functional_call(model, t, (x,)) - y).square().mean(), theta, time=0.2)
    start, end = laws.reference(theta), laws.values(after)
    sizes = {name: float(scale.norm()) for name, scale in start.scales.items()}
    return {name: float((end[name] - start.values[name]).norm()) / max(sizes[name], 1e-9) for name in end}


@pytest.mark.slow
@pytest.mark.parametrize("group", sampled(range(GROUPS), 3))
def test_discovered_laws_are_conserved_and_planted_laws_are_discovered(group: int) -> None:
    undecided = 0
    for seed in range(group * EACH, (group + 1) * EACH):
        module, planted, words = compose(seed)
        model = module.double()
        discovery = discover(model, torch.zeros(2, DIM), seed=seed, infer=False)
        if discovery.verdict == Verdict.INCONCLUSIVE:
            undecided += 1
            continue
        theta = dict(discovery.laws.parameters)
        exact = [symmetry for symmetry in discovery.laws if symmetry.exact]
        laws = LawSet(symmetries=tuple(exact), parameters=theta)
        broken = {name: d for name, d in drifted(laws, model, theta, seed).items() if not d <= FLOW}
        assert broken == {}, f"seed {seed}: {words}"
        alone = rank_of_gradients(exact, theta)
        assert rank_of_gradients([*exact, *planted], theta) == alone, f"seed {seed}: {words}\n{discovery.summary()}"
        assert discovery.explained <= discovery.count
    # A region of a kinked network can differ from the next; saying so is right, and must stay the exception.
    assert undecided <= EACH // 2
