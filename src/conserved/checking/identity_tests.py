"""The identity of gradients that each symmetry of the forward pass implies, tested on one backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conserved.checking.gradient_test import NOISE, ROUNDING, Gap, GradientTest, Method
from conserved.checking.locating import factor, factor_meaning, where
from conserved.checking.pass_under_test import Setting
from conserved.inference.probing.axis_moves import Group, ProbedSymmetry, TensorLeg, gather, generator_part, outer
from conserved.inference.probing.noise import wide

_NEAR = 16.0
"""An identity of a symmetry that holds up to e may be off by about e; how much further rounding of e may put it."""

_FEW = 64
"""Outputs below which the rounding of a function is assumed and not measured (`measure_noise`)."""

COARSE = 2.0**-13
"""The rounding from which on precision counts as half."""

_MANY, _TOGETHER = 16, 4.0
"""Coordinates from which on their residuals are looked at together, and standard deviations their root mean square may
have: of 16 normal numbers it exceeds 4 once in 10⁴⁰."""


def identity_tests(setting: Setting, symmetries: Sequence[ProbedSymmetry]) -> list[GradientTest]:
    """Return one test for each symmetry whose inputs have a gradient.

    In half precision, a second test takes all coordinates together.
    """
    chosen = [each for each in symmetries if all(setting.grads[leg.index] is not None for leg in each.inputs)]
    together = [test_together(setting, symmetry) for symmetry in chosen] if setting.noise.unit > COARSE else []
    return [*(_test(setting, symmetry) for symmetry in chosen), *(test for test in together if test is not None)]


def test_together(setting: Setting, symmetry: ProbedSymmetry) -> GradientTest | None:
    """Return whether the residuals of all coordinates are rounding.

    One row left out of a sum moves all of them a little.

    Rounding of a leg has the measured variance, and its sum may be off by one more rounding in one direction.
    """
    if not symmetry.exact or symmetry.group not in (Group.SCALING, Group.TRANSLATION):
        return None
    parts, variances, squares = zip(*(_terms(setting, symmetry, leg) for leg in symmetry.legs), strict=True)
    total = torch.stack(parts).sum(0)
    if total.numel() < _MANY:
        return None
    rounding = sum(part.square() for part in parts) + torch.stack(squares).sum(0) / _MANY
    variance = torch.stack(variances).sum(0) + setting.noise.unit**2 * rounding
    ratio = float((total.square() / variance.clamp_min(1e-300)).mean().sqrt())
    names = tuple(leg.name for leg in symmetry.inputs)
    size = float(torch.stack(squares).sum(0).sum().sqrt()) or 1.0
    test = GradientTest(
        gradients=names,
        method=Method.IDENTITY,
        what=f"{statement(symmetry)}, all of them together",
        residual=float(total.norm()) / size,
        limit=_TOGETHER * float(variance.sum().sqrt()) / size,
        worst=ratio / _TOGETHER,
        sees_factor=False,
    )
    if test.ok:
        return test
    left_out = "terms of a sum are left out or counted twice: one row or one tile of many"
    return replace(test, where="everywhere, a little", meaning=left_out)


def _terms(setting: Setting, symmetry: ProbedSymmetry, leg: TensorLeg) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a leg adds to the identity, the variance of it, and the sum of the squares it is made of."""
    if leg.output:
        value, gradient = wide(setting.outs[leg.index]), wide(setting.gradients[leg.index])
        value_noise = setting.noise.outs[leg.index].expand_as(value)
        gradient_noise = torch.zeros_like(gradient)
    else:
        grad, deviation = setting.grads[leg.index], setting.noise.grads[leg.index]
        assert grad is not None
        assert deviation is not None
        value, gradient = wide(setting.function.values[leg.index]), wide(grad)
        value_noise, gradient_noise = torch.zeros_like(value), deviation.expand_as(gradient)
    squares = (value.square(), gradient.square(), value_noise.square(), gradient_noise.square())
    sign = -1.0 if leg.output else 1.0
    if symmetry.group is Group.TRANSLATION:
        total = gather(gradient, leg) * leg.degree * sign
        return total, gather(squares[3], leg), gather(squares[1], leg)
    if symmetry.group is Group.SCALING:
        total = gather(value * gradient, leg) * leg.degree * sign
        variance = gather(squares[0] * squares[3] + squares[1] * squares[2], leg)
        return total, variance * leg.degree**2, gather(squares[0] * squares[1], leg) * leg.degree**2
    total = outer(gradient, value, leg) * sign
    variance = outer(squares[3], squares[0], leg) + outer(squares[1], squares[2], leg)
    size = outer(squares[1], squares[0], leg)
    if leg.degree < 0:
        total, variance, size = -total.transpose(-1, -2), variance.transpose(-1, -2), size.transpose(-1, -2)
    return total, variance, size


def gap_of(setting: Setting, symmetry: ProbedSymmetry) -> tuple[Gap, list[Tensor]]:
    """Return both sides of the identity with what rounding allows between them, and what each leg adds."""
    parts, variances, squares = zip(*(_terms(setting, symmetry, leg) for leg in symmetry.legs), strict=True)
    total = torch.stack(parts).sum(0)
    variance = torch.stack(variances).sum(0)
    size = torch.stack(squares).sum(0).sqrt() + torch.stack([part.abs() for part in parts]).sum(0)
    limit = NOISE * variance.sqrt() + ROUNDING * setting.noise.unit * size
    few = min(out.numel() for out in setting.outs) < _FEW
    if not symmetry.exact or setting.coarsest or few:
        # A few numbers do not say how fine their arithmetic is; the symmetry is then known to its own error only.
        limit = limit + _NEAR * symmetry.error * (size + 3 * _output_size(setting, total.numel()))
    if symmetry.group in (Group.ROTATION, Group.PAIRED):
        total = generator_part(symmetry.group, total, symmetry.pairs)
        if symmetry.group is Group.ROTATION:
            limit = limit + limit.transpose(-1, -2)
        else:
            limit = generator_part(Group.PAIRED, limit, symmetry.pairs)[..., :1].expand_as(total)
    scale = torch.stack(squares).sum(0).sqrt()
    return Gap(actual=total, expected=torch.zeros_like(total), limit=limit), [*parts, scale]


def _output_size(setting: Setting, count: int) -> float:
    """Return the size of ⟨dout, out⟩ that falls on each of so many coordinates.

    An identity is off by about this if its symmetry only nearly holds.
    """
    squares = sum(
        float((wide(out).square() * wide(gradient).square()).sum())
        for out, gradient in zip(setting.outs, setting.gradients, strict=True)
    )
    return float((squares / max(count, 1)) ** 0.5)


def _test(setting: Setting, symmetry: ProbedSymmetry) -> GradientTest:
    gap, (*parts, scale) = gap_of(setting, symmetry)
    names = tuple(leg.name for leg in symmetry.inputs)
    bad = gap.ratio > 1
    size = float(torch.stack([part.norm() for part in parts]).max()) or float(scale.norm()) or 1.0
    size = max(size, float(scale.norm()))
    result = GradientTest(
        gradients=names,
        method=Method.IDENTITY,
        what=statement(symmetry),
        residual=float(gap.actual.norm()) / size,
        limit=float(gap.limit.expand_as(gap.actual).norm()) / size,
        worst=gap.worst,
        sees_factor=symmetry.has_output,
    )
    if result.ok:
        return result
    return replace(
        result, where=where(bad, _labels(symmetry, bad.ndim)), meaning=_meaning(setting, symmetry, parts, bad)
    )


def _labels(symmetry: ProbedSymmetry, ndim: int) -> list[str] | None:
    first = symmetry.legs[0]
    labels = [f"axis {axis.axis} of {first.name}" for axis in first.axes]
    if symmetry.group in (Group.GENERAL_LINEAR, Group.ROTATION):
        labels.append(f"axis {first.axes[-1].axis} of {first.name}")
    if symmetry.group is Group.PAIRED:
        labels[-1:] = [f"pairs of axis {first.axes[-1].axis}", "part (scale, turn)"]
    return labels if len(labels) == ndim else None


def _meaning(setting: Setting, symmetry: ProbedSymmetry, parts: Sequence[Tensor], bad: Tensor) -> str:
    shapes = setting.shapes
    legs = symmetry.legs
    if not all(bool(torch.isfinite(part).all()) for part in parts):
        return "a gradient contains infinities or NaN"
    if len(symmetry.inputs) == 1 and symmetry.has_output:
        value = factor(parts[0], -sum(parts[1:], torch.zeros_like(parts[0])))
        if value is not None:
            return factor_meaning(legs[0].name, value, shapes)
        return f"d{legs[0].name} does not agree with the output it moves"
    if len(legs) == 2:
        value = factor(parts[0], -parts[1])
        if value is not None and abs(value) > 1e-6:
            first, other = legs[0].name, legs[1].name
            return f"either {factor_meaning(first, value, shapes)}, or {factor_meaning(other, 1 / value, shapes)}"
        return f"d{legs[0].name} and d{legs[1].name} do not belong to the same scores"
    if len(legs) == 1 and symmetry.group is Group.TRANSLATION:
        return (
            f"a shift of {legs[0].name} changes nothing, yet d{legs[0].name} does not add up to zero: a missing "
            "correction term (softmax, centring), or a mask that differs between forward and backward"
        )
    if len(legs) == 1:
        name = legs[0].name
        return f"the scale of {name} is forgotten, yet ⟨{name}, d{name}⟩ is not zero: a missing correction term"
    return ""


def statement(symmetry: ProbedSymmetry) -> str:
    """Return the identity in words and signs."""
    shift = symmetry.group is Group.TRANSLATION
    sides: dict[bool, list[str]] = {False: [], True: []}
    for leg in symmetry.legs:
        coefficient = "" if abs(leg.degree) == 1 else f"{abs(leg.degree):g} "
        term = f"d{leg.name}" if shift else f"d{leg.name}·{leg.name}"
        sides[leg.output or leg.degree < 0].append(f"{coefficient}Σ {term}")
    right = " + ".join(sides[True]) or "0"
    kind = {
        Group.SCALING: "",
        Group.TRANSLATION: "",
        Group.GENERAL_LINEAR: " (all pairs of entries)",
        Group.PAIRED: " (scale and turn of every pair)",
        Group.ROTATION: " (antisymmetric part)",
    }[symmetry.group]
    axes = ", ".join(map(str, symmetry.legs[0].axes))
    scope = f" for each index of axes {axes} of {symmetry.legs[0].name}" if axes else ""
    return f"{' + '.join(sides[False])} = {right}{kind}{scope}"
