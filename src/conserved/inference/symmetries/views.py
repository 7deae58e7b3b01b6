"""Parts of parameters as the views that a symmetry's legs are: contiguous runs, heads on a grid, or listed rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conserved.errors import ConservedError
from conserved.inference.types.engine import Region
from conserved.symmetry import Pick, View


class UnviewableError(ConservedError):
    """A part of a parameter that is no view: it cannot be the leg of a law."""


class Grid:
    """A parameter's shape, cut up where a part of it begins or ends."""

    def __init__(self, region: Region) -> None:
        self.name, self.shape, self.offset = region.name, region.shape, region.offset
        self.grid: list[list[int]] = [[size] for size in region.shape]
        self.picks: list[list[Pick]] = [[None] for _ in region.shape]
        self.region = region
        for dim in range(len(region.shape)):
            self.keep(dim, region.sets[dim])

    def keep(self, dim: int, chosen: np.ndarray) -> None:
        """Keep only these indices along an axis of the parameter, in ascending order."""
        size = self.shape[dim]
        if chosen.size == size:
            return
        start, steps = int(chosen[0]), np.unique(np.diff(chosen))
        if chosen.size == 1:
            self.grid[dim], self.picks[dim] = [size], [start]
        elif steps.size == 1 and steps[0] == 1:
            self.grid[dim], self.picks[dim] = _run(start, chosen.size, size)
        elif steps.size == 1 and size % int(steps[0]) == 0 and chosen.size == size // int(steps[0]):
            step = int(steps[0])
            self.grid[dim], self.picks[dim] = [size // step, step], [None, start]
        else:
            raise UnviewableError(f"{self.name} is used in pieces that are no slices")

    def axes(self, dim: int) -> list[int]:
        """Return the grid axes that an axis of the parameter is cut into and that are not picked away."""
        start = sum(len(part) for part in self.grid[:dim])
        return [start + n for n, pick in enumerate(self.picks[dim]) if not isinstance(pick, int)]

    def view(self, faced: Sequence[int], rows: tuple[int, ...] | None = None) -> View:
        """Return the view that faces some axes of the parameter."""
        grid = [size for part in self.grid for size in part]
        flat = enumerate(pick for part in self.picks for pick in part)
        picks: dict[int, Pick] = {index: pick for index, pick in flat if pick is not None}
        if not faced:
            raise UnviewableError(f"{self.name} has no axis that is left to act on")
        return View.of(
            self.name, self.shape, grid=tuple(grid), axes=tuple(faced), pick=picks, rows=rows, offset=self.offset
        )


def _run(start: int, length: int, size: int) -> tuple[list[int], list[Pick]]:
    """Return a run of indices: one cell of a grid if it is one, else a range."""
    if size % length == 0 and start % length == 0:
        return [size // length, length], [start // length, None]
    return [size], [(start, start + length)]


def rows_view(region: Region, dims: Sequence[int], indices: np.ndarray) -> View:
    """Return the view whose rows are `indices`, positions in the region along its axes `dims`, in this order."""
    grid = Grid(region)
    if not dims:
        return whole_view(region)
    local = np.unravel_index(indices, tuple(region.sets[dim].size for dim in dims))
    index = [region.sets[dim][part] for dim, part in zip(dims, local, strict=True)]
    moving = [
        n
        for n in range(len(dims))
        if bool((index[n] != index[n][:1]).any()) or (indices.size == 1 and n == len(dims) - 1)
    ]
    for n, dim in enumerate(dims):
        if n not in moving:
            grid.keep(dim, index[n][:1])
    if len(moving) == 1:
        (n,) = moving
        return _along(grid, dims[n], index[n])
    inner = tuple(index[n] for n in moving)
    sizes = tuple(region.shape[dims[n]] for n in moving)
    for n in moving:
        grid.grid[dims[n]], grid.picks[dims[n]] = [region.shape[dims[n]]], [None]
    flat = np.ravel_multi_index(inner, sizes)
    faced = [axis for n in moving for axis in grid.axes(dims[n])]
    everything = flat.size == int(np.prod(sizes)) and bool((flat == np.arange(flat.size)).all())
    return grid.view(faced, None if everything else tuple(map(int, flat)))


def _along(grid: Grid, dim: int, index: np.ndarray) -> View:
    """Return rows along one axis: all of it, a run, rotary planes of a run, or a list."""
    size = grid.shape[dim]
    grid.grid[dim], grid.picks[dim] = [size], [None]
    length = index.size
    steps = np.diff(index)
    if bool((steps == 1).all()):
        grid.keep(dim, index)
        faced = grid.axes(dim)
        if not faced:
            # One row: the axis is faced as a range of length one.
            grid.grid[dim], grid.picks[dim] = [size], [(int(index[0]), int(index[0]) + 1)]
            faced = grid.axes(dim)
        return grid.view(faced)
    start, half = int(index[0]), length // 2
    planes = np.stack([np.arange(half), np.arange(half) + half], 1).reshape(-1) if length % 2 == 0 else None
    if planes is not None and bool((index - start == planes).all()) and size % length == 0 and start % length == 0:
        grid.grid[dim], grid.picks[dim] = [size // length, 2, half], [start // length, None, None]
        first, second = grid.axes(dim)
        return grid.view([second, first])
    return grid.view(grid.axes(dim), tuple(map(int, index)))


def planes_view(region: Region, dims: Sequence[int], indices: np.ndarray) -> View:
    """Return the view with a row for every row of `indices`, whose several indices along one axis are columns."""
    if len(dims) != 1:
        raise UnviewableError(f"{region.name} is used in pieces that are no slices")
    grid = Grid(region)
    (dim,) = dims
    index = region.sets[dim][indices]
    rows, several = index.shape
    size, start = region.shape[dim], int(index[0, 0])
    step, jump = np.arange(rows)[:, None], np.arange(several)[None, :]
    length = rows * several
    if size % length or start % length:
        raise UnviewableError(f"{region.name} is used in pieces that are no slices")
    cells = [size // length]
    if bool((index - start == step * several + jump).all()):
        grid.grid[dim], grid.picks[dim] = [*cells, rows, several], [start // length, None, None]
        return grid.view(grid.axes(dim)[:1])
    if bool((index - start == jump * rows + step).all()):
        grid.grid[dim], grid.picks[dim] = [*cells, several, rows], [start // length, None, None]
        return grid.view(grid.axes(dim)[1:])
    raise UnviewableError(f"{region.name} is used in pieces that are no slices")


def whole_view(region: Region) -> View:
    """Return all of a region, faced by all its axes."""
    grid = Grid(region)
    faced = [axis for dim in range(len(region.shape)) for axis in grid.axes(dim)]
    # A region of one entry, which may be a part of its parameter, has no axis to face.
    return grid.view(faced) if faced else columns_of(grid, ())


def columns_view(region: Region, faced: Sequence[int], keep: tuple[int, int, int] | None = None) -> View:
    """Return the view whose rows run along `faced` and whose columns are all the rest, in order.

    Only a range of one axis can be kept.
    """
    grid = Grid(region)
    if keep is not None:
        dim, first, last = keep
        grid.keep(dim, region.sets[dim][first:last])
    return columns_of(grid, faced)


def columns_of(grid: Grid, faced: Sequence[int]) -> View:
    """Return the same, of what a grid keeps."""
    axes = [axis for dim in faced for axis in grid.axes(dim)]
    if axes:
        return grid.view(axes)
    picks: dict[int, Pick] = {
        1 + index: pick for index, pick in enumerate(p for part in grid.picks for p in part) if pick is not None
    }
    sizes = [size for part in grid.grid for size in part]
    return View.of(grid.name, grid.shape, grid=(1, *sizes), axes=(0,), pick=picks, offset=grid.offset)


def entries_view(region: Region, dims: Sequence[int], indices: np.ndarray) -> View:
    """Return the view with one row whose columns are these entries, positions in the region along its axes `dims`."""
    grid = Grid(region)
    local = np.unravel_index(indices, tuple(region.sets[dim].size for dim in dims))
    chosen = [np.unique(part) for part in local]
    if int(np.prod([part.size for part in chosen])) != indices.size or bool((np.diff(indices) <= 0).any()):
        raise UnviewableError(f"{region.name} is used in pieces that are no slices")
    for dim, part in zip(dims, chosen, strict=True):
        grid.keep(dim, region.sets[dim][part])
    return columns_of(grid, ())
