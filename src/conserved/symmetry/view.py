"""A named n × m view of a parameter that applies as well to anything of the parameter's shape.

A view is read in three moves: *reshape* the tensor to a grid, *pick* indices along grid axes, and *face* the
axes the group acts on. That covers what occurs in real networks without copying:

| parameter | grid | pick | face |
|---|---|---|---|
| query weight (H·d_h, d), head h | (H, d_h, d) | h | axis 1 |
| output weight (d, H·d_h), head h | (d, H, d_h) | h on axis 1 | axis 2 |
| fused qkv (3·H·d_h, d), key of head h | (3, H, d_h, d) | 1, h | axis 2 |
| transposed storage (d, 3·H·d_h) | (d, 3, H, d_h) | 1, h | axis 3 |
| rotary pairs (2j, 2j+1) | (H, d_h/2, 2, d) | h | axes 1, 2 |
| rotary pairs (j, j + d_h/2) | (H, 2, d_h/2, d) | h | axes 2, 1 |
| fused experts (E, 2·h, d), up branch of expert e | (E, 2, h, d) | e, 1 | axis 2 |
| bias (n,) | (n,) | | axis 0, one column |

A bias that rides along with a weight is a leg of one column: the moment map of [W b] is the sum of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

Pick = int | tuple[int, int] | None
"""The entries that a view reads along one grid axis: one index, a half-open range, or all of them."""


def whole(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return the global values of a tensor: a DTensor is gathered, a sparse gradient made dense."""
    # Asked by attribute: importing the class costs half a second that plain models need not pay.
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    return tensor.to_dense() if tensor.is_sparse else tensor


def local(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return the values of a tensor that this process holds.

    This is the process's own part of a DTensor; a sparse gradient becomes dense.
    """
    result: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return result.to_dense() if result.is_sparse else result


def local_as(tensor: Shaped[Tensor, "..."], like: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."] | None:
    """Return this process's part of a tensor, laid out as another tensor; None if that needs communication.

    The gradient of a sharded DTensor may come as a replica, as that of an embedding does under tensor parallelism. An
    optimizer takes its part of it.
    """
    placed, wanted = getattr(tensor, "placements", None), getattr(like, "placements", None)
    if placed == wanted:
        return local(tensor)
    if placed is None or wanted is None:
        return None
    if not all(own == other or own.is_replicate() for own, other in zip(placed, wanted, strict=True)):
        return None
    return local(tensor.redistribute(placements=wanted))  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Reshape to `grid`, keep `pick` along each grid axis, face `axes`: an n × m matrix."""

    parameter: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    axes: tuple[int, ...]
    pick: tuple[Pick, ...]
    rows: tuple[int, ...] | None = None
    """Which of the faced rows, in which order; all of them if None. Reading such a view copies."""
    offset: float = 0.0
    """Added to every entry of a point, and to no direction: a norm that multiplies by 1 + γ is seen as 1 + γ."""
    rest: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """The grid axes that make up the columns."""
    faced: int = field(init=False, compare=False, repr=False)
    """Rows before `rows` chooses among them."""
    n: int = field(init=False, compare=False, repr=False)
    """Rows: the size of the space the group acts on."""
    m: int = field(init=False, compare=False, repr=False)
    """Columns: the entries of each row."""

    @staticmethod
    def of(
        parameter: str,
        shape: tuple[int, ...],
        *,
        grid: tuple[int, ...] | None = None,
        axes: tuple[int, ...] | int = 0,
        pick: dict[int, Pick] | None = None,
        rows: tuple[int, ...] | None = None,
        offset: float = 0.0,
    ) -> View:
        """Create a view of a parameter; arguments that are left out stand for the whole parameter.

        Args:
            parameter: the name of the parameter.
            shape: its shape.
            grid: the shape it is reshaped to, such as (heads, width, d); by default its own.
            axes: the grid axes the group acts on: the rows of the matrix; the others that are left make up its columns.
            pick: by grid axis, one index or a half-open range; by default everything.
            rows: which of the rows, in which order; by default all.
            offset: added to every entry where the view reads parameters, as for a norm that multiplies by 1 + γ.

        Returns:
            The view.

        Raises:
            ValueError: grid, axes or picks do not fit the shape.
        """
        grid = tuple(shape) if grid is None else grid
        chosen = dict(pick or {})
        unknown = sorted(set(chosen) - set(range(len(grid))))
        if unknown:
            raise ValueError(
                f"Expected a grid axis of {grid} to pick from, got {unknown[0]} for {parameter}. Count axes of "
                "the grid from 0."
            )
        return View(
            parameter=parameter,
            shape=tuple(shape),
            grid=grid,
            axes=(axes,) if isinstance(axes, int) else axes,
            pick=tuple(chosen.get(axis) for axis in range(len(grid))),
            rows=rows,
            offset=offset,
        )

    def __post_init__(self) -> None:
        if prod(self.shape) != prod(self.grid):
            raise ValueError(
                f"Expected a grid of {prod(self.shape)} entries for {self.parameter} of shape {self.shape}, got "
                f"{self.grid} with {prod(self.grid)}. Correct the grid."
            )
        if len(self.pick) != len(self.grid):
            raise ValueError(
                f"Expected a pick for each of the {len(self.grid)} axes of {self.grid}, got {len(self.pick)} for "
                f"{self.parameter}. Pass None where nothing is picked."
            )
        if not self.axes or len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"Expected axes that name at least one grid axis, each once, got {self.axes} for "
                f"{self.parameter}. Correct them."
            )
        for axis in self.axes:
            if not 0 <= axis < len(self.grid) or isinstance(self.pick[axis], int):
                raise ValueError(
                    f"Expected an axis of the grid {self.grid}, got {axis} for {self.parameter}. Count axes of "
                    "the grid from 0."
                )
        for axis, (size, chosen) in enumerate(zip(self.grid, self.pick, strict=True)):
            start, stop = _bounds(chosen, size)
            if not 0 <= start < stop <= size:
                raise ValueError(
                    f"Expected a pick inside axis {axis} of the grid {self.grid}, got {chosen} for "
                    f"{self.parameter}. Correct it."
                )
        rest = tuple(a for a, p in enumerate(self.pick) if a not in self.axes and not isinstance(p, int))
        faced = prod(self._extent(axis) for axis in self.axes)
        if self.rows is not None and (not self.rows or not all(0 <= row < faced for row in self.rows)):
            raise ValueError(
                f"Expected rows among the {faced} of the view, got {self.rows} for {self.parameter}. Correct them."
            )
        object.__setattr__(self, "rest", rest)
        object.__setattr__(self, "faced", faced)
        object.__setattr__(self, "n", faced if self.rows is None else len(self.rows))
        object.__setattr__(self, "m", prod(self._extent(axis) for axis in rest))

    def _extent(self, axis: int) -> int:
        start, stop = _bounds(self.pick[axis], self.grid[axis])
        return stop - start

    def squeezed(self) -> View:
        """Return the same view without grid axes of size one on which the group does not act.

        Views of equal entries compare equal.
        """
        axes = [axis for axis, size in enumerate(self.grid) if size > 1 or axis in self.axes]
        return replace(
            self,
            grid=tuple(self.grid[axis] for axis in axes),
            axes=tuple(axes.index(axis) for axis in self.axes),
            pick=tuple(self.pick[axis] for axis in axes),
        )

    def reading(self, batch: tuple[int, ...] = ()) -> Reading:
        """Return the steps by which this view is read: batch axes first, then `axes`, then the rest.

        Args:
            batch: grid axes that keep their whole extent whatever they pick, so that all heads of a parameter are read
                at once.

        Returns:
            The steps, for tensors of the parameter's shape.
        """
        picks = tuple(
            (axis, p) for axis, p in reversed(list(enumerate(self.pick))) if p is not None and axis not in batch
        )
        gone = [axis for axis, chosen in picks if isinstance(chosen, int)]
        order = tuple(axis - sum(removed < axis for removed in gone) for axis in (*batch, *self.axes, *self.rest))
        return Reading(self, picks, order)

    def face(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Return the picked entries of a tensor of the parameter's shape, `axes` first.

        The result is a view of the tensor wherever torch can make one.
        """
        return self.reading().of(tensor)

    def matrix(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "n m"]:
        """Return the n × m matrix that this view sees in a gradient or an update, a tensor of the parameter's shape.

        Args:
            tensor: the gradient or the update.

        Returns:
            The matrix.
        """
        return self.chosen(self.face(tensor).reshape(-1, self.m))

    def of_point(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "n m"]:
        """Return the n × m matrix that this view sees in the parameter itself: with the offset added."""
        return self.matrix(tensor) + self.offset if self.offset else self.matrix(tensor)

    def chosen(self, matrices: Shaped[Tensor, "*batch faced m"]) -> Shaped[Tensor, "*batch n m"]:
        """Select the rows of this view from an array of shape (…, faced, m); leading axes are batch axes."""
        if self.rows is None:
            return matrices
        stride = _stride(self.rows)
        if stride is not None:
            # A view: laws of convolutions before a flattening read the same weight at hundreds of offsets.
            return matrices[..., self.rows[0] : self.rows[-1] + 1 : stride, :]
        return matrices.index_select(-2, torch.tensor(self.rows, device=matrices.device))

    def written(self, tensor: Float[Tensor, "..."], matrix: Float[Tensor, "n m"]) -> Float[Tensor, "..."]:
        """Return a copy of a parameter in which this view sees another matrix.

        Args:
            tensor: the parameter; a DTensor is gathered, and the result distributed as it was.
            matrix: the n × m matrix to write, offset included.

        Returns:
            A new tensor of the parameter's shape.
        """
        matrix = matrix - self.offset if self.offset else matrix
        result = whole(tensor).clone(memory_format=torch.contiguous_format)
        target = self.face(result)
        if self.rows is None:
            target.copy_(matrix.reshape(target.shape))
        else:
            all_rows = target.reshape(-1, self.m).clone()
            all_rows[list(self.rows)] = matrix
            target.copy_(all_rows.reshape(target.shape))
        if not hasattr(tensor, "full_tensor"):
            return result
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(tensor, DTensor)
        return distribute_tensor(result, tensor.device_mesh, tensor.placements)

    @property
    def transposed(self) -> bool:
        """Whether the group acts on the columns of the parameter as stored, so that its law reads WᵀW."""
        columns = [axis for axis in self.rest if self._extent(axis) > 1]
        return bool(columns) and max(columns) < max(self.axes)

    def text(self, *, latex: bool = False) -> str:
        """Return the parameter and the slice of it that is seen, such as o.weight[:,0:64]; with `latex`, as LaTeX."""
        window = _window(self.shape, self.grid, self.pick)
        if window is None:
            chosen = (
                ":" if p is None else "{}:{}".format(*_bounds(p, size))
                for p, size in zip(self.pick, self.grid, strict=True)
            )
            name = f"{self.parameter}.reshape({'×'.join(map(str, self.grid))})[{','.join(chosen)}]"
        else:
            while window and window[-1] == ":":
                window = window[:-1]
            name = f"{self.parameter}[{','.join(window)}]" if window else self.parameter
        if self.rows is not None:
            name += f"[{':,' if self.transposed else ''}({_join_names(self.rows)})]"
        name = _typewriter(name) if latex else name
        return f"({self.offset:g} + {name})" if self.offset else name

    def row(self, index: str, *, latex: bool = False) -> str:
        """Return one row of the view, as a row, column or entry of the parameter.

        Args:
            index: the index as it should be printed, such as "j".
            latex: whether it is written as LaTeX.

        Returns:
            Text such as o.weight[:,j].
        """
        face = self.text(latex=latex)
        position = index if self.m == 1 else f":,{index}" if self.transposed else f"{index},:"
        return rf"{face}_{{{position}}}" if latex else f"{face}[{position}]"

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, slots=True)
class Reading:
    """A view turned into steps: the entries to pick, last axis first, and the order of the axes that are left."""

    view: View
    picks: tuple[tuple[int, int | tuple[int, int]], ...]
    order: tuple[int, ...]

    def of(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Apply the steps to a tensor and return the entries that the view reads.

        Args:
            tensor: a tensor of the parameter's shape.

        Returns:
            The picked entries with their axes in order; a view of the tensor wherever torch can make one.

        Raises:
            ValueError: the tensor has another shape, or no values (the meta device).
        """
        view, tensor = self.view, whole(tensor)
        if tensor.is_meta:
            raise ValueError(
                f"Expected parameters with values, got {view.parameter} on the meta device. Laws can be listed "
                "for it; to evaluate them, load the weights."
            )
        if tensor.shape != view.shape:
            raise ValueError(
                f"Expected a tensor of shape {view.shape} for {view.parameter}, got {tuple(tensor.shape)}. "
                "Parameters, gradients and updates must have the parameter's own shape."
            )
        if view.grid != view.shape:
            tensor = tensor.reshape(view.grid)
        for axis, chosen in self.picks:
            if isinstance(chosen, int):
                tensor = tensor.select(axis, chosen)
            else:
                tensor = tensor.narrow(axis, chosen[0], chosen[1] - chosen[0])
        return tensor.permute(self.order)

    def matrices(self, tensor: Shaped[Tensor, "..."], constant: float) -> Shaped[Tensor, "batch n m"]:
        """Return the matrices that the view reads, one for every index along its batch axes.

        Args:
            tensor: a tensor of the parameter's shape.
            constant: 1 for the parameter itself, to which the offset is added, and 0 for a gradient or an update.

        Returns:
            (batch, n, m).
        """
        view = self.view
        rows = view.chosen(self.of(tensor).reshape(-1, view.faced, view.m))
        return rows + constant * view.offset if constant * view.offset else rows


@lru_cache(maxsize=4096)
def _stride(rows: tuple[int, ...]) -> int | None:
    """Return the distance between rows that are equally far apart; None if they are not, or descend."""
    if len(rows) < 2:
        return 1 if rows else None
    stride = rows[1] - rows[0]
    return stride if stride > 0 and rows == tuple(range(rows[0], rows[-1] + 1, stride)) else None


def _typewriter(name: str) -> str:
    escaped = "".join("\\" + c if c in "_%&#${}" else c for c in name)
    return r"\mathtt{" + escaped + "}"


def _join_names(rows: tuple[int, ...]) -> str:
    """Format row numbers as text; the middle of a long list is omitted."""
    shown = map(str, rows if len(rows) <= 8 else rows[:4])
    return ",".join(shown) + ("" if len(rows) <= 8 else f",…,{rows[-1]}")


def _bounds(chosen: Pick, size: int) -> tuple[int, int]:
    if chosen is None:
        return 0, size
    return (chosen, chosen + 1) if isinstance(chosen, int) else chosen


def _window(shape: tuple[int, ...], grid: tuple[int, ...], pick: tuple[Pick, ...]) -> list[str] | None:
    """Return the picked entries as one slice per axis of the stored shape, or None when they are not such slices."""
    pieces = [(extent, chosen) for extent, chosen in zip(grid, pick, strict=True) if extent != 1]
    texts: list[str] = []
    for size in shape:
        picks: list[tuple[int, Pick]] = []
        while prod(extent for extent, _ in picks) < size and pieces:
            picks.append(pieces.pop(0))
        text = _slice(picks, size) if prod(extent for extent, _ in picks) == size else None
        if text is None:
            return None
        texts.append(text)
    return texts


def _slice(pieces: list[tuple[int, Pick]], size: int) -> str | None:
    """Return picks along the grid axes that make up one stored axis, as one contiguous slice if they are one."""
    start, span, several = 0, size, False
    for extent, chosen in pieces:
        low, high = _bounds(chosen, extent)
        if high - low < extent:
            if several:
                return None
            start, span = start + low * (span // extent), (high - low) * (span // extent)
        several = several or high - low > 1
    if span == size:
        return ":"
    return str(start) if span == 1 else f"{start}:{start + span}"
