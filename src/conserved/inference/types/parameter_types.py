"""The types of parameters: what a part of one may do is decided at its first use, and met again at every other one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

import numpy as np

from conserved.inference.types.engine import ENTRIES, LARGEST, Engine, ReadPart, Region, scaled
from conserved.inference.types.field_groups import axes_of, has_axis
from conserved.inference.types.tensor_type import FIXED, Atoms, Field, Strand, Type, distinct, spread, tidy


def whole_parameter(name: str, shape: tuple[int, ...]) -> ReadPart:
    """Return a whole parameter, before its first use."""
    coordinates = tuple(
        Field((dim,), np.arange(size)) if size != 1 else Field((), np.zeros((), dtype=np.int64))
        for dim, size in enumerate(shape)
    )
    return ReadPart(name, shape, coordinates)


def known_type(engine: Engine, view: ReadPart) -> Type | None:
    """Return the type of a part of a parameter that was used before; None at its first use."""
    sets = tuple(distinct(coordinate.atoms) for coordinate in view.coordinates)
    for region in engine.regions.get(view.name, []):
        if all(np.array_equal(a, b) for a, b in zip(sets, region.sets, strict=True)):
            if region.offset != view.offset:
                engine.zero(region.type)
                region.type = FIXED
            return _read(engine, view, region)
    return None


def first_use(
    engine: Engine,
    view: ReadPart,
    factors: Sequence[Field],
    *,
    role: str,
    entries: bool = False,
    rows: Sequence[int] = (),
) -> Type:
    """Give a part of a parameter its type: `factors` over the axes of the view, and every shift it may have.

    `rows` are axes of the view along which shifts may have a number for every row.
    """
    sets = tuple(distinct(coordinate.atoms) for coordinate in view.coordinates)
    overlapping = [
        region
        for region in engine.regions.get(view.name, [])
        if all(np.intersect1d(a, b, assume_unique=True).size for a, b in zip(sets, region.sets, strict=True))
    ]
    if overlapping:
        # Parts that overlap without being equal: what they share would have to move in two ways.
        for region in overlapping:
            engine.zero(region.type)
            region.type = FIXED
        _region(engine, view, sets, FIXED)
        return FIXED
    sizes = [atoms.size for atoms in sets]
    fields = [_onto(engine, view, sets, factor) for factor in factors]
    wide = [dim for dim, size in enumerate(sizes) if size > 1]
    shifts = []
    if len(wide) <= 1 or (entries and prod(sizes) <= ENTRIES):
        shifts.append(Field(tuple(wide), engine.shifts.fresh([sizes[d] for d in wide])))
        if role == "table" and wide:
            shifts.append(Field((), engine.shifts.fresh(())))
    else:
        for dim in wide:
            others = [d for d in wide if d != dim]
            if prod(sizes[d] for d in others) <= LARGEST:
                shifts.append(Field(tuple(others), engine.shifts.fresh([sizes[d] for d in others])))
    strands = []
    for dim in wide if len(wide) > 1 and not view.offset else ():
        own = view.coordinates[dim]
        if not own.virtual and own.dims and set(own.dims) <= set(rows):
            data = [sizes[d] for d in wide if d != dim]
            if prod(data) <= ENTRIES:
                strands.append(
                    Strand(
                        Field((dim,), engine.shifts.fresh((sizes[dim],))),
                        Field(tuple(d for d in wide if d != dim), np.arange(prod(data)).reshape(data)),
                    )
                )
    region = _region(engine, view, sets, Type(tuple(fields), tuple(shifts), strands=tuple(strands)))
    region.role = role
    return _read(engine, view, region)


def _region(engine: Engine, view: ReadPart, sets: tuple[Atoms, ...], type_: Type) -> Region:
    region = Region(view.name, view.shape, sets, type_, view.offset, engine.origin)
    engine.regions.setdefault(view.name, []).append(region)
    return region


def _local(view: ReadPart, sets: tuple[Atoms, ...], axis: int) -> Field:
    coordinate = view.coordinates[axis]
    return replace(coordinate, atoms=np.searchsorted(sets[axis], coordinate.atoms))


def _read(engine: Engine, view: ReadPart, region: Region) -> Type:
    """Return the type of a view of a region."""

    def read_field(field: Field) -> Field:
        parts = [_local(view, region.sets, axis) for axis in field.dims]
        virtual, dims, _, _ = axes_of(parts) if parts else ([], [], [], [])
        if not parts:
            return field
        index = tuple(np.broadcast_arrays(*(spread(part, dims, (), virtual) for part in parts)))
        copies = None if field.copies is None else field.copies[index]
        return Field(tuple(dims), field.atoms[index], field.weight, tuple(virtual), copies)

    type_ = region.type
    strands = tuple(Strand(read_field(strand.field), read_field(strand.data)) for strand in type_.strands)
    read_type = Type(tuple(map(read_field, type_.factors)), tuple(map(read_field, type_.shifts)), strands=strands)
    return scaled(engine, read_type, view.scale)


def _onto(engine: Engine, view: ReadPart, sets: tuple[Atoms, ...], field: Field) -> Field:
    """Return a field over the axes of a view as a field over the axes of the parameter."""
    axes = [
        axis
        for axis, coordinate in enumerate(view.coordinates)
        if set(coordinate.dims) & set(field.dims) or any(has_axis(field, known) for known in coordinate.virtual)
    ]
    parts = [_local(view, sets, axis) for axis in axes]
    virtual, dims, sizes, counts = axes_of(parts) if parts else ([], [], [], [])
    strange = [dim for dim in field.dims if dim not in dims]
    other_axes = [axis for axis in field.virtual if not any(axis.same(known) for known in virtual)]
    if strange or other_axes:
        level = engine.uniform([field], strange, other_axes)
        field = level[0]
    shape = tuple(counts) + tuple(sizes)
    array = np.broadcast_to(spread(field, dims, (), virtual), shape)
    index = tuple(np.broadcast_to(spread(part, dims, (), virtual), shape) for part in parts)
    base = np.zeros(tuple(sets[axis].size for axis in axes), dtype=np.int64)
    base[index] = array
    # Entries that a view reads more than once must have one charge.
    again = base[index]
    if not np.array_equal(again, array):
        engine.charges.add([(Fraction(1), again), (Fraction(-1), array)], origin=engine.origin)
        engine.partition.shatter(array)
    copies = None
    if field.copies is not None:
        copies = np.zeros_like(base)
        spread_copies = replace(field, atoms=field.copies)
        copies[index] = np.broadcast_to(spread(spread_copies, dims, (), virtual), shape)
        copies = tidy(axes, copies)[1]
    kept_axes, base = tidy(axes, base)
    return Field(kept_axes, base, field.weight, copies=copies)
