"""The table of operators: what each allows its inputs and outputs to do, one entry per ATen operation.

An entry is a function from a `Step` (the operation with the types of its inputs) to the types of its results. Most entries
are one of a few families: moves of entries, sums, products, contractions, homogeneous functions f(s·x) = s^k f(x), functions
that fix their input, normalisations. An operation without an entry fixes all it touches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conserved.inference.capture import Operation, Program, Ref
from conserved.inference.engine import ENTRIES, Engine, View, _cancelled, renumbered, scaled
from conserved.inference.moves import Move, Regroup, Renumber, Take, broadcast, permute
from conserved.inference.types import FIXED, ZERO, Field, Image, Type, Virtual, distinct, tidy, without_constant_axes

Known = Type | View


@dataclass(slots=True)
class Step:
    """One operation with what is known of its inputs."""

    engine: Engine
    program: Program
    operation: Operation
    known: dict[int, Known]
    deferred: dict[int, tuple[Any, Any]]
    """Products that are only summed up: their operands."""

    def shape(self, ref: Any) -> tuple[int, ...]:
        return self.program.values[ref.value].shape if isinstance(ref, Ref) else ()

    def constant(self, ref: Any) -> Tensor | None:
        return self.program.values[ref.value].constant if isinstance(ref, Ref) else None

    def floating(self, ref: Any) -> bool:
        return isinstance(ref, Ref) and self.program.values[ref.value].dtype.is_floating_point

    def raw(self, ref: Any) -> Known:
        """The type, or a parameter that was not used yet."""
        if not isinstance(ref, Ref):
            return ZERO if isinstance(ref, int | float) and ref == 0 else FIXED
        found = self.known.get(ref.value, FIXED)
        if isinstance(found, View):
            return self.engine.known(found) or found
        return found

    def type(self, ref: Any, *, entries: bool = True) -> Type:
        """The type; a parameter that is used for the first time here may move entry by entry."""
        found = self.raw(ref)
        if isinstance(found, View):
            dims = sorted({dim for one in found.coordinates for dim in one.dims})
            sizes = [self.shape(ref)[dim] for dim in dims]
            virtual, counts = virtual_axes(found)
            if prod(sizes) * prod(counts) <= ENTRIES:
                fields = [self.engine.fresh(dims, sizes, virtual, counts)]
            else:
                fields = [self.engine.fresh((dim,), (size,)) for dim, size in zip(dims, sizes, strict=True)]
            found = self.engine.first_use(found, fields, role="gain", entries=entries)
        return found

    def arg(self, place: int, name: str = "", default: Any = None) -> Any:
        args = self.operation.args
        return args[place] if place < len(args) else self.operation.kwargs.get(name, default)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.program.values[self.operation.results[0]].shape


Rule = Callable[[Step], Sequence[Known] | Known]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register an entry for these operations (names without overload, such as "aten::mul")."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name if "::" in name else f"aten::{name}"] = function
        return function

    return register


def virtual_axes(view: View) -> tuple[list[Virtual], list[int]]:
    """The looked-up axes of a part of a parameter."""
    found: list[Virtual] = []
    counts: list[int] = []
    for one in view.coordinates:
        for n, axis in enumerate(one.virtual):
            if not any(axis.same(mine) for mine in found):
                found.append(axis)
                counts.append(one.atoms.shape[n])
    return found, counts


def moved(known: Known, move: Move) -> Known:
    """A type or a part of a parameter after a move."""
    return known.moved(move) if isinstance(known, View) else move.type(known)


def at(dim: int, count: int) -> int:
    """An axis counted from the front."""
    return dim + count if dim < 0 else dim


def wide(shape: Sequence[int]) -> set[int]:
    """Axes with more than one entry."""
    return {dim for dim, size in enumerate(shape) if size != 1}


# --- entries in new places ---------------------------------------------------------------------------------------------


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_copy", "_reshape_copy")
def reshape(s: Step) -> Known:
    x = s.arg(0)
    old, new = s.shape(x), s.out
    if prod(old) == 0 or (len(s.operation.args) > 1 and not isinstance(s.arg(1), list | tuple)):
        return fix_all(s)
    return moved(s.raw(x), Regroup(old, new))


@rule("permute", "permute_copy")
def _permute(s: Step) -> Known:
    count = len(s.shape(s.arg(0)))
    return moved(s.raw(s.arg(0)), permute([at(d, count) for d in s.arg(1)]))


@rule("transpose", "t", "swapaxes", "numpy_T", "mT", "adjoint")
def _transpose(s: Step) -> Known:
    count = len(s.shape(s.arg(0)))
    if count < 2:
        return s.raw(s.arg(0))
    a, b = at(s.arg(1, default=0), count), at(s.arg(2, default=1), count)
    order = list(range(count))
    order[a], order[b] = order[b], order[a]
    return moved(s.raw(s.arg(0)), permute(order))


@rule("unsqueeze")
def _unsqueeze(s: Step) -> Known:
    count = len(s.shape(s.arg(0)))
    dim = at(s.arg(1), count + 1)
    return moved(s.raw(s.arg(0)), Renumber(tuple(d + (d >= dim) for d in range(count))))


@rule("squeeze")
def _squeeze(s: Step) -> Known:
    shape = s.shape(s.arg(0))
    dims = s.arg(1, "dim")
    given = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {at(d, len(shape)) for d in given if shape and shape[at(d, len(shape))] == 1}
    kept = [d for d in range(len(shape)) if d not in gone]
    return moved(s.raw(s.arg(0)), Renumber(tuple(kept.index(d) if d in kept else None for d in range(len(shape)))))


@rule("expand", "expand_copy", "broadcast_to")
def _expand(s: Step) -> Known:
    return moved(s.raw(s.arg(0)), broadcast(s.shape(s.arg(0)), len(s.out)))


@rule("alias", "clone", "contiguous", "lift_fresh", "lift", "_to_copy", "to", "resolve_conj", "resolve_neg", "view_as",
      "dropout", "real", "alias_copy", "_conj", "positive", "lift_fresh_copy")
def same(s: Step) -> Known:
    if not s.program.values[s.operation.results[0]].dtype.is_floating_point:
        return FIXED
    return s.raw(s.arg(0))


@rule("slice", "slice_copy")
def _slice(s: Step) -> Known:
    x = s.arg(0)
    shape = s.shape(x)
    dim = at(s.arg(1, default=0), len(shape))
    index = np.arange(shape[dim])[slice(s.arg(2), s.arg(3), s.arg(4, default=1))]
    return taken(s, x, dim, index)


@rule("select", "select_copy")
def _select(s: Step) -> Known:
    x = s.arg(0)
    dim = at(s.arg(1), len(s.shape(x)))
    return taken(s, x, dim, at(s.arg(2), s.shape(x)[dim]))


def taken(s: Step, x: Any, dim: int, index: Any) -> Known:
    """Some entries along an axis: those that are taken do not mix with those that are not."""
    size = s.shape(x)[dim]
    known = s.raw(x)
    whole = not isinstance(index, int) and len(index) == size and bool((np.asarray(index) == np.arange(size)).all())
    if isinstance(known, Type) and not whole:
        chosen = np.zeros(size, dtype=np.int64)
        chosen[index] = 1
        for one in known.factors:
            if dim in one.dims:
                axis = len(one.virtual) + one.dims.index(dim)
                keys = chosen.reshape(tuple(-1 if n == axis else 1 for n in range(one.atoms.ndim)))
                s.engine.partition.split(one.atoms, np.broadcast_to(keys, one.atoms.shape), batch=False)
    return moved(known, Take(dim, index))


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "split_copy", "split_with_sizes_copy", "chunk")
def _split(s: Step) -> list[Known]:
    x = s.arg(0)
    shape = s.shape(x)
    dim = at(s.arg(2, "dim", 0), len(shape))
    found, start = [], 0
    for number in s.operation.results:
        size = s.program.values[number].shape[dim]
        found.append(taken(s, x, dim, np.arange(start, start + size)))
        start += size
    return found


@rule("unbind", "unbind_copy")
def _unbind(s: Step) -> list[Known]:
    x = s.arg(0)
    dim = at(s.arg(1, "dim", 0), len(s.shape(x)))
    return [taken(s, x, dim, index) for index in range(len(s.operation.results))]


@rule("flip")
def _flip(s: Step) -> Known:
    x = s.arg(0)
    shape = s.shape(x)
    known = s.raw(x)
    for dim in s.arg(1):
        known = moved(known, Take(at(dim, len(shape)), np.arange(shape[dim])[::-1].copy()))
    return known


@rule("roll")
def _roll(s: Step) -> Known:
    x = s.arg(0)
    shape, shifts, dims = s.shape(x), s.arg(1), s.arg(2, "dims", [])
    if not dims:
        return fix_all(s)
    known = s.raw(x)
    for shift, dim in zip(shifts, dims, strict=True):
        known = moved(known, Take(at(dim, len(shape)), np.roll(np.arange(shape[dim]), shift)))
    return known


@rule("repeat", "tile")
def _repeat(s: Step) -> Known:
    x = s.arg(0)
    known = moved(s.raw(x), broadcast(s.shape(x), len(s.out)))
    shape = (1,) * (len(s.out) - len(s.shape(x))) + s.shape(x)
    for dim, (size, total) in enumerate(zip(shape, s.out, strict=True)):
        if size != total and size > 1:
            known = moved(known, Take(dim, np.tile(np.arange(size), total // size)))
    return known


@rule("repeat_interleave")
def _repeat_interleave(s: Step) -> Known:
    return fix_all(s)


@rule("diagonal", "as_strided", "unfold", "conserved::read")
def _strided(s: Step) -> Known:
    """Any other way to read entries: through the position of every entry of the result in the source."""
    x = s.arg(0)
    shape = s.shape(x)
    if prod(shape) > ENTRIES or prod(s.out) > ENTRIES:
        return fix_all(s)
    if s.operation.name.startswith("conserved::read"):
        positions = _positions(s.arg(1), s.arg(2))
    elif "as_strided" in s.operation.name:
        return fix_all(s)
    else:
        source = torch.arange(prod(shape)).reshape(shape)
        function = getattr(source, "diagonal" if "diagonal" in s.operation.name else "unfold")
        positions = function(*s.operation.args[1:], **s.operation.kwargs).numpy()
    if positions is None:
        return fix_all(s)
    return read_at(s, s.type(x), shape, positions)


def _positions(base: Any, view: Any) -> np.ndarray | None:
    """For every entry of a view its position among the entries of its base; None if the base does not hold it."""
    (shape, strides, offset), (target, steps, start) = base, view
    if len(strides) != len(shape) or len(steps) != len(target):
        return None

    def places(sizes: Sequence[int], jumps: Sequence[int], first: int) -> np.ndarray:
        grid = np.indices(sizes) if sizes else np.zeros((0, 1), dtype=np.int64)
        found = np.full(tuple(sizes), first, dtype=np.int64)
        for axis, jump in enumerate(jumps):
            found = found + grid[axis] * jump
        return found

    held = places(shape, strides, offset).reshape(-1)
    order = np.argsort(held)
    wanted = places(target, steps, start)
    slot = np.searchsorted(held[order], wanted.reshape(-1))
    if (slot >= held.size).any() or (held[order][slot] != wanted.reshape(-1)).any():
        return None
    return order[slot].reshape(wanted.shape)


def read_at(s: Step, source: Type, shape: Sequence[int], positions: np.ndarray) -> Type:
    """The type of a tensor whose entries are those of another one at given positions."""
    index = np.unravel_index(positions, tuple(shape)) if shape else ()
    dims = tuple(range(positions.ndim))

    def field(one: Field) -> Field:
        array = one.atoms[tuple(index[dim] for dim in one.dims)] if one.dims else one.atoms
        if not one.dims:
            return one
        found_dims, found = tidy(dims, array)
        return Field(found_dims, found, one.weight)

    if any(one.virtual for one in (*source.factors, *source.shifts)):
        s.engine.zero(source)
        return FIXED
    everything = frozenset(dims)
    images = tuple(replace(one, varies=everything if one.varies else one.varies) for one in source.images)
    return Type(tuple(map(field, source.factors)), tuple(map(field, source.shifts)), images, source.zero)


@rule("conserved::write")
def _write(s: Step) -> Known:
    """Part of a tensor was written. It keeps its type if what was written has the type that was there before."""
    base, value = s.arg(0), s.arg(2)
    shape = s.shape(base)
    before, after = s.type(base), s.type(value)
    if prod(shape) > ENTRIES:
        positions = None
    else:
        positions = _positions(s.arg(1), s.arg(3))
    if positions is None:
        s.engine.zero(before)
        s.engine.zero(after)
        return FIXED
    if before.fixed and not before.zero and after.fixed:
        return FIXED
    if any(one.virtual for type_ in (before, after) for one in (*type_.factors, *type_.shifts)):
        before, after = unvirtual(s.engine, before), unvirtual(s.engine, after)
    if before.zero:
        factors = tuple(placed(s.engine, one, shape, positions) for one in after.factors)
    else:
        there = read_at(s, before, shape, positions)
        if not after.zero:
            s.engine.equate(there.factors, after.factors)
        factors = before.factors
    shifts = written_shift(s.engine, before.shifts, after.shifts, shape, positions)
    everywhere = frozenset(wide(shape))
    images = tuple(
        Image(s.engine.key(), everywhere, one.atoms) for type_ in (before, after) for one in type_.images
    )
    return Type(factors, shifts, images, before.zero and after.zero)


def over(one: Field, shape: Sequence[int]) -> np.ndarray:
    """The atoms of a field over all axes of a tensor."""
    return np.broadcast_to(one.atoms[tuple(slice(None) if d in one.dims else None for d in range(len(shape)))], tuple(shape))


def placed(engine: Engine, one: Field, shape: Sequence[int], positions: np.ndarray) -> Field:
    """Zeros into which something was written: the rest is zero and may move with anything."""
    full = engine.alone(tuple(range(len(shape))), shape).atoms.reshape(tuple(shape)).copy()
    full.reshape(-1)[positions.reshape(-1)] = over(one, positions.shape).reshape(-1)
    dims, full = tidy(tuple(range(len(shape))), full)
    dims, full = without_constant_axes(dims, full)
    return Field(dims, full, one.weight)


def written_shift(
    engine: Engine, before: Sequence[Field], after: Sequence[Field], shape: Sequence[int], positions: np.ndarray
) -> tuple[Field, ...]:
    """The shift of a tensor part of which was written: that of what was written there, the former one elsewhere."""
    if not before and not after:
        return ()
    full = total_shift(engine, before, shape).copy()
    full.reshape(-1)[positions.reshape(-1)] = total_shift(engine, after, positions.shape).reshape(-1)
    dims, full = tidy(tuple(range(len(shape))), full)
    return (Field(*without_constant_axes(dims, full)),)


def total_shift(engine: Engine, shifts: Sequence[Field], shape: Sequence[int]) -> np.ndarray:
    """One atom for the shift of every entry."""
    if not shifts:
        return np.zeros(tuple(shape), dtype=np.int64)
    if len(shifts) == 1 and shifts[0].weight == 1:
        return over(shifts[0], shape)
    atoms = engine.shifts.fresh(shape)
    terms = [(one.weight, over(one, shape)) for one in shifts]
    engine.shifts.add([*terms, (Fraction(-1), atoms)], origin=engine.origin)
    return atoms


@rule("cat", "concat", "concatenate")
def _cat(s: Step) -> Known:
    parts = [ref for ref in s.arg(0) if prod(s.shape(ref)) or len(s.shape(ref)) > 1]
    dim = at(s.arg(1, "dim", 0), len(s.out))
    return joined(s, parts, [s.shape(ref)[dim] for ref in parts], dim, [adopted_later(s, ref) for ref in parts])


def adopted_later(s: Step, ref: Any) -> Type:
    return s.type(ref)


@rule("stack")
def _stack(s: Step) -> Known:
    parts = s.arg(0)
    dim = at(s.arg(1, "dim", 0), len(s.out))
    count = len(s.out) - 1
    move = Renumber(tuple(d + (d >= dim) for d in range(count)))
    return joined(s, parts, [1] * len(parts), dim, [move.type(s.type(ref)) for ref in parts])


def joined(s: Step, parts: Sequence[Any], sizes: Sequence[int], dim: int, types: Sequence[Type]) -> Type:
    """Tensors side by side along `dim`."""
    engine = s.engine
    types = [unvirtual(engine, one) for one in types]
    if len(types) == 1:
        return types[0]

    def side_by_side(lists: list[Sequence[Field]], wild: list[bool], shift: bool) -> list[Field]:
        ordered = [sorted(one, key=lambda f: (-len(f.dims), f.dims)) for one in lists]
        found = []
        for rank in range(max((len(one) for one in ordered), default=0)):
            row = [one[rank] if rank < len(one) else None for one in ordered]
            present = [one for one in row if one is not None]
            first = present[0]
            if len(present) == len(row) and all(
                dim not in one.dims
                and one.dims == first.dims
                and one.weight == first.weight
                and np.array_equal(one.atoms, first.atoms)
                for one in present
            ):
                found.append(first)
                continue
            weight = first.weight
            dims = sorted({d for one in present for d in one.dims} | {dim})
            pieces = []
            for one, size, free in zip(row, sizes, wild, strict=True):
                shape = tuple(size if d == dim else s.out[d] for d in dims)
                if one is None:
                    if free and not shift:
                        pieces.append(engine.alone(dims, shape).atoms.reshape(shape))
                    else:
                        pieces.append(np.zeros(shape, dtype=np.int64))
                    continue
                index = tuple(slice(None) if d in one.dims else None for d in dims)
                array = np.broadcast_to(one.atoms[index], shape)
                if one.weight != weight:
                    system = engine.shifts if shift else engine.charges
                    if shift:
                        other = system.fresh(one.atoms.shape)
                    else:
                        other = engine.alone(range(one.atoms.ndim), one.atoms.shape).atoms.reshape(one.atoms.shape)
                    system.add([(weight, other), (-one.weight, one.atoms)], origin=engine.origin)
                    if not shift:
                        engine.partition.shatter(one.atoms)
                    array = np.broadcast_to(other[index], shape)
                pieces.append(array)
            whole = np.concatenate(pieces, dims.index(dim))
            found_dims, whole = tidy(dims, whole)
            found.append(Field(found_dims, whole, weight))
        return found

    wild = [one.zero for one in types]
    factors = side_by_side([one.factors for one in types], wild, False)
    shifts = side_by_side([one.shifts for one in types], wild, True)
    images = tuple(replace(one, key=engine.key(), varies=one.varies | {dim}) for type_ in types for one in type_.images)
    return Type(tuple(factors), tuple(shifts), images, all(wild))


def unvirtual(engine: Engine, type_: Type) -> Type:
    """A type whose charges do not depend on what an index tensor looks up."""
    if not any(one.virtual for one in (*type_.factors, *type_.shifts)):
        return type_
    axes = [axis for one in type_.factors for axis in one.virtual]
    factors = engine.uniform(type_.factors, (), axes)
    images = list(type_.images)
    shifts = []
    for one in type_.shifts:
        if one.virtual:
            images.append(Image(engine.key(), frozenset(one.occupied), distinct(one.atoms)))
        else:
            shifts.append(one)
    return Type(tuple(factors), tuple(shifts), tuple(images), type_.zero)


@rule("constant_pad_nd", "pad")
def _pad(s: Step) -> Known:
    value = s.arg(2, "value", 0)
    x = s.arg(0)
    if value:
        return fix_all(s)
    type_ = s.type(x)
    widths = s.arg(1)
    count = len(s.out)
    padded = [count - 1 - n // 2 for n in range(len(widths)) if widths[n]]
    s.engine.steady(Type((), type_.shifts, type_.images)) if type_.shifted else None
    factors = s.engine.uniform(type_.factors, padded) if any(w > 0 for w in widths) else type_.factors
    if any(w < 0 for w in widths):
        factors = s.engine.uniform(type_.factors, padded)
    return Type(tuple(factors), zero=type_.zero)


# --- sums and choices --------------------------------------------------------------------------------------------------


def aligned(s: Step, ref: Any, dims: int) -> Type:
    """The type of an operand over the axes of the result it is broadcast to."""
    shape = s.shape(ref)
    return broadcast(shape, dims).type(s.type(ref))


def sum_of(s: Step, left: Any, right: Any, sign: Fraction | int | float = 1) -> Type:
    """left + sign · right: both must move alike; a parameter that is added moves as what it is added to."""
    count = len(s.out)
    a, b = s.raw(left), s.raw(right)
    if isinstance(a, View) and isinstance(b, View):
        a = s.type(left)
    if isinstance(b, View):
        first = broadcast(s.shape(left), count).type(a) if isinstance(a, Type) else FIXED
        b = adopt(s, right, b, first, count)
    elif isinstance(a, View):
        a = adopt(s, left, a, broadcast(s.shape(right), count).type(b), count)
    x = broadcast(s.shape(left), count).type(a) if isinstance(left, Ref) else a
    y = broadcast(s.shape(right), count).type(b) if isinstance(right, Ref) else b
    assert isinstance(x, Type)
    assert isinstance(y, Type)
    y = scaled(s.engine, y, float(sign))
    return added(s.engine, x, y)


def added(engine: Engine, x: Type, y: Type) -> Type:
    """The type of a sum."""
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
    for one in (*x.images, *y.images):
        for place, other in enumerate(images):
            if other.key == one.key and other.varies == one.varies:
                weight = other.weight + one.weight
                if weight:
                    images[place] = replace(other, weight=weight)
                else:
                    del images[place]
                break
        else:
            images.append(one)
    return Type(tuple(factors), engine.net([*x.shifts, *y.shifts]), tuple(images), x.zero and y.zero)


def adopt(s: Step, ref: Any, view: View, like: Type, count: int) -> Type:
    """First use of a parameter in a sum: it moves as the other operand does."""
    offset = count - len(s.shape(ref))
    mine = {dim + offset for one in view.coordinates for dim in one.dims}
    fields = []
    foreign = sorted({dim for one in like.factors for dim in one.occupied} - mine)
    factors = s.engine.uniform(like.factors, foreign) if foreign else like.factors
    for one in factors:
        if one.virtual:
            continue
        fields.append(Field(tuple(dim - offset for dim in one.dims), one.atoms, one.weight))
    return s.engine.first_use(view, fields, role="bias", entries=True)


def number(ref: Any, s: Step) -> float | None:
    """The value of an operand that is one known number."""
    if isinstance(ref, int | float) and not isinstance(ref, bool):
        return float(ref)
    constant = s.constant(ref)
    if constant is not None and constant.numel() == 1 and constant.dtype != torch.bool and not constant.is_complex():
        return float(constant)
    return None


@rule("add", "add_")
def _add(s: Step) -> Known:
    return plus(s, s.arg(0), s.arg(1), s.arg(2, "alpha", 1))


@rule("sub", "sub_")
def _sub(s: Step) -> Known:
    return plus(s, s.arg(0), s.arg(1), -s.arg(2, "alpha", 1))


@rule("rsub")
def _rsub(s: Step) -> Known:
    x = s.type(s.arg(0))
    s.engine.equate(x.factors, ())
    return scaled(s.engine, Type((), x.shifts, x.images), -float(s.arg(2, "alpha", 1)))


EPSILON = 1e-2
"""A positive number up to this size that is added to a sum of squares is taken for a normalisation's ε."""


def plus(s: Step, left: Any, right: Any, alpha: int | float) -> Known:
    value = number(right, s)
    if value is None and number(left, s) is not None and isinstance(right, Ref) and number(right, s) is None and alpha == 1:
        left, right, value = right, left, number(left, s)
    if value is not None and (not isinstance(right, Ref) or prod(s.shape(right)) == 1):
        known = s.raw(left)
        if value == 0:
            return known
        if isinstance(known, View):
            return replace(known, offset=known.offset + alpha * value) if known.scale == 1 else sum_of(s, left, right, alpha)
        squares = any(one.weight.denominator == 1 and one.weight.numerator % 2 == 0 for one in known.factors)
        if known.factors and 0 < alpha * value <= EPSILON and (squares or norm_like(s, left)):
            s.engine.equate(known.factors, (), soft=alpha * value)
            return known
        s.engine.equate(known.factors, ())
        return Type((), known.shifts, known.images)
    return sum_of(s, left, right, alpha)


def norm_like(s: Step, ref: Any) -> bool:
    """Whether a value is a norm or a root of a sum of squares, so that a small number added to it is an ε."""
    maker = s.program.maker(ref.value)
    while maker is not None and base_name(maker.name) in ("aten::clone", "aten::_to_copy", "aten::expand", "aten::view"):
        maker = s.program.maker(maker.inputs()[0])
    return maker is not None and base_name(maker.name) in (
        "aten::sqrt", "aten::linalg_vector_norm", "aten::norm", "aten::std", "aten::var", "aten::abs",
    )


def base_name(name: str) -> str:
    """The name of an operation without its overload and without the mark of writing in place."""
    stem = name.rsplit(".", 1)[0]
    return stem[:-1] if stem.endswith("_") and not stem.endswith("__") else stem


@rule("where")
def _where(s: Step) -> Known:
    if len(s.operation.args) < 3:
        return FIXED
    return chosen(s, s.arg(0), s.arg(1), s.arg(2))


def chosen(s: Step, condition: Any, left: Any, right: Any) -> Type:
    """Entry by entry one of two tensors: entries between which the condition may differ do not mix."""
    count = len(s.out)
    varies = {dim + count - len(s.shape(condition)) for dim in wide(s.shape(condition))}
    for ref in (left, right):
        if isinstance(ref, Ref):
            s.engine.split_by(aligned(s, ref, count).factors, varies, batch=False)
    a, b = neutral(s, left), neutral(s, right)
    x, y = aligned(s, left, count), aligned(s, right, count)
    if a is not None and b is not None:
        return FIXED
    if a is not None or b is not None:
        kept, other = (y, a) if a is not None else (x, b)
        if other == "infinite":
            return kept
        if other == "zero":
            return Type(kept.factors, (), s.engine.imaged(kept, range(count)), kept.zero)
        s.engine.equate(kept.factors, ())
        return Type((), (), s.engine.imaged(kept, range(count)))
    result = added(s.engine, Type(x.factors, zero=x.zero), Type(y.factors, zero=y.zero))
    images = s.engine.imaged(x, range(count)) + s.engine.imaged(y, range(count))
    return Type(result.factors, (), images, result.zero)


def neutral(s: Step, ref: Any) -> str | None:
    """What a constant operand is: "infinite" (not moved by scales and shifts), "zero" (not by scales), or "fixed"."""
    if not isinstance(ref, Ref):
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


@rule("masked_fill", "masked_fill_")
def _masked_fill(s: Step) -> Known:
    return chosen(s, s.arg(1), s.arg(0), s.arg(2))


@rule("maximum", "minimum", "fmax", "fmin")
def _maximum(s: Step) -> Known:
    longer = max((s.arg(0), s.arg(1)), key=lambda ref: len(s.shape(ref)))
    result = chosen(s, longer, s.arg(0), s.arg(1))
    s.engine.split_by(result.factors, range(len(s.out)), batch=False)
    return result


@rule("lerp")
def _lerp(s: Step) -> Known:
    return fix_all(s)


@rule("tril", "triu")
def _tril(s: Step) -> Known:
    x = s.type(s.arg(0))
    s.engine.split_by(x.factors, range(len(s.out)), batch=False)
    return Type(x.factors, (), s.engine.imaged(x, wide(s.out)), x.zero)


# --- products ----------------------------------------------------------------------------------------------------------


@rule("neg", "neg_")
def _neg(s: Step) -> Known:
    return scaled(s.engine, s.type(s.arg(0)), -1.0)


@rule("mul", "mul_", "div", "div_", "true_divide", "multiply", "divide")
def _mul(s: Step) -> Known:
    divides = "div" in base_name(s.operation.name)
    left, right = s.arg(0), s.arg(1)
    if divides and s.arg(2, "rounding_mode") is not None:
        return FIXED
    return product(s, left, right, divides)


def product(s: Step, left: Any, right: Any, divides: bool = False) -> Known:
    for one, other, inverse in ((right, left, divides), (left, right, False)):
        value = number(one, s)
        if value is not None and (not isinstance(one, Ref) or prod(s.shape(one)) == 1) and not (divides and one is left):
            known = s.raw(other)
            factor = 1 / value if inverse and value else value
            if value == 0:
                return ZERO if not inverse else fix_all(s)
            if isinstance(known, View):
                return replace(known, scale=known.scale * factor) if known.offset == 0 else scaled(s.engine, s.type(other), factor)
            return moved(scaled(s.engine, known, factor), broadcast(s.shape(other), len(s.out)))
    count = len(s.out)
    if same_value(s, left, right):
        if divides:
            return FIXED
        return power(s, aligned(s, left, count), Fraction(2))
    x, y = aligned(s, left, count), aligned(s, right, count)
    varies = tuple(
        {dim + count - len(s.shape(ref)) for dim in wide(s.shape(ref))} for ref in (left, right)
    )
    if divides:
        y = Type(tuple(one.times(-1) for one in y.factors), y.shifts, y.images)
    return s.engine.multiply(x, y, (varies[0], varies[1]))


def same_value(s: Step, left: Any, right: Any) -> bool:
    """Whether two operands are one value, so that their product is a square and their quotient one."""
    return isinstance(left, Ref) and isinstance(right, Ref) and origin_of(s, left) == origin_of(s, right)


def origin_of(s: Step, ref: Ref) -> int:
    """The value that copies, reshapings without new axes and sums over one entry lead back to."""
    value = ref.value
    while True:
        maker = s.program.maker(value)
        if maker is None or base_name(maker.name) not in _COPIES:
            return value
        source = maker.inputs()[0]
        if prod(s.program.values[source].shape) != prod(s.program.values[value].shape):
            return value
        if [d for d in s.program.values[source].shape if d != 1] != [d for d in s.program.values[value].shape if d != 1]:
            return value
        value = source


_COPIES = {f"aten::{name}" for name in ("clone", "_to_copy", "view", "_unsafe_view", "unsqueeze", "squeeze", "sum", "alias", "expand", "amax")}


@rule("addcmul", "addcdiv", "addcmul_", "addcdiv_")
def _addcmul(s: Step) -> Known:
    inner = product(s, s.arg(1), s.arg(2), "div" in s.operation.name)
    assert isinstance(inner, Type)
    base = aligned(s, s.arg(0), len(s.out))
    return added(s.engine, base, scaled(s.engine, inner, float(s.operation.kwargs.get("value", 1))))


def power(s: Step, x: Type, exponent: Fraction) -> Type:
    """x^k entry by entry: k times the charge, and no shift."""
    for one in x.factors:
        s.engine.partition.shatter(one.atoms)
        s.engine.passed.setdefault("homogeneous", []).append(one.atoms)
    s.engine.steady(x)
    return Type(tuple(one.times(exponent) for one in x.factors) if exponent else (), zero=x.zero and exponent > 0)


HOMOGENEOUS = {
    "relu": 1, "relu_": 1, "abs": 1, "abs_": 1, "sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": -1,
    "square": 2, "leaky_relu": 1, "leaky_relu_": 1, "prelu": 1, "_prelu_kernel": 1, "rrelu_with_noise": 1, "sgn": 0, "sign": 0,
    "rsqrt_": Fraction(-1, 2), "sqrt_": Fraction(1, 2), "reciprocal_": -1, "square_": 2,
}
"""f(s·x) = s^k f(x) for positive s: the exponent k."""


def _homogeneous(exponent: Fraction) -> Rule:
    def apply(s: Step) -> Known:
        for ref in s.operation.args[1:]:
            if isinstance(ref, Ref) and s.floating(ref):
                s.engine.zero(s.type(ref))
        return power(s, s.type(s.arg(0)), exponent)

    return apply


for _name, _degree in HOMOGENEOUS.items():
    rule(_name)(_homogeneous(Fraction(_degree)))


@rule("pow", "pow_", "float_power")
def _pow(s: Step) -> Known:
    exponent = number(s.arg(1), s)
    if exponent is None or not isinstance(s.arg(0), Ref):
        return fix_all(s)
    fraction = Fraction(exponent).limit_denominator(64)
    return power(s, s.type(s.arg(0)), fraction) if float(fraction) == exponent else fix_all(s)


@rule("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "threshold", "threshold_", "hardtanh", "hardtanh_")
def _clamp(s: Step) -> Known:
    name = base_name(s.operation.name).removeprefix("aten::")
    if name.startswith("hardtanh"):
        bounds = [s.arg(1, default=-1.0), s.arg(2, default=1.0)]
    elif name.startswith("clamp_max"):
        bounds = [s.arg(1)]
    elif name.startswith("clamp_min"):
        bounds = [s.arg(1)]
    else:
        bounds = [s.arg(1, "min"), s.arg(2, "max")]
    values = [number(one, s) for one in bounds if one is not None]
    x = s.type(s.arg(0))
    if all(value == 0 for value in values):
        return power(s, x, Fraction(1))
    tiny = [value for value in values if value is not None and 0 < value <= EPSILON]
    if len(tiny) == len(values) == 1 and "max" not in name and x.factors and (
        norm_like(s, s.arg(0)) or any(one.weight.numerator % 2 == 0 for one in x.factors)
    ):
        s.engine.equate(x.factors, (), soft=tiny[0])
        return power(s, x, Fraction(1))
    return fix_all(s)


def fix_all(s: Step) -> Type:
    """All that goes in is fixed, and so is what comes out."""
    for number_ in s.operation.inputs():
        if s.program.values[number_].dtype.is_floating_point or s.program.values[number_].dtype.is_complex:
            s.engine.zero(s.type(Ref(number_)))
    return FIXED


FIXING = """exp exp_ expm1 log log2 log10 log1p gelu gelu_ silu silu_ sigmoid sigmoid_ tanh tanh_ softplus mish mish_ elu elu_ celu
selu erf erfc erfinv sin cos tan asin acos atan atan2 sinh cosh asinh acosh hardswish hardswish_ hardsigmoid hardsigmoid_
log_sigmoid_forward logit glu_jvp softshrink hardshrink digamma lgamma round floor ceil trunc frac remainder fmod
binary_cross_entropy binary_cross_entropy_with_logits mse_loss smooth_l1_loss huber_loss kl_div xlogy hypot exp2 sinc nan_to_num
l1_loss nll_loss_forward nll_loss2d_forward polar complex angle""".split()
rule(*FIXING)(fix_all)


@rule("view_as_complex")
def _view_as_complex(s: Step) -> Known:
    """Pairs of numbers as complex ones: both move alike."""
    x = s.type(s.arg(0))
    last = len(s.shape(s.arg(0))) - 1
    factors = s.engine.uniform(x.factors, [last])
    images = s.engine.imaged(Type((), x.shifts, x.images), (), ())
    found = Type(tuple(factors), (), tuple(replace(one, varies=one.varies - {last}) for one in images), x.zero)
    return found


@rule("view_as_real")
def _view_as_real(s: Step) -> Known:
    x = s.type(s.arg(0))
    return Type(x.factors, (), tuple(replace(one, varies=one.varies | {len(s.out) - 1}) for one in x.images), x.zero)


@rule("glu")
def _glu(s: Step) -> Known:
    """a · σ(b): the halves along an axis; the second is fixed."""
    x = s.arg(0)
    shape = s.shape(x)
    dim = at(s.arg(1, "dim", -1), len(shape))
    half = shape[dim] // 2
    first, second = (taken(s, x, dim, np.arange(start, start + half)) for start in (0, half))
    assert isinstance(first, Type)
    assert isinstance(second, Type)
    s.engine.zero(second)
    return s.engine.multiply(first, FIXED, (wide(s.out), wide(s.out)))


# --- contractions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axes:
    """How the axes of two operands meet: names for all of them, and what becomes of each."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    sizes: dict[int, int]

    @property
    def summed(self) -> set[int]:
        return (set(self.left) | set(self.right)) - set(self.result)

    @property
    def batch(self) -> set[int]:
        return {axis for axis in set(self.left) & set(self.right) & set(self.result) if self.sizes[axis] != 1}


def contraction(s: Step, left: Any, right: Any, axes: Axes) -> Type:
    """Σ over the axes that are not in the result."""
    engine = s.engine
    x, y = s.raw(left), s.raw(right)
    if any(isinstance(one, Type) and one.zero for one in (x, y)):
        return ZERO
    count = max(axes.sizes) + 1
    to_left = Renumber(axes.left)
    to_right = Renumber(axes.right)
    mine = set(axes.left) - set(axes.right)
    other = set(axes.right) - set(axes.left)
    if isinstance(x, View) and isinstance(y, View):
        x = first_contraction(engine, x, to_left, FIXED, axes, fresh_sum=True)
    if isinstance(x, View):
        assert isinstance(y, Type)
        x = first_contraction(engine, x, to_left, to_right.type(y), axes)
    elif isinstance(y, View):
        y = first_contraction(engine, y, to_right, to_left.type(x), axes)
    assert isinstance(x, Type)
    assert isinstance(y, Type)
    result = engine.contract(
        to_left.type(x),
        to_right.type(y),
        summed=axes.summed,
        batch=axes.batch,
        mine={axis for axis in mine if axes.sizes[axis] != 1},
        other={axis for axis in other if axes.sizes[axis] != 1},
    )
    return renumbered(result, {axis: place for place, axis in enumerate(axes.result)}, count)


def first_contraction(engine: Engine, view: View, place: Renumber, partner: Type, axes: Axes, *, fresh_sum: bool = False) -> Type:
    """First use of a parameter in a contraction: free along the axes that stay, dual to its partner along those summed."""
    moved_view = view.moved(place)
    own = sorted({dim for one in moved_view.coordinates for dim in one.dims})
    virtual, counts = virtual_axes(moved_view)
    kept = [dim for dim in own if dim not in axes.summed]
    fields = []
    if kept or virtual:
        fields.append(engine.fresh(kept, [axes.sizes[dim] for dim in kept], virtual, counts))
    else:
        fields.append(engine.fresh((), ()))
    if fresh_sum:
        inner = [dim for dim in own if dim in axes.summed]
        if inner:
            fields.append(engine.fresh(inner, [axes.sizes[dim] for dim in inner]))
    else:
        # A charge that all of the partner has can be taken up here, so that what comes out does not have it.
        touching = [one for one in partner.factors if one.touches(axes.summed) or not (one.dims or one.virtual)]
        foreign = sorted({dim for one in touching for dim in one.dims if dim not in own})
        strangers = [axis for one in touching for axis in one.virtual if not any(axis.same(v) for v in virtual)]
        left = engine.uniform(touching, foreign, strangers) if foreign or strangers else touching
        fields += [one.times(-1) for one in left]
    known = engine.first_use(moved_view, fields, role="map")
    back = {new: old for old, new in enumerate(place.places) if new is not None}
    return renumbered(known, back, max(axes.sizes) + 1)


@rule("mm")
def _mm(s: Step) -> Known:
    return matrix_product(s, s.arg(0), s.arg(1))


@rule("bmm")
def _bmm(s: Step) -> Known:
    return batched_product(s, s.arg(0), s.arg(1))


def batched_product(s: Step, left: Any, right: Any) -> Type:
    b, n, k = s.shape(left)
    m = s.shape(right)[2]
    return contraction(s, left, right, Axes((0, 1, 2), (0, 2, 3), (0, 1, 3), {0: b, 1: n, 2: k, 3: m}))


def matrix_product(s: Step, left: Any, right: Any) -> Type:
    n, k = s.shape(left)
    m = s.shape(right)[1]
    return contraction(s, left, right, Axes((0, 1), (1, 2), (0, 2), {0: n, 1: k, 2: m}))


@rule("mv")
def _mv(s: Step) -> Known:
    n, k = s.shape(s.arg(0))
    return contraction(s, s.arg(0), s.arg(1), Axes((0, 1), (1,), (0,), {0: n, 1: k}))


@rule("dot", "vdot")
def _dot(s: Step) -> Known:
    return contraction(s, s.arg(0), s.arg(1), Axes((0,), (0,), (), {0: s.shape(s.arg(0))[0]}))


@rule("linear")
def _linear(s: Step) -> Known:
    """x Wᵀ + b, as fused kernels record it."""
    x, w, b = s.arg(0), s.arg(1), s.arg(2, "bias")
    count = len(s.shape(x))
    sizes = {**dict(enumerate(s.shape(x))), count: s.shape(w)[0]}
    lead = tuple(range(count - 1))
    result: Known = contraction(s, x, w, Axes((*lead, count - 1), (count, count - 1), (*lead, count), sizes))
    return result if b is None else with_bias(s, result, b)


def with_bias(s: Step, result: Known, bias: Any, factor: int | float = 1.0) -> Type:
    """A product to which a parameter or tensor is added."""
    assert isinstance(result, Type)
    count = len(s.out)
    known = s.raw(bias)
    if isinstance(known, View):
        known = adopt(s, bias, known, result, count)
    return added(s.engine, result, scaled(s.engine, broadcast(s.shape(bias), count).type(known), factor))


@rule("addmm", "addmm_")
def _addmm(s: Step) -> Known:
    return with_bias(s, scaled(s.engine, matrix_product(s, s.arg(1), s.arg(2)), float(s.operation.kwargs.get("alpha", 1))),
                     s.arg(0), float(s.operation.kwargs.get("beta", 1)))


@rule("baddbmm", "baddbmm_")
def _baddbmm(s: Step) -> Known:
    beta = float(s.operation.kwargs.get("beta", 1))
    inner = scaled(s.engine, batched_product(s, s.arg(1), s.arg(2)), float(s.operation.kwargs.get("alpha", 1)))
    return inner if beta == 0 else with_bias(s, inner, s.arg(0), beta)


@rule("addmv", "addmv_")
def _addmv(s: Step) -> Known:
    n, k = s.shape(s.arg(1))
    inner = contraction(s, s.arg(1), s.arg(2), Axes((0, 1), (1,), (0,), {0: n, 1: k}))
    return with_bias(s, inner, s.arg(0), float(s.operation.kwargs.get("beta", 1)))


@rule("convolution", "convolution_overrideable", "_convolution")
def _convolution(s: Step) -> Known:
    """A contraction over channels (within groups) that mixes places: nothing may depend on the place."""
    x, w, b = s.arg(0), s.arg(1), s.arg(2)
    transposed, groups = bool(s.arg(6)), int(s.arg(8))
    shape, weight = s.shape(x), s.shape(w)
    batched = len(s.out) == len(weight)
    if not batched:
        return fix_all(s)
    places = list(range(2, len(shape)))
    known = s.raw(x)
    if isinstance(known, View):
        known = s.type(x)
    level = Type(tuple(s.engine.uniform(known.factors, places)), known.shifts, known.images, known.zero)
    # Axes: 0 batch, 1 group, 2 inputs of a group, 3 outputs of a group, 4 the kernel's and the image's places.
    inputs, outputs = shape[1] // groups, s.out[1] // groups
    split_x = Regroup(shape, (shape[0], groups, inputs, *shape[2:]))
    split_w = Regroup(weight, (groups, inputs, outputs, *weight[2:]) if transposed else (groups, outputs, inputs, *weight[2:]))
    left = split_x.type(level)
    kernel = prod(weight[2:])
    raw = moved(s.raw(w), split_w)
    spatial = tuple(5 + n for n in range(len(weight) - 2))
    names = (1, 2, 3, *spatial) if transposed else (1, 3, 2, *spatial)
    image = tuple(5 + len(spatial) + n for n in range(len(places)))
    sizes = {0: shape[0], 1: groups, 2: inputs, 3: outputs, 4: 1}
    sizes |= dict(zip(spatial, weight[2:], strict=True)) | dict(zip(image, shape[2:], strict=True))
    axes = Axes((0, 1, 2, *image), names, (0, 1, 3, *image), sizes)
    result = conv_contraction(s, left, raw, axes, kernel)
    merged = Regroup((shape[0], groups, outputs, *s.out[2:]), s.out)
    result = merged.type(renumbered(result, {0: 0, 1: 1, 3: 2, **{axis: 3 + n for n, axis in enumerate(image)}}, max(sizes) + 1))
    if b is None:
        return result
    known_b = s.raw(b)
    if isinstance(known_b, View):
        fields = s.engine.uniform(result.factors, [d for d in range(len(s.out)) if d != 1])
        known_b = s.engine.first_use(known_b, [Field(tuple(0 for _ in one.dims), one.atoms, one.weight) for one in fields],
                                       role="bias", entries=True)
    return added(s.engine, result, Renumber((1,)).type(known_b))


def conv_contraction(s: Step, left: Type, raw: Known, axes: Axes, kernel: int) -> Type:
    engine = s.engine
    place = Renumber(axes.right)
    x = Renumber(axes.left).type(left)
    if isinstance(raw, View):
        y = place.type(first_contraction(engine, raw, place, x, axes))
    else:
        y = place.type(raw)
    level = engine.uniform(y.factors, [axis for axis in axes.right if axis >= 5])
    y = Type(tuple(level), y.shifts, y.images, y.zero)
    sizes = axes.sizes
    images = {axis for axis in axes.left if axis >= 5 and sizes[axis] != 1}
    mine = {axis for axis in {0} | images if sizes[axis] != 1}
    return engine.contract(x, y, summed=axes.summed, batch=axes.batch, mine=mine, other={3} if sizes[3] != 1 else set())


# --- sums along axes ---------------------------------------------------------------------------------------------------


def reduced_dims(s: Step, place: int = 1) -> list[int]:
    """The axes an operation reduces; all of them if none are named."""
    shape = s.shape(s.arg(0))
    dims = s.arg(place, "dim")
    if dims is None or dims == []:
        return list(range(len(shape)))
    return [at(dim, len(shape)) for dim in ([dims] if isinstance(dims, int) else dims)] if shape else []


def without(type_: Type, dims: Sequence[int], count: int, keep: bool) -> Type:
    """A type that does not vary along `dims`, with these axes gone or of size one."""
    if keep:
        return type_
    kept = [dim for dim in range(count) if dim not in dims]
    return Renumber(tuple(kept.index(dim) if dim in kept else None for dim in range(count))).type(type_)


@rule("sum", "mean", "amax", "amin", "logsumexp", "max", "min", "median", "nansum", "std", "var", "var_mean", "std_mean", "cumsum", "cumsum_",
      "linalg_vector_norm", "norm")
def _reduce(s: Step) -> Any:
    name = base_name(s.operation.name).removeprefix("aten::").removesuffix("_")
    x = s.arg(0)
    shape = s.shape(x)
    if name in ("sum", "mean") and x.value in s.deferred:
        return summed_product(s, *s.deferred[x.value], shape)
    type_ = s.type(x)
    count = len(shape)
    if name in ("max", "min", "median") and len(s.operation.args) > 1 and isinstance(s.arg(1), Ref):
        return RULES["aten::maximum"](s)
    if name in ("linalg_vector_norm", "norm"):
        order = s.arg(1, default=2)
        dims = reduced_dims(s, 2)
        if order is not None and number(order, s) in (0, None):
            return fix_all(s)
    elif name in ("max", "min", "median"):
        dims = [at(s.arg(1), count)] if len(s.operation.args) > 1 and count else list(range(count))
    elif name == "cumsum":
        dims = [at(s.arg(1), count)]
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
        for one in type_.factors:
            s.engine.partition.shatter(one.atoms)
    factors = s.engine.uniform(type_.factors, dims)
    entries = prod(shape[dim] for dim in dims)
    if name in ("std", "var", "var_mean", "std_mean"):
        s.engine.forget_shift(Type((), type_.shifts, type_.images), dims)
        degree = 1 if name.startswith("std") else 2
        spread_type = Type(tuple(one.times(degree) for one in factors))
        first = without(spread_type, gone, count, keep)
        if name.endswith("_mean"):
            # The mean does see the shift; it was made uniform or dropped for the first result only.
            s.engine.steady(type_)
            return [first, without(Type(tuple(factors)), gone, count, keep)]
        return first
    if name in ("linalg_vector_norm", "norm"):
        s.engine.steady(type_)
        return without(Type(tuple(factors)), gone, count, keep)
    shifts, images = [], []
    scale = Fraction(entries) if name in ("sum", "nansum") else Fraction(1)
    for one in type_.shifts:
        if name in ("sum", "mean") and one.touches(dims) and not one.virtual and one.atoms.size <= 100_000:
            shifts.append(added_up(s, one, dims, name == "mean", entries))
        elif one.touches(dims) or name == "cumsum":
            images.append(Image(s.engine.key(), frozenset(one.occupied - set(dims)) | (set(dims) if name == "cumsum" else set()), distinct(one.atoms)))
            if name in ("amax", "amin", "max", "min", "median"):
                s.engine.forget_shift(Type((), (one,)), dims)
        else:
            shifts.append(one.times(scale))
    for image in type_.images:
        if image.varies & set(dims) or name == "cumsum":
            varies = image.varies if name == "cumsum" else image.varies - set(dims)
            images.append(Image(s.engine.key(), frozenset(varies | (set(dims) if name == "cumsum" else set())), image.atoms))
            if name in ("amax", "amin", "max", "min", "median"):
                # Which entry is the largest depends on the place.
                images[-1] = replace(images[-1], varies=frozenset(range(count)) - set(dims))
        else:
            images.append(replace(image, weight=image.weight * scale))
    result = Type(tuple(factors), tuple(shifts), tuple(images), type_.zero)
    return result if name == "cumsum" else without(result, gone, count, keep)


def summed_product(s: Step, left: Any, right: Any, shape: Sequence[int]) -> Type:
    """(x · y) summed along axes: a contraction."""
    count = len(shape)
    dims = set(reduced_dims(s))
    sizes: dict[int, int] = dict(enumerate(shape))
    names = [tuple(d + count - len(s.shape(ref)) for d in range(len(s.shape(ref)))) for ref in (left, right)]
    # An axis of size one is broadcast: it gets a name of its own.
    labelled = []
    for ref, own in zip((left, right), names, strict=True):
        fixed = []
        for place, axis in enumerate(own):
            if s.shape(ref)[place] == 1 and shape[axis] != 1:
                sizes[max(sizes) + 1] = 1
                fixed.append(max(sizes))
            else:
                fixed.append(axis)
        labelled.append(tuple(fixed))
    kept = tuple(axis for axis in range(count) if axis not in dims)
    result = contraction(s, left, right, Axes(labelled[0], labelled[1], kept, sizes))
    if len(s.out) == count and count:
        return Renumber(tuple(kept)).type(result)
    return result


def added_up(s: Step, one: Field, dims: Sequence[int], mean: bool, entries: int) -> Field:
    """The sum or mean of a shift along axes it varies along: new atoms, with an equation that says so."""
    mine = [dim for dim in dims if dim in one.dims]
    kept = [n for n, dim in enumerate(one.dims) if dim not in mine]
    lost = [n for n, dim in enumerate(one.dims) if dim in mine]
    array = one.atoms.transpose(kept + lost).reshape(tuple(one.atoms.shape[n] for n in kept) + (-1,))
    size = array.shape[-1]
    total = s.engine.shifts.fresh(array.shape[:-1])
    terms = [(Fraction(1), array[..., n]) for n in range(size)]
    s.engine.shifts.add([*terms, (Fraction(-size), total)], origin=s.engine.origin)
    weight = one.weight if mean else one.weight * entries
    return Field(tuple(one.dims[n] for n in kept), total, weight)


# --- softmax and normalisation -----------------------------------------------------------------------------------------


@rule("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
def _softmax(s: Step) -> Known:
    """Sees no shift along its axis, and every scale."""
    x = s.type(s.arg(0))
    dim = at(s.arg(1), len(s.out)) if s.out else 0
    if not s.out or s.out[dim] == 1:
        return FIXED
    s.engine.equate(x.factors, ())
    for one in x.factors:
        s.engine.partition.shatter(one.atoms)
    s.engine.forget_shift(x, [dim])
    return FIXED


def normalised(s: Step, x: Type, dims: Sequence[int], epsilon: int | float, *, centres: bool) -> Type:
    """x over its size along `dims`: forgets a scale common along them, up to ε, and if it centres a common shift."""
    left = s.engine.uniform(x.factors, dims)
    for one in x.factors:
        s.engine.partition.shatter(one.atoms)
    if epsilon and left:
        s.engine.equate(left, (), soft=epsilon)
    if centres:
        s.engine.forget_shift(x, dims)
    else:
        s.engine.steady(x)
    return FIXED


def affine(s: Step, weight: Any, bias: Any, dims: Sequence[int]) -> Type:
    """A gain and a bias over `dims` on something that does not move."""
    result = FIXED
    place = Renumber(tuple(dims))
    if weight is not None:
        result = place.type(s.type(weight, entries=True))
        s.engine.split_by(result.factors, range(len(s.out)), batch=False)
        result = Type(result.factors, (), s.engine.imaged(result, range(len(s.out))))
    if bias is not None:
        known = s.raw(bias)
        if isinstance(known, View):
            fields = [
                Field(tuple(dims.index(dim) for dim in one.dims), one.atoms, one.weight) for one in result.factors
            ]
            known = s.engine.first_use(known, fields, role="bias", entries=True)
        result = added(s.engine, result if weight is not None else FIXED, place.type(known))
    return result


@rule("native_layer_norm")
def _layer_norm(s: Step) -> Any:
    x, shape, weight, bias, epsilon = (s.arg(n) for n in range(5))
    count = len(s.out)
    dims = list(range(count - len(shape), count))
    normalised(s, s.type(x), dims, float(epsilon), centres=True)
    if weight is None and bias is None and len(dims) == 1:
        return [Type(centred=frozenset(dims)), FIXED, FIXED]
    return [affine(s, weight, bias, dims), FIXED, FIXED]


@rule("_fused_rms_norm", "rms_norm")
def _rms_norm(s: Step) -> Any:
    x, shape, weight, epsilon = (s.arg(n) for n in range(4))
    count = len(s.out)
    dims = list(range(count - len(shape), count))
    normalised(s, s.type(x), dims, float(epsilon or torch.finfo(s.program.values[x.value].dtype).eps), centres=False)
    return [affine(s, weight, None, dims), FIXED]


@rule("native_group_norm")
def _group_norm(s: Step) -> Any:
    x, weight, bias, _, channels, _, groups, epsilon = (s.arg(n) for n in range(8))
    shape = s.shape(x)
    apart = (shape[0], groups, channels // groups, *shape[2:])
    grouped = Regroup(shape, apart).type(s.type(x))
    normalised(s, grouped, list(range(2, len(apart))), float(epsilon), centres=True)
    return [affine(s, weight, bias, [1]), FIXED, FIXED]


@rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_native_batch_norm_legit_functional", "miopen_batch_norm", "_batch_norm_with_update",
      "batch_norm_with_update", "_native_batch_norm_legit_no_training", "_batch_norm_no_update")
def _batch_norm(s: Step) -> Any:
    x, weight, bias = s.arg(0), s.arg(1), s.arg(2)
    name = s.operation.name
    if "no_training" in name or "no_update" in name:
        training, epsilon = False, s.arg(6)
    elif "with_update" in name:
        training, epsilon = True, s.arg(6)
    else:
        training, epsilon = bool(s.arg(5)), s.arg(7)
    if name.startswith("aten::_native_batch_norm_legit.no_stats"):
        training, epsilon = bool(s.arg(3)), s.arg(5)
    type_ = s.type(x)
    if training:
        normalised(s, type_, [dim for dim in range(len(s.out)) if dim != 1], float(epsilon), centres=True)
    else:
        s.engine.zero(type_)
    return [affine(s, weight, bias, [1])] + [FIXED] * (len(s.operation.results) - 1)


@rule("_weight_norm_interface")
def _weight_norm(s: Step) -> Any:
    """g v / ‖v‖ along an axis: forgets the length of v."""
    v, g, dim = s.arg(0), s.arg(1), s.arg(2, default=0)
    type_ = s.type(v)
    dims = [d for d in range(len(s.out)) if d != at(dim, len(s.out))]
    s.engine.uniform(type_.factors, dims)
    for one in type_.factors:
        s.engine.partition.shatter(one.atoms)
    s.engine.steady(type_)
    gain = s.type(g)
    s.engine.split_by(gain.factors, range(len(s.out)), batch=False)
    return [Type(gain.factors, (), s.engine.imaged(gain, range(len(s.out)))), FIXED]


# --- pooling -----------------------------------------------------------------------------------------------------------


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "adaptive_max_pool2d",
      "_adaptive_avg_pool3d", "mkldnn_max_pool2d", "upsample_nearest2d", "upsample_nearest1d", "upsample_bilinear2d", "upsample_bicubic2d",
      "upsample_linear1d", "upsample_trilinear3d", "upsample_nearest3d", "max_pool2d", "avg_pool1d", "adaptive_avg_pool1d",
      "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_nearest_exact2d", "reflection_pad1d", "reflection_pad2d",
      "replication_pad1d", "replication_pad2d")
def _pool(s: Step) -> Any:
    """Places of an image are combined with positive weights or a maximum: nothing may depend on the place."""
    x = s.arg(0)
    shape = s.shape(x)
    spatial = next((n for n in (1, 2, 3) if f"{n}d" in s.operation.name), 2)
    dims = list(range(len(shape) - spatial, len(shape)))
    type_ = s.type(x)
    factors = s.engine.uniform(type_.factors, dims)
    for one in type_.factors:
        if "max" in s.operation.name:
            s.engine.partition.shatter(one.atoms)
    s.engine.steady(type_)
    return [Type(tuple(factors), zero=type_.zero)] + [FIXED] * (len(s.operation.results) - 1)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def _shuffle(s: Step) -> Known:
    x = s.arg(0)
    shape = s.shape(x)
    if prod(shape) > ENTRIES:
        return fix_all(s)
    function = getattr(torch, base_name(s.operation.name).removeprefix("aten::"))
    positions = function(torch.arange(prod(shape)).reshape(shape), *s.operation.args[1:]).numpy()
    return read_at(s, s.type(x), shape, positions)


# --- looking up --------------------------------------------------------------------------------------------------------


@rule("embedding")
def _embedding(s: Step) -> Known:
    """Rows of a table: all rows move alike. Rows that are trained otherwise than they are used do not move."""
    table, index = s.arg(0), s.arg(1)
    padding = s.arg(2, "padding_idx", -1)
    shape, places = s.shape(table), s.shape(index)
    known = s.raw(table)
    move = Renumber((None, *range(len(places), len(places) + len(shape) - 1)))
    if isinstance(known, View):
        sizes = shape[1:]
        dims = [dim + 1 for dim in range(len(sizes))]
        known = s.engine.first_use(known, [s.engine.fresh(dims, sizes)], role="table")
    if bool(s.arg(3, "scale_grad_by_freq", False)):
        s.engine.zero(known)
    elif padding is not None and padding >= 0:
        s.engine.steady(known)
        constant = s.program.padding_row(table.value, padding)
        if constant is None or bool(constant.any()):
            s.engine.zero(known)
    level = s.engine.uniform(known.factors, [0])
    return looked_up(s, Type(tuple(level), known.shifts, known.images, known.zero), move, frozenset(wide(places)))


def looked_up(s: Step, source: Type, move: Renumber, places: frozenset[int]) -> Type:
    """A type after its first axis was looked up by an index that varies along `places`."""
    shifts, images = [], []
    for one in source.shifts:
        if 0 in one.dims:
            varies = frozenset(new for dim in one.dims if dim for new in move.carry(dim)) | places
            images.append(Image(s.engine.key(), varies, distinct(one.atoms)))
        else:
            shifts.append(move.field(one))
    for image in source.images:
        varies = frozenset(new for dim in image.varies if dim for new in move.carry(dim))
        images.append(Image(s.engine.key(), varies | (places if 0 in image.varies else frozenset()), image.atoms))
    return Type(tuple(move.field(one) for one in source.factors), tuple(shifts), tuple(images), source.zero)


LOOKED_UP = 2048
"""Tables of at most this many entries along an axis keep apart what different indices look up."""


@rule("index", "index_select")
def _index(s: Step) -> Known:
    """Advanced indexing with one index tensor (or several, for axes along which nothing moves)."""
    x = s.arg(0)
    shape = s.shape(x)
    if "index_select" in s.operation.name:
        dim, index = at(s.arg(1), len(shape)), s.arg(2)
        indices: list[Any] = [None] * dim + [index]
    else:
        indices = list(s.arg(1))
    used = [n for n, one in enumerate(indices) if one is not None]
    boolean = any(isinstance(indices[n], Ref) and s.program.values[indices[n].value].dtype == torch.bool for n in used)
    known = s.raw(x)
    if boolean:
        covered = list(range(used[0], used[0] + len(s.shape(indices[used[0]])))) if len(used) == 1 else []
        if not covered:
            return fix_all(s)
        return compressed(s, s.type(x), covered, len(shape))
    if len(used) == 1:
        return one_index(s, x, known, used[0], indices[used[0]])
    type_ = s.type(x)
    factors = s.engine.uniform(type_.factors, used)
    if any(one.touches(used) for one in type_.shifts) or any(one.varies & set(used) for one in type_.images):
        s.engine.steady(type_)
        type_ = Type(tuple(factors), zero=type_.zero)
    # Where the looked-up axes go: to the place of the first if the indexed axes are neighbours, else to the front.
    together = used == list(range(used[0], used[-1] + 1))
    width = len(s.out) - (len(shape) - len(used))
    start = used[0] if together else 0
    places: list[int | None] = []
    for dim in range(len(shape)):
        if dim in used:
            places.append(None)
        else:
            before = len([d for d in range(dim) if d not in used])
            places.append(before if before < start else before + width)
    return Renumber(tuple(places)).type(Type(tuple(factors), type_.shifts, type_.images, type_.zero))


def compressed(s: Step, type_: Type, covered: Sequence[int], count: int) -> Type:
    """Entries where a mask is set, in a row: nothing may depend on the masked axes."""
    factors = s.engine.uniform(type_.factors, covered)
    start = covered[0]
    places = [dim if dim < start else None if dim in covered else dim - len(covered) + 1 for dim in range(count)]
    move = Renumber(tuple(places))
    shifts = []
    images = list(type_.images)
    for one in type_.shifts:
        if one.touches(covered):
            images.append(Image(s.engine.key(), frozenset(one.occupied), distinct(one.atoms)))
        else:
            shifts.append(one)
    found = []
    for image in images:
        varies = frozenset(new for dim in image.varies if dim not in covered for new in move.carry(dim))
        found.append(replace(image, key=s.engine.key(), varies=varies | ({start} if image.varies & set(covered) else set())))
    return Type(tuple(map(move.field, factors)), tuple(map(move.field, shifts)), tuple(found), type_.zero)


def one_index(s: Step, x: Any, known: Known, dim: int, index: Any) -> Known:
    """x[:, …, index]: a table looked up along one axis."""
    shape, places = s.shape(x), s.shape(index)
    constant = s.constant(index)
    if constant is not None and len(places) == 1 and isinstance(known, Type | View):
        return taken(s, x, dim, at_array(constant.numpy(), shape[dim]))
    width = len(places)
    axes = tuple(d if d < dim else None if d == dim else d + width - 1 for d in range(len(shape)))
    move = Renumber(axes)
    real = tuple(dim + n for n in range(width))
    slots_dims, slots = tidy(real, np.arange(prod(places)).reshape(places))
    virtual = Virtual(origin_of(s, index) + 1_000_000_000, slots_dims, slots)

    def field(one: Field) -> Field:
        if dim not in one.dims:
            return move.field(one)
        axis = len(one.virtual) + one.dims.index(dim)
        array = np.moveaxis(one.atoms, axis, len(one.virtual))
        rest = tuple(d for d in one.dims if d != dim)
        return Field(tuple(d if d < dim else d + width - 1 for d in rest), array, one.weight,
                     (*(Virtual(v.key, *move.array(v.dims, v.slots, 0)) for v in one.virtual), virtual))

    if isinstance(known, View):
        if shape[dim] <= LOOKED_UP and not any(dim in v.dims for one in known.coordinates for v in one.virtual):
            return replace(known, coordinates=tuple(map(field, known.coordinates)))
        known = s.type(x)
    touching = [one for one in known.factors if one.touches([dim])]
    if touching and (shape[dim] > LOOKED_UP or any(one.virtual for one in touching)):
        level = s.engine.uniform(known.factors, [dim])
        factors = tuple(map(move.field, level))
    else:
        for one in touching:
            s.engine.split_by([one], [dim], batch=True)
        factors = tuple(map(field, known.factors))
    shifts, images = [], []
    for one in known.shifts:
        if one.touches([dim]):
            varies = frozenset(new for d in one.occupied if d != dim for new in move.carry(d)) | set(real)
            images.append(Image(s.engine.key(), varies, distinct(one.atoms)))
        else:
            shifts.append(move.field(one))
    for image in known.images:
        varies = frozenset(new for d in image.varies if d != dim for new in move.carry(d))
        images.append(Image(s.engine.key(), varies | (set(real) if dim in image.varies else set()), image.atoms))
    return Type(factors, tuple(shifts), tuple(images), known.zero)


def at_array(index: np.ndarray, size: int) -> np.ndarray:
    """Indices counted from the front."""
    return np.where(index < 0, index + size, index)


@rule("gather", "take_along_dim", "topk", "sort", "msort")
def _gather(s: Step) -> Any:
    """Entries chosen along an axis: nothing may depend on the place along it."""
    x = s.arg(0)
    name = base_name(s.operation.name).removeprefix("aten::")
    count = len(s.shape(x))
    position = {"topk": 2, "sort": 1}.get(name, 1)
    dim = s.operation.kwargs.get("dim", s.arg(position, default=-1))
    if isinstance(dim, bool) or not isinstance(dim, int):
        dim = s.arg(2, default=-1)
    dim = at(dim, count)
    type_ = s.type(x)
    index = s.arg(2) if name in ("gather", "take_along_dim") else None
    s.engine.split_by(type_.factors, range(count) if index is None else expanded_less(s, index), batch=False)
    factors = s.engine.uniform(type_.factors, [dim])
    shifts = [one for one in type_.shifts if not one.touches([dim])]
    touched = [one for one in type_.shifts if one.touches([dim])]
    everything = frozenset(range(count))
    images = [Image(s.engine.key(), everything, distinct(one.atoms)) for one in touched]
    images += [one if dim not in one.varies else Image(s.engine.key(), everything, one.atoms) for one in type_.images]
    result = Type(tuple(factors), tuple(shifts), tuple(images), type_.zero)
    return [result] + [FIXED] * (len(s.operation.results) - 1)


def expanded_less(s: Step, ref: Any) -> set[int]:
    """The axes along which a tensor varies; not those it was expanded along."""
    shape = s.shape(ref)
    maker = s.program.maker(ref.value) if isinstance(ref, Ref) else None
    if maker is not None and base_name(maker.name) == "aten::expand" and isinstance(maker.args[0], Ref):
        source = s.shape(maker.args[0])
        offset = len(shape) - len(source)
        return {dim + offset for dim in wide(source)}
    return wide(shape)


@rule("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter", "scatter_", "scatter_reduce", "index_copy", "index_copy_")
def _index_add(s: Step) -> Known:
    """Entries are put, or added, at places along an axis: nothing may depend on the place."""
    base, dim, source = s.arg(0), s.arg(1), s.arg(3)
    if not isinstance(source, Ref):
        return fix_all(s)
    dim = at(dim, len(s.shape(base)))
    before, given = s.type(base), s.type(source)
    if given.shifted or before.shifted:
        s.engine.steady(given)
        s.engine.steady(before)
    given = unvirtual(s.engine, Type(given.factors, zero=given.zero))
    given = Type(tuple(s.engine.uniform(given.factors, [dim])), zero=given.zero)
    before = Type(tuple(s.engine.uniform(before.factors, [dim])), zero=before.zero)
    return added(s.engine, before, given)


@rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(s: Step) -> Known:
    base, indices, source = s.arg(0), list(s.arg(1)), s.arg(2)
    shape = s.shape(base)
    used = [n for n, one in enumerate(indices) if one is not None]
    before, given = s.type(base), s.type(source)
    if len(used) != 1 or used[0] != 0:
        return fix_all(s)
    boolean = s.program.values[indices[0].value].dtype == torch.bool
    depth = len(s.shape(indices[0])) if boolean else 1
    width = 1 if boolean else len(s.shape(indices[0]))
    if given.shifted or before.shifted:
        s.engine.steady(given)
        s.engine.steady(before)
    given = unvirtual(s.engine, Type(given.factors, zero=given.zero))
    offset = width + len(shape) - depth - len(s.shape(source))
    given = Renumber(tuple(d + offset for d in range(len(s.shape(source))))).type(given)
    given = Type(tuple(s.engine.uniform(given.factors, list(range(width)))), zero=given.zero)
    places = [None] * width + [d + depth for d in range(len(shape) - depth)]
    given = Renumber(tuple(places)).type(given)
    before = Type(tuple(s.engine.uniform(before.factors, list(range(depth)))), zero=before.zero)
    return added(s.engine, before, given)


@rule("slice_scatter", "select_scatter", "masked_scatter", "masked_select", "diagonal_scatter")
def _scatter_views(s: Step) -> Known:
    return fix_all(s)


# --- constants ---------------------------------------------------------------------------------------------------------


@rule("zeros", "zeros_like", "new_zeros", "zero", "zero_", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
def _zeros(s: Step) -> Known:
    return ZERO


@rule("fill", "fill_", "full", "full_like", "new_full", "ones", "ones_like", "new_ones", "arange", "scalar_tensor", "linspace", "eye",
      "rand", "randn", "rand_like", "randn_like", "bernoulli", "bernoulli_", "randint", "randperm", "normal", "normal_", "uniform_",
      "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "argsort", "isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or",
      "logical_xor", "any", "all", "bitwise_and", "bitwise_or", "bitwise_not", "nonzero", "bincount", "histc", "one_hot", "searchsorted", "bucketize",
      "multinomial", "floor_divide", "sym_size", "sym_stride", "randn_", "tril_indices", "triu_indices", "exponential_", "random_", "cumprod", "unique",
      "rand_", "_local_scalar_dense", "_assert_async", "is_same_size", "equal", "_unique2", "unique_consecutive", "heaviside", "signbit", "prod")
def constant(s: Step) -> Known:
    name = base_name(s.operation.name)
    if name in ("aten::cumprod", "aten::prod"):
        return fix_all(s)
    return [FIXED] * max(1, len(s.operation.results))  # type: ignore[return-value]


@rule("copy", "copy_")
def _copy(s: Step) -> Known:
    count = len(s.out)
    source = s.arg(1)
    return broadcast(s.shape(source), count).type(s.type(source))


@rule("native_dropout")
def _dropout(s: Step) -> Any:
    """A random mask keeps positive scales and mixes nothing."""
    if s.arg(2) is False or s.arg(1) == 0:
        return [s.raw(s.arg(0)), FIXED]
    x = s.type(s.arg(0))
    s.engine.split_by(x.factors, range(len(s.out)), batch=False)
    return [Type(x.factors, (), s.engine.imaged(x, range(len(s.out))), x.zero), FIXED]


@rule("detach", "detach_")
def _detach(s: Step) -> Known:
    """No gradient flows through: the identity holds only for motions that leave the value alone."""
    known = s.raw(s.arg(0))
    return known if isinstance(known, Type) and known.fixed else fix_all(s)
