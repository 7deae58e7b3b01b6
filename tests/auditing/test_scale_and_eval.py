"""Calls that a user makes: the scale of a gradient, and what a model in eval mode must not do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved


def _gradients(factor: float) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))
    x, y = torch.randn(32, 6), torch.randint(4, (32,))
    (factor * F.cross_entropy(model(x), y)).backward()
    return model, x, y


@pytest.mark.parametrize("factor", [1.0, 1.05, 2.0, 0.25])
def test_a_factor_in_the_gradient_is_measured(factor: float) -> None:
    model, x, y = _gradients(factor)
    before = [p.detach().clone() for p in model.parameters()]
    scale = conserved.check_scale(model, lambda: F.cross_entropy(model(x), y))
    assert scale.ok == (factor == 1)
    assert scale.ratio == pytest.approx(factor, rel=2e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_scale_asks_for_gradients() -> None:
    with pytest.raises(ValueError, match="backward"):
        conserved.check_scale(nn.Linear(2, 2), lambda: 0.0)


class EvaluatedMoments(nn.Module):
    """A sequence model with one thing wrong in eval mode."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.table, self.wrong = nn.Embedding(11, 8), wrong

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.wrong == "dropout":
            x = F.dropout(x, 0.1)
        if self.wrong == "batch":
            x = x - x.mean(0, keepdim=True)
        if self.wrong == "future":
            x = x + x.mean(1, keepdim=True)
        return x


@pytest.mark.parametrize(
    ("wrong", "said"), [("dropout", "deterministic"), ("batch", "rest of a batch"), ("future", "causal")]
)
def test_what_a_model_does_in_eval_mode_is_named(wrong: str, said: str) -> None:
    torch.manual_seed(0)
    model, tokens = EvaluatedMoments(wrong), torch.randint(11, (4, 6))
    result = conserved.check_eval(model, tokens, causal=True)
    assert not result.ok
    assert said in result.verdict.message
    assert model.training
    assert conserved.check_eval(EvaluatedMoments(""), tokens, causal=True).ok


def test_a_call_leaves_weights_as_a_monitor_last_saw_them() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    F.cross_entropy(model(x), y).backward()
    before = [(p._version, p.detach().clone()) for p in model.parameters()]
    assert conserved.check_scale(model, lambda: F.cross_entropy(model(x), y)).ok
    for p, (version, value) in zip(model.parameters(), before, strict=True):
        assert p._version == version
        assert torch.equal(p, value)
