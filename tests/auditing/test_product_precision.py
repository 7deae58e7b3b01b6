"""Passes whose products round their factors, as tensor cores do to TF32: their rounding is no wrong gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import audit, gauge, recognize
from conserved.product_precision import read_switch, rounds_factors
from conserved.verdict import Status
from scale_models import HandWritten


def tf32(x: Tensor) -> Tensor:
    """Round to ten fraction bits, to nearest."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class TensorCoreProduct(torch.autograd.Function):
    """A linear map with rounded factors, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return tf32(x) @ tf32(weight).T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        gradient = tf32(grads[0])
        return gradient @ tf32(weight), gradient.flatten(0, -2).T @ tf32(x).flatten(0, -2)


class TensorCoreLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return TensorCoreProduct.apply(x, self.weight)


@pytest.mark.parametrize("closed", [False, True])
def test_rounded_factors_are_not_refuted_and_wrong_ones_are(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = HandWritten(100, 64, 128, 2, 4, 2), torch.randint(100, (4, 24))
    laws = recognize(model, tokens, loss="cross_entropy")
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TensorCoreLinear

    def closure() -> Tensor:
        return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    closure().backward()
    again = closure if closed else None
    assert audit(model, laws).verdict == Status.REFUTED, "rounding is above that of float32"
    monkeypatch.setattr("conserved.auditing.backward_pass.rounds_factors", lambda *_, **__: True)
    clean = audit(model, laws, closure=again)
    assert clean.verdict == Status.VERIFIED, clean.summary()
    assert clean.known == "products"
    assert "TF32" in clean.summary()
    gradient = model.get_parameter("layers.1.k.weight").grad
    assert gradient is not None
    gradient[:16] *= 1.05
    assert {row.family for row in audit(model, laws, closure=again).failures} >= {"query_key"}


def test_what_pytorch_allows_decides() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert not rounds_factors("cuda")
        assert not rounds_factors("cpu")
        torch.set_float32_matmul_precision("high")
        assert rounds_factors("cuda")
        assert not rounds_factors("cpu"), "processors do not know TF32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_convolutions_round_by_default() -> None:
    assert rounds_factors("cuda", convolutions=True)


def test_a_switch_that_may_not_be_read_is_read_elsewhere() -> None:
    def refuse() -> bool:
        raise RuntimeError("a mix of the legacy and new APIs")

    assert read_switch(lambda: True) is True
    assert len(read_switch(refuse)) == 2


def test_key_sums_of_rounded_products_are_held_to_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = HandWritten(100, 64, 128, 2, 4, 2), torch.randint(100, (4, 24))
    monkeypatch.setattr("conserved.auditing.softmax_gauge.rounds_factors", lambda *_: True)
    with gauge(model) as watched:
        model(tokens).square().mean().backward()
    assert min(row.tolerance for row in watched.rows) > 1e-3
