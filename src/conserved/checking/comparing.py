"""Two gradients that should be equal, held against each other: what every relation ends in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conserved.checking.gradient_test import Gap, GradientTest, Method, gap_between
from conserved.checking.locating import pattern_meaning, where
from conserved.checking.pass_under_test import Setting
from conserved.inference.probing.noise import TENSOR_CORE_UNIT, by_row, wide
from conserved.product_precision import rounds_factors
from conserved.tolerances import NOISE, USEFUL_SHARE

Gradients = Sequence[Tensor | None]

REFUSALS = (Exception,)
"""Exceptions that a kernel may raise for inputs that it does not support. Any class is possible."""


def compare(
    setting: Setting,
    what: str,
    actual_gradients: Gradients,
    expected: Gradients,
    *,
    indices: Sequence[int] | None = None,
    noise: Sequence[Tensor | None] | None = None,
    exactly: bool = False,
    factor: bool = False,
    other_kernel: bool = False,
    meaning: str = "",
) -> Iterator[GradientTest]:
    """Yield a test for each input: whether two gradients agree up to their noise.

    `other_kernel` says that other shapes or strides may have chosen another kernel. On a GPU that may be one that
    rounds single precision to ten bits inside, where the first did not.
    """
    function = setting.function
    for index in range(len(function.names)) if indices is None else indices:
        right, actual = expected[index], actual_gradients[index]
        if right is None and actual is None:
            continue
        name = function.names[index]
        if right is None or actual is None:
            missing = torch.zeros_like(function.values[index]) if right is None else right
            actual, right = (missing * 0 if actual is None else actual), missing
        deviation = (setting.noise.grads if noise is None else noise)[index]
        size = by_row(wide(setting.grads[index]).square()).sqrt().mean() if setting.grads[index] is not None else 0.0  # type: ignore[arg-type]
        floor = 8 * setting.noise.unit * setting.noise.response[index] * float(size)
        spread = (
            torch.zeros((), device=actual.device, dtype=torch.float64) if deviation is None or exactly else deviation
        )
        unit = max(setting.noise.unit, _tensor_core_unit(actual)) if other_kernel else setting.noise.unit
        gap = gap_between(actual, right, spread, unit, floor)
        # A part that was run alone has no rounding of its own to be measured.
        if gap.worst > 1 and not exactly and right.shape == function.values[index].shape:
            gap = replace(gap, limit=gap.limit + _rounding_of(setting, index))
            if gap.worst <= 1 and gap.allowed > USEFUL_SHARE:
                continue
        yield _judge(setting, name, what, gap, factor=factor, meaning=meaning)


def _rounding_of(setting: Setting, index: int) -> Tensor:
    """Return how far a gradient may be off because intermediate results are rounded."""
    spread = setting.rounding
    return NOISE * spread.grads[index] + 2 * spread.decisions[index]


def _judge(setting: Setting, name: str, what: str, gap: Gap, *, factor: bool, meaning: str) -> GradientTest:
    test = GradientTest(
        gradients=(name,),
        method=Method.RELATION,
        what=what,
        residual=gap.residual,
        limit=gap.allowed,
        worst=gap.worst,
        sees_factor=factor,
        entry=gap.entry,
    )
    if test.ok:
        return test
    bad = gap.ratio > 1
    pattern = pattern_meaning(name, bad, gap.actual, gap.expected, setting.shapes)
    return replace(test, where=where(bad), meaning="; ".join(part for part in (pattern, meaning) if part))


def _tensor_core_unit(tensor: Tensor) -> float:
    """Return the rounding of tensor cores where they may compute in single precision; zero elsewhere."""
    allowed = tensor.is_cuda and tensor.dtype == torch.float32 and rounds_factors("cuda", convolutions=True)
    return TENSOR_CORE_UNIT if allowed else 0.0


def backward_pass(
    setting: Setting,
    values: Sequence[Tensor] | None = None,
    gradients: Gradients | None = None,
    wanted: Sequence[int] | None = None,
) -> Gradients:
    """Return the gradients at the inputs and output gradients of the setting, or at others.

    An output gradient of None is not passed to the backward at all, as if nothing had used that output.
    """
    chosen = setting.function.values if values is None else values
    return setting.function.gradients(chosen, setting.gradients if gradients is None else gradients, wanted)[1]


def short(problem: Exception) -> str:
    """Return an exception in one line."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:100] if lines else ''}"
