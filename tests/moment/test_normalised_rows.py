"""What ε leaves of the scale of rows, against the derivative of PyTorch's own norms along it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from as_written import import_as_written
from conserved.moment import RowNorm, triton_backend

EPSILON = 0.3


def along_the_scale(x: Tensor, grad: Tensor, gain: Tensor | None, *, centred: bool) -> Tensor:
    """⟨x, ∂L/∂x⟩ of every row for the loss ⟨y, D⟩, by automatic differentiation in float64."""
    wide = x.double().clone().requires_grad_()
    by = None if gain is None else gain.double()
    shape = (x.shape[1],)
    y = F.layer_norm(wide, shape, by, None, EPSILON) if centred else F.rms_norm(wide, shape, by, EPSILON)
    (result,) = torch.autograd.grad((y * grad.double()).sum(), wide)
    return (result * wide.detach()).sum(1)


def terms(x: Tensor, grad: Tensor, gain: Tensor | None, *, centred: bool) -> Tensor:
    """ε/(s + ε) y_i D_i, entry by entry, in float64."""
    values = x.double() - x.double().mean(1, keepdim=True) if centred else x.double()
    weight = EPSILON / (values.square().mean(1, keepdim=True) + EPSILON) ** 1.5
    return weight * values * grad.double() * (1.0 if gain is None else gain.double())


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernel":
        pytest.importorskip("triton")
        import_as_written("conserved.moment.kernels")
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
    x, grad = torch.randn(2, rows, width).to(dtype)
    x = (x + 0.4).to(dtype)
    gain = torch.randn(width).to(dtype) if gained else None
    value, _ = RowNorm(epsilon=EPSILON, centred=centred).remainder(x, grad, gain)
    expected = along_the_scale(x, grad, gain, centred=centred)
    largest = float(terms(x, grad, gain, centred=centred).norm())
    assert float((value.double() - expected).norm()) <= (1e-12 if dtype == torch.float64 else 1e-5) * largest + 1e-14


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_are_squared_one_by_one(way: str, dtype: torch.dtype, centred: bool) -> None:
    x, grad = torch.randn(2, 6, 40).to(dtype)
    gain = torch.randn(40)
    _, squares = RowNorm(epsilon=EPSILON, centred=centred).remainder(x, grad, gain)
    expected = terms(x, grad, gain, centred=centred).square().sum(1)
    torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=0.0)


def test_a_gradient_that_is_not_finite_spoils_its_row_alone(way: str) -> None:
    x, grad = torch.randn(2, 5, 12)
    grad[1, 3], x[4, 0] = torch.inf, torch.nan
    result = RowNorm(epsilon=EPSILON, centred=True).remainder(x, grad, None)
    assert result.isfinite().all(0).tolist() == [True, False, True, True, False]


def test_rows_that_do_not_follow_each_other_in_memory(way: str) -> None:
    x, grad = (torch.randn(48, 18).mT for _ in range(2))
    norm = RowNorm(epsilon=EPSILON, centred=True)
    torch.testing.assert_close(norm.remainder(x, grad, None), norm.remainder(x.clone(), grad.clone(), None))


def test_one_gain_for_all_entries(way: str) -> None:
    x, grad = torch.randn(2, 5, 12)
    memory = torch.tensor([1.5, 777.0, 777.0])
    norm = RowNorm(epsilon=EPSILON, centred=False)
    torch.testing.assert_close(norm.remainder(x, grad, memory[:1]), norm.remainder(x, 1.5 * grad, None))


def test_large_slopes_have_squares_where_terms_are_small(way: str) -> None:
    x, grad = 1e6 * torch.randn(4, 12), 1e20 * torch.randn(4, 12)
    result = RowNorm(epsilon=1e-12, centred=False).remainder(x, grad, None)
    assert result.isfinite().all()
