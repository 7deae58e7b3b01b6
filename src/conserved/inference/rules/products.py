"""Rules for products, powers and functions of single entries."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np

from conserved.inference.program.captured_program import ValueRef
from conserved.inference.rules.step import (
    Known,
    Step,
    TypingRule,
    at,
    base_name,
    fix_all,
    moved,
    norm_like,
    number,
    rule,
    same_value,
    wide,
)
from conserved.inference.rules.sums import EPSILON, add, align
from conserved.inference.rules.views import take
from conserved.inference.types.engine import ReadPart, scaled
from conserved.inference.types.reindexing import broadcast
from conserved.inference.types.tensor_type import FIXED, ZERO, Type


@rule("neg")
def _neg(s: Step) -> Known:
    return scaled(s.engine, s.type(s.arg(0)), -1.0)


@rule("mul", "div")
def _mul(s: Step) -> Known:
    divides = "div" in base_name(s.operation.name)
    left, right = s.arg(0), s.arg(1)
    if divides and s.arg(2, "rounding_mode") is not None:
        return FIXED
    return product(s, left, right, divides)


def product(s: Step, left: Any, right: Any, divides: bool = False) -> Known:
    """Return the type of left · right, or of left / right, entry by entry.

    Args:
        s: the operation.
        left: one operand.
        right: the other.
        divides: whether it is the quotient.

    Returns:
        The type of the result.
    """
    for item, other, inverse in ((right, left, divides), (left, right, False)):
        value = number(item, s)
        if (
            value is not None
            and (not isinstance(item, ValueRef) or prod(s.shape(item)) == 1)
            and not (divides and item is left)
        ):
            known = s.raw(other)
            factor = 1 / value if inverse and value else value
            if value == 0:
                return ZERO if not inverse else fix_all(s)
            if isinstance(known, ReadPart):
                return (
                    replace(known, scale=known.scale * factor)
                    if known.offset == 0
                    else scaled(s.engine, s.type(other), factor)
                )
            return moved(scaled(s.engine, known, factor), broadcast(s.shape(other), len(s.out)))
    count = len(s.out)
    if same_value(s, left, right):
        if divides:
            return FIXED
        return power(s, align(s, left, count), Fraction(2))
    x, y = align(s, left, count), align(s, right, count)
    varies = tuple({dim + count - len(s.shape(ref)) for dim in wide(s.shape(ref))} for ref in (left, right))
    if divides:
        for item in y.factors:
            # Not linear: what is divided by does not mix, also where nothing else differs along its axes.
            s.engine.partition.shatter(item.atoms)
        # −x/y² times a shift of y varies wherever y does.
        y = Type(tuple(item.times(-1) for item in y.factors), (), s.engine.imaged(y, varies[1]))
    centred = (x.centred - varies[1]) | (frozenset() if divides else y.centred - varies[0])
    return replace(s.engine.multiply(x, y, (varies[0], varies[1])), centred=centred)


@rule("addcmul", "addcdiv")
def _addcmul(s: Step) -> Known:
    inner = product(s, s.arg(1), s.arg(2), "div" in s.operation.name)
    assert isinstance(inner, Type)
    base = align(s, s.arg(0), len(s.out))
    return add(s.engine, base, scaled(s.engine, inner, s.operation.kwargs.get("value", 1)))


def power(s: Step, x: Type, exponent: Fraction) -> Type:
    """Return the type of x^k, entry by entry: k times the charge, and no shift.

    Args:
        s: the operation.
        x: the type of the input.
        exponent: k.

    Returns:
        The type of the result.
    """
    for factor in x.factors:
        s.engine.partition.shatter(factor.atoms)
        s.engine.passed.setdefault("homogeneous", []).append(factor.atoms)
    s.engine.steady(x)
    return Type(tuple(factor.times(exponent) for factor in x.factors) if exponent else (), zero=x.zero and exponent > 0)


HOMOGENEOUS: dict[str, int | Fraction] = {
    "relu": 1,
    "abs": 1,
    "sqrt": Fraction(1, 2),
    "rsqrt": Fraction(-1, 2),
    "reciprocal": -1,
    "leaky_relu": 1,
    "_prelu_kernel": 1,
    "rrelu_with_noise": 1,
    "sgn": 0,
    "sign": 0,
}
"""f(s·x) = s^k f(x) for positive s: the exponent k."""


def _homogeneous(exponent: Fraction) -> TypingRule:
    def apply(s: Step) -> Known:
        for ref in s.operation.args[1:]:
            if isinstance(ref, ValueRef) and s.floating(ref):
                s.engine.zero(s.type(ref))
        return power(s, s.type(s.arg(0)), exponent)

    return apply


for _name, _degree in HOMOGENEOUS.items():
    rule(_name)(_homogeneous(Fraction(_degree)))


@rule("pow")
def _pow(s: Step) -> Known:
    exponent = number(s.arg(1), s)
    if exponent is None or not isinstance(s.arg(0), ValueRef):
        return fix_all(s)
    if exponent == 1:
        return s.type(s.arg(0))
    fraction = Fraction(exponent).limit_denominator(64)
    return power(s, s.type(s.arg(0)), fraction) if float(fraction) == exponent else fix_all(s)


@rule("clamp", "clamp_min", "clamp_max", "threshold", "hardtanh")
def _clamp(s: Step) -> Known:
    name = base_name(s.operation.name).removeprefix("aten::")
    if name.startswith("hardtanh"):
        bounds = [s.arg(1, default=-1.0), s.arg(2, default=1.0)]
    elif name.startswith("clamp_max") or name.startswith("clamp_min"):
        bounds = [s.arg(1)]
    else:
        bounds = [s.arg(1, "min"), s.arg(2, "max")]
    values = [number(bound, s) for bound in bounds if bound is not None]
    x = s.type(s.arg(0))
    if all(value == 0 for value in values):
        return power(s, x, Fraction(1))
    tiny = [value for value in values if value is not None and 0 < value <= EPSILON]
    if (
        len(tiny) == len(values) == 1
        and "max" not in name
        and x.factors
        and (norm_like(s, s.arg(0)) or any(bound.weight.numerator % 2 == 0 for bound in x.factors))
    ):
        s.engine.equate(x.factors, (), soft=tiny[0])
        return power(s, x, Fraction(1))
    return fix_all(s)


@rule("exp")
def _exp(s: Step) -> Known:
    return s.engine.exponential(s.type(s.arg(0)))


@rule("log")
def _log(s: Step) -> Known:
    return s.engine.logarithm(s.type(s.arg(0)))


FIXING = (
    *("expm1", "log2", "log10", "log1p", "gelu", "silu", "sigmoid", "tanh", "softplus", "mish", "elu", "celu"),
    *("erf", "erfc", "erfinv", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh"),
    *("acosh", "hardswish", "hardsigmoid", "log_sigmoid_forward", "logit", "glu_jvp", "softshrink", "hardshrink"),
    *("digamma", "lgamma", "round", "floor", "ceil", "trunc", "frac", "remainder", "fmod", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "mse_loss", "smooth_l1_loss", "huber_loss", "xlogy", "exp2"),
    *("sinc", "nan_to_num", "nll_loss_forward", "nll_loss2d_forward", "polar", "complex", "angle"),
)
"""Functions of single entries that pass no scale and no shift on."""

rule(*FIXING)(fix_all)


@rule("hypot")
def _hypot(s: Step) -> Known:
    """Return the type of √(x² + y²), which passes on a positive scale that x and y share."""
    # Squares first: opposite shifts of x and y cancel in a sum, but not in this root.
    squares = [power(s, align(s, s.arg(index), len(s.out)), Fraction(2)) for index in (0, 1)]
    return power(s, add(s.engine, *squares), Fraction(1, 2))


@rule("copysign")
def _copysign(s: Step) -> Known:
    """Return the type of |x| sign(y), which scales as x and does not see a positive scale of y."""
    magnitude, sign = (align(s, s.arg(index), len(s.out)) for index in (0, 1))
    power(s, sign, Fraction(0))
    return power(s, magnitude, Fraction(1))


@rule("view_as_complex")
def _view_as_complex(s: Step) -> Known:
    """Return pairs of numbers as complex ones: both move alike."""
    x = s.type(s.arg(0))
    last = len(s.shape(s.arg(0))) - 1
    factors = s.engine.uniform(x.factors, [last])
    images = s.engine.imaged(Type((), x.shifts, x.images), (), ())
    complex_type = Type(
        tuple(factors), (), tuple(replace(image, varies=image.varies - {last}) for image in images), x.zero
    )
    return complex_type


@rule("view_as_real")
def _view_as_real(s: Step) -> Known:
    x = s.type(s.arg(0))
    last = len(s.out) - 1
    return Type(x.factors, (), s.engine.imaged(Type((), x.shifts, x.images), [last]), x.zero)


@rule("glu")
def _glu(s: Step) -> Known:
    """Return a · σ(b): the halves along an axis; the second is fixed."""
    x = s.arg(0)
    shape = s.shape(x)
    dim = at(s.arg(1, "dim", -1), len(shape))
    half = shape[dim] // 2
    s.type(x)
    first, second = (take(s, x, dim, np.arange(start, start + half)) for start in (0, half))
    assert isinstance(first, Type)
    assert isinstance(second, Type)
    s.engine.zero(second)
    return s.engine.multiply(first, FIXED, (wide(s.out), wide(s.out)))
