"""The last line: gradients against the slope of the function along chosen directions, in the best precision it runs in.

Along a direction u the slope of ⟨dout, f⟩ is ⟨G, u⟩. Differences over two distances give the slope, an estimate of
their own truncation, and with the noise of the function an error that is stated. A wrong factor shows here if nowhere
else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conserved.auditing.functions.gradient_test import NOISE, ROUNDING, Method, Tested
from conserved.auditing.functions.locating import factor_meaning, where
from conserved.auditing.functions.pass_under_test import Setting
from conserved.inference.probing.noise import by_row, measure_output_noise, rms, wide
from conserved.inference.probing.numerical_function import UNIT, Values

_STEP = {torch.float64: 2.0**-10, torch.float32: 2.0**-6, torch.float16: 2.0**-4, torch.bfloat16: 2.0**-3}
_LINE = {torch.float64: 2.0**-22, torch.float32: 2.0**-12, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
_USEFUL = 0.25
"""A slope known to worse than this share of itself tests nothing."""

_TRUNCATION = 3.0
_CLOSE = 0.25
"""A tile whose slope comes closer to its limit than this may be wrong too; then nothing is said about the place."""

_TILE, _TILES = 8, 16
"""The smallest tile looked at, and how many at most along an axis, when a wrong gradient is located."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A function in the precision slopes are taken in, and the noise of its outputs there."""

    values: Values
    noise: Values
    precision: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Direction:
    place: int
    along: Tensor
    name: str
    where: str = "everywhere"
    aligned: bool = False


def best_precision(setting: Setting) -> _Line:
    """The finest precision in which the function still computes the same outputs."""
    function = setting.function
    own = function.precision
    finer = (torch.float64,) if own == torch.float32 else (torch.float32, torch.float64)
    for precision in finer if own != torch.float64 else ():
        values = tuple(value.to(precision) for value in function.values)
        try:
            outs = function.outputs(values)
            if not _agree(setting, outs):
                continue
            noise = measure_output_noise(function, values, _LINE[precision])
        except Exception:  # a kernel may refuse a precision in any way it likes
            continue
        ours = sum(rms(deviation) for deviation in setting.noise.outs)
        if sum(rms(deviation) for deviation in noise) < 0.5 * ours or own == torch.float32:
            return _Line(values=values, noise=noise, precision=precision)
    return _Line(values=function.values, noise=setting.noise.outs, precision=own)


def _agree(setting: Setting, outs: Sequence[Tensor]) -> bool:
    for out, before, deviation in zip(outs, setting.outs, setting.noise.outs, strict=True):
        if out.shape != before.shape or not bool(torch.isfinite(out).all()):
            return False
        size = by_row(wide(before).square()).sqrt()
        limit = NOISE * deviation + ROUNDING * setting.noise.unit * (size + wide(before).abs())
        if not bool(((wide(out) - wide(before)).abs() <= limit).all()):
            return False
    return True


def slope_tests(setting: Setting, *, blocks: bool = True) -> tuple[list[Tested], list[str]]:
    """A test for each input along its gradient, along random directions and along blocks of its axes.

    Returns:
        The tests, and a sentence for each input whose slope is too noisy to say anything.
    """
    line = best_precision(setting)
    told = str(line.precision)[6:]
    found: list[Tested] = []
    useless: list[str] = []
    for place, name in enumerate(setting.function.names):
        if setting.grads[place] is None:
            continue
        counted = 0
        for direction in _directions(setting, place, blocks=blocks):
            if setting.late:
                useless.append("slopes were cut short: the time allowed was used up")
                return found, useless
            test = _test(setting, line, direction, told)
            if test is not None:
                found.append(test)
                counted += 1
        if any(not test.ok and name in test.gradients for test in found) and not setting.late:
            found += _tiles(setting, line, place, told)
        if not counted:
            useless.append(f"the slope along {name} is lost in the noise of the function in {told}")
    return found, useless


def _tiles(setting: Setting, line: _Line, place: int, told: str) -> list[Tested]:
    """Which tiles of a wrong gradient are wrong: along every long axis, the slope of each tile by itself."""
    name, shape = setting.function.names[place], setting.function.values[place].shape
    value = wide(setting.function.values[place])
    generator = torch.Generator(value.device).manual_seed(setting.seed + 7)
    found: list[Tested] = []
    for axis, length in enumerate(shape):
        if length < 2 * _TILE:
            continue
        width = max(_TILE, 2 ** (length // _TILES).bit_length())
        wrong = torch.zeros(length, dtype=torch.bool)
        worst: Tested | None = None
        clear = True
        for start in range(0, length, width):
            mask = torch.zeros(length, dtype=torch.float64, device=value.device)
            mask[start : start + width] = rms(value) or 1.0
            signs = torch.randint(2, value.shape, generator=generator, device=value.device).double() * 2 - 1
            lying = [length if other == axis else 1 for other in range(value.ndim)]
            test = _test(setting, line, _Direction(place=place, along=signs * mask.view(lying), name="a tile"), told)
            if test is not None and not test.ok:
                wrong[start : start + width] = True
                worst = test if worst is None or test.worst > worst.worst else worst
            clear &= test is not None and not _CLOSE < test.worst <= 1
        if worst is not None and clear and not bool(wrong.all()):
            shown = where(wrong, [f"axis {axis} of d{name}"])
            found.append(
                replace(worst, what=f"slope along each tile of {width} of axis {axis}, taken in {told}", where=shown)
            )
    return found


def _directions(setting: Setting, place: int, *, blocks: bool) -> Iterator[_Direction]:
    value = wide(setting.function.values[place])
    grad = setting.grads[place]
    assert grad is not None
    steep = wide(grad)
    generator = torch.Generator(value.device).manual_seed(setting.seed + 101 + place)
    size = by_row(value.square()).sqrt().expand_as(value).clamp_min(0.1 * rms(value) or 1.0)

    def random() -> Tensor:
        signs = torch.randint(2, value.shape, generator=generator, device=value.device).double() * 2 - 1
        return signs * size

    lean = by_row(steep.square()).sqrt()
    aligned = steep / lean.clamp_min(float(lean.max()) * 1e-3 + 1e-300) * size
    aligned = aligned.clamp(-3 * size, 3 * size)
    if float(steep.abs().max()) > 0:
        yield _Direction(place=place, along=aligned, name="the gradient itself", aligned=True)
    for _ in range(3):
        yield _Direction(place=place, along=random(), name="a random direction")
    if not blocks:
        return
    for axis in range(value.ndim):
        length = value.shape[axis]
        if length < 2:
            continue
        spans = {(length - 1, length), (0, max(1, length // 4)), (length - max(1, length // 4), length)}
        if 2 < length <= 8:
            spans |= {(index, index + 1) for index in range(length)}
        for start, stop in sorted(spans):
            mask = torch.zeros(length, dtype=torch.float64, device=value.device)
            mask[start:stop] = 1
            shape = [1] * value.ndim
            shape[axis] = length
            span = f"index {start} of axis {axis}" if stop == start + 1 else f"{start}–{stop - 1} of axis {axis}"
            mixture = (random() + aligned).clamp(-2 * size, 2 * size)
            yield _Direction(place=place, along=mixture * mask.view(shape), name=f"{span} alone", where=span)


def _test(setting: Setting, line: _Line, direction: _Direction, told: str) -> Tested | None:
    function = setting.function
    place, step = direction.place, _STEP[line.precision]
    grad, deviation = setting.grads[place], setting.noise.grads[place]
    assert grad is not None
    assert deviation is not None
    heights, reached = [], []
    for multiple in (-2, -1, 1, 2):
        moved = (wide(line.values[place]) + multiple * step * direction.along).to(line.precision)
        reached.append((wide(moved) - wide(line.values[place])) / (multiple * step))
        height = _height(setting, line, place, moved)
        if height is None:
            return None
        heights.append(height)
    # What was really added, after rounding to the precision of the function.
    along = (reached[1] + reached[2]) / 2
    near = (heights[2] - heights[1]) / (2 * step)
    far = (heights[3] - heights[0]) / (4 * step)
    slope = float(((4 * near - far) / 3).sum())
    noise = sum(
        float((wide(out_slope).square() * spread.square().expand_as(out_slope)).sum())
        for out_slope, spread in zip(setting.slopes, line.noise, strict=True)
    )
    # Entry by entry as well as in sum: where a function has kinks, their errors may cancel. A kink at the very point
    # shows in the fourth difference alone.
    middle = _height(setting, line, place, line.values[place])
    if middle is None:
        return None
    kinked = (heights[0] - 4 * heights[1] + 6 * middle - 4 * heights[2] + heights[3]) / step
    error = NOISE * noise**0.5 / step + sum(
        _TRUNCATION * (abs(float(bent.sum())) + 2 * float(bent.norm())) for bent in (near - far, kinked)
    )
    products = wide(grad) * along
    expected = float(products.sum())
    spread = float((deviation.square() * along.square()).sum()) ** 0.5
    size = float(products.square().sum()) ** 0.5
    limit = error + NOISE * spread + ROUNDING * setting.noise.unit * (size + abs(expected))
    if UNIT[line.precision] >= UNIT[torch.float16]:
        # The four points of a coarse precision do not lie on one line.
        limit += NOISE * UNIT[line.precision] / step * size
    scale = max(abs(slope), abs(expected), size)
    if scale == 0 or (direction.aligned and limit > _USEFUL * scale) or (error > 4 * scale):
        return None
    worst = abs(slope - expected) / limit if limit > 0 else 0.0
    name = function.names[place]
    test = Tested(
        gradients=(name,),
        method=Method.SLOPE,
        what=f"slope along {direction.name}, taken in {told}",
        residual=abs(slope - expected) / scale,
        limit=limit / scale,
        worst=worst if worst == worst else float("inf"),
        sees_factor=direction.aligned,
    )
    if test.ok:
        return test
    meaning = ""
    if direction.aligned and slope != 0 and 1e-3 < expected / slope < 1e3:
        meaning = f"along its own direction {factor_meaning(name, expected / slope, setting.shapes)}"
    return replace(test, where=direction.where, meaning=meaning)


def _height(setting: Setting, line: _Line, place: int, moved: Tensor) -> Tensor | None:
    """dout·f entry by entry, with one input replaced."""
    values = [moved if number == place else value for number, value in enumerate(line.values)]
    try:
        outs = setting.function.outputs(values)
    except Exception:  # a kernel may refuse inputs in any way it likes
        return None
    parts = [(wide(out) * wide(slope)).flatten() for out, slope in zip(outs, setting.slopes, strict=True)]
    found = torch.cat(parts)
    return found if bool(torch.isfinite(found).all()) else None
