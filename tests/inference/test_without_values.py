"""Tests that a model followed without values, as large ones are, has the laws it has with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved
from conserved.inference import followed_calls
from conserved.inference.program import recorder

WIDTH, HEAD, POSITIONS = 8, 4, 24


def laws_of(model: nn.Module, *inputs: Any) -> dict[str, str]:
    """Return the kind of every law by its name."""
    return {law.name: repr(law.kind) for law in conserved.recognize(model, *inputs).symmetries}


class Attention(nn.Module):
    """One head with rotary positions from tables, as litgpt keeps them."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, HEAD, bias=False), nn.Linear(WIDTH, HEAD, bias=False)
        angles = torch.outer(torch.arange(POSITIONS), torch.tensor([1.0, 0.3])).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        return x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        return (self.rotate(self.q(x)) @ self.rotate(self.k(x)).mT).softmax(-1)


class Replaced(Attention):
    """The same with a table that every call replaces: its values are those of one call."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        self.sin = self.sin * 2
        return result


class Written(Attention):
    """The same with a table that every call writes to."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        self.sin.mul_(2)
        return result


class FromPython(nn.Module):
    """Halves of one map, chosen by numbers that stand in the program."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 4, bias=False), nn.Linear(2, 3, bias=False)
        self.mix = nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x)
        chosen = torch.tensor([1, 0])
        steps = int(torch.arange(3).sum())
        return self.out(h[..., [0, 3]] * h[..., [2, 1]]) * steps + self.mix(h[..., :2][..., chosen]).relu()


class Padded(nn.Module):
    """Words with a row for padding that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, padding_idx=0)
        self.norm, self.head = nn.LayerNorm(4, elementwise_affine=False, eps=0.0), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.words(tokens) + 0 * self.words.weight[0]))


class Relative(nn.Module):
    """A bias by relative position, looked up with a table of numbers."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(5, 2))
        self.register_buffer("number", (torch.arange(3)[:, None] - torch.arange(3)[None] + 2).reshape(-1))
        self.q, self.k = nn.Linear(WIDTH, HEAD), nn.Linear(WIDTH, HEAD)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias[self.number].reshape(3, 3, 2).permute(2, 0, 1)
        return ((self.q(x) @ self.k(x).mT)[:, None] + bias).softmax(-1)


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
VECTORS = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
MODELS = {
    Attention: VECTORS,
    Replaced: VECTORS,
    Written: VECTORS,
    FromPython: VECTORS,
    Padded: TOKENS,
    Relative: VECTORS,
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("kept", [100_000, 8], ids=["small tables", "large tables"])
def test_laws_are_those_of_the_model_with_values(
    model: type[nn.Module], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "KEPT", kept)
    with_values = laws_of(model(), MODELS[model])
    monkeypatch.setattr(followed_calls, "LARGE", 0)
    assert laws_of(model(), MODELS[model]) == with_values
    assert with_values


def test_rotations_of_a_table_are_laws_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_calls, "LARGE", 0)
    assert list(laws_of(Attention(), VECTORS).values()) == ["ComplexScaling()"]


@pytest.mark.parametrize("model", [Replaced, Written])
def test_a_table_that_calls_change_is_no_constant(model: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_calls, "LARGE", 0)
    assert "ComplexScaling()" not in laws_of(model(), VECTORS).values()


def test_following_without_values_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_calls, "LARGE", 0)
    model = Replaced()
    before, hooks = model.sin.clone(), dict(model._forward_hooks)
    conserved.recognize(model, VECTORS)
    assert torch.equal(model.sin, before)
    assert dict(model._forward_hooks) == hooks
    assert F.mse_loss(model(VECTORS), torch.zeros(2, 3, 3)) > 0
