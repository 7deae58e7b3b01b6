"""Norms that are written out as modules: what they multiply by, and how they may be called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import conserved
from conserved.auditing.epsilon_terms import EpsilonTerms, _Written

EPSILON = 1e-3


class Written(nn.Module):
    """x/√(mean x² + ε), times a gain made of a parameter."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.centred = kind in ("centred", "exponential")
        self.shape = nn.Parameter(torch.ones(width) if kind in ("plain", "centred") else torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width)) if self.centred else None

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        gain = {"exponential": self.shape.exp(), "one more": 1 + self.shape}.get(self.kind, self.shape)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * gain
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize(
    ("kind", "width", "expected"),
    [
        ("plain", 1, ("shape", 0.0)),
        ("plain", 33, ("shape", 0.0)),
        ("one more", 1, ("shape", 1.0)),
        ("one more", 6, ("shape", 1.0)),
        ("centred", 33, ("shape", 0.0)),
        ("centred", 6, ("shape", 0.0)),
        ("exponential", 6, (None, 0.0)),
        ("exponential", 33, (None, 0.0)),
    ],
)
def test_a_gain_is_known_by_its_parameter_or_asked_for(
    kind: str, width: int, expected: tuple[str | None, float]
) -> None:
    module = Written(kind, width)
    result = _Written.of(module, EPSILON)
    assert result is not None
    assert (result.parameter, result.offset) == expected
    with torch.no_grad():
        module.shape.normal_()
        if module.bias is not None:
            module.bias.normal_()
    # Whatever it multiplies by is what it does to a row, up to the size of the row.
    x = torch.randn(5, width)
    values = x - x.mean(-1, keepdim=True) if module.centred else x
    y = values / (values.square().mean(-1, keepdim=True) + EPSILON).sqrt() * result.gain(module, x)
    bias = 0.0 if module.bias is None else module.bias
    torch.testing.assert_close(y + bias, module(x).detach(), rtol=1e-4, atol=1e-5)


class Squashed(Written):
    """No norm."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / EPSILON**0.5) * self.shape


class Rectified(Written):
    """Scales as a norm does, and is not one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Rolled(Written):
    """Of the size of a norm, in other places."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(1, -1)


class OfSums(Written):
    """Divides by the root of a sum; its gain, which is one number, does not say of how many."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) * self.shape


@pytest.mark.parametrize(("module", "width"), [(Squashed, 6), (Rectified, 6), (Rolled, 6), (OfSums, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_module_that_is_no_norm_is_none(module: type[Written], width: int, dtype: torch.dtype) -> None:
    assert _Written.of(module("plain", width).to(dtype), EPSILON) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_centred_norm_is_told_from_others_in_every_precision(dtype: torch.dtype) -> None:
    result = _Written.of(Written("centred", 6).to(dtype), EPSILON)
    assert result is not None
    assert result.row.centred


def test_a_gain_that_is_asked_for_has_the_precision_of_the_input() -> None:
    module = Written("exponential", 6).double()
    with torch.no_grad():
        module.shape.normal_()
    result = _Written.of(module, EPSILON)
    assert result is not None
    gain = result.gain(module, torch.zeros(1, 6, dtype=torch.float64))
    torch.testing.assert_close(gain, module.shape.exp().detach(), rtol=1e-12, atol=0.0)


def test_other_tensors_in_the_place_of_parameters_do_not_stop_a_pass() -> None:
    model, x = Called("by place"), torch.randn(7, 5)
    laws = conserved.recognize(model, x)
    with EpsilonTerms(model, laws).watching() as terms:
        others = {name: p * 1.0 for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, (x,)).square().mean().backward()
    assert terms.sides({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


class Called(nn.Module):
    """Two maps with a norm between them, which is called in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.norm, self.down = nn.Linear(5, 6, bias=False), Written("plain", 6), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = 0.05 * self.up(x)
        return self.down(self.norm(h) if self.way == "by place" else self.norm(x=h))


@pytest.mark.parametrize("way", ["by place", "by name"])
def test_a_correct_model_is_not_refuted_however_its_norm_is_called(way: str) -> None:
    model, x = Called(way), torch.randn(7, 5)
    laws = conserved.recognize(model, x)
    assert any(not law.exact for law in laws)
    with EpsilonTerms(model, laws).watching() as terms:
        model(x).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sides = terms.sides(grads)
    assert sides
    for law in laws:
        if law.name in sides:
            mu = law.identity(dict(model.named_parameters()), grads).detach().double().flatten().numpy()
            assert abs(mu).max() > 1e-3, "ε shows"
            assert abs(mu - sides[law.name].value).max() <= 1e-4 * abs(mu).max()


def test_a_norm_that_is_called_with_more_than_its_input_is_not_known() -> None:
    class Twice(Written):
        def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
            return super().forward(x) * times

    model, x = Called("by place"), torch.randn(7, 5)
    model.norm = Twice("plain", 6)
    laws = conserved.recognize(model, x)
    model.norm.register_forward_pre_hook(lambda module, args: (*args, 1.0))
    with EpsilonTerms(model, laws).watching() as terms:
        model(x).square().mean().backward()
    assert not terms.sides({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_gains_are_those_of_the_call_and_not_of_the_one_before() -> None:
    model, x = Called("by place"), torch.randn(7, 5)
    model.norm = Written("one more", 6)
    laws = conserved.recognize(model, x)
    with EpsilonTerms(model, laws).watching() as terms:
        for times in (0.0, 1.0):
            # The first call has a gain of one and no gradient; the second has that of the model.
            others = {name: p * times if "norm" in name else p for name, p in model.named_parameters()}
            (times * torch.func.functional_call(model, others, (x,)).square().mean()).backward()
            if not times:
                torch.nn.init.normal_(model.norm.shape)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sides = terms.sides(grads)
    assert sides
    for law in laws:
        if law.name in sides:
            mu = law.identity(dict(model.named_parameters()), grads).detach().double().flatten().numpy()
            assert abs(mu - sides[law.name].value).max() <= 1e-4 * abs(mu).max()


@pytest.mark.parametrize("given", [None, 3.0, "text"])
def test_what_a_norm_may_be_called_with_does_not_stop_a_pass(given: object) -> None:
    result = _Written.of(Written("plain", 6), EPSILON)
    assert result is not None
    assert result.call(Written("plain", 6), given) is None
