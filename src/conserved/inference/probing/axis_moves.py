"""How a group moves axes of inputs and outputs: a `Symmetry` whose legs are views of them.

If moving the inputs along a group leaves f alone, or moves its outputs along, then y − f(x) stays zero. Differentiating
⟨dy, y − f(x)⟩ along the group gives μ(θ, G) = 0 for θ = (x, y) and G = (dx, −dy): the outputs are legs too, and the
gradient that belongs to an output is minus the one that the backward pass is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from conserved.inference.probing.noise import wide
from conserved.symmetry import Degree, Kind, Leg, Symmetry, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a tensor that moves.

    Each coordinate of the group is shared by `every` entries of the axis. They lie next to each other or, if `tiled`,
    one block apart, as in grouped heads and rotary pairs.
    """

    axis: int
    every: int = 1
    tiled: bool = False

    def __str__(self) -> str:
        if self.every == 1:
            return str(self.axis)
        return f"{self.axis} ({'strided' if self.tiled else 'adjacent'} by {self.every})"

    def split(self, size: int) -> tuple[int, ...]:
        """Return the sizes into which the axis is divided: coordinates, and the entries that share one."""
        if self.every == 1:
            return (size,)
        count = size // self.every
        return (self.every, count) if self.tiled else (count, self.every)


def view_of(name: str, shape: Sequence[int], axes: Sequence[Axis], *, pairs: bool = False) -> View:
    """Return a view of a tensor with a row for every coordinate; all entries are one row if no axis has coordinates.

    Args:
        name: the name of the input or output.
        shape: its shape.
        axes: the axes that carry coordinates, in the order of the coordinates.
        pairs: whether the two entries that share a coordinate of the last axis are rows of their own, one after the
            other, as the real and imaginary part of a complex number.

    Returns:
        The view.
    """
    if not axes:
        return View.of(name, tuple(shape), grid=(1, *shape), axes=0)
    carried = {axis.axis: axis for axis in axes}
    grid: list[int] = []
    first: dict[int, int] = {}
    for index, size in enumerate(shape):
        first[index] = len(grid)
        grid += carried[index].split(size) if index in carried else (size,)
    faced = [first[axis.axis] + (axis.tiled and axis.every > 1) for axis in axes]
    if pairs:
        last = axes[-1]
        faced.append(first[last.axis] + (0 if last.tiled else 1))
    return View.of(name, tuple(shape), grid=tuple(grid), axes=tuple(faced))


def probed(kind: Kind, legs: Iterable[tuple[View, Degree]]) -> Symmetry:
    """Return a symmetry of a function, with legs that are views of its inputs and outputs."""
    moving = tuple(Leg(view, degree) for view, degree in legs)
    part = ", ".join(map(describe_leg, moving))
    return Symmetry(block="", family=kind.code, part=part, kind=kind, legs=moving, source="probed")


def coordinates_of(view: View) -> tuple[int, ...]:
    """Return the sizes of the axes that the rows of a view run over; none where all entries are one row."""
    if len(view.grid) > len(view.shape) and view.grid == (1, *view.shape):
        return ()
    return tuple(view.grid[axis] for axis in view.axes)


def axes_of(view: View) -> tuple[Axis, ...]:
    """Return the axes of the tensor that carry the rows of a view: the inverse of `view_of`."""
    result: list[Axis] = []
    parts = _parts(view)
    for position in view.axes if coordinates_of(view) else ():
        axis, number, sizes = parts[position]
        if any(known.axis == axis for known in result):
            continue  # the second of a pair
        every = prod(sizes) // sizes[number]
        result.append(Axis(axis=axis, every=every, tiled=every > 1 and number == 1))
    return tuple(result)


def _parts(view: View) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return for every axis of the grid the axis of the tensor, its place in it, and the sizes the axis is split to."""
    parts: list[tuple[int, int, tuple[int, ...]]] = []
    start = 0
    for axis, size in enumerate(view.shape):
        stop = start + 1
        while prod(view.grid[start:stop]) < size:
            stop += 1
        sizes = view.grid[start:stop]
        parts += [(axis, number, sizes) for number in range(len(sizes))]
        start = stop
    return parts


def move(symmetry: Symmetry, tensors: Mapping[str, Tensor], element: Tensor) -> dict[str, Tensor]:
    """Return the tensors after a group element has acted, each rounded once to its own precision."""
    moving = {name: wide(tensors[name]) for name in symmetry.parameters}
    moved = symmetry.act(moving, element)
    return dict(tensors) | {name: moved[name].to(tensors[name].dtype) for name in moving}


def describe_leg(leg: Leg) -> str:
    """Return a leg as text: the tensor, the axes that carry coordinates, and the degree."""
    power = "" if leg.degree == 1 else f"^{leg.degree:g}"
    return f"{leg.view.parameter}[{', '.join(map(str, axes_of(leg.view))) or 'all'}]{power}"


def describe(symmetry: Symmetry, outputs: Iterable[str]) -> str:
    """Return a symmetry of a function as text.

    Args:
        symmetry: the symmetry.
        outputs: names of the outputs, which move with the inputs instead of against them.

    Returns:
        Text such as "scaling of q[0, 1, 3] against k[0, 1, 3]^-1".
    """
    text = f"{symmetry.kind.title} of {describe_leg(symmetry.legs[0])}"
    for leg in symmetry.legs[1:]:
        joint = "moves" if leg.view.parameter in outputs else "against" if leg.degree < 0 else "and"
        text += f" {joint} {describe_leg(leg)}"
    return text + ("" if symmetry.exact else f" (up to {symmetry.epsilon:.0e})")
