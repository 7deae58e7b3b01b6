"""Derivations of laws are written out and checked by rules of their own; spoiled ones are seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conserved import LawSet, blocks, recognize
from conserved.inference.checker import check
from conserved.inference.derivation import Derivation
from conserved.inference.signed_sets import SignedSets
from conserved.inference.written import Unwritten


def derivations(laws: LawSet) -> dict[str, Any]:
    """Every derivation that is written out, through a file's text."""
    found = {}
    assert isinstance(laws.derivation, Derivation)
    for symmetry in laws:
        if not symmetry.kind.linear:
            found[symmetry.name] = json.loads(json.dumps(laws.derivation.written(symmetry)))
    return found


def decoder() -> LawSet:
    return recognize(blocks.DecoderLM(12, 8, 2, 4, 6, kv_heads=2), torch.zeros(2, 5, dtype=torch.int64))


class Fused(nn.Module):
    """Attention with one map for queries, keys and values, biases, and a learned key."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
        self.up, self.down = nn.Linear(4, 3), nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.down(F.relu(self.up(y)))


MODELS: dict[str, Callable[[], LawSet]] = {
    "rotary grouped decoder": decoder,
    "fused attention and ReLU": lambda: recognize(Fused(), torch.randn(2, 3, 4)),
    "layer norm": lambda: recognize(
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_every_derivation_that_is_written_is_right(model: str) -> None:
    found = derivations(MODELS[model]())
    assert len(found) > 2
    for name, derivation in found.items():
        report = check(derivation)
        assert report.ok, (name, report.wrong, report.unchecked)
        assert report.steps >= 2


def spoiled(derivation: dict[str, Any], seed: int) -> dict[str, Any]:
    """The derivation with the motion of one tensor changed: a charge, or a row of those that are mixed."""
    generator = np.random.default_rng(seed)
    copy = json.loads(json.dumps(derivation))
    moving = [v for v in copy["values"].values() if v["charges"]]
    chosen = moving[generator.integers(len(moving))]
    array = np.asarray(chosen["charges"][0]["array"], dtype=float)
    array.reshape(-1)[generator.integers(array.size)] += 1.0
    chosen["charges"][0]["array"] = array.tolist()
    return copy


@pytest.mark.parametrize("model", MODELS)
def test_a_spoiled_motion_does_not_follow(model: str) -> None:
    for name, derivation in derivations(MODELS[model]()).items():
        for seed in range(4):
            assert not check(spoiled(derivation, seed)).ok, (name, seed)


def test_a_general_linear_group_does_not_pass_through_relu() -> None:
    """The same charges are right for a linear pair and for a ReLU between: only the rows tell them apart."""
    laws = recognize(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)), torch.randn(5, 3))
    (derivation,) = derivations(laws).values()
    assert check(derivation).ok
    relu = {**derivation["steps"][0], "operation": "aten::relu.default"}
    between = next(s for s in derivation["steps"] if s["operation"].startswith("aten::mm"))["results"][0]
    relu |= {"arguments": [{"value": between}], "results": [between]}
    assert check(derivation | {"steps": [*derivation["steps"], relu]}).wrong


def test_a_motion_that_reaches_the_output_is_refused() -> None:
    laws = recognize(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)), torch.randn(5, 3))
    (derivation,) = derivations(laws).values()
    last = derivation["outputs"][0]
    derivation["values"][str(last)]["charges"] = [{"axes": [], "array": 1.0}]
    assert "an output moves" in check(derivation).wrong


def test_translations_say_why_they_are_not_written() -> None:
    laws = recognize(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(5, 3))
    assert isinstance(laws.derivation, Derivation)
    shift = next(symmetry for symmetry in laws if symmetry.kind.linear)
    with pytest.raises(Unwritten, match="axes they vary along"):
        laws.derivation.written(shift)


@pytest.mark.parametrize("seed", range(20))
def test_sets_of_equal_and_opposite_numbers_are_those_of_a_naive_closure(seed: int) -> None:
    """Merging many at a time against propagating one equation after the other until nothing changes."""
    generator = np.random.default_rng(seed)
    count, equations = 12, int(generator.integers(1, 14))
    left, right = generator.integers(0, count, (2, equations))
    signs = generator.choice([-1, 1], equations)
    sets = SignedSets()
    sets.grow(count)
    torn = [sets.join(left[signs == s], right[signs == s], int(s)) for s in (1, -1)]
    root, sign = sets.roots()
    vanish = np.isin(root, sets.find(np.concatenate(torn))[0])
    rows = np.zeros((equations, count))
    for n, (a, b, s) in enumerate(zip(left, right, signs, strict=True)):
        rows[n, a] += 1
        rows[n, b] -= s
    kernel = np.linalg.svd(rows)[2][np.linalg.matrix_rank(rows) :]
    for a in range(count):
        assert vanish[a] == bool(np.allclose(kernel[:, a], 0))
        if not vanish[a]:
            assert np.allclose(kernel[:, a], sign[a] * kernel[:, root[a]])
    assert len(set(root[~vanish])) == kernel.shape[0]
