r"""Identities of parameters that lie in pieces on several processes.

Laws are read off the program of one process and speak of its pieces. For every group of processes a leg plays one of
three roles:

* *same*: its parameter is replicated over the group;
* *part*: its parameter is cut along an axis that the law adds up, as the neurons that read a gain;
* *own*: its parameter is cut along the axis the law acts on or picks from, as heads and neurons.

A law whose legs all are their own is a law of this process alone. A law of which some leg is the same everywhere, or a
part of a sum, is a law of the group:

    μ(θ, G) = Σ_{same legs} μ_ℓ + Σ_{processes} Σ_{other legs} μ_ℓ = 0

with gradients as they are after all reductions. A process's own sums satisfy it exactly when a reduction is missing, so
that one piece does not decide it. Where doubtful, legs are added up: if a law holds on every process, so does
the sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from conserved.boundary import Boundary
from conserved.layout.groups import RankGroup
from conserved.layout.leg_sums import leg_sums, small_leg, small_shape, small_view
from conserved.layout.table import ModelLayout, ParameterLayout
from conserved.symmetry import Kind, Leg, Symmetry, Tensors, View

Role = Literal["same", "part", "own"]

OTHER_LAWS = "the processes of the {group} know other laws of it, so that its pieces cannot be put together"
"""Reason for a law that is left open."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AssembledTensors:
    """Parameters and gradients of this process, with what its laws need of other processes."""

    points: Tensors
    """Parameters of this process, and small legs that stand for those of several."""
    gradients: Tensors
    left_open: Mapping[str, str] = field(default_factory=dict)
    """By name, laws that cannot be put together, and why."""
    together: tuple[RankGroup, ...] = ()
    """Groups whose processes have the same laws and judge alike."""
    moved: int = 0
    """Bytes that this process sent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawAssembly:
    """The plan by which processes put laws of their pieces together, made once for a model and its laws."""

    groups: tuple[RankGroup, ...]
    """Groups over which some leg is cut."""
    symmetries: tuple[Symmetry, ...]
    """The laws as they are evaluated: a leg that is added up over processes is a small one."""
    sums: Mapping[str, LegSum]
    """By name of a small leg, what it is made of."""

    @staticmethod
    def of(layout: ModelLayout, symmetries: Sequence[Symmetry]) -> LawAssembly:
        """Return how laws, as this process reads them, are put together."""
        sums: dict[str, LegSum] = {}
        laws: list[Symmetry] = []
        for given in symmetries:
            symmetry = given.polarised
            over = _sums(symmetry, layout, layout.spread)
            legs = [*symmetry.legs]
            for index, groups in over.items():
                leg = symmetry.legs[index]
                sizes = "×".join(str(group.size) for group in groups)
                name = _unused(f"{leg.view.text()} summed over {sizes} processes", sums)
                sums[name] = LegSum(symmetry.name, symmetry.kind, leg, groups)
                legs[index] = Leg(small_view(name, small_shape(symmetry.kind, leg)), leg.degree)
            laws.append(replace(symmetry, legs=tuple(legs)) if over else given)
        return LawAssembly(groups=layout.spread, symmetries=tuple(laws), sums=sums)

    @property
    def names(self) -> frozenset[str]:
        """The names of laws that hold for sums over processes only."""
        return frozenset(part.law for part in self.sums.values())

    @property
    def origin(self) -> dict[str, str]:
        """By name of a small leg, the parameter that it is made of."""
        return {name: part.leg.view.parameter for name, part in self.sums.items()}

    def put_together(self, points: Tensors, gradients: Tensors) -> AssembledTensors:
        """Add up what laws need of other processes; every process of every group has to call it.

        Args:
            points: the parameters of this process.
            gradients: their gradients, after all reductions.
        """
        if not self.groups:
            return AssembledTensors(points=points, gradients=gradients)
        # A process that fails here must still answer the others, who would wait for it.
        values = Boundary(logs=False).attempt("layout", self._values, points, gradients)
        pieces: dict[str, Tensor] = values or {}
        device = next((tensor.device for tensor in points.values()), torch.device("cpu"))
        left_open: dict[str, str] = {}
        together: list[RankGroup] = []
        moved = 0
        for group in self.groups:
            chosen = [name for name, part in self.sums.items() if group in part.groups]
            laws = zlib.crc32("|".join(symmetry.name for symmetry in self.symmetries).encode())
            sums = -1 if values is None else _signature(chosen, pieces)
            alike, everything = _compare(group, sums, laws, device)
            moved += 16 * (group.size - 1)
            if everything:
                together.append(group)
            if not alike or values is None:
                left_open |= {self.sums[name].law: OTHER_LAWS.format(group=group) for name in chosen}
            elif chosen:
                moved += _add_up(group, [pieces[name] for name in chosen])
        theta, directions = dict(points), dict(gradients)
        for name, part in self.sums.items():
            if part.law not in left_open:
                theta[name], directions[name] = small_leg(part.kind, part.leg, pieces[name])
        return AssembledTensors(
            points=theta, gradients=directions, left_open=left_open, together=tuple(together), moved=moved
        )

    def _values(self, points: Tensors, gradients: Tensors) -> dict[str, Tensor]:
        return {name: leg_sums(part.kind, part.leg, points, gradients) for name, part in self.sums.items()}


@dataclass(frozen=True, slots=True)
class LegSum:
    """A leg of a law that is added up over the processes of some groups."""

    law: str
    kind: Kind
    leg: Leg
    groups: tuple[RankGroup, ...]


def _sums(symmetry: Symmetry, layout: ModelLayout, groups: Sequence[RankGroup]) -> dict[int, tuple[RankGroup, ...]]:
    """Return, for each leg that is cut, the groups over which its sums are added up, by the place of the leg.

    The result is None for a law of this process alone.
    """
    over: dict[int, list[RankGroup]] = {}
    for group in groups:
        # What gathers itself is whole on every process.
        roles: list[Role] = [
            "same"
            if leg.view.parameter in layout.gathered
            else _role(symmetry.kind, leg, layout[leg.view.parameter], group)
            for leg in symmetry.legs
        ]
        if all(role == "own" for role in roles) or all(role == "same" for role in roles):
            continue
        for index, role in enumerate(roles):
            if role != "same":
                over.setdefault(index, []).append(group)
    return {index: tuple(result) for index, result in over.items()}


def _role(kind: Kind, leg: Leg, layout: ParameterLayout, group: RankGroup) -> Role:
    if group in layout.own:
        return "own"
    cut = next((cut for cut in layout.cuts if cut.group == group), None)
    if cut is None:
        return "same"
    view, products = leg.view, kind.products
    axes = _grid_axes(view, cut.axis)
    picked = any(view.pick[axis] is not None and view.grid[axis] > 1 for axis in axes) or view.rows is not None
    faces = products.faces
    acted_on = {"rows": set(view.axes), "columns": set(view.rest), "entries": set()}[faces]
    several = {axis for axis in axes if view.grid[axis] > 1}
    return "own" if picked or several & acted_on else "part"


def _grid_axes(view: View, axis: int) -> tuple[int, ...]:
    """Return the grid axes that an axis of the parameter is split into, or merged into with its neighbours."""
    first = last = 0
    size = count = 1
    start, grid = 0, view.grid
    for number, extent in enumerate(view.shape):
        size *= extent
        while last < len(grid) and (count < size or (last < len(grid) and grid[last] == 1)):
            count *= grid[last]
            last += 1
        if count == size:
            if start <= axis <= number:
                return tuple(range(first, last))
            first, start, size, count = last, number + 1, 1, 1
    return tuple(range(first, len(grid)))


def _signature(chosen: Sequence[str], pieces: Mapping[str, Tensor]) -> int:
    return zlib.crc32("|".join(f"{name} {pieces[name].numel()}" for name in chosen).encode())


def _compare(group: RankGroup, sums: int, laws: int, device: torch.device) -> tuple[bool, bool]:
    """Return whether all processes of a group add up the same sums, and have the same laws."""
    every = group.gather(torch.tensor([sums, laws], dtype=torch.int64, device=device))
    alike = (every == every[0]).all(0).tolist()
    return bool(alike[0]), bool(alike[1])


def _add_up(group: RankGroup, pieces: Sequence[Tensor]) -> int:
    """Add up sums over a group in one message; return the bytes this process sends in a ring."""
    message = torch.cat([*pieces])
    group.sum(message)
    for piece, values in zip(pieces, message.split([piece.numel() for piece in pieces]), strict=True):
        piece.copy_(values)
    return 2 * (group.size - 1) * message.numel() * message.element_size() // group.size


def _unused(name: str, taken: Mapping[str, LegSum]) -> str:
    """Return a name that no small leg has yet: laws may see one parameter in several ways."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free
