"""How noisy a function and its gradients are in themselves, measured by differences along a short line.

A smooth function's fourth difference along five nearby points vanishes with the fourth power of their distance; what
is left is the noise of its arithmetic, whatever that arithmetic is (half precision, TF32, atomic additions, a sum in
another order). This is Hamming's difference table, as in J. Moré and S. Wild, "Estimating computational noise" (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conserved.inference.probing.numerical_function import NumericalFunction, Values
from conserved.tolerances import UNIT

_STENCIL = (1.0, -4.0, 6.0, -4.0, 1.0)
_VARIANCE = 70.0
"""The sum of the squares of the stencil: the variance of a fourth difference of independent noise of variance one."""

_STEP = {torch.float64: 2.0**-22, torch.float32: 2.0**-15, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
_TENSOR_CORE_STEP = 2.0**-12
"""Single precision on a GPU may be rounded to ten bits inside; a shorter step would not reach the next such number."""

TENSOR_CORE_UNIT = 2.0**-12
_FEW = 16


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision, where comparing adds no error of its own."""
    return tensor.detach().double()


def by_row(square: Tensor) -> Tensor:
    """Return the mean over as many trailing axes as make a fair sample, kept as axes of size one."""
    dims: list[int] = []
    count = 1
    for axis in range(square.ndim - 1, -1, -1):
        dims.append(axis)
        count *= square.shape[axis]
        if count >= _FEW:
            break
    return square.mean(dims, keepdim=True) if dims else square


def rms(tensor: Tensor) -> float:
    """Return the root mean square."""
    return float(wide(tensor).square().mean().sqrt()) if tensor.numel() else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionNoise:
    """Standard deviations of outputs and gradients by row, and the relative error of one rounding as it shows in the
    outputs. `response` is the relative change of a gradient per relative change of the inputs, plus one."""

    outs: Values
    grads: tuple[Tensor | None, ...]
    unit: float
    relative: tuple[float, ...]
    response: tuple[float, ...]


def nearby(values: Sequence[Tensor], step: float, seed: int) -> list[list[Tensor]]:
    """Return five points on a line through `values`, each entry moved by a share of itself."""
    generator = torch.Generator(values[0].device).manual_seed(seed)
    points: list[list[Tensor]] = [[] for _ in _STENCIL]
    for value in values:
        device = value.device
        share = torch.rand(value.shape, generator=generator, dtype=torch.float32, device=device) + 0.5
        share *= torch.randint(2, value.shape, generator=generator, device=device).mul_(2).sub_(1)
        for index, point in enumerate(points):
            moved = wide(value) * (1 + (index - 2) * step * share.double())
            point.append(moved.to(value.dtype) if index != 2 else value.detach().clone())
    return points


def step_of(function: NumericalFunction) -> float:
    """Return how far apart the points are, relative to the entries."""
    step = _STEP[function.precision]
    if function.precision == torch.float32 and function.values[0].is_cuda:
        step = _TENSOR_CORE_STEP
    return step


def measure_noise(
    function: NumericalFunction, gradients: Sequence[Tensor], *, seed: int = 17, shorter: float = 1.0
) -> FunctionNoise:
    """Return the noise of outputs and gradients around the function's inputs, from five forward and backward passes.

    Args:
        function: the function at its inputs.
        gradients: output gradients of the backward passes.
        seed: of the direction the five points lie in.
        shorter: how many times nearer to each other than usual the points are, where the precision allows.
    """
    step = max(step_of(function) / shorter, 32 * UNIT[function.precision] if shorter > 1 else 0.0)
    count = len(function.values)
    points_ = nearby([*function.values, *gradients], step, function.seed + seed)
    runs = [function.gradients(point[:count], point[count:]) for point in points_]
    outs = [[wide(run[0][index]) for run in runs] for index in range(len(runs[0][0]))]
    grads = [[run[1][index] for run in runs] for index in range(len(function.values))]
    unit = max([UNIT[function.precision], *(UNIT[out.dtype] for out in runs[0][0])])
    shares = []
    for points in outs:
        spread = noise_of(points).square().mean().sqrt()
        response = (points[3] - points[1]).square().mean().sqrt() / (2 * step) + points[2].square().mean().sqrt()
        if points[2].numel() >= 64 and response > 0:
            shares.append(float(spread / response))
        elif points[2].numel() < 64:
            # The noise of a few numbers says little about the arithmetic behind them.
            shares.append(TENSOR_CORE_UNIT if points[2].is_cuda else UNIT[torch.float32])
    unit = max([unit, *(share for share in shares if share < float("inf"))])
    deviations: list[Tensor | None] = []
    relative, responses = [], []
    for passes in grads:
        arrived = [wide(grad) for grad in passes if grad is not None]
        if len(arrived) < len(_STENCIL):
            deviations.append(None)
            relative.append(0.0)
            responses.append(1.0)
            continue
        spread = noise_of(arrived)
        size = arrived[2].square().mean().sqrt()
        deviations.append(deviation_of(arrived))
        moved = arrived[3] - arrived[1]
        change = moved[moved.isfinite()].square().sum().div(moved.numel()).sqrt() / (2 * step)
        scale = float(size) or 1.0
        relative.append(float(spread[spread.isfinite()].square().sum().div(spread.numel()).sqrt()) / scale)
        responses.append(1.0 + float(change) / scale)
    return FunctionNoise(
        outs=tuple(_output_deviation(points, run.dtype) for points, run in zip(outs, runs[0][0], strict=True)),
        grads=tuple(deviations),
        unit=unit,
        relative=tuple(relative),
        response=tuple(responses),
    )


def measure_output_noise(
    function: NumericalFunction, values: Sequence[Tensor], step: float, *, entrywise: bool = False
) -> Values:
    """Measure the standard deviation of each output by row, from five forward passes around `values`.

    Args:
        function: the function.
        values: the inputs.
        step: the distance of neighbouring points, relative to the entries.
        entrywise: return one sample of every entry instead. Each is off by itself, but a weighted sum of their squares
            estimates the variance of the same sum of outputs, also where outputs of one row differ by orders of
            magnitude.
    """
    runs = [function.outputs(point) for point in nearby(values, step, function.seed + 17)]
    if entrywise:
        return tuple(noise_of([wide(run[index]) for run in runs]).abs() for index in range(len(runs[0])))
    return tuple(_output_deviation([wide(run[index]) for run in runs], out.dtype) for index, out in enumerate(runs[0]))


def deviation_of(points: Sequence[Tensor]) -> Tensor:
    """Return the noise by row, with that of a typical row added: a row may be quiet by chance.

    A row with a point outside of the function's domain (an inverse sine beyond one) counts as a typical one.
    """
    rows = by_row(noise_of(points).square())
    typical = rows[rows.isfinite()].median() if bool(rows.isfinite().any()) else torch.zeros_like(rows).sum()
    return (torch.where(rows.isfinite(), rows, typical) + typical).sqrt()


def _output_deviation(points: Sequence[Tensor], precision: torch.dtype) -> Tensor:
    result = deviation_of(points)
    if points[2].numel() < _FEW:
        result = result + 2 * max(UNIT[precision], UNIT[torch.float32]) * points[2].abs()
    return result


def noise_of(points: Sequence[Tensor]) -> Tensor:
    """Return one sample of the noise of each entry, from five points on a line."""
    total = torch.zeros_like(points[0])
    for weight, point in zip(_STENCIL, points, strict=True):
        total += weight * point
    return total / _VARIANCE**0.5
