"""Rotary planes: decided once for layers that are alike, never for one that differs, at any length of context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved import LawSet, audit, blocks, recognize
from conserved.inference import infer
from conserved.inference.program import capture as captured
from conserved.inference.symmetries.rotation import Rotations


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was decided by running operations, in order."""
    result: list[bool] = []
    still = Rotations._still

    def noted(self: Rotations, *given: list[int]) -> bool:
        result.append(still(self, *given))
        return result[-1]

    monkeypatch.setattr(Rotations, "_still", noted)
    return result


class Rotary(nn.Module):
    """Attention of one head with rotary planes, whose keys are multiplied by constants after they are turned."""

    angles: Tensor
    factors: Tensor

    def __init__(self, factors: list[float], *, biased: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.biased = biased
        self.register_buffer("angles", torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1]))
        self.register_buffer("factors", torch.tensor(factors))

    def turned(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.turned(self.q(x)), self.turned(self.k(x)) * self.factors
        grads = -torch.arange(5.0, dtype=x.dtype)[:, None] * x.new_ones(5)
        scores = torch.baddbmm(grads.expand(len(x), 5, 5), q, k.mT) if self.biased else q @ k.mT
        result: Tensor = x + self.o(scores.softmax(-1) @ self.v(x))
        return result


def kinds(laws: LawSet, layer: int) -> set[str]:
    """Of the symmetries of queries and keys of a layer."""
    return {type(symmetry.kind).__name__ for symmetry in laws if f"{layer}.q.weight" in symmetry.parameters}


def test_layers_that_are_alike_are_decided_once(decisions: list[bool]) -> None:
    result = {}
    for depth in (1, 5):
        model = blocks.DecoderLM(16, 16, depth, 2, 8, kv_heads=1, max_length=8, positions="rotary-half")
        decisions.clear()
        laws = recognize(model, torch.zeros(2, 8, dtype=torch.long), loss="cross_entropy")
        assert decisions == [True]
        result[depth] = len([symmetry for symmetry in laws if "query_key" in symmetry.name])
    assert result[5] == 5 * result[1] > 0


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_with_other_constants_is_not_taken_for_its_neighbour(decisions: list[bool], biased: bool) -> None:
    torch.manual_seed(0)
    # Same operations and shapes: in the second layer the two halves of a plane are weighed differently.
    model = nn.Sequential(Rotary([1.0] * 4, biased=biased), Rotary([1.0, 1.0, 2.0, 3.0], biased=biased)).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    laws = recognize(model, x)
    assert sorted(decisions) == [False, True]
    assert (kinds(laws, 0), kinds(laws, 1)) == ({"ComplexScaling"}, {"OneScale"})
    model(x).square().sum().backward()
    assert audit(model, laws).ok


def test_a_call_that_does_not_fit_in_memory_is_followed_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = captured.capture
    model, tokens = blocks.DecoderLM(8, 4, 1, 1, 4, positions="rotary-half"), torch.zeros(1, 4).long()
    known = {symmetry.name for symmetry in recognize(model, tokens)}

    def capture(call: Any, parameters: dict[str, Tensor], model: nn.Module, **buffers: Any) -> Any:
        if not next(iter(parameters.values())).is_meta:
            raise torch.OutOfMemoryError
        return followed(call, parameters, model, **buffers)

    monkeypatch.setattr(infer, "capture", capture)
    assert {symmetry.name for symmetry in recognize(model, tokens)} == known


def test_a_decision_takes_no_more_memory_than_queries_and_keys() -> None:
    """At 65,536 tokens scores would be 32 GiB in double precision."""
    length = 65_536
    with torch.device("meta"):
        model = blocks.DecoderLM(8, 4, 1, 1, 4, max_length=length, positions="rotary-half")
        tokens = torch.zeros(1, length).long()
    laws = recognize(model, tokens)
    assert any("query_key" in symmetry.name for symmetry in laws)
