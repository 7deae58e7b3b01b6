"""What ε leaves of the scale of rows, against the derivative of PyTorch's own norms along it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from as_written import import_as_written
from conserved.moment import RowNorm, triton_backend

pytest.importorskip("triton")
import_as_written("conserved.moment.kernels")

EPSILON = 0.3


def along_the_scale(x: Tensor, slope: Tensor, gain: Tensor | None, *, centred: bool) -> Tensor:
    """⟨x, ∂L/∂x⟩ of every row for the loss ⟨y, D⟩, by automatic differentiation in float64."""
    wide = x.double().requires_grad_()
    by = None if gain is None else gain.double()
    shape = (x.shape[1],)
    y = F.layer_norm(wide, shape, by, None, EPSILON) if centred else F.rms_norm(wide, shape, by, EPSILON)
    (found,) = torch.autograd.grad((y * slope.double()).sum(), wide)
    return (found * wide.detach()).sum(1)


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(triton_backend, "available", lambda device: request.param == "kernel")
    return str(request.param)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (18, 48, torch.float32),
        (1, 3, torch.float32),
        (70, 130, torch.bfloat16),
        (3, 4097, torch.float16),
        (5, 1, torch.float32),
        (0, 8, torch.float32),
        (2, 9000, torch.float32),
        (9, 12, torch.float64),
    ],
)
def test_it_is_the_derivative_along_the_scale(
    way: str, rows: int, width: int, dtype: torch.dtype, gained: bool, centred: bool
) -> None:
    x, slope = torch.randn(2, rows, width).to(dtype)
    x = (x + 0.4).to(dtype)
    gain = torch.randn(width).to(dtype) if gained else None
    value, squares = RowNorm(EPSILON, centred).remainder(x, slope, gain)
    expected = along_the_scale(x, slope, gain, centred=centred)
    largest = float(squares.double().sum().sqrt()) if rows else 0.0
    assert float((value.double() - expected).norm()) <= (1e-12 if dtype == torch.float64 else 1e-5) * largest + 1e-14


def test_terms_are_squared_one_by_one(way: str) -> None:
    x, slope, gain = torch.randn(6, 40), torch.randn(6, 40), torch.randn(40)
    _, squares = RowNorm(EPSILON, False).remainder(x, slope, gain)
    weight = EPSILON / (x.square().mean(1, keepdim=True) + EPSILON) ** 1.5
    torch.testing.assert_close(squares, (weight * x * slope * gain).square().sum(1))


def test_rows_that_do_not_follow_each_other_in_memory(way: str) -> None:
    x, slope = (torch.randn(48, 18).mT for _ in range(2))
    norm = RowNorm(EPSILON, True)
    torch.testing.assert_close(norm.remainder(x, slope, None), norm.remainder(x.clone(), slope.clone(), None))
