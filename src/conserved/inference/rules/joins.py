"""Rules for operators that put tensors together: joins, padding, and writes into a part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

import numpy as np

from conserved.inference.rules.step import Known, Step, at, fix_all, rule, wide
from conserved.inference.rules.views import cut_axis, positions_in, read_at, unvirtual
from conserved.inference.types.engine import ENTRIES, Engine
from conserved.inference.types.reindexing import Renumber
from conserved.inference.types.tensor_type import (
    FIXED,
    ZERO,
    Field,
    Image,
    Type,
    tidy,
    without_constant_axes,
)


@rule("conserved::write")
def _write(s: Step) -> Known:
    """Type a write into part of a tensor. It keeps its type if the new part has the same type."""
    base, value = s.arg(0), s.arg(2)
    shape = s.shape(base)
    before, after = s.type(base), s.type(value)
    positions = None if prod(shape) > ENTRIES else positions_in(s.arg(1), s.arg(3))
    if positions is None:
        s.engine.zero(before)
        s.engine.zero(after)
        return FIXED
    if before.fixed and not before.zero and after.fixed:
        return FIXED
    if any(field.virtual for type_ in (before, after) for field in (*type_.factors, *type_.shifts)):
        before, after = unvirtual(s.engine, before), unvirtual(s.engine, after)
    if before.zero:
        factors = tuple(place_field(s.engine, factor, shape, positions) for factor in after.factors)
    else:
        there = read_at(s, before, shape, positions)
        if not after.zero:
            s.engine.equate(there.factors, after.factors)
        factors = before.factors
    shifts = written_shift(s.engine, before.shifts, after.shifts, shape, positions)
    everywhere = frozenset(wide(shape))
    images = tuple(
        Image(s.engine.key(), everywhere, image.atoms) for type_ in (before, after) for image in type_.images
    )
    return Type(factors, shifts, images, before.zero and after.zero)


def over(field: Field, shape: Sequence[int]) -> np.ndarray:
    """Return the atoms of a field over all axes of a tensor."""
    return np.broadcast_to(
        field.atoms[tuple(slice(None) if d in field.dims else None for d in range(len(shape)))], tuple(shape)
    )


def place_field(engine: Engine, field: Field, shape: Sequence[int], positions: np.ndarray) -> Field:
    """Return zeros into which something was written: the rest is zero and may move with anything."""
    full = engine.alone(tuple(range(len(shape))), shape).atoms.reshape(tuple(shape)).copy()
    full.reshape(-1)[positions.reshape(-1)] = over(field, positions.shape).reshape(-1)
    dims, full = tidy(tuple(range(len(shape))), full)
    dims, full = without_constant_axes(dims, full)
    return Field(dims, full, field.weight)


def written_shift(
    engine: Engine, before: Sequence[Field], after: Sequence[Field], shape: Sequence[int], positions: np.ndarray
) -> tuple[Field, ...]:
    """Return the shift of a tensor part of which was written.

    Entries that were written have the shift of the new values, and the others keep theirs.
    """
    if not before and not after:
        return ()
    full = total_shift(engine, before, shape).copy()
    full.reshape(-1)[positions.reshape(-1)] = total_shift(engine, after, positions.shape).reshape(-1)
    dims, full = tidy(tuple(range(len(shape))), full)
    return (Field(*without_constant_axes(dims, full)),)


def total_shift(engine: Engine, shifts: Sequence[Field], shape: Sequence[int]) -> np.ndarray:
    """Return one atom for the shift of every entry."""
    if not shifts:
        return np.zeros(tuple(shape), dtype=np.int64)
    if len(shifts) == 1 and shifts[0].weight == 1:
        return over(shifts[0], shape)
    atoms = engine.shifts.fresh(shape)
    terms = [(shift.weight, over(shift, shape)) for shift in shifts]
    engine.shifts.add([*terms, (Fraction(-1), atoms)], origin=engine.origin)
    return atoms


@rule("cat")
def _cat(s: Step) -> Known:
    parts = [ref for ref in s.arg(0) if prod(s.shape(ref)) or len(s.shape(ref)) > 1]
    dim = at(s.arg(1, "dim", 0), len(s.out))
    return side_by_side(
        s, [s.shape(ref)[dim] for ref in parts], dim, [s.type(ref, role="bias") for ref in parts], s.out
    )


@rule("stack")
def _stack(s: Step) -> Known:
    parts = s.arg(0)
    dim = at(s.arg(1, "dim", 0), len(s.out))
    count = len(s.out) - 1
    move = Renumber(tuple(d + (d >= dim) for d in range(count)))
    return side_by_side(s, [1] * len(parts), dim, [move.type(s.type(ref, role="bias")) for ref in parts], s.out)


def side_by_side(s: Step, sizes: Sequence[int], dim: int, types: Sequence[Type], out: Sequence[int]) -> Type:
    """Return tensors side by side along `dim`, which together have the shape `out`."""
    engine = s.engine
    types = [unvirtual(engine, item) for item in types]
    if len(types) == 1:
        return types[0]

    def fields(lists: list[Sequence[Field]], wild: list[bool], shift: bool) -> list[Field]:
        ordered = [sorted(item, key=lambda f: (-len(f.dims), f.dims)) for item in lists]
        result = []
        for rank in range(max((len(item) for item in ordered), default=0)):
            row = [item[rank] if rank < len(item) else None for item in ordered]
            present = [item for item in row if item is not None]
            first = present[0]
            # Zeros move with anything: they take on what stands beside them.
            anything = [item is None and free and not shift for item, free in zip(row, wild, strict=True)]
            if len(present) + sum(anything) == len(row) and all(
                dim not in item.dims
                and item.dims == first.dims
                and item.weight == first.weight
                and np.array_equal(item.atoms, first.atoms)
                for item in present
            ):
                result.append(first)
                continue
            weight = first.weight
            dims = sorted({d for item in present for d in item.dims} | {dim})
            pieces = []
            for item, size, free in zip(row, sizes, wild, strict=True):
                shape = tuple(size if d == dim else out[d] for d in dims)
                if item is None:
                    if free and not shift:
                        pieces.append(engine.alone(dims, shape).atoms.reshape(shape))
                    else:
                        pieces.append(np.zeros(shape, dtype=np.int64))
                    continue
                index = tuple(slice(None) if d in item.dims else None for d in dims)
                array = np.broadcast_to(item.atoms[index], shape)
                if item.weight != weight:
                    system = engine.shifts if shift else engine.charges
                    if shift:
                        other = system.fresh(item.atoms.shape)
                    else:
                        other = engine.alone(range(item.atoms.ndim), item.atoms.shape).atoms.reshape(item.atoms.shape)
                    system.add([(weight, other), (-item.weight, item.atoms)], origin=engine.origin)
                    if not shift:
                        engine.partition.shatter(item.atoms)
                    array = np.broadcast_to(other[index], shape)
                pieces.append(array)
            joined = np.concatenate(pieces, dims.index(dim))
            found_dims, joined = tidy(dims, joined)
            result.append(Field(found_dims, joined, weight))
        return result

    wild = [item.zero for item in types]
    factors = fields([item.factors for item in types], wild, False)
    common, apart = shared_shift(engine, [item.shifts for item in types], dim)
    shifts = [*common, *fields(apart, wild, True)]
    images = tuple(
        replace(image, key=engine.key(), varies=image.varies | {dim}) for type_ in types for image in type_.images
    )
    return Type(tuple(factors), tuple(shifts), images, all(wild))


def shared_shift(
    engine: Engine, parts: Sequence[Sequence[Field]], dim: int
) -> tuple[Sequence[Field], list[Sequence[Field]]]:
    """Return shifts of tensors side by side, as one that all have and what it takes to make up each.

    Keys of which one is a parameter move together if that parameter and the others' bias do: that is seen later only
    if the part in common does not vary along the axis they are joined along.
    """
    first = next((part for part in parts if part), None)
    simple = first is not None and all(
        len(part) <= 1 and not any(dim in f.dims or f.virtual or f.dims != first[0].dims for f in part)
        for part in parts
    )
    if first is None or not simple or all(part and part[0].atoms is first[0].atoms for part in parts):
        return (), list(parts)
    (base,) = first
    apart: list[Sequence[Field]] = []
    for item in parts:
        if item is first:
            apart.append(())
            continue
        difference = replace(base, atoms=engine.shifts.fresh(base.atoms.shape), weight=Fraction(1))
        terms = [(f.weight, f.atoms) for f in item]
        engine.shifts.add([*terms, (-base.weight, base.atoms), (Fraction(-1), difference.atoms)], origin=engine.origin)
        apart.append((difference,))
    return first, apart


@rule("constant_pad_nd")
def _pad(s: Step) -> Known:
    """Return zeros on both sides, axis by axis; negative widths cut off instead."""
    if s.arg(2, "value", 0):
        return fix_all(s)
    known = s.type(s.arg(0))
    shape = list(s.shape(s.arg(0)))
    widths = s.arg(1)
    for n in range(len(widths) // 2):
        dim, before, after = len(shape) - 1 - n, widths[2 * n], widths[2 * n + 1]
        inside = np.arange(max(0, -before), shape[dim] - max(0, -after))
        if inside.size < shape[dim]:
            known = cut_axis(s, known, dim, inside, shape[dim])
        sizes = [max(0, before), inside.size, max(0, after)]
        types = [ZERO, known, ZERO]
        shape[dim] = sum(sizes)
        present = [n for n, size in enumerate(sizes) if size]
        known = side_by_side(s, [sizes[n] for n in present], dim, [types[n] for n in present], shape)
    return known
