"""Rules for operators that read the entries of one tensor in another order: views, slices, splits, repetitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from conserved.inference.rules.step import Known, Step, at, fix_all, moved, rule
from conserved.inference.types.engine import ENTRIES, Engine
from conserved.inference.types.reindexing import Regroup, Renumber, Take, broadcast, permute
from conserved.inference.types.tensor_type import (
    FIXED,
    Field,
    Image,
    Type,
    distinct,
    moved_key,
    tidy,
)


@rule("view", "_unsafe_view", "_reshape_alias", "view_copy", "_reshape_copy")
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


@rule("transpose", "t")
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


@rule("expand", "expand_copy")
def _expand(s: Step) -> Known:
    return moved(s.raw(s.arg(0)), broadcast(s.shape(s.arg(0)), len(s.out)))


@rule(
    *("alias", "clone", "lift_fresh", "lift", "_to_copy"),
    *("alias_copy", "_conj", "lift_fresh_copy"),
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
    *("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "split_copy", "split_with_sizes_copy"),
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


@rule("repeat")
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
        positions = positions_in(s.arg(1), s.arg(2))
    elif "as_strided" in s.operation.name:
        return fix_all(s)
    else:
        source = torch.arange(prod(shape)).reshape(shape)
        function = getattr(source, "diagonal" if "diagonal" in s.operation.name else "unfold")
        positions = function(*s.operation.args[1:], **s.operation.kwargs).numpy()
    if positions is None:
        return fix_all(s)
    return read_at(s, s.type(x), shape, positions)


def positions_in(base: Any, view: Any) -> np.ndarray | None:
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
