"""The gradient of the given form against that of the reference form, against rounding that is measured.

Rounding changes when inputs move by a few units in the last place; a defect does not. So both forms are run at five
nearby points, and the mean of their differences is compared with the deviation of the given form's gradients there,
which the fourth difference measures (`probing.noise`). Sums over long axes are compared block by block.

Rounding of what all entries of a tensor share does not change that way. The output of attention is stored as a rounded
mean of values, and if these are nearly equal, the mean stays where it is while its terms move; what the backward pass
reads of it is off by the same at all nearby points. So where the forms differ, they are compared twice more: at other
nearby points, and with whole tensors scaled by a few per cent. The gradient of a defect follows smoothly and is off in
the same entries each time; what is not off in all comparisons is rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conserved.checking.gradient_test import GradientTest, Method
from conserved.checking.locating import pattern_meaning, where
from conserved.checking.pass_under_test import Setting
from conserved.checking.random_rounding import RoundingSpread, rounding_spread
from conserved.checking.reference_form import FunctionForm
from conserved.inference.probing.noise import by_row, deviation_of, nearby, rms, step_of, wide
from conserved.tolerances import NOISE, USEFUL_SHARE

_BLOCK_DEVIATIONS = 4.0
"""The same for the root mean square over a block, which is one deviation if the difference is rounding."""

_BIAS = 6.0
"""Roundings of its size by which a gradient may be off in one direction: constants rounded to the precision, statistics
that the forward saved, the output that a backward reads."""

_MOVED = 4.0
"""Roundings of its inputs that a gradient may answer to: tables and constants of a lower precision are off by one each,
always in the same direction, and a saturated softmax multiplies that."""

_PERSISTENT = 0.8
"""The persistence from which on a difference is no rounding: halfway, in squares, between 1/5 and one."""

_NATURAL = 0.1
"""The share of a gradient's usual size below which two forms may differ where a function is saturated: 1 − tanh² and
p − p² are then differences of numbers near one, and all that is left is rounding, always in the same direction."""

_AMPLIFIED = 16.0
"""How many times more than their outputs two functions' gradients may differ: a norm of two entries cancels digits that
its output does not."""

_COUNT = 5

_OTHER_SEED = 29
"""Of the direction in which the points of a second comparison lie."""

_SCALED = 16.0
"""Roundings by which whole tensors are scaled at most: eight steps from one stored number to the next, 3 % in bfloat16.
A smooth difference changes by a few times that, which is far below its size."""

_DRAWS = 3
"""Random changes of the inputs from which instability is measured; a decision is seldom close in all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean difference of two forms' gradients of one input, with what rounding explains of it.

    `deviation` is that of a single pass, by row; `change` how much a row changes with the inputs, per relative change.
    `persistence` is the size of the mean over the mean size: one for a defect, 1/√5 for rounding. `unstable` is how
    much the reference gradient itself changes if inputs move by a rounding of their tensor's size. `rounding` is
    how much it changes if every intermediate result is rounded, where a test failed.
    """

    mean: Tensor
    expected: Tensor
    deviation: Tensor
    change: Tensor
    unit: float
    persistence: float
    unstable: Tensor
    rounding: Tensor | None = None

    @property
    def relative(self) -> float:
        """The size of the difference at a single point, relative to the reference gradient."""
        return rms(self.mean) / (rms(self.expected) or 1.0)

    @property
    def noise(self) -> float:
        """The rounding of a single pass, relative to the reference gradient."""
        return float(self.deviation.square().expand_as(self.mean).mean().sqrt()) / (rms(self.expected) or 1.0)


def differences(
    given: Setting, form: FunctionForm, values: Sequence[Tensor], gradients: Sequence[Tensor], *, seed: int = 17
) -> list[Difference | None]:
    """Run both forms at five nearby points and average the differences of their gradients.

    Args:
        given: the form under test, for its unit and responses.
        form: the reference form.
        values: inputs in the precision of the given form.
        gradients: output gradients in the precision of the given form.
        seed: of the direction in which the points lie.
    """
    function = given.function
    count = len(values)
    step = step_of(function)
    points = nearby([*values, *gradients], step, function.seed + seed)
    own: list[list[Tensor | None]] = [[] for _ in values]
    reference: list[list[Tensor | None]] = [[] for _ in values]
    for point in points:
        grads = function.gradients(point[:count], point[count:])[1]
        right = form.gradients(point[:count], point[count:])
        for index in range(count):
            own[index].append(grads[index])
            reference[index].append(right[index])
    spread = _instability(given, form, values, gradients)
    result: list[Difference | None] = []
    for index in range(count):
        pairs = [
            _in_range(wide(a), wide(b), a.dtype)
            for a, b in zip(own[index], reference[index], strict=True)
            if a is not None and b is not None
        ]
        # Nearby points may lie outside of the domain, as of an inverse sine near one.
        if len(pairs) < _COUNT or not all(bool(torch.isfinite(right).all()) for _, right in pairs):
            result.append(None)
            continue
        gaps = [a - b for a, b in pairs]
        result.append(
            Difference(
                mean=torch.stack(gaps).mean(0),
                expected=pairs[2][1],
                deviation=deviation_of([a for a, _ in pairs]),
                change=by_row(((pairs[3][1] - pairs[1][1]) / (2 * step)).square()).sqrt(),
                unit=given.noise.unit,
                persistence=rms(torch.stack(gaps).mean(0)) / (rms(torch.stack(gaps)) or 1.0),
                # A draw outside of the domain says nothing.
                unstable=spread[index].nan_to_num(0.0, 0.0, 0.0),
            )
        )
    return result


def scaled_differences(
    given: Setting,
    form: FunctionForm,
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    before: Sequence[Difference | None],
) -> list[Difference | None]:
    """Average the differences where whole inputs are scaled, with their deviation over these points.

    Args:
        given: the form under test.
        form: the reference form.
        values: inputs in the precision of the given form.
        gradients: output gradients in the precision of the given form.
        before: the differences at nearby points.

    Returns:
        The differences; None where there was none before, or a gradient is not finite.
    """
    generator = torch.Generator().manual_seed(given.seed + 83)
    gaps: list[list[Tensor]] = [[] for _ in values]
    for _ in range(_COUNT):
        factors = 1 + _SCALED * given.noise.unit * (2 * torch.rand(len(values), generator=generator) - 1)
        point = [(wide(value) * factor).to(value) for value, factor in zip(values, factors.tolist(), strict=True)]
        pairs = zip(given.function.gradients(point, gradients)[1], form.gradients(point, gradients), strict=True)
        for own, (grad, right) in zip(gaps, pairs, strict=True):
            if grad is not None and right is not None:
                a, b = _in_range(wide(grad), wide(right), grad.dtype)
                own.append(a - b)
    result: list[Difference | None] = []
    for difference, own in zip(before, gaps, strict=True):
        if difference is None or len(own) < _COUNT or not all(bool(torch.isfinite(gap).all()) for gap in own):
            result.append(None)
            continue
        every = torch.stack(own)
        rows = by_row(every.var(0))
        result.append(
            replace(
                difference,
                mean=every.mean(0),
                # A row may be quiet at five points by chance: that of a typical row is added, as for nearby points.
                deviation=(rows + rows.median()).sqrt(),
                persistence=rms(every.mean(0)) / (rms(every) or 1.0),
            )
        )
    return result


def _in_range(given: Tensor, right: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return both gradients with zeros where the right one leaves the range of the precision and the given one too."""
    beyond = right.abs().ge(torch.finfo(precision).max * (1 - 2.0**-6)) & given.isinf() & (given.sign() == right.sign())
    return given.masked_fill(beyond, 0.0), right.masked_fill(beyond, 0.0)


def _instability(
    given: Setting, form: FunctionForm, values: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor]:
    """Measure how the reference gradient changes with inputs, by row, for changes that rounding inside stands for.

    An intermediate result of the size of a tensor is rounded by that size, not by the size of the entry that it came
    from. Order, ties and thresholds (sort, topk, max, where) are then decided otherwise in the given form, and its
    gradient is another one, rightly.
    """
    generator = torch.Generator().manual_seed(given.seed + 61)
    exact = form.at(values)
    middle = form.gradients(values, gradients)
    total: list[Tensor] = [torch.zeros((), dtype=torch.float64, device=value.device) for value in values]
    for _ in range(_DRAWS):
        moved = [
            x + (given.noise.unit * rms(x) * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(x)
            for x in exact
        ]
        typed = [wide(v).to(kind) for v, kind in zip(gradients, form.out_types, strict=True)]
        for index, grad in enumerate(form.function.gradients(moved, typed)[1]):
            before = middle[index]
            if grad is not None and before is not None:
                total[index] = total[index] + by_row((wide(grad) - wide(before)).square()) / _DRAWS
    return [square.sqrt() for square in total]


def agreement_tests(
    given: Setting, form: FunctionForm, values: Sequence[Tensor], gradients: Sequence[Tensor], *, at: str = ""
) -> Iterator[GradientTest]:
    """Yield a test for each input whether the given form has the reference form's gradient.

    At the inputs that were given it is compared by entry and by block. At others (`at` says which) only as a whole:
    where a function is saturated, rounding sits in few entries and their deviation is not known.
    """
    at_nearby = differences(given, form, values, gradients)
    again: list[list[Difference | None]] = []
    spread: RoundingSpread | None = None
    for index, difference in enumerate(at_nearby):
        if difference is None:
            continue
        tests = _tests_of(given, form, [difference], index, values, gradients, at)
        if not all(test.ok for test in tests):
            again = again or [
                differences(given, form, values, gradients, seed=_OTHER_SEED),
                scaled_differences(given, form, values, gradients, at_nearby),
            ]
            others = [each[index] for each in again]
            repeated = [difference, *(other for other in others if other is not None)]
            tests = _tests_of(given, form, repeated, index, values, gradients, at)
        if not all(test.ok for test in tests):
            # Only then: rounding every intermediate result at random takes two dozen passes.
            typed = [wide(v).to(kind) for v, kind in zip(gradients, form.out_types, strict=True)]
            spread = spread or rounding_spread(form.function, form.at(values), typed, given.noise.unit)
            size = by_row(difference.expected.square()).sqrt()
            apart = _AMPLIFIED * _outputs_apart(given, form, values) * size / _BLOCK_DEVIATIONS
            more = (spread.grads[index] + spread.decisions[index] + apart).expand_as(difference.expected)
            repeated = [replace(each, unstable=each.unstable + more, rounding=more) for each in repeated]
            tests = _tests_of(given, form, repeated, index, values, gradients, at)
        yield from tests


def _outputs_apart(given: Setting, form: FunctionForm, values: Sequence[Tensor]) -> float:
    """Return the relative difference of both forms' outputs, where it is the same at every nearby point; else zero.

    They are two functions then, by that much, with gradients that differ by a few times as much: the default ε of a
    norm depends on the precision.
    """
    apart = 0.0
    points = nearby(list(values), step_of(given.function), given.seed + 19)
    pairs = [(given.function.outputs(point), form.function.outputs(form.at(point))) for point in points]
    for number in range(len(given.outs)):
        gaps = torch.stack([wide(own[number]) - wide(right[number]) for own, right in pairs])
        right = wide(pairs[_COUNT // 2][1][number])
        size = by_row(right.square()).sqrt().clamp_min(rms(right)).clamp_min(1e-300)
        if rms(gaps.mean(0)) > _PERSISTENT * rms(gaps):
            apart = max(apart, float((by_row(gaps.mean(0).square()).sqrt() / size).max()))
    return apart


def _tests_of(
    given: Setting,
    form: FunctionForm,
    repeated: list[Difference],
    index: int,
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    at: str,
) -> list[GradientTest]:
    """Return the tests of one gradient. What is not off in every one of the repeated comparisons is rounding."""
    name = given.function.names[index]
    precision = str(given.function.precision)[6:]
    description = f"the gradient in {precision} is that of the function in {form.words}{at}, up to rounding"
    if not at:
        return [_entries(given, repeated, name, description), *_blocks(given, repeated, name, description)]
    lost = lost_to_rounding(given, index, values, gradients)
    natural = _natural(given, index, gradients)
    tests = [_whole(given, difference, name, description, natural, lost) for difference in repeated]
    return [test for test in [min(tests, key=lambda test: test.worst)] if tests[0].limit <= USEFUL_SHARE]


def _natural(given: Setting, index: int, gradients: Sequence[Tensor]) -> float:
    """Return the size that a gradient has for output gradients like these at the inputs that were given.

    Where a function is saturated its gradient is a small difference of large numbers (1 − tanh²), and rounding of these
    is relative to them.
    """
    grad = given.grads[index]
    before = sum(rms(gradient) for gradient in given.gradients)
    return 0.0 if grad is None or not before else rms(grad) * sum(rms(gradient) for gradient in gradients) / before


def lost_to_rounding(given: Setting, index: int, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> float:
    """Return the size below which a gradient is rounding of the terms of its sum, as in a saturated softmax.

    An input that carries the outputs has ⟨G, x⟩ = ⟨dout, out⟩; a far smaller gradient is a difference of such terms.
    """
    carried = sum(
        float((wide(out) * wide(gradient)).square().sum())
        for out, gradient in zip(given.function.outputs(values), gradients, strict=True)
    )
    length = float(wide(values[index]).norm())
    return _BIAS * given.noise.unit * carried**0.5 / length if length else 0.0


def _whole(
    given: Setting, difference: Difference, name: str, description: str, natural: float, lost: float
) -> GradientTest:
    """Test all entries of a gradient together."""
    right = difference.expected
    limit = (
        _BLOCK_DEVIATIONS * difference.deviation
        + _BIAS * difference.unit * by_row(right.square()).sqrt()
        + _MOVED * difference.unit * difference.change
        + _BLOCK_DEVIATIONS * difference.unstable
    )
    allowed = max(rms(limit.expand_as(right)), _NATURAL * natural, lost)
    worst = rms(difference.mean) / max(allowed, 1e-300)
    if difference.persistence < _PERSISTENT:
        # The difference is another one at every point: rounding, however large.
        worst = min(worst, 1.0)
    # Relative to its usual size: of a gradient that vanishes, everything is many times its size.
    scale = max(rms(right), natural, lost) or 1.0
    test = GradientTest(
        gradients=(name,),
        method=Method.RELATION,
        what=description,
        residual=rms(difference.mean) / scale,
        limit=allowed / scale,
        worst=worst if worst == worst else float("inf"),
        sees_factor=False,
    )
    return test if test.ok else replace(test, where="everywhere", meaning=_only_here(given, ""))


def _entries(given: Setting, repeated: list[Difference], name: str, description: str) -> GradientTest:
    """Test every entry of a gradient by itself."""
    difference, right = repeated[0], repeated[0].expected
    limits = [_entry_limit(each) for each in repeated]
    ratios = [
        each.mean.abs() / limit.expand_as(right).clamp_min(1e-300) for each, limit in zip(repeated, limits, strict=True)
    ]
    limit, ratio = limits[0], torch.stack([each.nan_to_num(nan=torch.inf) for each in ratios]).amin(0)
    scale = rms(right) or 1.0
    test = GradientTest(
        gradients=(name,),
        method=Method.RELATION,
        what=description,
        residual=difference.relative,
        limit=rms(limit.expand_as(right)) / scale,
        worst=float(ratio.max()) if ratio.numel() else 0.0,
        sees_factor=True,
        smallest=_smallest(limit, right),
    )
    if test.ok:
        return test
    bad = ratio > 1
    meaning = pattern_meaning(name, bad, difference.mean + right, right, given.shapes)
    return replace(test, where=where(bad), meaning=_only_here(given, meaning))


def _entry_limit(difference: Difference) -> Tensor:
    size = by_row(difference.expected.square()).sqrt()
    return (
        NOISE * difference.deviation / _COUNT**0.5
        # A row may vanish by cancellation (attention to one key): its rounding is that of the terms.
        + _BIAS * difference.unit * (size.clamp_min(rms(difference.expected)) + difference.expected.abs())
        + _MOVED * difference.unit * (difference.change + difference.change.square().mean().sqrt())
        + _BLOCK_DEVIATIONS * difference.unstable
    )


def _only_here(given: Setting, meaning: str) -> str:
    precision = str(given.function.precision)[6:]
    own = f"in this form alone ({precision}): the reference form of the same function has another gradient"
    return "; ".join(part for part in (meaning, own) if part)


def _smallest(limit: Tensor, right: Tensor) -> float:
    """Return the relative error of a row, spread over its entries, that would have been seen."""
    size = by_row(right.square()).sqrt()
    allowed = by_row(limit.expand_as(right).square()).sqrt()
    live = size > 1e-3 * float(size.max())
    return float((allowed / size)[live].median()) if bool(live.any()) else float("inf")


def _blocks(given: Setting, repeated: list[Difference], name: str, description: str) -> Iterator[GradientTest]:
    """Test every index of every axis: errors of a row, a head or a channel add up, and rounding does not."""
    difference, right = repeated[0], repeated[0].expected
    for axis in range(right.ndim):
        if right.shape[axis] < 2:
            continue
        limit, ratio = _block_limit(difference, axis)
        for other in repeated[1:]:
            ratio = torch.minimum(ratio, _block_limit(other, axis)[1])
        size = _size_of_blocks(right, axis)
        live = size > 1e-3 * float(size.max())
        test = GradientTest(
            gradients=(name,),
            method=Method.RELATION,
            what=f"{description}, for each index of axis {axis}",
            residual=difference.relative,
            limit=rms(limit) / (rms(right) or 1.0),
            worst=float(ratio.max()),
            sees_factor=True,
            smallest=float((limit / size)[live].median()) if bool(live.any()) else float("inf"),
        )
        if test.ok:
            yield test
        else:
            shown = where(ratio > 1, [f"axis {axis} of d{name}"])
            yield replace(test, where=shown, meaning=_only_here(given, ""))


def _block_limit(difference: Difference, axis: int) -> tuple[Tensor, Tensor]:
    """Return how far each index of an axis may be off, and how far it is off in units of that."""
    right = difference.expected
    parts = (difference.mean, difference.deviation.expand_as(right), right, difference.change.expand_as(right))
    gap, noise, size, change = (_size_of_blocks(part, axis) for part in parts)
    # A mean over n squares of normal noise is off by √(2/n); eight of those for the largest of many blocks.
    count = max(1, right.numel() // right.shape[axis])
    few = _BLOCK_DEVIATIONS * (1 + 8 / (2 * count) ** 0.5)
    if difference.rounding is not None:
        noise = noise + _size_of_blocks(difference.rounding, axis) * _COUNT**0.5
    limit = few * noise / _COUNT**0.5 + difference.unit * (_BIAS * size.clamp_min(rms(right)) + _MOVED * change)
    return limit, (gap / limit.clamp_min(1e-300)).nan_to_num(nan=torch.inf)


def _size_of_blocks(part: Tensor, axis: int) -> Tensor:
    others = [other for other in range(part.ndim) if other != axis]
    return (part.square().mean(others) if others else part.square()).sqrt()
