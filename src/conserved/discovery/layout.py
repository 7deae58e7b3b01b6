"""Positions in a flattened parameter written as views: stacked, fused, transposed or flattened storage alike.

An n × m array of positions is one view if its offsets are digits of a mixed-radix number, position = Σ stride · digit,
with one digit (or a list of its values) along the rows and the others along the columns. What is not is cut into pieces
that are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from conserved.symmetry import Pick, View

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Digit:
    """Multiples of a stride, from 0 to extent − 1; `faced` if the group acts along it."""

    stride: int
    extent: int
    faced: bool = False


def views_of(name: str, shape: tuple[int, ...], positions: Positions) -> list[View]:
    """Return views that together see the entries at n × m positions; each has all n rows and some of the columns."""
    single = view_of(name, shape, positions)
    if single is not None:
        return [single]
    count = positions.shape[1]
    longest = next(size for size in range(count - 1, 0, -1) if view_of(name, shape, positions[:, :size]) is not None)
    starts = range(0, count, longest)
    return [view for start in starts for view in views_of(name, shape, positions[:, start : start + longest])]


def view_of(name: str, shape: tuple[int, ...], positions: Positions) -> View | None:
    """Return the view that sees the entries at n × m positions, columns in increasing order; None if there is none."""
    shape = shape or (1,)
    first = int(positions[0, 0])
    down, along = positions[:, 0] - first, positions[0] - first
    if not np.array_equal(positions, first + down[:, None] + along[None]):
        return None
    if len(along) == 1:
        return _single_column(name, shape, positions[:, 0])
    columns = digits(along)
    if columns is None:
        return None
    if len(down) == 1:
        return _on_grid(name, shape, first, columns, None)
    steps = np.abs(down[down != 0])
    stride = int(np.gcd.reduce(steps)) if len(steps) else 0
    if stride == 0:
        return None
    low = int(down.min())
    numbers = ((down - low) // stride).tolist()
    face = _Digit(stride, max(numbers) + 1, faced=True)
    rows = None if numbers == list(range(len(numbers))) else tuple(numbers)
    return _on_grid(name, shape, first + low, [*columns, face], rows)


def _single_column(name: str, shape: tuple[int, ...], positions: Positions) -> View:
    """Return one column of entries.

    It follows one stored axis if the entries lie on one, and lists entries of the flat parameter otherwise.
    """
    if len(positions) == 1:
        result = _on_grid(name, shape, int(positions[0]), [], None)
        assert result is not None
        return result
    steps = np.diff(positions)
    if (steps == steps[0]).all() and steps[0] > 0:
        result = _on_grid(name, shape, int(positions[0]), [_Digit(int(steps[0]), len(positions), faced=True)], None)
        if result is not None:
            return result
    return View.of(name, shape, grid=(prod(shape), 1), axes=0, rows=tuple(positions.tolist()))


def digits(offsets: Positions) -> list[_Digit] | None:
    """Return offsets 0 = o_0 < o_1 < … as all sums of multiples of strides, smallest stride first.

    The result is None if the offsets are not such sums.
    """
    result: list[_Digit] = []
    remaining = offsets
    while len(remaining) > 1:
        step = int(remaining[1] - remaining[0])
        if step <= 0:
            return None
        differs = np.flatnonzero(np.diff(remaining) != step)
        run = int(differs[0]) + 1 if len(differs) else len(remaining)
        if len(remaining) % run:
            return None
        rows = remaining.reshape(-1, run)
        if not np.array_equal(rows, rows[:, :1] + step * np.arange(run)):
            return None
        result.append(_Digit(step, run))
        remaining = rows[:, 0]
    return result


def _on_grid(
    name: str, shape: tuple[int, ...], first: int, used: list[_Digit], rows: tuple[int, ...] | None
) -> View | None:
    """Return the view with these digits above its first position, on a grid that keeps the stored axes where it can."""
    size = prod(shape)
    ordered = sorted(_at_stored_axes(shape, first, used), key=lambda digit: digit.stride)
    grid: list[int] = []
    picks: list[Pick] = []
    faced: list[int] = []
    bottom = 1
    for digit in ordered:
        if digit.stride % bottom:
            return None
        _skip(shape, bottom, digit.stride, first, grid, picks)
        above = [other.stride for other in ordered if other.stride > digit.stride]
        extent, top = _room(shape, first, digit, min(above, default=size))
        if extent is None:
            return None
        start = first // digit.stride % extent
        if digit.faced:
            faced.append(len(grid))
        grid.append(extent)
        picks.append(None if digit.extent == extent else (start, start + digit.extent))
        bottom = top
    _skip(shape, bottom, size, first, grid, picks)
    if prod(grid) != size:
        return None
    grid, picks, faced = grid[::-1], picks[::-1], [len(grid) - 1 - index for index in faced]
    if not faced:
        # A single row is faced along an axis of one entry.
        grid, picks, faced = [1, *grid], [None, *picks], [0]
    return View(parameter=name, shape=shape, grid=tuple(grid), axes=tuple(faced), pick=tuple(picks), rows=rows)


def _at_stored_axes(shape: tuple[int, ...], first: int, used: list[_Digit]) -> list[_Digit]:
    """Return column digits cut where a stored axis ends, so that views can be written as slices."""
    result = []
    for digit in used:
        stride, extent = digit.stride, digit.extent
        for boundary in () if digit.faced else _strides(shape)[::-1]:
            inner = boundary // stride if boundary % stride == 0 else 0
            if 1 < inner < extent and extent % inner == 0 and first // stride % inner == 0:
                result.append(_Digit(stride, inner))
                stride, extent = boundary, extent // inner
        result.append(_Digit(stride, extent, digit.faced))
    return result


def _room(shape: tuple[int, ...], first: int, digit: _Digit, ceiling: int) -> tuple[int | None, int]:
    """Return how far a grid axis of this stride reaches: to the end of its stored axis if that holds the digit."""
    ends = [e for e in (*_strides(shape)[::-1], prod(shape)) if digit.stride < e <= ceiling and e % digit.stride == 0]
    for end in dict.fromkeys([*ends, ceiling]):
        if end % digit.stride or ceiling % end:
            continue
        extent = end // digit.stride
        if first // digit.stride % extent + digit.extent <= extent:
            return extent, end
    return None, ceiling


def _skip(shape: tuple[int, ...], low: int, high: int, first: int, grid: list[int], picks: list[Pick]) -> None:
    """Skip axes between two strides along which the view takes one index, one for each stored axis."""
    for end in [*(s for s in _strides(shape)[::-1] if low < s < high and s % low == 0 and high % s == 0), high]:
        if end > low and end % low == 0:
            extent = end // low
            grid.append(extent)
            picks.append(first // low % extent)
            low = end


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of the stored axes, largest first."""
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]
