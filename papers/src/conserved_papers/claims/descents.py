"""Small training runs for claims about discrete time: a block on random regression data, and how its laws drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.inference import recognize
from conserved.laws import LawSet
from conserved.tracking import Monitor
from conserved_papers.lab import fits

Watch = Callable[[dict[str, Tensor]], Tensor]
"""Numbers made of the parameters."""
StepSizes = Callable[[int], float]
"""The step size of step k, from 0."""


def constant(size: float) -> StepSizes:
    """Return the same step size throughout."""
    return lambda _: size


def scattered(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a block with all weights of size one or so, where gradients are not small."""
    torch.manual_seed(seed)
    model = build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def monitored(
    build: Callable[[], nn.Module],
    optimizer_of: Callable[[list[Tensor]], Optimizer],
    *,
    steps: int = 20,
    fresh: bool = True,
    laws_of: Callable[[nn.Module], LawSet] = recognize,
) -> Monitor:
    """Run an optimizer on a block and return the monitor that watched it.

    Args:
        build: makes the block, of width 4.
        optimizer_of: makes the optimizer.
        steps: the number of steps.
        fresh: whether every step sees new noise; otherwise all see one batch.
        laws_of: the quantities to watch.

    Returns:
        The monitor, with its account of every step.
    """
    model = scattered(build)
    optimizer = optimizer_of(list(model.parameters()))
    monitor = Monitor(model, optimizer, laws_of(model), every=1, audit=None)
    x, y = (torch.randn(6, 5, 4, dtype=torch.float64) for _ in range(2))
    for number in range(steps):
        if fresh and number:
            x, y = (torch.randn(6, 5, 4, dtype=torch.float64) for _ in range(2))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        monitor.step()
    return monitor


def drifts(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    watch: Watch,
    schedule: StepSizes,
    steps: Sequence[int],
    *,
    stochastic: bool,
    seed: int = 0,
    path: bool = False,
) -> list[float]:
    """Return ‖h(θ_k) − h(θ_0)‖ over the size of the squared weights, after so many steps of (stochastic) gradient
    descent.

    With `path` the path length, Σ‖h(θ_{i+1}) − h(θ_i)‖, which cannot be small because changes cancel.
    Full-batch runs see the same inputs and targets in every step. Stochastic ones see fresh inputs and targets of pure
    noise, so that gradients do not settle.
    """
    model = scattered(build, seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fixed = _batch(shape, generator)
    start = _watched(model, watch)
    size = float(sum(p.detach().square().sum() for p in model.parameters()))
    result: dict[int, float] = {}
    length, last = 0.0, start
    for number in range(max(steps)):
        x, noise = _batch(shape, generator) if stochastic else fixed
        optimizer.zero_grad()
        output = model(x)
        (output - noise.expand_as(output)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = schedule(number)
        optimizer.step()
        now = _watched(model, watch)
        length, last = length + float((now - last).norm()), now
        if number + 1 in steps:
            result[number + 1] = (length if path else float((now - start).norm())) / size
    return [result[step] for step in steps]


def _batch(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(4, *shape[:-1], 1, generator=generator, dtype=torch.float64)


def _watched(model: nn.Module, watch: Watch) -> Tensor:
    with torch.no_grad():
        return watch(dict(model.named_parameters())).clone()


def exponent(x: Sequence[float | int], y: Sequence[float]) -> float:
    """Return the p of y ∝ x^p, by least squares; NaN if some y is zero."""
    return math.nan if min(y) <= 0 else fits.exponent(x, y)


def flow(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], watch: Watch, *, time: float, steps: int
) -> list[Tensor]:
    """Follow gradient flow by the classical Runge–Kutta method; the watched numbers at every step."""
    parameters = list(model.parameters())
    start = [p.detach().clone() for p in parameters]

    def downhill(at: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            for parameter, value in zip(parameters, at, strict=True):
                parameter.copy_(value)
        return [-g for g in torch.autograd.grad(loss(model), parameters)]

    def moved(by: list[Tensor], far: float) -> list[Tensor]:
        return [a + far * b for a, b in zip(start, by, strict=True)]

    h = time / steps
    seen = [_watched(model, watch)]
    for _ in range(steps):
        k1 = downhill(start)
        k2 = downhill(moved(k1, h / 2))
        k3 = downhill(moved(k2, h / 2))
        k4 = downhill(moved(k3, h))
        start = [s + h / 6 * (a + 2 * b + 2 * c + d) for s, a, b, c, d in zip(start, k1, k2, k3, k4, strict=True)]
        downhill(start)
        seen.append(_watched(model, watch))
    return seen
