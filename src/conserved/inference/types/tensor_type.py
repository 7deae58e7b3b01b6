"""The type of a tensor: how each of its entries moves under the unknown group of symmetries of a program.

The group acts on parameters; every tensor that is computed from them moves along. To first order the motion of a tensor
T is a charge times T plus a shift,

    δT[i] = (Σ_f w_f q[a_f(i)]) T[i] + Σ_g w_g σ[b_g(i)] + (images),

with one unknown number for every *atom*: q for charges, σ for shifts. A `Field` is the map i ↦ a(i): an array of atoms
over some of the tensor's axes, the same for all indices of the others. Reshaping, slicing and joining tensors only
re-indexes these arrays, so fused projections, interleaved heads and grouped queries need no special case. An `Image` is
a shift that has been through a product with data: only where it comes from and along which axes it varies is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Atoms = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Virtual:
    """The axis that an index tensor looks entries up along: which of its entries is used where in a tensor.

    `dims` are the axes of the tensor that the index varies along and `slots` says, over those axes, which entry of the
    index tensor decides. Two tensors that were looked up by one index tensor agree where their slots do.
    """

    key: int
    dims: tuple[int, ...]
    slots: Atoms

    def same(self, other: Virtual) -> bool:
        """Return whether both look up the same entry at every place."""
        return (
            self.key == other.key
            and self.dims == other.dims
            and self.slots.shape == other.slots.shape
            and bool((self.slots == other.slots).all())
        )


@dataclass(frozen=True, eq=False, slots=True)
class Field:
    """Atoms over the axes `dims` of a tensor, constant along all others, with a weight: the power of the scale.

    `virtual` axes, if any, are the leading axes of `atoms`.
    """

    dims: tuple[int, ...]
    atoms: Atoms
    weight: Fraction = Fraction(1)
    virtual: tuple[Virtual, ...] = ()
    copies: Atoms | None = None
    """Where atoms occur several times (a key head repeated for its queries), which of the copies a place belongs to."""

    def times(self, weight: Fraction | int) -> Field:
        """Return the same atoms with another weight."""
        return replace(self, weight=self.weight * weight)

    def touches(self, dims: Iterable[int]) -> bool:
        """Return whether the motion can differ along one of these axes."""
        own = self.occupied
        return any(dim in own for dim in dims)

    @property
    def occupied(self) -> set[int]:
        """The axes of the tensor along which the motion can differ."""
        result = set(self.dims)
        for axis in self.virtual:
            result.update(axis.dims)
        return result


@dataclass(frozen=True, eq=False, slots=True)
class Image:
    """A shift that was multiplied with data: a linear map of `atoms`, of which only the axes it varies along are known.

    Two images with one `key` are the same map of the same axes, so that they cancel in x − mean(x). A move of entries
    along an axis that an image varies along makes another map of it, and gives it another key: see `moved_key`.
    """

    key: int
    varies: frozenset[int]
    atoms: Atoms
    weight: Fraction = Fraction(1)


@dataclass(frozen=True, eq=False, slots=True)
class Strand:
    """A shift times data: one number for every row of a map, as in σ[o] · (c x)[n].

    Rows may be moved by numbers of their own, which is what sums over the rows of one head are. `data` has a label for
    every place: the data may differ between places whose labels do.
    """

    field: Field
    data: Field


@dataclass(frozen=True, eq=False, slots=True)
class Type:
    """How a tensor moves: `factors` multiply, the rest adds. A tensor of zeros fits any factors."""

    factors: tuple[Field, ...] = ()
    shifts: tuple[Field, ...] = ()
    images: tuple[Image, ...] = ()
    zero: bool = False
    centred: frozenset[int] = frozenset()
    """Axes along which the tensor sums to zero, as after a norm that centres: its readers see no common shift."""
    strands: tuple[Strand, ...] = ()

    @property
    def fixed(self) -> bool:
        """Whether the tensor does not move at all."""
        return not (self.factors or self.shifts or self.images or self.strands)

    @property
    def shifted(self) -> bool:
        """Whether something is added to the tensor."""
        return bool(self.shifts or self.images or self.strands)


FIXED = Type()
ZERO = Type(zero=True)


def moved_key(key: int, *move: Hashable) -> int:
    """Return the key of an image after a move: the same for the same move of the same image, and new for any other.

    Keys of the engine count up from one; these are digests of 120 bits, above all of them.
    """
    digest = hashlib.blake2b(repr((key, move)).encode(), digest_size=15).digest()
    return (1 << 121) | int.from_bytes(digest, "big")


_DENSE = 16
"""Numbers between the first and the last atom, for each atom, up to which they are marked one by one."""


def distinct(atoms: Atoms) -> Atoms:
    """Return the different entries of an array, in ascending order."""
    # Along axes without a stride the same entries come again.
    flat = atoms[tuple(slice(0, 1) if step == 0 else slice(None) for step in atoms.strides)].reshape(-1)
    if flat.size < 2 or bool((flat[1:] > flat[:-1]).all()):
        return flat
    first, last = int(flat.min()), int(flat.max())
    if last - first >= _DENSE * flat.size:
        return np.unique(flat)
    # Atoms are numbered in a row, so that a mark for each takes less than sorting them.
    present = np.zeros(last - first + 1, dtype=np.bool_)
    present[flat - first] = True
    return np.flatnonzero(present).astype(flat.dtype, copy=False) + first


def tidy(dims: Sequence[int], array: Atoms, leading: int = 0) -> tuple[tuple[int, ...], Atoms]:
    """Return a field without axes of size one, its axes in ascending order."""
    remaining = [index for index, _ in enumerate(dims) if array.shape[leading + index] != 1]
    array = array.reshape(array.shape[:leading] + tuple(array.shape[leading + index] for index in remaining))
    dims = [dims[index] for index in remaining]
    order = sorted(range(len(dims)), key=dims.__getitem__)
    if order != list(range(len(order))):
        array = array.transpose(tuple(range(leading)) + tuple(leading + index for index in order))
    return tuple(sorted(dims)), array


def without_constant_axes(dims: tuple[int, ...], array: Atoms, leading: int = 0) -> tuple[tuple[int, ...], Atoms]:
    """Return a field without the axes along which it does not change."""
    remaining = list(dims)
    for dim in dims:
        axis = leading + remaining.index(dim)
        first = np.take(array, [0], axis)
        if bool((array == first).all()):
            array = np.asarray(np.take(array, 0, axis))
            remaining.remove(dim)
    return tuple(remaining), array


def spread(field: Field, dims: Sequence[int], shape: Sequence[int], virtual: Sequence[Virtual] = ()) -> Atoms:
    """Return the atoms of a field over more axes.

    The axes are those in `virtual`, then those in `dims`, with the sizes of `shape`.
    """
    leading = len(field.virtual)
    source = field.atoms
    index: list[slice | None] = []
    order: list[int] = []
    for axis in virtual:
        match = next((n for n, own_axis in enumerate(field.virtual) if own_axis.same(axis)), None)
        index.append(None if match is None else slice(None))
        if match is not None:
            order.append(match)
    for dim in dims:
        index.append(slice(None) if dim in field.dims else None)
        if dim in field.dims:
            order.append(leading + field.dims.index(dim))
    source = source.transpose(order)[tuple(index)] if index else source
    return source
