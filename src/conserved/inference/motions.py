"""How every entry of a tensor moves when a law's parameters do: what the checker of derivations computes with.

To first order a motion of a tensor T is affine in T, with matrices and vectors over its entries in order,

    δT[e] = charge[e] T[e] + Σ_{e'} mixed[e, e'] T[e'] + shift[e] + Σ_images weight[e] u[label[e]].

An image is a number that depends on data, of which only is known where it is the same: at entries of one label. Nothing
here knows the inference; these are plain arrays of numbers in one direction of the law's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

KEYS = count(1)
"""Numbers for images."""

LARGEST_NUMBER = 2**40
"""Directions are drawn from whole numbers up to this."""
CLOSE = 16.0
"""Numbers this close are equal: rounding is far smaller, and two drawn numbers are far further apart."""


class Wrong(Exception):
    """A step does not follow."""


class Unchecked(Exception):
    """A step there is no rule for here."""


def need(holds: bool | np.bool_, why: str) -> None:
    """Refuse a step that does not follow."""
    if not holds:
        raise Wrong(why)


@dataclass(frozen=True, slots=True)
class Mixed:
    """A sparse matrix without a diagonal: entries in order of rows, then columns."""

    rows: Array
    columns: Array
    weights: Array

    @staticmethod
    def of(rows: Array, columns: Array, weights: Array, size: int) -> Mixed | None:
        """Entries in any order, those at one place added up; None if nothing is left."""
        place, inverse = np.unique(rows * size + columns, return_inverse=True)
        total = np.zeros(place.size)
        np.add.at(total, inverse.reshape(-1), weights)
        kept = np.abs(total) > CLOSE
        if not kept.any():
            return None
        return Mixed(place[kept] // size, place[kept] % size, total[kept])

    def same(self, other: Mixed | None) -> bool:
        """Whether two matrices are equal."""
        return (
            other is not None
            and np.array_equal(self.rows, other.rows)
            and np.array_equal(self.columns, other.columns)
            and bool((np.abs(self.weights - other.weights) < CLOSE).all())
        )


@dataclass(frozen=True, slots=True)
class MovedImage:
    """A shift that was multiplied with data: equal numbers at equal labels, none where the label is −1."""

    key: int
    labels: Array
    weights: Array

    @property
    def nothing(self) -> bool:
        return not (self.labels >= 0).any()


@dataclass(frozen=True, slots=True)
class Motion:
    """The motion of a tensor of `shape`; all arrays are flat. Entries that are `zero` move in any way by charges."""

    shape: tuple[int, ...]
    charge: Array
    mixed: Mixed | None = None
    shift: Array | None = None
    images: tuple[MovedImage, ...] = ()
    zero: Array | None = None

    @staticmethod
    def still_one(shape: Sequence[int], *, zero: bool = False) -> Motion:
        """A tensor that does not move; perhaps one of zeros."""
        size = prod(shape)
        return Motion(tuple(shape), np.zeros(size), zero=np.ones(size, dtype=bool) if zero else None)

    @property
    def size(self) -> int:
        return self.charge.size

    @property
    def scaled(self) -> bool:
        """Whether entries are multiplied or mixed."""
        moving = np.abs(self.charge) > CLOSE
        return self.mixed is not None or bool((moving if self.zero is None else moving & ~self.zero).any())

    @property
    def shifted(self) -> bool:
        """Whether something is added to entries."""
        return (self.shift is not None and bool((np.abs(self.shift) > CLOSE).any())) or any(
            not one.nothing for one in self.images
        )

    @property
    def still(self) -> bool:
        return not self.scaled and not self.shifted

    @property
    def vanishes(self) -> bool:
        """Whether it is a tensor of zeros."""
        return self.zero is not None and bool(self.zero.all())

    def unshifted(self, why: str) -> None:
        """Refuse a motion that adds something."""
        need(not self.shifted, why)

    def unmixed(self, why: str) -> None:
        """Refuse a motion that mixes entries."""
        need(self.mixed is None, why)

    def grid(self) -> Array:
        """Charges in the tensor's shape, NaN where it is zero."""
        charge = self.charge if self.zero is None else np.where(self.zero, np.nan, self.charge)
        return charge.reshape(self.shape)


def same_numbers(a: Array, b: Array) -> bool:
    """Whether two arrays agree, NaN standing for any number."""
    difference = np.abs(a - b)
    return bool((np.isnan(difference) | (difference < CLOSE)).all())


def alike(a: Motion, b: Motion) -> bool:
    """Whether two tensors of one shape move in the same way."""
    if a.vanishes or b.vanishes:
        return not (a.shifted or b.shifted)
    if not same_numbers(a.grid().reshape(-1), b.grid().reshape(-1)):
        return False
    if (a.mixed is None) != (b.mixed is None) or (a.mixed is not None and not a.mixed.same(b.mixed)):
        return False
    return not added(a, b, -1.0).shifted


def added(a: Motion, b: Motion, factor: float = 1.0) -> Motion:
    """The shifts of a + factor · b, whatever their charges are; those of a are kept."""
    shift = a.shift
    if b.shift is not None:
        shift = factor * b.shift + (0 if a.shift is None else a.shift)
    images = {one.key: one for one in a.images}
    for one in b.images:
        turned = replace(one, weights=factor * one.weights)
        mine = images.get(one.key)
        total = turned if mine is None else _merged(images.pop(one.key), turned)
        images[total.key] = total
    kept = tuple(one for one in images.values() if not one.nothing)
    return replace(a, shift=shift, images=kept)


def _merged(a: MovedImage, b: MovedImage) -> MovedImage:
    """The sum of two images of one origin: equal labels add up, different ones make a label of their own."""
    both = (a.labels >= 0) & (b.labels >= 0)
    if (a.labels[both] != b.labels[both]).any():
        table = np.stack([a.labels, b.labels, np.round(a.weights, 9), np.round(b.weights, 9)])
        _, rows = np.unique(table, axis=1, return_inverse=True)
        labels = np.where((a.labels >= 0) | (b.labels >= 0), rows.reshape(-1), -1)
        return MovedImage(next(KEYS), labels, np.where(labels >= 0, 1.0, 0.0))
    labels = np.where(a.labels >= 0, a.labels, b.labels)
    weights = np.where(a.labels >= 0, a.weights, 0.0) + np.where(b.labels >= 0, b.weights, 0.0)
    return MovedImage(a.key, np.where(np.abs(weights) > 1e-12, labels, -1), weights)


# --- entries in other places ----------------------------------------------------------------------------------------


def joined(parts: Sequence[Motion]) -> Motion:
    """Several tensors as one long one."""
    starts = np.concatenate([[0], np.cumsum([one.size for one in parts])]).astype(np.int64)
    size = int(starts[-1])
    mixed = [(start, one.mixed) for start, one in zip(starts, parts, strict=False) if one.mixed is not None]
    images: dict[int, tuple[Array, Array]] = {}
    for start, one in zip(starts, parts, strict=False):
        for image in one.images:
            labels, weights = images.setdefault(image.key, (np.full(size, -1), np.zeros(size)))
            labels[start : start + one.size], weights[start : start + one.size] = image.labels, image.weights
    return Motion(
        (size,),
        np.concatenate([one.charge for one in parts]),
        Mixed(
            np.concatenate([m.rows + s for s, m in mixed]),
            np.concatenate([m.columns + s for s, m in mixed]),
            np.concatenate([m.weights for _, m in mixed]),
        )
        if mixed
        else None,
        np.concatenate([np.zeros(one.size) if one.shift is None else one.shift for one in parts])
        if any(one.shift is not None for one in parts)
        else None,
        tuple(MovedImage(key, labels, weights) for key, (labels, weights) in images.items()),
        np.concatenate([np.zeros(one.size, dtype=bool) if one.zero is None else one.zero for one in parts])
        if any(one.zero is not None for one in parts)
        else None,
    )


def taken(source: Motion, places: Array, shape: Sequence[int]) -> Motion:
    """The tensor whose entry e is entry places[e] of the source, and zero where that is −1."""
    flat = places.reshape(-1).astype(np.int64)
    none = flat < 0
    safe = np.where(none, 0, flat)
    zero = none if source.zero is None else none | source.zero[safe]
    if not source.size:
        return Motion.still_one(shape, zero=True)
    return Motion(
        tuple(shape),
        np.where(none, 0.0, source.charge[safe]),
        None if source.mixed is None else _taken_mixed(source.mixed, flat, source.size),
        None if source.shift is None else np.where(none, 0.0, source.shift[safe]),
        tuple(
            MovedImage(one.key, np.where(none, -1, one.labels[safe]), np.where(none, 0.0, one.weights[safe]))
            for one in source.images
        ),
        zero if zero.any() else None,
    )


def _taken_mixed(mixed: Mixed, places: Array, size: int) -> Mixed | None:
    """Entries that are mixed with others keep them: the n-th copy of one entry is mixed with n-th copies of others."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    first = np.searchsorted(ordered, np.arange(size))
    count = np.searchsorted(ordered, np.arange(size), side="right") - first
    copy = np.empty(places.size, dtype=np.int64)
    copy[order] = np.arange(places.size) - first[np.maximum(ordered, 0)]
    begins = np.searchsorted(mixed.rows, np.arange(size))
    length = np.searchsorted(mixed.rows, np.arange(size), side="right") - begins
    chosen = np.flatnonzero((places >= 0) & (length[np.maximum(places, 0)] > 0))
    if not chosen.size:
        return None
    times = length[places[chosen]]
    rows = np.repeat(chosen, times)
    inner = np.arange(rows.size) - np.repeat(np.cumsum(times) - times, times)
    where = np.repeat(begins[places[chosen]], times) + inner
    columns = mixed.columns[where]
    need((copy[rows] < count[columns]).all(), "only some of the entries that are mixed are taken")
    return Mixed.of(rows, order[first[columns] + copy[rows]], mixed.weights[where], places.size)


def spread(motion: Motion, shape: Sequence[int]) -> Motion:
    """A tensor broadcast to a shape."""
    if motion.shape == tuple(shape):
        return motion
    places = np.broadcast_to(np.arange(motion.size).reshape(motion.shape), tuple(shape))
    return taken(motion, places, shape)


def transposed(motion: Motion, order: Sequence[int], shape: Sequence[int]) -> Motion:
    """Axes in another order, then another shape."""
    places = np.arange(motion.size).reshape(motion.shape).transpose(order)
    return taken(motion, places, shape)


def level(motion: Motion, axes: Sequence[int], why: str, *, shifts: bool = True) -> Motion:
    """The motion over the other axes of a tensor that moves alike along `axes`; they stay, with one entry each."""
    count = len(motion.shape)
    gone = sorted({axis % count for axis in axes}) if count else []
    if not gone:
        return motion
    kept = [axis for axis in range(count) if axis not in gone]
    inner = prod(motion.shape[axis] for axis in gone)
    outer = prod(motion.shape[axis] for axis in kept)
    small = tuple(1 if axis in gone else size for axis, size in enumerate(motion.shape))
    if not inner or not outer:
        return Motion.still_one(small, zero=True)
    turned = transposed(motion, [*kept, *gone], (outer, inner))
    grid = turned.grid()
    with np.errstate(all="ignore"):
        empty = np.asarray(np.isnan(grid).all(1))
        first = np.where(empty, 0.0, np.nanmax(np.where(empty[:, None], 0.0, grid), 1))
    need(same_numbers(grid, np.broadcast_to(first[:, None], grid.shape)), why)
    mixed = None
    if turned.mixed is not None:
        (r, a), (c, b) = np.divmod(turned.mixed.rows, inner), np.divmod(turned.mixed.columns, inner)
        need((a == b).all(), why)
        zeros = np.isnan(grid)
        need((zeros[r] == zeros[c]).all(), why)
        table = grouped(r * outer + c, turned.mixed.weights, (inner - zeros.sum(1))[r], why)
        mixed = Mixed.of(table[0] // outer, table[0] % outer, table[1], outer)
    shift: Array | None = None
    images: list[MovedImage] = []
    if shifts:
        if turned.shift is not None:
            rows = turned.shift.reshape(outer, inner)
            need(same_numbers(rows, np.broadcast_to(rows[:, :1], rows.shape)), why)
            shift = rows[:, 0].copy()
        for one in turned.images:
            labels, weights = one.labels.reshape(outer, inner), one.weights.reshape(outer, inner)
            need((labels == labels[:, :1]).all() and np.allclose(weights, weights[:, :1]), why)
            images.append(MovedImage(one.key, labels[:, 0].copy(), weights[:, 0].copy()))
    return Motion(small, first, mixed, shift, tuple(images), empty if empty.any() else None)


def grouped(keys: Array, weights: Array, times: Array | int, why: str) -> tuple[Array, Array]:
    """Keys that each occur as often as `times` says, with one weight: the keys and the weights."""
    found, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    need((counts[inverse.reshape(-1)] == times).all(), why)
    need(same_numbers(weights, weights[first][inverse.reshape(-1)]), why)
    return found, weights[first]
