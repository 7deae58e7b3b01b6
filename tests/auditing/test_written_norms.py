"""Norms that are written out as modules: what they multiply by, and what ε leaves of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conserved.auditing.epsilon_terms import _Written

EPSILON = 1e-3


class Written(nn.Module):
    """x/√(mean x² + ε), times a gain made of a parameter."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.shape = nn.Parameter(torch.ones(width) if kind == "plain" else torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "centred" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "centred":
            x = x - x.mean(-1, keepdim=True)
        gain = {"plain": self.shape, "centred": self.shape.exp(), "one more": 1 + self.shape}[self.kind]
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * gain
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize(
    ("kind", "expected"), [("plain", ("shape", 0.0)), ("one more", ("shape", 1.0)), ("centred", (None, 0.0))]
)
@pytest.mark.parametrize("width", [1, 6, 33])
def test_a_gain_is_known_by_its_parameter_or_asked_for(
    kind: str, expected: tuple[str | None, float], width: int
) -> None:
    module = Written(kind, width)
    found = _Written.of(module, EPSILON)
    if width == 1 and kind == "centred":
        return  # of one number minus its mean nothing is left, and anything is said of it
    assert found is not None
    assert (found.parameter, found.offset) == expected
    with torch.no_grad():
        module.shape.normal_()
        if module.bias is not None:
            module.bias.normal_()
    # Whatever it multiplies by is what it does to a row, up to the size of the row.
    x = torch.randn(5, width)
    values = x - x.mean(-1, keepdim=True) if kind == "centred" else x
    y = values / (values.square().mean(-1, keepdim=True) + EPSILON).sqrt() * found.gain(module, x)
    bias = 0.0 if module.bias is None else module.bias
    torch.testing.assert_close(y + bias, module(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_module_that_is_no_norm_is_none() -> None:
    class Squashed(Written):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.shape

    assert _Written.of(Squashed("plain", 6), EPSILON) is None
