"""The identity of gradients that each symmetry of the forward pass implies, tested on one backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conserved.checking.gradient_test import Gap, GradientTest, Method
from conserved.checking.locating import factor, factor_meaning, where
from conserved.checking.pass_under_test import Setting
from conserved.inference.probing.axis_moves import axes_of, coordinates_of
from conserved.inference.probing.noise import wide
from conserved.inference.probing.symmetry_search import Probe
from conserved.moment import Magnitudes, Plan
from conserved.symmetry import ComplexScaling, Direction, Point, Symmetry
from conserved.tolerances import COARSE_UNIT, NOISE, ROUNDING

_ENTRIES = {
    "block_general_linear": " (all pairs of entries)",
    "complex_scaling": " (scale and turn of every pair)",
    "block_rotation": " (antisymmetric part)",
}
"""The numbers that an identity of a group of matrices has, by the code of its kind."""

_NEAR = 16.0
"""An identity of a symmetry that holds up to e may be off by about e; how much further rounding of e may put it."""

_FEW = 64
"""Outputs below which the rounding of a function is assumed and not measured (`measure_noise`)."""

_MANY, _TOGETHER = 16, 4.0
"""Coordinates from which on their residuals are looked at together, and standard deviations their root mean square may
have: of 16 normal numbers it exceeds 4 once in 10⁴⁰."""


@dataclass(frozen=True, slots=True)
class IdentityTerms:
    """The moment map of one symmetry on one pass, with what noise and rounding make of it.

    The sources are θ = (inputs, outputs) and G = (their gradients, minus the output gradients): see `axis_moves`.
    """

    parts: list[Tensor]
    """What each leg adds to μ(θ, G)."""
    variance: Tensor
    """The variance of μ(θ, G) by the measured noise of θ and G."""
    square: Tensor
    """The sum of the squares of all products that μ(θ, G) is made of."""

    @property
    def total(self) -> Tensor:
        return torch.stack(self.parts).sum(0)


def terms_of(setting: Setting, symmetry: Symmetry) -> IdentityTerms:
    """Evaluate the moment map of a symmetry on a pass, and twice more on squares."""
    point, gradient, point_noise, gradient_noise = _sources(setting, symmetry)
    alone = Plan.of([symmetry], kernels=False).legs_alone
    parts = alone.evaluate((Point(point), Direction(gradient)), [(0, 1)]).values()
    # Variances add up: those of a product of independent numbers with the other squared, without any sign.
    legs = tuple(replace(leg, degree=leg.degree * abs(leg.degree)) for leg in symmetry.legs)
    positive = Plan.of([replace(symmetry, legs=legs)], kernels=False)
    squares = [{name: tensor.square() for name, tensor in each.items()} for each in (point, gradient)]
    noises = [{name: tensor.square() for name, tensor in each.items()} for each in (point_noise, gradient_noise)]
    sources: list[Point | Direction] = [
        Point(squares[0]),
        Direction(squares[1]),
        Direction(noises[0]),
        Direction(noises[1]),
    ]
    moments = positive.evaluate([Magnitudes(source) for source in sources], [(0, 1), (0, 3), (2, 1)])
    square, of_gradient, of_point = (moments.values(pair)[0] for pair in range(3))
    shape = _shape(symmetry)
    return IdentityTerms(
        parts=[part.reshape(shape) for part in parts],
        variance=(of_gradient + of_point).reshape(shape),
        square=square.reshape(shape),
    )


def _sources(setting: Setting, symmetry: Symmetry) -> tuple[dict[str, Tensor], ...]:
    """Return θ, G and the standard deviations of both, by the name of an input or output."""
    point, gradient, point_noise, gradient_noise = {}, {}, {}, {}
    for name in symmetry.parameters:
        if name in setting.function.out_names:
            index = setting.function.out_names.index(name)
            point[name] = wide(setting.outs[index])
            gradient[name] = -wide(setting.gradients[index])
            point_noise[name] = setting.noise.outs[index].expand_as(point[name])
            gradient_noise[name] = torch.zeros_like(gradient[name])
            continue
        index = setting.function.names.index(name)
        grad, deviation = setting.grads[index], setting.noise.grads[index]
        assert grad is not None
        assert deviation is not None
        point[name] = wide(setting.function.values[index])
        gradient[name] = wide(grad)
        point_noise[name] = torch.zeros_like(point[name])
        gradient_noise[name] = deviation.expand_as(gradient[name])
    return point, gradient, point_noise, gradient_noise


def _shape(symmetry: Symmetry) -> tuple[int, ...]:
    """Return the shape of μ with an axis for every axis of the first leg that carries coordinates."""
    sizes, own = coordinates_of(symmetry.legs[0].view), symmetry.kind.products.shape(symmetry.n, symmetry.m)
    return (*sizes[:-1], *own[1:]) if symmetry.kind.rotates else sizes


def identity_tests(setting: Setting, probed: Probe) -> list[GradientTest]:
    """Return one test for each symmetry whose inputs have a gradient.

    In half precision, a second test takes all coordinates together.
    """
    tests: list[GradientTest] = []
    together: list[GradientTest | None] = []
    for symmetry in tested_symmetries(setting, probed.symmetries):
        terms = terms_of(setting, symmetry)
        tests.append(_test(setting, symmetry, terms, probed.errors[symmetry]))
        if setting.noise.unit > COARSE_UNIT:
            together.append(judge_together(setting, symmetry, terms))
    return [*tests, *(test for test in together if test is not None)]


def tested_symmetries(setting: Setting, symmetries: Sequence[Symmetry]) -> list[Symmetry]:
    """Return the symmetries all inputs of which have a gradient."""
    missing = {name for name, grad in zip(setting.function.names, setting.grads, strict=True) if grad is None}
    return [symmetry for symmetry in symmetries if missing.isdisjoint(symmetry.parameters)]


def is_tested_together(symmetry: Symmetry) -> bool:
    """Return whether the residuals of a symmetry are independent and many."""
    return symmetry.exact and not symmetry.kind.rotates and symmetry.identities >= _MANY


def judge_together(setting: Setting, symmetry: Symmetry, terms: IdentityTerms) -> GradientTest | None:
    """Return the test of all coordinates together, or None where it says nothing more than the others.

    One row left out of a sum moves all coordinates a little. Rounding of a leg has the measured variance, and its sum
    may be off by one more rounding in one direction.
    """
    if not is_tested_together(symmetry):
        return None
    total = terms.total
    rounding = sum(part.square() for part in terms.parts) + terms.square / _MANY
    variance = terms.variance + setting.noise.unit**2 * rounding
    ratio = float((total.square() / variance.clamp_min(1e-300)).mean().sqrt())
    size = float(terms.square.sum().sqrt()) or 1.0
    test = GradientTest(
        gradients=_inputs(setting, symmetry),
        method=Method.IDENTITY,
        what=f"{statement(symmetry, setting.function.out_names)}, all of them together",
        residual=float(total.norm()) / size,
        limit=_TOGETHER * float(variance.sum().sqrt()) / size,
        worst=ratio / _TOGETHER,
        sees_factor=False,
    )
    if test.ok:
        return test
    left_out = "terms of a sum are left out or counted twice: one row or one tile of many"
    return replace(test, where="everywhere, a little", meaning=left_out)


def _inputs(setting: Setting, symmetry: Symmetry) -> tuple[str, ...]:
    return tuple(name for name in symmetry.parameters if name in setting.function.names)


def _gap(setting: Setting, symmetry: Symmetry, terms: IdentityTerms, error: float) -> Gap:
    """Return both sides of the identity with what rounding allows between them."""
    total = terms.total
    size = terms.square.sqrt() + torch.stack([part.abs() for part in terms.parts]).sum(0)
    limit = NOISE * terms.variance.sqrt() + ROUNDING * setting.noise.unit * size
    few = min(out.numel() for out in setting.outs) < _FEW
    if not symmetry.exact or setting.coarsest or few:
        # A few numbers do not say how fine their arithmetic is; the symmetry is then known to its own error only.
        limit = limit + _NEAR * error * (size + 3 * _output_size(setting, total.numel()))
    return Gap(actual=total, expected=torch.zeros_like(total), limit=limit)


def _output_size(setting: Setting, count: int) -> float:
    """Return the size of ⟨dout, out⟩ that falls on each of so many coordinates.

    An identity is off by about this if its symmetry only nearly holds.
    """
    squares = sum(
        float((wide(out).square() * wide(gradient).square()).sum())
        for out, gradient in zip(setting.outs, setting.gradients, strict=True)
    )
    return float((squares / max(count, 1)) ** 0.5)


def _test(setting: Setting, symmetry: Symmetry, terms: IdentityTerms, error: float) -> GradientTest:
    gap = _gap(setting, symmetry, terms, error)
    bad = gap.ratio > 1
    scale = float(terms.square.sum().sqrt())
    size = max(float(torch.stack([part.norm() for part in terms.parts]).max()), scale) or 1.0
    result = GradientTest(
        gradients=_inputs(setting, symmetry),
        method=Method.IDENTITY,
        what=statement(symmetry, setting.function.out_names),
        residual=float(gap.actual.norm()) / size,
        limit=float(gap.limit.expand_as(gap.actual).norm()) / size,
        worst=gap.worst,
        sees_factor=any(name in setting.function.out_names for name in symmetry.parameters),
    )
    if result.ok:
        return result
    return replace(
        result,
        where=where(bad, _labels(symmetry, bad.ndim)),
        meaning=_meaning(setting, symmetry, terms.parts, result.sees_factor),
    )


def _labels(symmetry: Symmetry, ndim: int) -> list[str] | None:
    """Return a name for every axis of the identity: axes of the first leg, its pairs and their numbers."""
    view = symmetry.legs[0].view
    labels = [f"axis {axis.axis} of {view.parameter}" for axis in axes_of(view)]
    if isinstance(symmetry.kind, ComplexScaling):
        labels[-1:] = [f"pairs of axis {axes_of(view)[-1].axis}", "part (scale, turn)"]
    elif symmetry.kind.rotates:
        labels.append(labels[-1])
    return labels if len(labels) == ndim else None


def _meaning(setting: Setting, symmetry: Symmetry, parts: Sequence[Tensor], moves_outputs: bool) -> str:
    shapes = setting.shapes
    names = symmetry.parameters
    if not all(bool(torch.isfinite(part).all()) for part in parts):
        return "a gradient contains infinities or NaN"
    first = names[0]
    if len(_inputs(setting, symmetry)) == 1 and moves_outputs:
        value = factor(parts[0], -sum(parts[1:], torch.zeros_like(parts[0])))
        if value is not None:
            return factor_meaning(first, value, shapes)
        return f"d{first} does not agree with the output it moves"
    if len(names) == 2:
        value = factor(parts[0], -parts[1])
        if value is not None and abs(value) > 1e-6:
            other = names[1]
            return f"either {factor_meaning(first, value, shapes)}, or {factor_meaning(other, 1 / value, shapes)}"
        return f"d{first} and d{names[1]} do not belong to the same scores"
    if len(names) == 1 and symmetry.kind.linear:
        return (
            f"a shift of {first} changes nothing, yet d{first} does not add up to zero: a missing "
            "correction term (softmax, centring), or a mask that differs between forward and backward"
        )
    if len(names) == 1:
        return f"the scale of {first} is forgotten, yet ⟨{first}, d{first}⟩ is not zero: a missing correction term"
    return ""


def statement(symmetry: Symmetry, outputs: Sequence[str]) -> str:
    """Return the identity in words and signs; legs that are `outputs` stand on the right."""
    sides: dict[bool, list[str]] = {False: [], True: []}
    for leg in symmetry.legs:
        name = leg.view.parameter
        coefficient = "" if abs(leg.degree) == 1 else f"{abs(leg.degree):g} "
        term = f"d{name}" if symmetry.kind.linear else f"d{name}·{name}"
        sides[name in outputs or leg.degree < 0].append(f"{coefficient}Σ {term}")
    right = " + ".join(sides[True]) or "0"
    axes = ", ".join(map(str, axes_of(symmetry.legs[0].view)))
    scope = f" for each index of axes {axes} of {symmetry.parameters[0]}" if axes else ""
    return f"{' + '.join(sides[False])} = {right}{_ENTRIES.get(symmetry.kind.code, '')}{scope}"
