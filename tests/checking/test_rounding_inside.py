"""Right functions whose intermediate results are rounded are not refuted; wrong gradients of them still are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conserved import check
from conserved.checking.random_rounding import _occurs, rounding_spread
from conserved.inference.probing.numerical_function import function_of
from conserved.verdict import Status


def sorted_products(x: Tensor, w: Tensor) -> Tensor:
    """Products that are tied in bfloat16 and not in float64."""
    products = torch.tanh(x) * w
    return torch.take_along_dim(products, products.argsort(1), 1)


def cast_inside(x: Tensor) -> Tensor:
    return F.log_softmax((x.to(torch.bfloat16) * 2).to(x.dtype), -1)


def normalized(x: Tensor) -> Tensor:
    """A norm whose default ε is that of the precision, over two entries."""
    return F.rms_norm(x, (2,))


def constant_rows(x: Tensor) -> Tensor:
    """A layer norm of equal entries, whose gradient is the rounding of terms that cancel."""
    return F.layer_norm(torch.logcumsumexp(x, -1)[..., :1].expand(8, 16), (16,))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (sorted_products, torch.bfloat16),
        (cast_inside, torch.bfloat16),
        (cast_inside, torch.float32),
        (normalized, torch.float32),
        (constant_rows, torch.float32),
    ],
)
def test_rounding_inside_a_function_is_no_wrong_gradient(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    inputs = {
        sorted_products: [torch.randn(3, 16, 8), torch.randn(8)],
        cast_inside: [torch.randn(4, 12)],
        normalized: [torch.randn(40, 2)],
        constant_rows: [torch.randn(8, 16)],
    }[function]
    result = check(function, *(value.to(dtype) for value in inputs))
    assert result.verdict.status is not Status.REFUTED, result


@pytest.mark.parametrize("factor", [0.5, 1.1])
@pytest.mark.parametrize("function", [cast_inside, normalized])
def test_a_wrong_gradient_of_the_same_function_is_refuted(function: Callable[..., Tensor], factor: float) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return function(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                return factor * torch.autograd.grad(function(x), x, grad)[0]

    torch.manual_seed(3)
    x = torch.randn(4, 12) if function is cast_inside else torch.randn(40, 2)
    assert check(Wrong.apply, x).verdict.status is Status.REFUTED


class _SteeperGrid(torch.autograd.Function):
    """The identity, whose backward is off by a factor: the gradient of a grid that is a tenth too large."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor) -> Tensor:
        return grid.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.1 * gradient


def test_a_cell_that_rounding_of_a_coordinate_chooses_is_no_wrong_gradient() -> None:
    torch.manual_seed(1)
    image, grid = torch.randn(2, 3, 5, 5).bfloat16(), (4 * torch.rand(2, 5, 5, 2) - 2).bfloat16()
    # A coordinate of zero is the middle of five columns, and 1 − 0.0003 is one in bfloat16.
    grid[0, ::2, ::2] = torch.tensor([-2.84e-4, 0.1]).bfloat16()

    def sampled(image: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(image, grid, align_corners=False)

    assert check(sampled, image, grid).verdict.status is not Status.REFUTED
    wrong = check(lambda image, grid: sampled(image, _SteeperGrid.apply(grid)), image, grid)
    assert wrong.verdict.status is Status.REFUTED


def test_selections_round_nothing() -> None:
    def largest(x: Tensor) -> Tensor:
        return x.flip(0).amax(-1)

    function = function_of(largest, [torch.randn(4, 6, dtype=torch.float64)], {})
    spread = rounding_spread(function, function.values, [torch.ones(4, dtype=torch.float64)], 2.0**-9)
    assert not float(spread.outs[0].abs().max())
    assert not float(spread.decisions[0].abs().max())


def test_a_decision_that_rounding_makes_shows() -> None:
    def smaller(x: Tensor) -> Tensor:
        return torch.where(3 * x[0] < 3 * x[1], x[0], 5 * x[1])

    x = torch.tensor([1.0, 1.0 + 2.0**-10], dtype=torch.float64)
    function = function_of(smaller, [x], {})
    spread = rounding_spread(function, function.values, [torch.ones((), dtype=torch.float64)], 2.0**-9)
    assert bool((spread.decisions[0] >= 1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [10, 50_000])
def test_entries_that_an_operand_holds_are_those_that_a_sort_finds(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    operand = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).abs()
    drawn = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).abs()
    entries = torch.where(torch.arange(size) % 3 == 0, operand.flip(0), drawn).reshape(2, -1)
    assert torch.equal(_occurs(entries, operand), torch.isin(entries, operand))
    assert not _occurs(drawn + 100, operand).any()
