"""Rounding inside of kernels, sampled at nearby weights: what moves with the last bits is noise, what stays is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import audit, recognize
from conserved.auditing.diagnosis import Origin
from conserved.auditing.nearby_weights import nearby_weights
from conserved.auditing.reference_comparison import compare_with_reference
from conserved.auditing.replay import ClosureReplay


class Kernel(torch.autograd.Function):
    """x ↦ 2x. Its gradient has a factor that depends on the last bits of the input, or one that does not.

    The first is what fused attention does where few queries matter: one number, taken from rounded outputs, is the same
    in every pass and linear in the output gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.wrong = wrong
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        noise = 0.6 * float((x.double().abs().sum() * 1e4).frac()) - 0.3
        return 2 * gradients[0] * (ctx.wrong or 1 + noise), None


class Attention(nn.Module):
    """An attention layer whose queries go through the kernel; `wrong` is its factor, 0 the one that is noise."""

    def __init__(self, wrong: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (part(x).unflatten(-1, (2, 32)).transpose(1, 2) for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(Kernel.apply(q, self.wrong), k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(-2)) + x


def pass_of(wrong: float) -> tuple[Attention, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = Attention(wrong).to(torch.bfloat16)
    x, target = torch.randint(64, (2, 33)), torch.randn(2, 33, 64)

    def loss() -> Tensor:
        return (model(x).float() - target).square().mean()

    loss().backward()
    return model, loss


def test_weights_come_back_bit_by_bit_and_graphs_stay_valid() -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    loss = model(torch.randn(3, 8, requires_grad=True)).square().sum()
    with suppress(RuntimeError), nearby_weights({"weight": model.weight}, torch.bfloat16, 0):
        away = (model.weight.detach() - before).abs() / before.abs()
        raise RuntimeError
    assert 0 < away.max() <= torch.finfo(torch.bfloat16).eps
    assert torch.equal(model.weight, before)
    loss.backward()


@pytest.mark.parametrize("wrong", [0.0, 1.2])
def test_what_moves_with_the_last_bits_is_imprecise_and_what_stays_is_wrong(wrong: float) -> None:
    model, loss = pass_of(wrong)
    result = compare_with_reference(ClosureReplay(model, loss), dict(model.named_parameters()), torch.bfloat16)
    assert result.obstacle == ""
    names = {item.parameter for item in (result.failures if wrong else result.imprecise)}
    assert "q.weight" in names
    assert result.ok == (wrong == 0)
    assert ("autograd function" in result.cause) == (wrong != 0)


@pytest.mark.parametrize("wrong", [0.0, 1.02])
def test_an_identity_is_broken_by_what_stays_and_not_by_what_moves(wrong: float) -> None:
    model, loss = pass_of(wrong)
    laws = recognize(model, torch.zeros(1, 8, dtype=torch.long)).select(lambda law: law.family == "query_key")
    result = audit(model, laws, closure=loss)
    assert {row.family for row in result.failures} == ({"query_key"} if wrong else set())
    origins = {diagnosis.origin for diagnosis in result.diagnoses.values()}
    assert origins == ({Origin.KERNEL} if wrong else {Origin.ROUNDING})
