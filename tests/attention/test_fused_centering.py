"""The kernels of centered attention, in Triton's interpreter, compute what PyTorch's operations compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interpreted_kernels
from conserved.attention import centered, centered_attention, fused_centering, gauge_constants

pytest.importorskip("triton")
interpreted_kernels.install()

CALLS: dict[str, dict[str, int]] = {
    "causal": {},
    "full": {"keys": 70},
    "grouped": {"groups": 3},
    "odd": {"width": 24, "queries": 37, "keys": 37},
    "split": {"queries": 300, "keys": 300},
}


def inputs(*, queries: int = 50, keys: int = 50, groups: int = 1, width: int = 32) -> list[Tensor]:
    """Queries, keys, values and an output gradient whose heads share a large component; one head shares nothing."""
    torch.manual_seed(0)
    q = torch.randn(2, 2 * groups, queries, width)
    k = 0.3 * torch.randn(2, 2, keys, width) + 2 * torch.randn(2, 2, 1, width)
    v = 0.1 * torch.randn(2, 2, keys, width) + torch.randn(2, 2, 1, width)
    k[0, 1], v[0, 1] = torch.randn(keys, width), torch.randn(keys, width)
    return [tensor.half() for tensor in (q, k, v, torch.randn(2, 2 * groups, queries, width))]


def options(call: str) -> dict[str, Any]:
    return {"is_causal": call != "full", "enable_gqa": call == "grouped"}


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use the kernels on the processor, and count how often."""
    calls: list[int] = []

    def applies(*tensors: Tensor) -> bool:
        calls.append(len(tensors))
        return True

    monkeypatch.setattr(centered_attention, "kernels_apply", applies)
    monkeypatch.setattr(gauge_constants, "kernels_apply", applies)
    return calls


@pytest.mark.parametrize("call", CALLS)
def test_constants_are_those_of_pytorch(call: str, use_kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = inputs(**CALLS[call])
    fused = gauge_constants.row_constants(q, k, v, options(call))
    monkeypatch.setattr(gauge_constants, "kernels_apply", lambda *_: False)
    plain = gauge_constants.row_constants(q, k, v, options(call))
    for actual, expected in ((fused.key, plain.key), (fused.value, plain.value)):
        assert actual is not None
        assert expected is not None
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=4e-3)
        assert not actual[0, 1].any()
        assert actual[1, 1].any()
    assert use_kernels


def test_kernels_leave_keys_alone_where_rounding_would_move_large_scores(use_kernels: list[int]) -> None:
    q, k, v, _ = inputs()
    calm = gauge_constants.row_constants(q, k, v, {"is_causal": True})
    loud = gauge_constants.row_constants(1000 * q, k, v, {"is_causal": True})
    assert calm.key is not None
    assert loud.key is not None
    assert calm.key[1, 1].any()
    assert not loud.key.any()
    assert use_kernels


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_attention_and_gradients_stay_the_same(call: str, tokens_first: bool, use_kernels: list[int]) -> None:
    tensors = inputs(**CALLS[call])
    if tokens_first:  # the memory of (batch, length, heads, width), seen as (batch, heads, length, width)
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    *leaves, gradient = tensors
    leaves = [tensor.requires_grad_() for tensor in leaves]
    output = centered()(*leaves, **options(call))
    actual = [output, *torch.autograd.grad(output, leaves, gradient)]
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    q, k, v = exact
    output = F.scaled_dot_product_attention(q, k, v, **options(call))
    expected = [output, *torch.autograd.grad(output, exact, gradient.double())]
    for ours, theirs in zip(actual, expected, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 4 * 2**-11
    assert len(use_kernels) == 3


def test_kernels_do_not_apply_to_a_processor_or_to_single_precision() -> None:
    q, k, v, _ = inputs()
    assert not fused_centering.kernels_apply(q, k, v)
    assert not fused_centering.kernels_apply(q.float())


def test_what_a_mask_hides_is_left_to_pytorch(use_kernels: list[int]) -> None:
    q, k, v, _ = inputs()
    hidden = torch.zeros(50, 50, dtype=torch.float16)
    hidden[:, :25] = -torch.inf
    hidden[:5] = 0
    output = centered()(q, k, v, attn_mask=hidden)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=hidden.double())
    assert (output - expected).norm() / expected.norm() < 2**-10
    assert use_kernels
