"""Laws over whole tables of which a program reads a slice, so that they hold for longer and shorter inputs too.

Learned positions are the usual case: P[:t] is added, with t the length of the inputs. Rows that are not read have no
gradient, so an identity that spans them holds as well. One that stops at row t fails on the next, longer batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from conserved.inference.types.engine import Region
from conserved.inference.typing import Typing
from conserved.symmetry import Leg, Symmetry, View


def over_unread_rows(symmetries: Iterable[Symmetry], typing: Typing) -> list[Symmetry]:
    """Return symmetries whose legs span the rows that nothing reads beside those that are read.

    Args:
        symmetries: symmetries of the program.
        typing: the typed program; a parameter counts if one slice of it is used, cut along one axis.
    """
    cut = {}
    for name, regions in typing.engine.regions.items():
        axes = [(dim, region.sets[dim]) for region in regions for dim in _cut_axes(region)]
        if len(regions) == 1 and len(axes) == 1:
            dim, rows = axes[0]
            if rows.size:
                cut[name] = dim, (int(rows[0]), int(rows[0]) + rows.size)
    return [
        replace(symmetry, legs=tuple(_extend(leg, symmetry, cut) for leg in symmetry.legs)) if cut else symmetry
        for symmetry in symmetries
    ]


def _cut_axes(region: Region) -> list[int]:
    return [dim for dim, size in enumerate(region.shape) if region.sets[dim].size != size]


def _extend(leg: Leg, symmetry: Symmetry, cut: dict[str, tuple[int, tuple[int, int]]]) -> Leg:
    view = leg.view
    if view.parameter not in cut or view.rows is not None or len(view.shape) < 2:
        return leg
    dim, rows = cut[view.parameter]
    axes = _grid_axes(view, dim)
    sliced = [axis for axis in axes if not isinstance(view.pick[axis], int)]
    if len(sliced) != 1 or _rows(view, axes) != rows:
        return leg
    faced = sliced[0] in view.axes
    # Columns may be added to what a group acts on, and rows to what is summed over them.
    if symmetry.kind.linear != faced and symmetry.kind.shared != "nothing":
        return leg
    first, count = axes[0], len(axes)
    grid = (*view.grid[:first], view.shape[dim], *view.grid[first + count :])
    pick = (*view.pick[:first], None, *view.pick[first + count :])
    moved = {axis: axis if axis < first else max(first, axis - count + 1) for axis in view.axes}
    extended = replace(view, grid=grid, pick=pick, axes=tuple(moved[axis] for axis in view.axes))
    return replace(leg, view=extended)


def _rows(view: View, axes: list[int]) -> tuple[int, int] | None:
    """Return the indices along an axis of the parameter that a view keeps.

    They form a range of one grid axis, or one cell of two axes.
    """
    picks = [view.pick[axis] for axis in axes]
    if len(axes) == 1 and isinstance(picks[0], tuple):
        return picks[0]
    if len(axes) == 2 and isinstance(picks[0], int) and picks[1] is None:
        length = view.grid[axes[1]]
        return picks[0] * length, (picks[0] + 1) * length
    return None


def _grid_axes(view: View, dim: int) -> list[int]:
    """Return the axes of a view's grid that an axis of the parameter is cut into."""
    after = prod(view.shape[dim + 1 :])
    before = after * view.shape[dim]
    return [
        axis
        for axis in range(len(view.grid))
        if after <= prod(view.grid[axis + 1 :]) < before and view.grid[axis] * prod(view.grid[axis + 1 :]) <= before
        if view.grid[axis] > 1 or view.shape[dim] == 1
    ]
