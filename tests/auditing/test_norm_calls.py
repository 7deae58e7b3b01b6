"""What ε leaves of the scale that a norm function forgets, against automatic differentiation along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conserved.auditing.norm_calls import NormCall, listen_to_norms

EPSILON = 0.2

CALLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer norm": (lambda x, g: F.layer_norm(x, (6,), g(6), None, EPSILON), (3, 4, 6)),
    "layer norm over two axes": (lambda x, g: F.layer_norm(x, (4, 6), g(4, 6), None, EPSILON), (3, 4, 6)),
    "without a gain": (lambda x, g: F.layer_norm(x, (6,), None, None, EPSILON), (3, 4, 6)),
    "root mean square": (lambda x, g: F.rms_norm(x, (6,), g(6), EPSILON), (3, 4, 6)),
    "one group": (lambda x, g: F.group_norm(x, 1, g(8), None, EPSILON), (3, 8, 5)),
    "two groups": (lambda x, g: F.group_norm(x, 2, g(8), None, EPSILON), (3, 8, 5)),
    "a group for each channel": (lambda x, g: F.group_norm(x, 8, g(8), None, EPSILON), (3, 8, 5)),
    "batch": (lambda x, g: F.batch_norm(x, None, None, g(8), None, True, 0.1, EPSILON), (3, 8, 5)),
    "batch of vectors": (lambda x, g: F.batch_norm(x, None, None, g(8), None, True, 0.1, EPSILON), (7, 8)),
}


class Heard:
    """One call of a norm."""

    def __init__(self) -> None:
        self.calls: list[NormCall] = []

    def note_call(self, x: Tensor, out: Tensor, norm: NormCall) -> None:
        """Keep it."""
        self.calls.append(norm)


def heard(name: str, x: Tensor) -> tuple[Tensor, NormCall]:
    """A call with the same gains every time, which half precision has too."""
    generator = torch.Generator().manual_seed(3)

    def gain(*shape: int) -> Tensor:
        return (3 * torch.randn(shape, generator=generator)).half().to(x.dtype)

    listener = Heard()
    with listen_to_norms(listener):
        out = CALLS[name][0](x, gain)
    (call,) = listener.calls
    return out, call


def along_the_scale(name: str, x: Tensor, grad: Tensor, shape: Sequence[int], axes: Sequence[int]) -> Tensor:
    """Σ x ∂L/∂x over all axes but some, in float64."""
    wide = x.double().clone().requires_grad_()
    out, _ = heard(name, wide)
    (result,) = torch.autograd.grad((out * grad.double()).sum(), wide)
    products = (result * wide.detach()).reshape(*shape)
    others = [axis for axis in range(len(shape)) if axis not in axes]
    return products.sum(others) if others else products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_sums_are_those_of_the_derivative(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(CALLS[name][1]) + 0.3).to(dtype)
    # As large as they are under a loss scale: half precision has nothing beyond 65,504.
    grad = (1e4 * torch.randn(CALLS[name][1])).to(dtype)
    _, call = heard(name, x)
    lead = [axis for axis in range(len(call.shape)) if axis not in call.axes]
    for axes in ((), *((axis,) for axis in lead), tuple(lead)):
        result = call.remainder(x, grad, axes)
        assert result is not None
        expected = along_the_scale(name, x, grad, call.shape, axes)
        assert result.shape == (2, *expected.shape)
        limit = 1e-12 if dtype == torch.float64 else 1e-5
        assert float((result[0] - expected).norm()) <= limit * float(result[1].sum().sqrt())


@pytest.mark.parametrize("name", CALLS)
def test_what_is_normalised_over_cannot_be_kept_apart(name: str) -> None:
    x = torch.randn(CALLS[name][1])
    _, call = heard(name, x)
    assert call.remainder(x, x, call.axes[:1]) is None
