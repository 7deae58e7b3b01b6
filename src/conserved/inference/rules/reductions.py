"""Rules for sums, means and extremes along axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

from conserved.inference.program.captured_program import ValueRef
from conserved.inference.rules.contractions import OperandAxes, contraction
from conserved.inference.rules.step import Known, Step, at, base_name, fix_all, number, rule
from conserved.inference.rules.sums import maximum
from conserved.inference.types.reindexing import Renumber
from conserved.inference.types.tensor_type import FIXED, Field, Image, Type, distinct


def reduced_dims(s: Step, index: int = 1) -> list[int]:
    """Return the axes an operation reduces; all of them if none are named."""
    shape = s.shape(s.arg(0))
    dims = s.arg(index, "dim")
    if dims is None or dims == []:
        return list(range(len(shape)))
    return [at(dim, len(shape)) for dim in ([dims] if isinstance(dims, int) else dims)] if shape else []


def without(type_: Type, dims: Sequence[int], count: int, keep: bool) -> Type:
    """Return a type that does not vary along `dims`, with these axes gone or of size one."""
    if keep:
        return type_
    remaining = [dim for dim in range(count) if dim not in dims]
    return Renumber(tuple(remaining.index(dim) if dim in remaining else None for dim in range(count))).type(type_)


@rule(
    *("sum", "mean", "amax", "amin", "logsumexp", "max", "min", "median", "nansum", "std", "var", "var_mean"),
    *("std_mean", "cumsum", "linalg_vector_norm", "norm"),
)
def _reduce(s: Step) -> Any:
    name = base_name(s.operation.name).removeprefix("aten::").removesuffix("_")
    x = s.arg(0)
    shape = s.shape(x)
    if name in ("sum", "mean") and x.value in s.deferred:
        return summed_product(s, *s.deferred[x.value], shape)
    type_ = s.type(x)
    count = len(shape)
    if name in ("max", "min", "median") and len(s.operation.args) > 1 and isinstance(s.arg(1), ValueRef):
        return maximum(s)
    if name in ("linalg_vector_norm", "norm"):
        order = s.arg(1, default=2)
        dims = reduced_dims(s, 2)
        if order is not None and number(order, s) in (0, None):
            return fix_all(s)
    elif name in ("max", "min", "median"):
        dims = [at(s.arg(1), count)] if len(s.operation.args) > 1 and count else list(range(count))
    elif name == "cumsum":
        dims = [at(s.arg(1), count)] if count else []
    else:
        dims = reduced_dims(s)
    keep = name == "cumsum" or len(s.out) == count
    if name == "logsumexp":
        s.engine.zero(Type(type_.factors))
        s.engine.forget_shift(type_, dims) if not type_.shifted else s.engine.steady(type_)
        return FIXED
    gone = dims
    dims = [dim for dim in dims if shape[dim] != 1]
    if name not in ("sum", "mean", "nansum", "cumsum"):
        # Not linear: entries of different channels do not mix.
        for item in type_.factors:
            s.engine.partition.shatter(item.atoms)
    factors = s.engine.uniform(type_.factors, dims)
    entries = prod(shape[dim] for dim in dims)
    if name in ("std", "var", "var_mean", "std_mean"):
        s.engine.forget_shift(Type((), type_.shifts, type_.images), dims)
        degree = 1 if name.startswith("std") else 2
        spread_type = Type(tuple(factor.times(degree) for factor in factors))
        first = without(spread_type, gone, count, keep)
        if name.endswith("_mean"):
            # The mean does see the shift; it was made uniform or dropped for the first result only.
            s.engine.steady(type_)
            return [first, without(Type(tuple(factors)), gone, count, keep)]
        return first
    if name in ("linalg_vector_norm", "norm"):
        s.engine.steady(type_)
        return without(Type(tuple(factors)), gone, count, keep)
    shifts, images = _shifts_along(s, type_, name, dims, entries)
    result = Type(tuple(factors), tuple(shifts), tuple(images), type_.zero)
    return result if name == "cumsum" else without(result, gone, count, keep)


def _shifts_along(
    s: Step, type_: Type, name: str, dims: Sequence[int], entries: int
) -> tuple[list[Field], list[Image]]:
    """Return what is left of the shifts of a type when axes are reduced, and what is only known of it."""
    shifts: list[Field] = []
    images: list[Image] = []
    count = len(s.shape(s.arg(0)))
    scale = Fraction(entries) if name in ("sum", "nansum") else Fraction(1)
    for shift in type_.shifts:
        if name in ("sum", "mean") and shift.touches(dims) and not shift.virtual and shift.atoms.size <= 100_000:
            shifts.append(add_up(s, shift, dims, name == "mean", entries))
        elif shift.touches(dims) or name == "cumsum":
            images.append(
                Image(
                    s.engine.key(),
                    frozenset(shift.occupied - set(dims)) | (set(dims) if name == "cumsum" else set()),
                    distinct(shift.atoms),
                )
            )
            if name in ("amax", "amin", "max", "min", "median"):
                s.engine.forget_shift(Type((), (shift,)), dims)
        else:
            shifts.append(shift.times(scale))
    for image in type_.images:
        if image.varies & set(dims) or name == "cumsum":
            varies = image.varies if name == "cumsum" else image.varies - set(dims)
            images.append(
                Image(s.engine.key(), frozenset(varies | (set(dims) if name == "cumsum" else set())), image.atoms)
            )
            if name in ("amax", "amin", "max", "min", "median"):
                # Which entry is the largest depends on the place.
                images[-1] = replace(images[-1], varies=frozenset(range(count)) - set(dims))
        else:
            images.append(replace(image, weight=image.weight * scale))
    return shifts, images


def summed_product(s: Step, left: Any, right: Any, shape: Sequence[int]) -> Type:
    """Return (x · y) summed along axes: a contraction."""
    count = len(shape)
    dims = set(reduced_dims(s))
    sizes: dict[int, int] = dict(enumerate(shape))
    names = [tuple(d + count - len(s.shape(ref)) for d in range(len(s.shape(ref)))) for ref in (left, right)]
    # An axis of size one is broadcast: it gets a name of its own.
    labelled = []
    for ref, own in zip((left, right), names, strict=True):
        fixed = []
        for index, axis in enumerate(own):
            if s.shape(ref)[index] == 1 and shape[axis] != 1:
                sizes[max(sizes) + 1] = 1
                fixed.append(max(sizes))
            else:
                fixed.append(axis)
        labelled.append(tuple(fixed))
    remaining = tuple(axis for axis in range(count) if axis not in dims)
    result = contraction(s, left, right, OperandAxes(labelled[0], labelled[1], remaining, sizes))
    if len(s.out) == count and count:
        return Renumber(tuple(remaining)).type(result)
    return result


def add_up(s: Step, field: Field, dims: Sequence[int], mean: bool, entries: int) -> Field:
    """Return the sum or mean of a shift along axes it varies along: new atoms, with an equation that says so."""
    summed = [dim for dim in dims if dim in field.dims]
    remaining = [n for n, dim in enumerate(field.dims) if dim not in summed]
    lost = [n for n, dim in enumerate(field.dims) if dim in summed]
    array = field.atoms.transpose(remaining + lost).reshape((*tuple(field.atoms.shape[n] for n in remaining), -1))
    size = array.shape[-1]
    total = s.engine.shifts.fresh(array.shape[:-1])
    terms = [(Fraction(1), array[..., n]) for n in range(size)]
    s.engine.shifts.add([*terms, (Fraction(-size), total)], origin=s.engine.origin)
    weight = field.weight if mean else field.weight * entries
    return Field(tuple(field.dims[n] for n in remaining), total, weight)


@rule("prod")
def _prod(s: Step) -> Type:
    """Return a product along an axis: its charge is the sum of theirs, and nothing may be added to its factors."""
    shape = s.shape(s.arg(0))
    x = s.type(s.arg(0))
    if not shape:
        # A number is its own product.
        return x
    dims = [at(s.arg(1), len(shape))] if isinstance(s.arg(1), int) else list(range(len(shape)))
    if any(factor.virtual for factor in x.factors):
        return fix_all(s)
    s.engine.steady(x)
    factors = []
    for item in x.factors:
        s.engine.partition.shatter(item.atoms)
        times = prod(shape[dim] for dim in dims if dim not in item.dims)
        factors.append(_total(s, item, dims).times(times))
    # A product of zeros is zero, and one of no factors is one.
    zero = x.zero and prod(shape[dim] for dim in dims) > 0
    return without(Type(tuple(factors), zero=zero), dims, len(shape), len(s.out) == len(shape))


rule("cumprod")(fix_all)


@rule("cummax", "cummin")
def _running_extreme(s: Step) -> list[Known]:
    """Return the largest entries so far and where they are: nothing may depend on the place or mix."""
    x, count = s.type(s.arg(0)), len(s.out)
    s.engine.steady(x)
    for factor in x.factors:
        s.engine.partition.shatter(factor.atoms)
    dims = [at(s.arg(1, "dim"), count)] if count else []
    return [Type(tuple(s.engine.uniform(x.factors, dims)), zero=x.zero), FIXED]


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _fourier(s: Step) -> Known:
    """Return a Fourier transform along axes: linear, and every result is made of all entries along them."""
    x = s.type(s.arg(0))
    s.engine.steady(x)
    return Type(tuple(s.engine.uniform(x.factors, [at(dim, len(s.out)) for dim in s.arg(1, "dim")])), zero=x.zero)


def _total(s: Step, field: Field, dims: Sequence[int]) -> Field:
    """Return charges added up along axes."""
    remaining = [n for n, dim in enumerate(field.dims) if dim not in dims]
    lost = [n for n, dim in enumerate(field.dims) if dim in dims]
    if not lost:
        return field
    array = field.atoms.transpose(remaining + lost).reshape((*tuple(field.atoms.shape[n] for n in remaining), -1))
    total = s.engine.alone([field.dims[n] for n in remaining], [field.atoms.shape[n] for n in remaining])
    terms = [(Fraction(1), array[..., n]) for n in range(array.shape[-1])]
    s.engine.charges.add([*terms, (Fraction(-1), total.atoms.reshape(array.shape[:-1]))], origin=s.engine.origin)
    return total.times(field.weight)
