"""Rules for sums and choices: both operands must move alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from conserved.inference.program.captured_program import ValueRef
from conserved.inference.rules.step import Known, Step, base_name, norm_like, number, rule, wide
from conserved.inference.types.engine import Engine, Number, ReadPart, scaled
from conserved.inference.types.parameter_types import first_use
from conserved.inference.types.reindexing import broadcast
from conserved.inference.types.tensor_type import FIXED, Field, Image, Type


def align(s: Step, ref: Any, dims: int) -> Type:
    """Return the type of an operand over the axes of the result it is broadcast to."""
    shape = s.shape(ref)
    return broadcast(shape, dims).type(s.type(ref))


def sum_of(s: Step, left: Any, right: Any, sign: Number = 1) -> Type:
    """Return left + sign · right: both must move alike; a parameter that is added moves as what it is added to."""
    count = len(s.out)
    a, b = s.raw(left), s.raw(right)
    if isinstance(a, ReadPart) and isinstance(b, ReadPart):
        a = s.type(left)
    if isinstance(b, ReadPart):
        first = broadcast(s.shape(left), count).type(a) if isinstance(a, Type) else FIXED
        b = adopt(s, right, b, first, count)
    elif isinstance(a, ReadPart):
        assert isinstance(b, Type)
        a = adopt(s, left, a, broadcast(s.shape(right), count).type(b), count)
    assert isinstance(a, Type)
    assert isinstance(b, Type)
    x = broadcast(s.shape(left), count).type(a) if isinstance(left, ValueRef) else a
    y = broadcast(s.shape(right), count).type(b) if isinstance(right, ValueRef) else b
    y = scaled(s.engine, y, sign)
    return add(s.engine, x, y)


def add(engine: Engine, x: Type, y: Type) -> Type:
    """Return the type of a sum."""
    x, y = engine.moving(x), engine.moving(y)
    if x.zero and y.zero:
        factors: Sequence[Field] = ()
    elif x.zero or y.zero:
        factors = y.factors if x.zero else x.factors
    else:
        engine.equate(x.factors, y.factors)
        factors = x.factors if y.fixed is False and len(x.factors) <= len(y.factors) else y.factors
        if not x.factors or not y.factors:
            factors = ()
    images: list[Image] = []
    for image in (*x.images, *y.images):
        for index, other in enumerate(images):
            if other.key == image.key and other.varies == image.varies:
                weight = other.weight + image.weight
                if weight:
                    images[index] = replace(other, weight=weight)
                else:
                    del images[index]
                break
        else:
            images.append(image)
    return Type(
        tuple(factors),
        engine.net([*x.shifts, *y.shifts]),
        tuple(images),
        x.zero and y.zero,
        strands=x.strands + y.strands,
    )


def adopt(s: Step, ref: Any, view: ReadPart, like: Type, count: int) -> Type:
    """Give a parameter that is first used in a sum the type of the other operand, so that both move alike."""
    offset = count - len(s.shape(ref))
    own_dims = {dim + offset for coordinate in view.coordinates for dim in coordinate.dims}
    fields = []
    foreign = sorted({dim for factor in like.factors for dim in factor.occupied} - own_dims)
    factors = s.engine.uniform(like.factors, foreign) if foreign else like.factors
    for item in factors:
        if item.virtual:
            continue
        fields.append(Field(tuple(dim - offset for dim in item.dims), item.atoms, item.weight))
    return first_use(s.engine, view, fields, role="bias", entries=True)


@rule("add")
def _add(s: Step) -> Known:
    return plus(s, s.arg(0), s.arg(1), s.arg(2, "alpha", 1))


@rule("sub")
def _sub(s: Step) -> Known:
    result = plus(s, s.arg(0), s.arg(1), -s.arg(2, "alpha", 1))
    dim = _mean_of(s, s.arg(0), s.arg(1)) if s.arg(2, "alpha", 1) == 1 else None
    return replace(result, centred=frozenset({dim})) if dim is not None and isinstance(result, Type) else result


def _mean_of(s: Step, x: Any, mean: Any) -> int | None:
    """Return the axis along which one operand is the mean of the other, so that their difference sums to zero along
    it.
    """
    maker = s.program.maker(mean.value) if isinstance(mean, ValueRef) and isinstance(x, ValueRef) else None
    if maker is None or base_name(maker.name) != "aten::mean" or maker.args[0] != x or len(maker.args) < 3:
        return None
    dims, count = maker.args[1], len(s.shape(x))
    if not isinstance(dims, list | tuple) or len(dims) != 1 or len(s.shape(mean)) != count:
        return None
    return int(dims[0]) % count


@rule("rsub")
def _rsub(s: Step) -> Known:
    """Return other − alpha · x."""
    if isinstance(s.arg(1), ValueRef):
        return sum_of(s, s.arg(1), s.arg(0), -s.arg(2, "alpha", 1))
    x = s.type(s.arg(0))
    if s.arg(1) == 0:
        # A number that is zero scales with everything.
        return scaled(s.engine, x, -s.arg(2, "alpha", 1))
    s.engine.equate(x.factors, ())
    return scaled(s.engine, Type((), x.shifts, x.images), -s.arg(2, "alpha", 1))


EPSILON = 1e-2
"""A positive number up to this size that is added to a sum of squares is taken for a normalisation's ε."""


def plus(s: Step, left: Any, right: Any, alpha: Number) -> Known:
    """Return the type of left + alpha · right; a small number that is added to squares is a normalisation's ε.

    Args:
        s: the operation.
        left: one operand.
        right: the other.
        alpha: the factor of the second.

    Returns:
        The type of the result.
    """
    if isinstance(alpha, complex):
        return sum_of(s, left, right, alpha)
    value = number(right, s)
    if (
        value is None
        and number(left, s) is not None
        and isinstance(right, ValueRef)
        and number(right, s) is None
        and alpha == 1
    ):
        left, right, value = right, left, number(left, s)
    if value is not None and (not isinstance(right, ValueRef) or prod(s.shape(right)) == 1):
        known = s.raw(left)
        if value == 0:
            return known
        if isinstance(known, ReadPart):
            return (
                replace(known, offset=known.offset + alpha * value)
                if known.scale == 1
                else sum_of(s, left, right, alpha)
            )
        squares = any(factor.weight.denominator == 1 and factor.weight.numerator % 2 == 0 for factor in known.factors)
        if known.factors and 0 < alpha * value <= EPSILON and (squares or norm_like(s, left)):
            s.engine.equate(known.factors, (), soft=alpha * value)
            return known
        s.engine.equate(known.factors, ())
        return Type((), known.shifts, known.images)
    return sum_of(s, left, right, alpha)


@rule("where")
def _where(s: Step) -> Known:
    if len(s.operation.args) < 3:
        return FIXED
    return choose(s, s.arg(0), s.arg(1), s.arg(2))


def choose(s: Step, condition: Any, left: Any, right: Any) -> Type:
    """Return entry by entry one of two tensors: entries between which the condition may differ do not mix."""
    count = len(s.out)
    varies = {dim + count - len(s.shape(condition)) for dim in wide(s.shape(condition))}
    for ref in (left, right):
        if isinstance(ref, ValueRef):
            s.engine.split_by(align(s, ref, count).factors, varies, batch=False)
    a, b = neutral(s, left), neutral(s, right)
    x, y = align(s, left, count), align(s, right, count)
    if a is not None and b is not None:
        return FIXED
    if a is not None or b is not None:
        operand, other = (y, a) if a is not None else (x, b)
        if other == "infinite":
            return operand
        if other == "zero":
            return Type(operand.factors, (), s.engine.imaged(operand, range(count)), operand.zero)
        s.engine.equate(operand.factors, ())
        return Type((), (), s.engine.imaged(operand, range(count)))
    result = add(s.engine, Type(x.factors, zero=x.zero), Type(y.factors, zero=y.zero))
    images = s.engine.imaged(x, range(count)) + s.engine.imaged(y, range(count))
    return Type(result.factors, (), images, result.zero)


def neutral(s: Step, ref: Any) -> str | None:
    """Return what a constant operand is.

    It is "infinite" (scales and shifts leave it), "zero" (scales leave it) or "fixed".
    """
    if not isinstance(ref, ValueRef):
        value = torch.tensor(float(ref))
    else:
        if not isinstance(s.raw(ref), Type) or not s.type(ref).fixed:
            return None
        constant = s.constant(ref)
        if constant is None:
            return "zero" if s.type(ref).zero else "fixed"
        value = constant.double() if not constant.is_complex() else constant.real.double()
    lowest = value <= -1e4
    if bool((torch.isinf(value) | lowest).all()):
        return "infinite"
    return "zero" if bool((value == 0).all()) else "fixed"


@rule("masked_fill")
def _masked_fill(s: Step) -> Known:
    return choose(s, s.arg(1), s.arg(0), s.arg(2))


@rule("maximum", "minimum", "fmax", "fmin")
def maximum(s: Step) -> Known:
    """Return the larger or the smaller of two tensors, entry by entry: what is compared does not mix."""
    longer = max((s.arg(0), s.arg(1)), key=lambda ref: len(s.shape(ref)))
    result = choose(s, longer, s.arg(0), s.arg(1))
    s.engine.split_by(result.factors, range(len(s.out)), batch=False)
    return result


@rule("lerp")
def _lerp(s: Step) -> Known:
    """Return x + w (y − x): both must move alike, by whatever share they are mixed."""
    left, right, share = s.arg(0), s.arg(1), s.arg(2, "weight")
    count = len(s.out)
    x, y = align(s, left, count), align(s, right, count)
    value = number(share, s)
    if value is not None:
        return add(s.engine, scaled(s.engine, x, 1 - value), scaled(s.engine, y, value))
    s.engine.zero(s.type(share))
    varies = [{dim + count - len(s.shape(ref)) for dim in wide(s.shape(ref))} for ref in (left, right, share)]
    return add(
        s.engine,
        s.engine.multiply(x, FIXED, (varies[0], varies[2])),
        s.engine.multiply(y, FIXED, (varies[1], varies[2])),
    )


@rule("tril", "triu")
def _tril(s: Step) -> Known:
    x = s.type(s.arg(0))
    s.engine.split_by(x.factors, range(len(s.out)), batch=False)
    return Type(x.factors, (), s.engine.imaged(x, wide(s.out)), x.zero)
