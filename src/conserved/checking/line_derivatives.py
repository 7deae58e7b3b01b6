"""The derivative of a function along a line through its inputs, from four points, with an error that is stated.

Outputs at four points of the line serve every output gradient v: ⟨v, f⟩ has derivative ⟨v, J u⟩ along u, and a right
backward gives the same number as ⟨Jᵀv, u⟩. Two distances give the derivative and its truncation; the noise
of the outputs gives the rest of the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conserved.inference.probing.noise import wide
from conserved.inference.probing.numerical_function import NumericalFunction
from conserved.tolerances import COARSE_UNIT, UNIT

STEP = {torch.float64: 2.0**-10, torch.float32: 2.0**-6, torch.float16: 2.0**-4, torch.bfloat16: 2.0**-3}
"""The distance of neighbouring points relative to the direction, by precision."""

DEVIATIONS = 7.0
"""Standard deviations of noise allowed for a derivative. 2·10⁵ derivatives of normal noise reach 4.7; estimates of the
deviation from 16 samples are low by a third once in 10⁴, which leaves 4.7/7 = 0.67."""

ROUNDINGS = 8.0
"""Roundings of its size allowed in one direction: constants, saved statistics and the final rounding
of a gradient are each off by one at most, and a kernel has fewer than eight of them in a row."""

_ROUNDED = 0.6
"""The standard deviation of rounding to nearest, in units of half a spacing: 1/√3."""

_TRUNCATION = 3.0
_CONVERGED = 0.25
"""How far two distances may differ: a smooth function differs by 3/4 of its second-order term."""

_SHORT, _LONG = 2.0**-20, 2.0**-3
"""Relative moves by which a function is seen to move in steps: eight roundings of single precision, and a large one."""

_RESOLVED = 4.0
"""Spacings of its precision that an output must change by to be matched. Rounding errors at points nearer to each other
than that are not independent: most of them are equal, and the rest is a whole spacing in the direction of the change.
"""

_LINEAR = 0.25
"""The share of its outputs by which a gradient may predict them to change between the middle and a near point in half
precision; beyond that a function bends within one spacing of its inputs, as a norm of a constant row does."""

_SHOWN = 2.0
"""Standard deviations of its noise from which on a difference shows truncation. A kink at the middle of the line makes
the fourth difference four times as large as its error, so a quarter of what stays below is added to the error."""

_PROPORTIONAL, _PROPORTIONAL_COARSE = 64.0, 4.0
"""Roundings of its size by which an output must move to show that it depends on an input; in half precision fewer,
because its kernels accumulate in float32."""

_NEAR_FAR, _FOURTH = 0.625**0.5, 70.0**0.5
"""Standard deviations of near − far and of the fourth difference, in standard deviations of one output over the step:
1/2 + 1/8 and 1 + 16 + 36 + 16 + 1 under the root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Differences of all outputs along a line, entry by entry.

    Attributes:
        near: J u from the two near points.
        far: J u from the two far points.
        bend: the fourth difference over the step, which shows kinks at the point itself.
        deviations: the standard deviation of each output entry.
        along: by input, the displacement per step as it was after rounding; None if the input stays.
        step: the distance of neighbouring points.
        reach: the largest size of each output at the points.
    """

    near: tuple[Tensor, ...]
    far: tuple[Tensor, ...]
    bend: tuple[Tensor, ...]
    deviations: tuple[Tensor, ...]
    along: tuple[Tensor | None, ...]
    step: float
    reach: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivativeGap:
    """A derivative from outputs, the same from a gradient, and what may lie between them.

    `converged` says that both distances give nearly the same derivative: neither sees finer structure. In half
    precision points cannot be nearer than a spacing; a gradient then must not predict changes larger than the outputs.
    `size` is the root of the sum of squares of what the gradient's gradient adds up; `error` is the part of the limit
    that comes from the outputs.
    """

    measured: float
    expected: float
    limit: float
    error: float
    size: float
    converged: bool = True

    @property
    def scale(self) -> float:
        return max(abs(self.measured), abs(self.expected), self.size)

    @property
    def worst(self) -> float:
        if self.limit <= 0:
            return 0.0 if self.measured == self.expected else float("inf")
        ratio = abs(self.measured - self.expected) / self.limit
        return ratio if ratio == ratio else float("inf")


def line_through(
    function: NumericalFunction,
    values: Sequence[Tensor],
    directions: Sequence[Tensor | None],
    noise: Sequence[Tensor],
    middle: Sequence[Tensor] | None = None,
) -> Line | None:
    """Evaluate a function at four points of a line; None if it refuses one of them or overflows.

    Args:
        function: the function.
        values: the inputs the line goes through.
        directions: by input, the direction in double precision, or None where the input stays.
        noise: standard deviations of the outputs.
        middle: the outputs at `values`, where they are known.
    """
    precision = max((value.dtype for value in values), key=lambda dtype: UNIT[dtype])
    step = STEP[precision]
    directions = [
        None if along is None else _representable(value, along, step)
        for value, along in zip(values, directions, strict=True)
    ]
    points: list[list[Tensor]] = []
    reached: list[list[Tensor | None]] = []
    kinds: list[torch.dtype] = []
    for multiple in (-2, -1, 1, 2):
        moved = [
            value if along is None else (wide(value) + multiple * step * along).to(value.dtype)
            for value, along in zip(values, directions, strict=True)
        ]
        outs = _outputs(function, moved)
        if outs is None:
            return None
        kinds = [out.dtype for out in outs]
        points.append([wide(out) for out in outs])
        reached.append(
            [
                None if along is None else (wide(new) - wide(value)) / (multiple * step)
                for new, value, along in zip(moved, values, directions, strict=True)
            ]
        )
    outputs = _outputs(function, values) if middle is None else middle
    centre = None if outputs is None else [wide(out) for out in outputs]
    if centre is None or any(out.shape != before.shape for out, before in zip(points[0], centre, strict=True)):
        return None
    every = list(zip(*points, centre, noise, strict=True))
    return Line(
        near=tuple((p2 - p1) / (2 * step) for _, p1, p2, _, _, _ in every),
        far=tuple((p3 - p0) / (4 * step) for p0, _, _, p3, _, _ in every),
        bend=tuple((p0 - 4 * p1 + 6 * c - 4 * p2 + p3) / step for p0, p1, p2, p3, c, _ in every),
        # An output that is rounded to the same number at all points shows no noise and has it all the same.
        deviations=tuple(
            torch.maximum(spread.expand_as(c), _ROUNDED * UNIT[kind] * c.abs())
            for (_, _, _, _, c, spread), kind in zip(every, kinds, strict=True)
        ),
        along=tuple(_extrapolate(*parts) for parts in zip(*reached, strict=True)),
        step=step,
        reach=tuple(torch.stack([p.abs() for p in (p0, p1, p2, p3, c)]).amax(0) for p0, p1, p2, p3, c, _ in every),
    )


def has_derivative(function: NumericalFunction, index: int, seed: int) -> tuple[bool, ...] | None:
    """Return, by output, whether it changes in proportion to a small move of one input, beyond its rounding.

    A larger move says less: a saturated softmax changes under it although its derivative is zero, and so does a
    comparison with a threshold. The finest precision that the function takes is used. None if it takes no move.
    """
    # A compiled function would be compiled again for the finer precision.
    function = function.uncompiled
    own = function.values
    for values in (tuple(value.double() for value in own), own):
        x = wide(values[index])
        generator = torch.Generator(x.device).manual_seed(seed + 307)
        signs = torch.randint(2, x.shape, generator=generator, device=x.device).double() * 2 - 1
        along = signs * x.abs().clamp_min(2.0**-4 * float(x.square().mean().sqrt()) or 1.0)
        middle = _outputs(function, values)
        if middle is None:
            continue
        unit = max(UNIT[tensor.dtype] for tensor in (*values, *middle))
        roundings = _PROPORTIONAL if unit < COARSE_UNIT else _PROPORTIONAL_COARSE
        noise = [roundings * unit * (wide(out).abs() + wide(out).square().mean().sqrt()) for out in middle]
        lines = [
            line_through(
                function, values, [length * along if i == index else None for i in range(len(values))], noise, middle
            )
            for length in (1.0, 2.0**-7)
        ]
        if any(lines):
            shown = [_moves(line) for line in lines if line is not None]
            return tuple(any(every) for every in zip(*shown, strict=True))
    return None


def moves_in_steps(function: NumericalFunction, index: int, seed: int) -> bool:
    """Return whether outputs follow an input in steps alone, as those of `torch.round` do.

    Its derivative is zero then. In double precision most outputs stay as they are, bit by bit, while the input moves by
    some roundings of single precision, and most change under a large move.
    """
    function = function.uncompiled
    values = [value.double() for value in function.values]
    middle = _outputs(function, values)
    if middle is None or any(out.dtype != torch.float64 for out in middle):
        return False
    generator = torch.Generator(values[index].device).manual_seed(seed + 311)
    shares = []
    for length in (_SHORT, _LONG):
        moved = list(values)
        drawn = torch.rand(values[index].shape, generator=generator, device=values[index].device, dtype=torch.float64)
        moved[index] = values[index] * (1 + length * (0.5 + drawn))
        outs = _outputs(function, moved)
        if outs is None:
            return False
        equal = torch.cat([(a == b).flatten() for a, b in zip(outs, middle, strict=True)])
        shares.append(float(equal.double().mean()))
    return shares[0] > 0.5 > shares[1]


def _moves(line: Line) -> list[bool]:
    """Return, by output, whether two distances give one derivative, above the noise."""
    moves = []
    for near, far, deviation in zip(line.near, line.far, line.deviations, strict=True):
        size, noise = float(near.norm()), float(deviation.norm()) / line.step
        moves.append(size > 2 * noise and float((near - far).norm()) <= _CONVERGED * size + noise)
    return moves


def _representable(value: Tensor, along: Tensor, step: float) -> Tensor:
    """Return a direction whose steps are whole spacings of half precision, so that far points are twice as far as near
    ones.

    Otherwise the two distances differ by rounding of the inputs, which looks like truncation.
    """
    if UNIT[value.dtype] < COARSE_UNIT:
        return along
    move = step * along
    largest = (wide(value).abs() + 2 * move.abs()).clamp_min(torch.finfo(value.dtype).tiny)
    spacing = torch.finfo(value.dtype).eps * torch.exp2(largest.log2().floor())
    return torch.sign(move) * (move.abs() / spacing).round().clamp_min(1.0) * spacing / step


def _outputs(function: NumericalFunction, values: Sequence[Tensor]) -> Sequence[Tensor] | None:
    try:
        outs = function.outputs(values)
    except Exception:  # a kernel may refuse inputs in any way it likes
        return None
    return outs if all(bool(torch.isfinite(out).all()) for out in outs) else None


def _extrapolate(*reached: Tensor | None) -> Tensor | None:
    """Return the displacement of the extrapolated derivative (4 near − far)/3, as the points were after rounding."""
    if reached[0] is None:
        return None
    far, near = (reached[0] + reached[3]) / 2, (reached[1] + reached[2]) / 2  # type: ignore[operator]
    return (4 * near - far) / 3


def _beyond_noise(part: Tensor, deviation: float) -> float:
    """Return the truncation that a difference shows beyond its own noise, in sum and entry by entry."""
    total = max(0.0, abs(float(part.sum())) - _SHOWN * deviation)
    square = max(0.0, float(part.square().sum()) - 2 * deviation**2)
    return _TRUNCATION * (total + 2 * square**0.5)


def derivative_gap(
    line: Line,
    gradients: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    deviations: Sequence[Tensor | None],
    unit: float,
) -> DerivativeGap:
    """Compare ⟨v, J u⟩ from a line with ⟨G, u⟩ from gradients.

    Args:
        line: the outputs along u.
        gradients: the output gradients v.
        grads: the gradients G of a backward pass from v.
        deviations: standard deviations of the gradients.
        unit: the relative error of one rounding of the function.
    """
    weights = [wide(gradient) for gradient in gradients]
    near = torch.cat([(v * part).flatten() for v, part in zip(weights, line.near, strict=True)])
    far = torch.cat([(v * part).flatten() for v, part in zip(weights, line.far, strict=True)])
    bend = torch.cat([(v * part).flatten() for v, part in zip(weights, line.bend, strict=True)])
    variance = sum(
        float((v.square() * spread.square()).sum()) for v, spread in zip(weights, line.deviations, strict=True)
    )
    # Entry by entry as well as in sum: where a function has kinks, their errors may cancel. A kink at the very point
    # shows in the fourth difference alone.
    noise = variance**0.5 / line.step
    error = (DEVIATIONS + _SHOWN * _FOURTH / 4) * noise
    error += _beyond_noise(near - far, _NEAR_FAR * noise) + _beyond_noise(bend, _FOURTH * noise)
    expected, squares, spread = 0.0, 0.0, 0.0
    for grad, along, deviation in zip(grads, line.along, deviations, strict=True):
        if grad is None or along is None:
            continue
        products = wide(grad) * along
        expected += float(products.sum())
        squares += float(products.square().sum())
        if deviation is not None:
            spread += float((deviation.square() * along.square()).sum())
    size = squares**0.5
    reach = sum(float((v.abs() * largest).sum()) for v, largest in zip(weights, line.reach, strict=True))
    limit = error + DEVIATIONS * spread**0.5 + ROUNDINGS * unit * (size + abs(expected))
    return DerivativeGap(
        measured=float(((4 * near - far) / 3).sum()),
        expected=expected,
        limit=limit,
        error=error,
        size=size,
        converged=float((near - far).norm()) <= _CONVERGED * float(near.norm()) + 3 * noise
        and (unit < COARSE_UNIT or abs(expected) * line.step <= _LINEAR * reach),
    )


def matched_derivatives(line: Line, outs: Sequence[Tensor], *, relative: bool) -> tuple[list[Tensor], float]:
    """Return output gradients along J u itself, in which its derivative is largest against noise.

    And the bias of doing so.

    The derivative of ⟨v, f⟩ is then a sum of squares, to which output noise adds with random signs: it is known √n
    times better than along a random v. The far difference is taken, whose noise is not that of the near one; the part
    of it in the extrapolated gradient adds a third of its square.

    Args:
        line: the outputs along u.
        outs: the outputs at the middle of the line, for their precision and size.
        relative: whether relative changes of outputs count, so that small outputs count as much as large ones.
    """
    gradients, bias = [], 0.0
    for far, deviation, out in zip(line.far, line.deviations, outs, strict=True):
        spacing = torch.finfo(out.dtype).eps * (wide(out).abs() + 2 * line.step * far.abs())
        weight = (4 * line.step * far.abs() >= _RESOLVED * spacing).to(far)
        if relative:
            size = wide(out).abs().clamp_min(2.0**-24 * float(wide(out).abs().max()) + 1e-30)
            weight = weight * torch.exp2(-2 * size.log2().round())
        v = far * weight
        peak = float(v.abs().max())
        scale = 2.0 ** -round(torch.tensor(peak).log2().item()) if 0 < peak < float("inf") else 1.0
        gradients.append((v * scale).to(out.dtype))
        bias += scale * float((weight * deviation.square()).sum()) / (12 * line.step**2)
        # Near the bound, outputs are chosen whose noise adds to the change: up to one deviation of the far difference.
        chosen = 4 * line.step * far.abs() < 2 * _RESOLVED * spacing
        bias += scale * float((weight * chosen * far.abs() * deviation).sum()) / (3 * 8**0.5 * line.step)
    return gradients, bias
