"""What a check takes for an input, for a derivative and for a precision: functions that raised false alarms once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import conserved

SIGNS = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class _WithBackward(torch.autograd.Function):
    """A function whose backward is given."""

    @staticmethod
    def forward(ctx: Any, value: Any, gradients: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.gradients = gradients
        with torch.no_grad():
            return value(*inputs)

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> Any:
        return None, None, *ctx.gradients(dout[0], *ctx.saved_tensors)


def test_a_target_that_is_compared_is_held_fixed(x: Tensor) -> None:
    result = conserved.check(F.hinge_embedding_loss, x[0], SIGNS)
    assert result.verdict.holds, str(result)
    assert list(result.inputs) == ["input"]
    assert any("held fixed: target" in note for note in result.notes)


def test_inputs_that_a_function_refuses_to_differentiate_by_are_held_fixed(x: Tensor) -> None:
    assert conserved.check(F.soft_margin_loss, x[0], SIGNS).verdict.holds
    result = conserved.check(F.batch_norm, x, torch.zeros(6), torch.ones(6))
    assert result.verdict.holds, str(result)
    assert any("running_mean, running_var" in note for note in result.notes)


def test_a_missing_gradient_of_a_smooth_input_is_refuted(x: Tensor) -> None:
    def forgets(x: Tensor, scale: Tensor) -> Any:
        return _WithBackward.apply(lambda x, s: x * s, lambda g, x, s: (g * s, None), x, scale)

    assert not conserved.check(forgets, x, torch.tensor(0.7)).ok
    assert not conserved.check(forgets, x, x[0].clone()).ok
    assert not conserved.check(forgets, x.bfloat16(), x[0].bfloat16()).ok


def test_an_output_of_steps_needs_no_gradient(x: Tensor) -> None:
    def steps(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.floor() + 0 * x.sum()

    assert conserved.check(steps, x).ok


def test_a_saturated_softmax_needs_no_gradient() -> None:
    scores = torch.tensor([[400.0, -300.0], [-500.0, 350.0], [200.0, -600.0]])

    def weights(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return scores.softmax(-1) @ v, scores.softmax(-1)

    assert conserved.check(weights, scores, torch.randn(2, 3)).ok


def test_a_median_of_equal_numbers_has_no_gradient_that_could_be_wrong(x: Tensor) -> None:
    def median(x: Tensor) -> Tensor:
        return x.sort(-1).values[..., 2:4].mean(-1)

    result = conserved.check(median, x)
    assert result.verdict.holds, str(result)


def test_a_constant_in_single_precision_is_not_the_precision_of_a_function(x: Tensor) -> None:
    def shifted(x: Tensor) -> Tensor:
        return torch.linalg.inv(x @ x.mT + torch.eye(4).to(x))

    assert conserved.check(shifted, x).reference == "float64"


def test_a_cast_to_single_precision_is_the_precision_of_a_function(x: Tensor) -> None:
    assert conserved.check(lambda x: (x.float() ** 2).to(x.dtype), x).reference == ""


def test_a_loss_is_held_against_its_own_double_precision(x: Tensor) -> None:
    loss = conserved.check(lambda x: (x.tanh() ** 2).mean() / (1 + x.abs().sum()), x)
    assert loss.reference == "float64"
    assert loss.verdict.holds, str(loss)


def test_a_map_that_is_the_identity_by_accident_may_be_reordered_there_alone() -> None:
    """Householder reflections along unit vectors commute with some permutations at these vectors and nowhere else."""
    vectors = torch.eye(4)[[0, 0]]

    def reflect(x: Tensor, vectors: Tensor) -> Tensor:
        for v in vectors:
            x = x - 2 * (x @ v)[..., None] * v / (v @ v)
        return x

    result = conserved.check(reflect, torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), vectors)
    assert result.ok, str(result)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_wrong_factor_is_seen_where_a_function_is_steep_near_zero(x: Tensor, factor: float) -> None:
    def cube_root(x: Tensor) -> Any:
        return _WithBackward.apply(
            lambda x: x.sign() * x.abs() ** (1 / 3), lambda g, x: (factor * g * x.abs() ** (-2 / 3) / 3,), x
        )

    result = conserved.check(cube_root, x)
    assert result.verdict.holds if factor == 1 else not result.ok, str(result)


def test_an_infinite_slope_is_not_a_defect_and_a_division_by_zero_is() -> None:
    x = torch.tensor([0.3, 1.0, -0.5, 0.25, -1.0, 0.75]).bfloat16()
    assert conserved.check(torch.asin, x).ok

    def divides(x: Tensor) -> Any:
        return _WithBackward.apply(lambda x: x * x, lambda g, x: (2 * g * x * (1 - x) / (1 - x).abs() ** 1.5,), x)

    def overflows(x: Tensor) -> Any:
        return _WithBackward.apply(lambda x: x * x, lambda g, x: (2 * g * x / (x != 1.0).to(x),), x)

    assert not conserved.check(divides, x.float()).ok
    assert not conserved.check(overflows, x.float()).ok


def test_a_sign_that_flips_at_zero_has_no_gradient_that_could_be_wrong() -> None:
    x, y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).unbind()
    assert conserved.check(torch.copysign, x, y).ok
    assert conserved.check(torch.copysign, x[0, 0], y[0, 0]).ok


def test_ties_of_half_precision_are_not_noise() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)).mul(2).round().div(2).bfloat16()
    assert conserved.check(torch.msort, x).ok
    assert conserved.check(lambda x: x.cummax(0).values, x).ok


def test_a_gradient_beyond_the_range_of_half_precision_may_be_infinite() -> None:
    x = torch.tensor([0.3, -0.7, 1.5703, 0.2, 1.1, -1.2]).half()
    assert conserved.check(torch.tan, x).ok


def test_points_outside_of_a_domain_are_not_noise() -> None:
    x = torch.cat([torch.linspace(0.002, 0.99, 15), torch.tensor([1.0, 0.996])]).bfloat16()
    for function in (torch.asin, torch.sqrt):
        assert conserved.check(function, x).ok, function
    assert conserved.check(torch.logit, x[:-2]).ok


def test_an_output_beyond_all_powers_has_no_degree() -> None:
    x = torch.linspace(-9.0, 9.0, 12)
    assert conserved.check(torch.special.erfcx, x).ok


def test_a_rounding_to_decimals_has_a_gradient_of_zero() -> None:
    x = 5 * torch.randn(20, generator=torch.Generator().manual_seed(0))
    assert conserved.check(lambda x: torch.round(x, decimals=3), x).ok


def test_a_gradient_of_zero_of_what_moves_smoothly_is_still_refuted(x: Tensor) -> None:
    def forgotten(x: Tensor) -> Tensor:
        return _WithBackward.apply(torch.sin, lambda dout, x: (0 * dout,), x)

    assert conserved.check(forgotten, x).verdict == conserved.Verdict.REFUTED


@pytest.mark.parametrize("seed", [0, 2])
def test_biases_near_zero_are_no_symmetry_because_they_move_little(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w0, w1, w2, w3 = (torch.randn(*shape, generator=generator) for shape in ((4, 8), (8, 8), (8, 8), (8, 4)))

    def residual_block(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = x @ w0.to(x) / 2 + a
        return (h + torch.relu(torch.relu(h) @ w1.to(x) / 3) @ w2.to(x) * 2e-4 + b) @ w3.to(x)

    x = torch.randn(5, 4, generator=generator)
    a, b = (1e-3 * torch.randn(8, generator=generator) for _ in range(2))
    assert conserved.check(residual_block, x, a, b).ok


def test_a_root_of_zero_has_no_gradient_that_could_be_wrong(x: Tensor) -> None:
    x[0, 0] = 0
    assert conserved.check(lambda x: x.abs().sqrt(), x).ok


def test_a_division_of_zero_by_zero_at_a_finite_slope_is_a_defect(x: Tensor) -> None:
    x[0] = 0
    assert not conserved.check(lambda x: (x * x).sum(-1).sqrt(), x).ok
