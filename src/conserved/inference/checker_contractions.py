"""Rules of the checker for sums of products: matrix products and convolutions."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from conserved.inference.checker_rules import CheckedStep, image, labelled, rule, same_mixed
from conserved.inference.motions import (
    CLOSE,
    Array,
    Mixed,
    Motion,
    MovedImage,
    Unchecked,
    added,
    grouped,
    level,
    need,
    same_numbers,
    spread,
    taken,
    transposed,
)


def row_labels(labels: Array, rows: int) -> tuple[Array, Array]:
    """Equal rows of labels get one number, −1 if nothing is in them; and which rows are of one label only."""
    table = labels.reshape(rows, -1)
    _, found = np.unique(table, axis=0, return_inverse=True)
    return np.where((table >= 0).any(1), found.reshape(-1), -1), (table == table[:, :1]).all(1)


def contracted(x: Motion, y: Motion, sizes: tuple[int, int, int, int], centred: tuple[bool, bool]) -> Motion:
    """Σ_k x[b,n,k] y[b,k,m]. Charges add up to something that does not depend on k.

    With matrices M that mix entries, the coefficient of x[n',k'] y[k,m'] must be that of M_z:
    M_x[(n,k),(n',k')] δ(m,m') + M_y[(k',m),(k,m')] δ(n,n') = M_z[(n,m),(n',m')] δ(k,k').
    """
    batch, rows, inner, columns = sizes
    shape = (batch, rows, columns)
    if x.vanishes or y.vanishes or not prod(sizes):
        return Motion.still_one(shape, zero=True)
    left, right = x.grid().reshape(batch, rows, inner), y.grid().reshape(batch, inner, columns)
    if np.isnan(left).any() or np.isnan(right).any():
        if prod((batch, rows, inner, columns)) > 20_000_000:
            raise Unchecked("too large")
        with np.errstate(all="ignore"):
            total = left[:, :, :, None] + right[:, None]
            first = np.nanmax(np.where(np.isnan(total).all(2, keepdims=True), 0.0, total), 2)
        need(same_numbers(total, first[:, :, None]), "what is summed does not move alike")
        charge = first
    else:
        along = left[:, :1] - left[:, :1, :1]
        need(same_numbers(left - left[:, :, :1], along), "what is summed does not move alike")
        opposite = (right - right[:, :1]).transpose(0, 2, 1)
        need(same_numbers(opposite, -along), "what is summed does not move alike")
        charge = left[:, :, :1] + right[:, :1]
    # Rows and columns of zeros move in any way; what they make is zero.
    empty = (np.asarray(np.isnan(left).all(2)), np.asarray(np.isnan(right).all(1)))
    mixed = _mixed_product(x.mixed, y.mixed, sizes, (left, right))
    zero = (empty[0][:, :, None] | empty[1][:, None]).reshape(-1)
    images = _images_of_product(x, y, sizes, centred)
    return Motion(shape, charge.reshape(-1), mixed, None, images, zero if zero.any() else None)


def _mixed_product(
    x: Mixed | None, y: Mixed | None, sizes: tuple[int, int, int, int], grids: tuple[Array, Array]
) -> Mixed | None:
    empty = (np.asarray(np.isnan(grids[0]).all(2)), np.asarray(np.isnan(grids[1]).all(1)))
    batch, rows, inner, columns = sizes
    why = "entries that are mixed are summed otherwise than their duals"
    tables: list[dict[int, float]] = []
    kept: list[tuple[Array, Array, Array]] = []
    for number, (mixed, stays) in enumerate(((x, rows), (y, columns))):
        tables.append({})
        if mixed is None:
            continue
        shape = (batch, rows, inner) if number == 0 else (batch, inner, columns)
        place, other = np.unravel_index(mixed.rows, shape), np.unravel_index(mixed.columns, shape)
        b, n, k = (place[0], place[1], place[2]) if number == 0 else (place[0], place[2], place[1])
        b2, n2, k2 = (other[0], other[1], other[2]) if number == 0 else (other[0], other[2], other[1])
        need((b == b2).all(), "entries of different products are mixed")
        across = k != k2
        need((n[across] == n2[across]).all(), why)
        keys = (b * inner + k) * inner + k2 if number == 0 else (b * inner + k2) * inner + k
        times = stays - empty[number].sum(1)
        found, weights = grouped(keys[across], mixed.weights[across], times[b[across]], why)
        tables[-1] = dict(zip(found.tolist(), weights.tolist(), strict=True))
        along = ~across
        if along.any():
            keys = (b * stays + n) * stays + n2
            table = np.isnan(grids[number]) if number == 0 else np.isnan(grids[number]).transpose(0, 2, 1)
            here = (b[along], n[along], n2[along])
            need((table[here[0], here[1]] == table[here[0], here[2]]).all(), why)
            times = inner - table[here[0], here[1]].sum(1)
            found, weights = grouped(keys[along], mixed.weights[along], times, why)
            b3, rest = np.divmod(found, stays * stays)
            n3, n4 = np.divmod(rest, stays)
            free = np.arange(columns if number == 0 else rows)
            if number == 0:
                r = ((b3 * rows + n3) * columns)[:, None] + free
                c = ((b3 * rows + n4) * columns)[:, None] + free
            else:
                r = (b3[:, None] * rows + free) * columns + n3[:, None]
                c = (b3[:, None] * rows + free) * columns + n4[:, None]
            kept.append((r.reshape(-1), c.reshape(-1), np.repeat(weights, free.size)))
    left, right = tables
    need(left.keys() == right.keys(), why)
    need(all(abs(left[key] + right[key]) < CLOSE for key in left), why)
    if not kept:
        return None
    parts = [np.concatenate(one) for one in zip(*kept, strict=True)]
    return Mixed.of(parts[0], parts[1], parts[2], batch * rows * columns)


def _images_of_product(
    x: Motion, y: Motion, sizes: tuple[int, int, int, int], centred: tuple[bool, bool]
) -> tuple[MovedImage, ...]:
    """A shift of one factor is an image of data: the same wherever the same row of shifts meets the same data."""
    batch, rows, inner, columns = sizes
    found = []
    for labels in labelled(x):
        row, one = row_labels(labels, batch * rows)
        row = np.where(one & centred[1], -1, row).reshape(batch, rows, 1)
        data = np.arange(batch * columns).reshape(batch, 1, columns)
        found.append(image(np.where(row >= 0, row * (batch * columns) + data, -1)))
    for labels in labelled(y):
        turned = labels.reshape(batch, inner, columns).transpose(0, 2, 1)
        row, one = row_labels(turned, batch * columns)
        row = np.where(one & centred[0], -1, row).reshape(batch, 1, columns)
        data = np.arange(batch * rows).reshape(batch, rows, 1)
        found.append(image(np.where(row >= 0, row * (batch * rows) + data, -1)))
    return tuple(one for one in found if not one.nothing)


def matrix_product(step: CheckedStep, a: int, b: int) -> Motion:
    """A product of matrices, with or without a leading axis."""
    x, y = step.tensor(a), step.tensor(b)
    sx, sy = x.shape, y.shape
    sizes = (sx[0], sx[1], sx[2], sy[2]) if len(sx) == 3 else (1, sx[0], sx[1], sy[1])
    flat = []
    for place, axis in ((a, len(sx) - 1), (b, len(sy) - 2)):
        value = step.number_of(place)
        flat.append(value is not None and axis in step.centred.get(value, ()))
    return contracted(x, y, sizes, (flat[0], flat[1]))


@rule("mm", "bmm")
def _matrices(step: CheckedStep) -> Motion:
    return replace(matrix_product(step, 0, 1), shape=step.shape())


@rule("mv", "dot", "vdot")
def _vectors(step: CheckedStep) -> Motion:
    x, y = step.tensor(0), step.tensor(1)
    rows = x.shape[0] if len(x.shape) == 2 else 1
    return replace(contracted(x, y, (1, rows, x.shape[-1], 1), (False, False)), shape=step.shape())


@rule("addmm", "baddbmm", "addmv")
def _matrices_plus(step: CheckedStep) -> Motion:
    """A product to which something is added that moves as the product does."""
    shape = step.shape()
    if step.name == "addmv":
        x, y = step.tensor(1), step.tensor(2)
        total = contracted(x, y, (1, x.shape[0], x.shape[1], 1), (False, False))
    else:
        total = matrix_product(step, 1, 2)
    alpha, beta = (float(step.record["named"].get(name, 1)) for name in ("alpha", "beta"))
    total = replace(total, shape=shape, images=tuple(replace(i, weights=i.weights * alpha) for i in total.images))
    return with_bias(total, spread(step.tensor(0), shape), beta)


def with_bias(total: Motion, bias: Motion, factor: float = 1.0) -> Motion:
    """A sum of which the second part moves as the first."""
    if factor == 0:
        return total
    if not bias.vanishes and not total.vanishes:
        need(same_numbers(bias.grid(), total.grid()), "what is added does not move alike")
        need(same_mixed(bias.mixed, total.mixed), "what is added does not move alike")
    if total.vanishes:
        total = replace(bias, shift=None, images=())
    return added(replace(total, zero=None), bias, factor)


@rule("convolution", "convolution_overrideable")
def _convolution(step: CheckedStep) -> Motion:
    """A contraction over channels that mixes places: nothing may depend on the place."""
    x, w, bias = step.tensor(0), step.tensor(1), step.operand(2)
    turned, groups = bool(step.given(6, "transposed", False)), int(step.given(8, "groups", 1))
    shape = step.shape()
    channels, out, rank = x.shape[1], shape[1], len(x.shape)
    # Axes along which the kernel does nothing are like samples; along the others nothing may depend on the place.
    free = [n for n in range(2, rank) if w.shape[n] == 1 and shape[n] == x.shape[n] and not _given_at(step, 4, n - 2)]
    free = free if any(x.shape[n] > 1 for n in free) and not turned else []
    bare = replace(x, shift=None, images=())
    small = level(bare, [0, *(n for n in range(2, rank) if n not in free)], "it depends on the place")
    rows, kernel = prod(x.shape[n] for n in free), prod(w.shape[2:])
    small = transposed(replace(small, shape=(groups, channels // groups, rows)), (0, 2, 1), (-1,))
    order = (0, 1, 2, 3) if turned else (0, 2, 1, 3)
    own = (groups, channels // groups, out // groups, kernel)
    own = own if turned else (own[0], own[2], own[1], own[3])
    maps = transposed(replace(w, shape=own, shift=None, images=()), order, (-1,))
    sizes = (groups, rows, channels // groups, out // groups * kernel)
    product = replace(contracted(small, maps, sizes, (False, False)), shape=(groups, rows, out // groups, kernel))
    made = level(product, [3], "it depends on the place in the kernel")
    made = transposed(made, (0, 2, 1, 3), (out, rows))
    where = np.zeros((1,) * rank, dtype=np.int64) + np.arange(out).reshape(1, out, *([1] * (rank - 2))) * rows
    step_size = rows
    for axis in free:
        step_size //= x.shape[axis]
        where = where + np.arange(x.shape[axis]).reshape([-1 if n == axis else 1 for n in range(rank)]) * step_size
    total = taken(made, np.broadcast_to(where, shape), shape)
    places = np.broadcast_to(np.arange(out).reshape(1, out, *([1] * (rank - 2))), shape)
    images: list[MovedImage] = []
    for labels in labelled(w):
        # δz[b,o,p] = Σ s[o,i,u] x[b,i,p+u]: the same for output channels with the same s.
        table = labels.reshape(own)
        table = table.transpose(0, 2, 1, 3) if turned else table
        row, _ = row_labels(np.ascontiguousarray(table), out)
        group = np.arange(out) // (out // groups)
        row = np.where(row >= 0, row * groups + group, -1).reshape(1, out, *([1] * (len(shape) - 2)))
        data = np.arange(prod(shape) // out).reshape(shape[0], 1, *shape[2:])
        images.append(image(np.broadcast_to(np.where(row >= 0, row * (prod(shape) // out) + data, -1), shape)))
    if x.shifted:
        images.append(image(np.arange(prod(shape))))
    total = replace(total, images=tuple(images))
    if bias is None:
        return total
    wide = taken(bias, places, shape)
    return with_bias(total, wide)


def _given_at(step: CheckedStep, place: int, axis: int) -> int:
    """The entry of a list of numbers, one for each axis, that may be one number for all."""
    given = step.given(place, default=[0])
    return int(given[axis] if axis < len(given) else given[0])
