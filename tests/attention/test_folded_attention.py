"""Attention that projections center: the same function and gradients, more accurate, and refused where it is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import conserved
from conserved.attention import NotInvariantError, folded


class Layer(nn.Module):
    """Attention with grouped heads; keys and values of all tokens share a large component through their biases."""

    def __init__(self, *, biases: bool = True, fused: bool = False, key_heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.key_heads, self.width = 4, key_heads, 16
        self.q, self.o = nn.Linear(64, 64, bias=biases), nn.Linear(64, 64, bias=biases)
        size = key_heads * self.width
        self.kv = nn.Linear(64, 2 * size, bias=biases) if fused else None
        self.k, self.v = nn.Linear(64, size, bias=biases), nn.Linear(64, size, bias=biases)
        self.attend: Any = F.scaled_dot_product_attention

    def projections(self) -> dict[str, Any]:
        if self.kv is None:
            return {"key": self.k, "value": self.v}
        size = self.key_heads * self.width
        return {"key": (self.kv, slice(0, size)), "value": (self.kv, slice(size, None))}

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        k, v = (self.k(x), self.v(x)) if self.kv is None else self.kv(x).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (self.q(x), k, v))
        y = self.attend(q, k, v, enable_gqa=True, **(options or {"is_causal": True}))
        return self.o(y.transpose(1, 2).flatten(2))


class OtherLinear(nn.Linear):
    """A linear map whose forward may be anything."""


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return (0.3 * torch.randn(3, 20, 64) + 2 * torch.randn(64)).to(dtype)


def gradients(layer: nn.Module, x: Tensor, **options: Any) -> dict[str, Tensor]:
    """Output and the gradients of parameters and input."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, **options)
    y.sin().sum().backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return grads | {"y": y.detach(), "x": x.grad}


def triangle_with_empty_rows() -> Tensor:
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    mask[:3] = False
    return mask


@pytest.mark.parametrize("options", [{}, {"attn_mask": triangle_with_empty_rows()}])
@pytest.mark.parametrize("sizes", [{}, {"biases": False}, {"fused": True}, {"fused": True, "biases": False}])
def test_output_and_all_gradients_are_those_of_the_plain_layer(sizes: Any, options: Any) -> None:
    plain = Layer(**sizes).double()
    layer = copy.deepcopy(plain)
    layer.attend = folded(**layer.projections(), every=2)
    for step in range(4):
        x = tokens() + step
        actual, expected = gradients(layer, x, **options), gradients(plain, x, **options)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-12 * max(1.0, float(value.abs().max())))
    assert layer.state_dict().keys() == plain.state_dict().keys()


def test_keys_and_values_arrive_centered_from_the_second_call_on() -> None:
    layer, seen = Layer().double(), []

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if k.dtype == torch.float64 and k.requires_grad:
            seen.append([float(tensor.detach().mean((0, 2)).norm()) for tensor in (k, v)])
        return F.scaled_dot_product_attention(q, k, v, **options)

    layer.attend = folded(attend, **layer.projections())
    for _ in range(2):
        gradients(layer, tokens())
    first, *_, last = seen
    assert all(after < before / 5 for before, after in zip(first, last, strict=True))


def test_dq_is_more_accurate_in_half_precision() -> None:
    def error(attend: Any) -> float:
        layer = Layer(key_heads=4).bfloat16()
        exact = copy.deepcopy(layer).double()
        if attend is not None:
            layer.attend = attend(layer)
            gradients(layer, tokens(torch.bfloat16))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            actual = gradients(layer, tokens(torch.bfloat16))["q.weight"].double()
        expected = gradients(exact, tokens(torch.bfloat16).double())["q.weight"]
        return float((actual - expected).norm() / expected.norm())

    plain = error(None)
    assert error(lambda layer: folded(key=layer.k, value=layer.v)) < plain / 5
    assert error(lambda layer: folded(value=layer.v)) < 0.8 * plain


def test_calls_without_gradients_are_plain() -> None:
    plain, x = Layer(), tokens(torch.float32)
    layer = copy.deepcopy(plain)
    layer.attend = folded(**layer.projections())
    gradients(layer, x)
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))


def test_the_laws_of_keys_and_values_are_still_found_and_hold() -> None:
    plain, x = Layer(key_heads=4), tokens(torch.float32)
    layer = copy.deepcopy(plain)
    layer.attend = folded(**layer.projections())
    gradients(layer, x)
    laws = conserved.recognize(layer, x)
    assert len(laws.laws) == len(conserved.recognize(plain, x).laws) > 5
    gradients(layer, x)
    assert conserved.audit(layer, laws).ok


def test_constants_stay_in_the_same_memory_and_follow_the_batch() -> None:
    layer = Layer().double()
    layer.attend = folded(**layer.projections(), every=1)
    gradients(layer, tokens())
    memory = layer.attend._added.data_ptr()
    before = layer.attend._added.clone()
    gradients(layer, tokens() + 1)
    assert layer.attend._added.data_ptr() == memory
    assert not torch.equal(layer.attend._added, before)
    assert gradients(layer, tokens()[:2])["y"].isfinite().all()
    gradients(layer, tokens() * torch.nan)
    assert gradients(layer, tokens())["y"].isfinite().all()


def test_functions_that_do_not_return_a_shift_of_values_are_refused() -> None:
    def with_sink(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options) / 2

    layer = Layer()
    layer.attend = folded(with_sink, value=layer.v)
    with pytest.raises(NotInvariantError, match="return a constant"):
        gradients(layer, tokens(torch.float32))
    layer.attend = folded(value=layer.v)
    with pytest.raises(NotInvariantError, match="turn dropout off"):
        gradients(layer, tokens(torch.float32), dropout_p=0.5)


def test_arguments_are_validated() -> None:
    with pytest.raises(TypeError, match=r"Expected a torch\.nn\.Linear"):
        folded(value=OtherLinear(2, 2))
    with pytest.raises(ValueError, match="Expected every"):
        folded(value=nn.Linear(2, 2), every=0)


def test_it_compiles_into_one_graph() -> None:
    plain, x = Layer().double(), tokens()
    layer = copy.deepcopy(plain)
    layer.attend = folded(**layer.projections(), every=1)
    gradients(layer, x)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = gradients(plain, x)
    for name, value in gradients(compiled, x).items():
        torch.testing.assert_close(value, expected[name.removeprefix("_orig_mod.")], rtol=0, atol=1e-11)
