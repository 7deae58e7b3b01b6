"""Fields that meet in one equation: their common axes, which of them are connected, and the terms they add to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

import numpy as np

from conserved.inference.types.tensor_type import Atoms, Field, Virtual, spread


def has_axis(field: Field, axis: Virtual) -> bool:
    """Return whether a looked-up axis is one of a field."""
    return any(axis.same(own_axis) for own_axis in field.virtual)


def _same_axes(a: Field, b: Field) -> bool:
    return a.dims == b.dims and len(a.virtual) == len(b.virtual) and all(has_axis(b, axis) for axis in a.virtual)


def within(a: Field, b: Field) -> bool:
    """Return whether every axis of one field is an axis of the other."""
    return set(a.dims) <= set(b.dims) and all(has_axis(b, axis) for axis in a.virtual)


def cancel(fields: Sequence[Field]) -> tuple[Field, ...]:
    """Return fields without those that occur with opposite weights, equal ones added up."""
    fields_left: list[Field] = []
    for field in fields:
        for index, other in enumerate(fields_left):
            if (
                field.atoms.shape == other.atoms.shape
                and field.dims == other.dims
                and _same_axes(field, other)
                and (field.atoms is other.atoms or bool((field.atoms == other.atoms).all()))
            ):
                weight = other.weight + field.weight
                if weight:
                    fields_left[index] = replace(other, weight=weight)
                else:
                    del fields_left[index]
                break
        else:
            fields_left.append(field)
    return tuple(fields_left)


def components(fields: Sequence[Field]) -> list[list[Field]]:
    """Return groups of fields that are connected by common axes."""
    groups: list[tuple[set[int], list[Virtual], list[Field]]] = []
    for field in fields:
        dims, virtual, members = set(field.dims), list(field.virtual), [field]
        apart = []
        for group in groups:
            if group[0] & dims or any(axis.same(known) for axis in group[1] for known in virtual):
                dims |= group[0]
                virtual += [axis for axis in group[1] if not any(axis.same(known) for known in virtual)]
                members = group[2] + members
            else:
                apart.append(group)
        groups = [*apart, (dims, virtual, members)]
    return [members for _, _, members in groups]


def axes_of(group: Sequence[Field]) -> tuple[list[Virtual], list[int], list[int], list[int]]:
    """Return all axes of a group of fields.

    The result has the virtual axes, the dimensions, the sizes of the dimensions and the sizes of the virtual axes.
    """
    virtual: list[Virtual] = []
    counts: list[int] = []
    sizes: dict[int, int] = {}
    for field in group:
        for n, axis in enumerate(field.virtual):
            if not any(axis.same(known) for known in virtual):
                virtual.append(axis)
                counts.append(field.atoms.shape[n])
        for n, dim in enumerate(field.dims):
            sizes[dim] = field.atoms.shape[len(field.virtual) + n]
    dims = sorted(sizes)
    return virtual, dims, [sizes[dim] for dim in dims], counts


def terms_of(group: Sequence[Field]) -> tuple[list[tuple[Fraction, Atoms]], int]:
    """Return the terms of the equation of a group, over all its axes, and how many equations there are."""
    virtual, dims, sizes, counts = axes_of(group)
    return [(field.weight, spread(field, dims, sizes, virtual)) for field in group], prod(sizes) * prod(counts)


def coordinates_of(field: Field, dims: Iterable[int]) -> Atoms | None:
    """Return for every place of a field its position along those of its own axes that are among `dims`."""
    own_dims = [dim for dim in field.dims if dim in set(dims)]
    if not own_dims:
        return None
    leading = len(field.virtual)
    shape = field.atoms.shape
    keys = np.zeros((1,) * len(shape), dtype=np.int64)
    for dim in own_dims:
        axis = leading + field.dims.index(dim)
        index = np.arange(shape[axis]).reshape(tuple(-1 if n == axis else 1 for n in range(len(shape))))
        keys = keys * shape[axis] + index
    return np.broadcast_to(keys, shape)
