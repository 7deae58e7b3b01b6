"""Rules for entries in new places: views, slices, joins, writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import torch

from conserved.inference.rules.step import Known, Step, at, fix_all, moved, rule, wide
from conserved.inference.types.engine import ENTRIES, Engine
from conserved.inference.types.reindexing import Regroup, Renumber, Take, broadcast, permute
from conserved.inference.types.tensor_type import (
    FIXED,
    ZERO,
    Field,
    Image,
    Type,
    distinct,
    moved_key,
    tidy,
    without_constant_axes,
)


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_copy", "_reshape_copy")
def reshape(s: Step) -> Known:
    """Return the same entries in the same order, in another shape."""
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
    remaining = [d for d in range(len(shape)) if d not in gone]
    return moved(
        s.raw(s.arg(0)), Renumber(tuple(remaining.index(d) if d in remaining else None for d in range(len(shape))))
    )


@rule("expand", "expand_copy", "broadcast_to")
def _expand(s: Step) -> Known:
    return moved(s.raw(s.arg(0)), broadcast(s.shape(s.arg(0)), len(s.out)))


@rule(
    "alias",
    "clone",
    "contiguous",
    "lift_fresh",
    "lift",
    "_to_copy",
    "to",
    "resolve_conj",
    "resolve_neg",
    "view_as",
    "dropout",
    "real",
    "alias_copy",
    "_conj",
    "positive",
    "lift_fresh_copy",
)
def same(s: Step) -> Known:
    """Return a copy, perhaps in another precision."""
    dtype = s.program.values[s.operation.results[0]].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return FIXED
    return s.raw(s.arg(0))


@rule("slice", "slice_copy")
def _slice(s: Step) -> Known:
    x = s.arg(0)
    shape = s.shape(x)
    dim = at(s.arg(1, default=0), len(shape))
    index = np.arange(shape[dim])[slice(s.arg(2), s.arg(3), s.arg(4, default=1))]
    return take(s, x, dim, index)


@rule("select", "select_copy")
def _select(s: Step) -> Known:
    x = s.arg(0)
    dim = at(s.arg(1), len(s.shape(x)))
    return take(s, x, dim, at(s.arg(2), s.shape(x)[dim]))


def take(s: Step, x: Any, dim: int, index: Any) -> Known:
    """Return some entries along an axis: those that are taken do not mix with those that are not."""
    size = s.shape(x)[dim]
    known = s.raw(x)
    return cut_axis(s, known, dim, index, size) if isinstance(known, Type) else moved(known, Take(dim, index))


def cut_axis(s: Step, known: Type, dim: int, index: Any, size: int) -> Type:
    """Return a type of which some entries along an axis are taken."""
    complete = not isinstance(index, int) and len(index) == size and bool((np.asarray(index) == np.arange(size)).all())
    if not complete:
        # Entries that are taken, or taken more often, do not mix with the others.
        chosen = np.bincount(np.atleast_1d(index), minlength=size)
        for factor in known.factors:
            if dim in factor.dims:
                axis = len(factor.virtual) + factor.dims.index(dim)
                keys = chosen.reshape(tuple(-1 if n == axis else 1 for n in range(factor.atoms.ndim)))
                s.engine.partition.split(factor.atoms, np.broadcast_to(keys, factor.atoms.shape), batch=False)
    return known if complete else Take(dim, index).type(known)


@rule(
    "split",
    "split_with_sizes",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "split_copy",
    "split_with_sizes_copy",
    "chunk",
)
def _split(s: Step) -> list[Known]:
    x = s.arg(0)
    shape = s.shape(x)
    dim = at(s.arg(2, "dim", 0), len(shape))
    result, start = [], 0
    for number in s.operation.results:
        size = s.program.values[number].shape[dim]
        result.append(take(s, x, dim, np.arange(start, start + size)))
        start += size
    return result


@rule("unbind", "unbind_copy")
def _unbind(s: Step) -> list[Known]:
    x = s.arg(0)
    dim = at(s.arg(1, "dim", 0), len(s.shape(x)))
    return [take(s, x, dim, index) for index in range(len(s.operation.results))]


@rule("conserved::all_to_all", "conserved::reduce_scatter")
def _deal_out(s: Step) -> Known:
    """Type an exchange that sends entries of the first axis to other processes.

    The type stays where no motion differs along that axis.
    """
    type_ = s.type(s.arg(0))
    if any(factor.touches((0,)) for factor in type_.factors):
        return fix_all(s)
    uneven = tuple(shift for shift in type_.shifts if shift.touches((0,)))
    s.engine.zero(Type(shifts=uneven, strands=type_.strands))
    # Data of other processes are other data: what was multiplied with them is another map of the same shift.
    images = tuple(
        replace(image, key=moved_key(image.key, s.operation.name, s.operation.results[0]))
        if 0 in image.varies
        else image
        for image in type_.images
    )
    shifts = tuple(shift for shift in type_.shifts if not shift.touches((0,)))
    return replace(type_, shifts=shifts, images=images, strands=())


@rule("conserved::from_peer")
def _from_peer(s: Step) -> Known:
    """Type what another process has in the place of a tensor: the same motions, of other data."""
    type_ = s.type(s.arg(0))
    s.engine.zero(Type(strands=type_.strands))
    images = tuple(
        replace(image, key=moved_key(image.key, s.operation.name, s.operation.results[0])) if image.varies else image
        for image in type_.images
    )
    return replace(type_, images=images, strands=())


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
def _as_strided(s: Step) -> Known:
    """Type any other way to read entries, by the source position of every entry of the result."""
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
    """Return for every entry of a view its position among the entries of its base.

    The result is None if the base does not hold the view.
    """
    (shape, strides, offset), (target, steps, start) = base, view
    if len(strides) != len(shape) or len(steps) != len(target):
        return None

    def places(sizes: Sequence[int], jumps: Sequence[int], first: int) -> np.ndarray:
        grid = np.indices(sizes) if sizes else np.zeros((0, 1), dtype=np.int64)
        result = np.full(tuple(sizes), first, dtype=np.int64)
        for axis, jump in enumerate(jumps):
            result = result + grid[axis] * jump
        return result

    flat_positions = places(shape, strides, offset).reshape(-1)
    order = np.argsort(flat_positions)
    wanted = places(target, steps, start)
    slot = np.searchsorted(flat_positions[order], wanted.reshape(-1))
    if (slot >= flat_positions.size).any() or (flat_positions[order][slot] != wanted.reshape(-1)).any():
        return None
    return order[slot].reshape(wanted.shape)


def read_at(s: Step, source: Type, shape: Sequence[int], positions: np.ndarray) -> Type:
    """Return the type of a tensor whose entries are those of another one at given positions."""
    index = np.unravel_index(positions, tuple(shape)) if shape else ()
    dims = tuple(range(positions.ndim))

    def read_field(field: Field) -> Field:
        array = field.atoms[tuple(index[dim] for dim in field.dims)] if field.dims else field.atoms
        if not field.dims:
            return field
        found_dims, atoms = tidy(dims, array)
        return Field(found_dims, atoms, field.weight)

    source = unvirtual(s.engine, source)
    everything = frozenset(dims)
    images = tuple(
        replace(image, key=s.engine.key(), varies=everything) if image.varies else image for image in source.images
    )
    for field in source.factors:
        if not field.dims:
            continue
        if _couples(field, index):
            # One axis of the result runs through this factor's and other axes at once, as a diagonal does.
            s.engine.partition.shatter(field.atoms)
            continue
        sizes = tuple(shape[dim] for dim in field.dims)
        flat = np.ravel_multi_index(tuple(index[dim] for dim in field.dims), sizes).reshape(-1)
        often = np.bincount(flat, minlength=prod(sizes)).reshape(field.atoms.shape)
        s.engine.partition.split(field.atoms, often, batch=False)
    return Type(tuple(map(read_field, source.factors)), tuple(map(read_field, source.shifts)), images, source.zero)


def _couples(field: Field, index: Sequence[np.ndarray]) -> bool:
    """Return whether along some axis of the result both the axes of a field and others change."""

    def changing(dims: Iterable[int]) -> set[int]:
        return {
            axis
            for dim in dims
            for axis in range(index[dim].ndim)
            if bool((index[dim] != np.take(index[dim], [0], axis)).any())
        }

    others = [dim for dim in range(len(index)) if dim not in field.dims]
    return bool(changing(field.dims) & changing(others))


@rule("conserved::write")
def _write(s: Step) -> Known:
    """Type a write into part of a tensor. It keeps its type if the new part has the same type."""
    base, value = s.arg(0), s.arg(2)
    shape = s.shape(base)
    before, after = s.type(base), s.type(value)
    positions = None if prod(shape) > ENTRIES else _positions(s.arg(1), s.arg(3))
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


@rule("cat", "concat", "concatenate")
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


def unvirtual(engine: Engine, type_: Type) -> Type:
    """Return a type whose charges do not depend on what an index tensor looks up."""
    if not any(field.virtual for field in (*type_.factors, *type_.shifts)):
        return type_
    axes = [axis for factor in type_.factors for axis in factor.virtual]
    factors = engine.uniform(type_.factors, (), axes)
    images = list(type_.images)
    shifts = []
    for field in type_.shifts:
        if field.virtual:
            images.append(Image(engine.key(), frozenset(field.occupied), distinct(field.atoms)))
        else:
            shifts.append(field)
    return Type(tuple(factors), tuple(shifts), tuple(images), type_.zero)


@rule("constant_pad_nd", "pad")
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
