"""Test gradients against derivatives of the function along chosen directions, in the best precision it runs in.

Along a direction u the derivative of ⟨dout, f⟩ is ⟨G, u⟩. Two distances give it, with an estimate of
their own truncation, and with the noise of the function an error that is stated. A wrong factor shows here if nowhere
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conserved.checking.gradient_test import GradientTest, Method
from conserved.checking.inner_precision import inner_precision
from conserved.checking.line_derivatives import DerivativeGap, Line, derivative_gap, line_through, matched_derivatives
from conserved.checking.locating import factor_meaning, where
from conserved.checking.pass_under_test import Setting
from conserved.checking.reference_form import outputs_agree
from conserved.checking.scaled_pass import sampled_pass
from conserved.inference.probing.noise import by_row, measure_output_noise, rms, wide
from conserved.inference.probing.numerical_function import Values
from conserved.tolerances import COARSE_UNIT, UNIT, USEFUL_SHARE_OF_SUMS

_LINE = {torch.float64: 2.0**-22, torch.float32: 2.0**-12, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
_CLOSE = 0.25
"""A tile whose derivative comes closer to its limit than this may be wrong too; its place is then not named."""

_TILE, _TILES = 8, 16
"""The smallest tile looked at, and how many at most along an axis, when a wrong gradient is located."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A function in the precision gradients are taken in, and the noise of its outputs there."""

    values: Values
    noise: Values
    precision: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Direction:
    index: int
    along: Tensor
    name: str
    where: str = "everywhere"
    aligned: bool = False
    matched: bool = False
    """Whether the output gradient was chosen for this direction."""


def best_precision(setting: Setting) -> _Line:
    """Return the finest precision in which the function still computes the same outputs."""
    function = setting.function
    own = function.precision
    finer = (torch.float64,) if own == torch.float32 else (torch.float32, torch.float64)
    for precision in finer if own != torch.float64 else ():
        values = tuple(value.to(precision) for value in function.values)
        try:
            outs = function.outputs(values)
            inner = inner_precision(replace(function, values=values))
            if not outputs_agree(setting, outs) or UNIT[inner] > UNIT[precision]:
                continue
            noise = measure_output_noise(function, values, _LINE[precision])
        except Exception:  # a kernel may refuse a precision in any way it likes
            continue
        ours = sum(rms(deviation) for deviation in setting.noise.outs)
        if sum(rms(deviation) for deviation in noise) < 0.5 * ours or own == torch.float32:
            return _Line(values=values, noise=noise, precision=precision)
    return _Line(values=function.values, noise=setting.noise.outs, precision=own)


def directional_tests(setting: Setting, *, blocks: bool = True) -> tuple[list[GradientTest], list[str]]:
    """Return a test for each input along its gradient, along random directions and along blocks of its axes.

    Returns:
        The tests, and a sentence for each input whose gradient is too noisy to say anything.
    """
    line = best_precision(setting)
    precision_name = str(line.precision)[6:]
    tests: list[GradientTest] = []
    useless: list[str] = []
    for index, name in enumerate(setting.function.names):
        if setting.grads[index] is None:
            continue
        counted = 0
        for direction in _directions(setting, index, blocks=blocks):
            if setting.late:
                useless.append("directional derivatives were cut short: the time allowed was used up")
                return tests, useless
            made = [test for test in _tests(setting, line, direction, precision_name) if test is not None]
            tests += made
            counted += len(made)
        if any(not test.ok and name in test.gradients for test in tests) and not setting.late:
            tests += _tiles(setting, line, index, precision_name)
        if not counted:
            useless.append(f"the derivative along {name} is lost in the noise of the function in {precision_name}")
    return tests, useless


def _tiles(setting: Setting, line: _Line, index: int, precision_name: str) -> list[GradientTest]:
    """Return which tiles of a wrong gradient are wrong.

    The derivative along each tile of every long axis decides.
    """
    name, shape = setting.function.names[index], setting.function.values[index].shape
    value = wide(setting.function.values[index])
    generator = torch.Generator(value.device).manual_seed(setting.seed + 7)
    result: list[GradientTest] = []
    for axis, length in enumerate(shape):
        if length < 2 * _TILE:
            continue
        width = max(_TILE, 2 ** (length // _TILES).bit_length())
        wrong = torch.zeros(length, dtype=torch.bool)
        worst: GradientTest | None = None
        clear = True
        for start in range(0, length, width):
            mask = torch.zeros(length, dtype=torch.float64, device=value.device)
            mask[start : start + width] = rms(value) or 1.0
            signs = torch.randint(2, value.shape, generator=generator, device=value.device).double() * 2 - 1
            lying = [length if other == axis else 1 for other in range(value.ndim)]
            test = _test(
                setting, line, _Direction(index=index, along=signs * mask.view(lying), name="a tile"), precision_name
            )
            if test is not None and not test.ok:
                wrong[start : start + width] = True
                worst = test if worst is None or test.worst > worst.worst else worst
            clear &= test is not None and not _CLOSE < test.worst <= 1
        if worst is not None and clear and not bool(wrong.all()):
            shown = where(wrong, [f"axis {axis} of d{name}"])
            result.append(
                replace(
                    worst,
                    what=f"derivative along each tile of {width} of axis {axis}, taken in {precision_name}",
                    where=shown,
                )
            )
    return result


def _directions(setting: Setting, position: int, *, blocks: bool) -> Iterator[_Direction]:
    value = wide(setting.function.values[position])
    grad = setting.grads[position]
    assert grad is not None
    steep = wide(grad)
    generator = torch.Generator(value.device).manual_seed(setting.seed + 101 + position)
    size = by_row(value.square()).sqrt().expand_as(value).clamp_min(0.1 * rms(value) or 1.0)

    def random() -> Tensor:
        signs = torch.randint(2, value.shape, generator=generator, device=value.device).double() * 2 - 1
        return signs * size

    lean = by_row(steep.square()).sqrt()
    aligned = steep / lean.clamp_min(float(lean.max()) * 1e-3 + 1e-300) * size
    aligned = aligned.clamp(-3 * size, 3 * size)
    if float(steep.abs().max()) > 0:
        yield _Direction(index=position, along=aligned, name="the gradient itself", aligned=True)
        # Entries near zero stay on their side of it, where a root or a logarithm is steep.
        near = torch.sign(aligned) * torch.minimum(aligned.abs(), value.abs())
        if not torch.equal(near, aligned) and float((near * steep).abs().max()) > 0:
            name = "the gradient, no entry moving by more than itself"
            yield _Direction(index=position, along=near, name=name, aligned=True)
    for _ in range(3):
        yield _Direction(index=position, along=random(), name="a random direction")
    if not blocks:
        return
    for axis in range(value.ndim):
        length = value.shape[axis]
        if length < 2:
            continue
        spans = {(length - 1, length), (0, max(1, length // 4)), (length - max(1, length // 4), length)}
        # The tiles of kernels: an axis that is no multiple of one ends in a part of it.
        spans |= {(length - last, length) for last in (8, 16, 64) if length >= 2 * last}
        if 2 < length <= 8:
            spans |= {(index, index + 1) for index in range(length)}
        for start, stop in sorted(spans):
            mask = torch.zeros(length, dtype=torch.float64, device=value.device)
            mask[start:stop] = 1
            shape = [1] * value.ndim
            shape[axis] = length
            span = f"index {start} of axis {axis}" if stop == start + 1 else f"{start}–{stop - 1} of axis {axis}"
            mixture = (random() + aligned).clamp(-2 * size, 2 * size)
            yield _Direction(index=position, along=mixture * mask.view(shape), name=f"{span} alone", where=span)


def _tests(setting: Setting, line: _Line, direction: _Direction, precision_name: str) -> Iterator[GradientTest | None]:
    """Test a direction with the output gradient at hand, and in half precision with the one that fits it best."""
    drawn = _draw_derivative(setting, line, direction)
    if drawn is None:
        return
    gap = derivative_gap(drawn, setting.gradients, setting.grads, setting.noise.grads, setting.noise.unit)
    yield _judge_derivative(setting, direction, gap, precision_name)
    if setting.noise.unit < COARSE_UNIT or line.precision != setting.function.precision:
        return
    gradients, bias = matched_derivatives(drawn, setting.outs, relative=False)
    # Sums of numbers of one sign are rounded in one direction; the noise of another pass does not show that.
    made = sampled_pass(setting.function, setting.function.values, gradients)
    if not made.finite:
        return
    gap = derivative_gap(drawn, gradients, made.grads, made.deviations, setting.noise.unit)
    gap = replace(gap, limit=gap.limit + bias, error=gap.error + bias)
    fitting = replace(direction, name=f"{direction.name}, with the output derivative along its change", matched=True)
    yield _judge_derivative(setting, fitting, gap, precision_name)


def _draw_derivative(setting: Setting, line: _Line, direction: _Direction) -> Line | None:
    moved = [direction.along if number == direction.index else None for number in range(len(line.values))]
    return line_through(setting.function, line.values, moved, line.noise)


def _test(setting: Setting, line: _Line, direction: _Direction, precision_name: str) -> GradientTest | None:
    drawn = _draw_derivative(setting, line, direction)
    if drawn is None:
        return None
    gap = derivative_gap(drawn, setting.gradients, setting.grads, setting.noise.grads, setting.noise.unit)
    return _judge_derivative(setting, direction, gap, precision_name)


def _judge_derivative(
    setting: Setting, direction: _Direction, gap: DerivativeGap, precision_name: str
) -> GradientTest | None:
    index = direction.index
    summed = direction.aligned or direction.matched
    if (
        gap.scale == 0
        or not gap.converged
        or (summed and gap.limit > USEFUL_SHARE_OF_SUMS * gap.scale)
        or gap.error > 4 * gap.scale
    ):
        return None
    name = setting.function.names[index]
    test = GradientTest(
        gradients=(name,),
        method=Method.DERIVATIVE,
        what=f"derivative along {direction.name}, taken in {precision_name}",
        residual=abs(gap.measured - gap.expected) / gap.scale,
        limit=gap.limit / gap.scale,
        worst=gap.worst,
        sees_factor=summed and direction.where == "everywhere",
        smallest=_smallest(direction, gap),
    )
    if test.ok:
        return test
    meaning = ""
    if summed and gap.measured != 0 and 1e-3 < gap.expected / gap.measured < 1e3:
        ratio = gap.expected / gap.measured
        along = "along its own direction " if direction.where == "everywhere" else f"at {direction.where} "
        meaning = f"{along}{factor_meaning(name, ratio, setting.shapes)}"
    return replace(test, where=direction.where, meaning=meaning)


def _smallest(direction: _Direction, gap: DerivativeGap) -> float:
    """Return the relative error, spread over all entries, that would have failed.

    A direction of a block says nothing.
    """
    if direction.where != "everywhere":
        return float("inf")
    size = abs(gap.expected) if direction.aligned or direction.matched else gap.size
    return gap.limit / size if size > 0 else float("inf")
