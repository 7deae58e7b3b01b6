"""Laws of other flows: another metric, and momentum, each held against an integration of the flow itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conserved.certificates import certify
from conserved.discovery import UnsuitableError, discover
from conserved.discovery.metric import entropy
from conserved.discovery.phase_space import FRICTION
from conserved_papers.blocks import FeedForward, MixtureOfExperts, SwiGLU

EXAMPLE = torch.zeros(3, dtype=torch.float64)


def pair() -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(3, 2, "linear").double()


@pytest.mark.parametrize(
    ("metric", "count"),
    [
        ({}, 3),
        ({"up.weight": 4.0}, 3),
        ({"up.weight": torch.tensor([[1.0, 2.0, 3.0], [2.0, 5.0, 1.0]])}, 2),
        ({"up.weight": entropy, "down.weight": entropy}, 2),
    ],
    ids=["Euclidean", "one number", "one number per entry", "entropy"],
)
def test_laws_in_another_metric_are_counted_and_certified(metric: dict[str, Any], count: int) -> None:
    result = discover(pair(), EXAMPLE, metric=metric, forms=False)
    assert (result.count, result.verdict.holds) == (count, True)
    assert certify(pair(), EXAMPLE, metric=metric).at_most == count


def integrated(slope: Callable[[Tensor], Tensor], start: Tensor, time: float, steps: int) -> Tensor:
    """Follow an ODE by the classical Runge–Kutta method."""
    state, h = start, time / steps
    for _ in range(steps):
        a = slope(state)
        b = slope(state + h / 2 * a)
        c = slope(state + h / 2 * b)
        d = slope(state + h * c)
        state = state + h / 6 * (a + 2 * b + 2 * c + d)
    return state


def product_loss(theta: Tensor) -> Tensor:
    """½‖A B x − y‖² for A, B of 2 × 2, as a gradient in (A, B)."""
    x, y = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.5, 1.5], dtype=torch.float64)

    def loss(flat: Tensor) -> Tensor:
        return ((flat[:4].reshape(2, 2) @ flat[4:].reshape(2, 2) @ x - y).square()).sum() / 2

    return torch.func.grad(loss)(theta)


START = torch.tensor([0.7, 0.4, 0.9, 0.2, 0.5, 0.8, 0.3, 1.1], dtype=torch.float64)


def test_under_the_entropy_the_sums_of_a_neuron_are_balanced_and_not_their_squares() -> None:
    end = integrated(lambda theta: -theta * product_loss(theta), START, 1.0, 400)

    def sums(theta: Tensor) -> Tensor:
        return theta[:4].reshape(2, 2).sum(0) - theta[4:].reshape(2, 2).sum(1)

    def squares(theta: Tensor) -> Tensor:
        return theta[:4].reshape(2, 2).square().sum(0) - theta[4:].reshape(2, 2).square().sum(1)

    assert torch.allclose(sums(end), sums(START), atol=1e-9)
    assert float((squares(end) - squares(START)).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"nothing": 2.0}, "got nothing"),
        ({"up.weight": 0.0}, "positive"),
        ({"up.weight": float("nan")}, "positive"),
        ({"up.weight": torch.ones(5)}, r"that expands to"),
    ],
    ids=["unknown", "zero", "NaN", "shape"],
)
def test_a_metric_that_is_none_is_refused(metric: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsuitableError, match=message):
        discover(pair(), EXAMPLE, metric=metric)


@pytest.mark.parametrize(
    ("build", "shape", "count"),
    [
        (lambda: FeedForward(2, 2, "linear"), (2,), 1),
        (lambda: SwiGLU(2, 1), (2,), 0),
        (lambda: MixtureOfExperts(2, 1, 2), (2,), 4),
    ],
    ids=["a rotation remains", "a scaling does not", "a translation leaves two for each number"],
)
def test_laws_of_momentum(build: Callable[[], Any], shape: tuple[int, ...], count: int) -> None:
    result = discover(build(), torch.zeros(shape, dtype=torch.float64), dynamics="heavy_ball")
    assert result.verdict.holds
    assert (result.count, result.explained) == (count, count)


def test_the_antisymmetric_momentum_is_conserved_and_the_symmetric_one_is_not() -> None:
    def slope(state: Tensor) -> Tensor:
        theta, velocity = state.chunk(2)
        return torch.cat((velocity, -FRICTION * velocity - product_loss(theta)))

    def momentum(state: Tensor) -> Tensor:
        a, b, va, vb = (part.reshape(2, 2) for part in state.split(4))
        return a.mT @ va - (b @ vb.mT).mT

    start = torch.cat((START, 0.3 * START.flip(0)))
    end = integrated(slope, start, 1.0, 400)
    before, after = momentum(start), momentum(end) * torch.exp(torch.tensor(FRICTION))
    assert float((after - after.mT - before + before.mT).abs().max()) < 1e-8, (
        "the method's own error is a quarter of it"
    )
    assert float((after + after.mT - before - before.mT).abs().max()) > 1e-2


@pytest.mark.usefixtures("as_users_run_it")
def test_an_unknown_dynamics_is_refused() -> None:
    with pytest.raises(UnsuitableError, match="heavy_ball"):
        discover(pair(), EXAMPLE, dynamics="adam")  # type: ignore[call-overload]
