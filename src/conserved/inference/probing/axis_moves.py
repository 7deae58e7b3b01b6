"""How a group moves the axes of inputs and outputs, and the identity of gradients that follows.

If moving the inputs along a group leaves f alone, or moves its outputs along, then differentiating at the unit element
gives, for every generator E,  Σ_inputs ⟨dT, E·T⟩ = Σ_outputs ⟨dout, E·out⟩  (SCIENCE: the output is a leg too).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from conserved.inference.probing.noise import wide


class Group(StrEnum):
    """The groups that are tried, each acting on axes of tensors."""

    SCALING = "scaling"
    GENERAL_LINEAR = "general linear"
    PAIRED = "paired rotations and scales"
    ROTATION = "rotation"
    TRANSLATION = "translation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a tensor that moves: `every` entry of the group is shared by that many entries of the axis, next to
    each other or, if `tiled`, one block apart (grouped heads, rotary pairs)."""

    axis: int
    every: int = 1
    tiled: bool = False

    def __str__(self) -> str:
        if self.every == 1:
            return str(self.axis)
        return f"{self.axis} ({'strided' if self.tiled else 'adjacent'} by {self.every})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLeg:
    """A tensor that takes part: which of its axes carry the coordinates of the group, and to which power it moves."""

    name: str
    index: int
    output: bool
    axes: tuple[Axis, ...]
    degree: float = 1.0

    def __str__(self) -> str:
        power = "" if self.degree == 1 else f"^{self.degree:g}"
        return f"{self.name}[{', '.join(map(str, self.axes)) or 'all'}]{power}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedSymmetry:
    """A continuous symmetry that the forward pass was seen to have.

    Attributes:
        group: the group that acts.
        sizes: sizes of the coordinates; a group of matrices mixes the last one.
        legs: inputs and outputs that move, each axis list in the order of `sizes`.
        error: largest relative change of an output that the moves left, by row.
        exact: whether that is the noise of the function; if not, identities hold up to about `error`.
    """

    group: Group
    sizes: tuple[int, ...]
    legs: tuple[TensorLeg, ...]
    error: float = 0.0
    exact: bool = True
    pairs: str = field(default="")

    @property
    def inputs(self) -> tuple[TensorLeg, ...]:
        """The legs that are inputs of the function."""
        return tuple(leg for leg in self.legs if not leg.output)

    @property
    def has_output(self) -> bool:
        """Whether an output moves along: then a wrong factor is seen."""
        return any(leg.output for leg in self.legs)

    def __str__(self) -> str:
        text = f"{self.group.value}{self.pairs and f' ({self.pairs})'} of {self.legs[0]}"
        for leg in self.legs[1:]:
            text += f" {'moves' if leg.output else 'against' if leg.degree < 0 else 'and'} {leg}"
        return text + ("" if self.exact else f" (up to {self.error:.0e})")


def spread(values: Tensor, leg: TensorLeg, ndim: int) -> Tensor:
    """Return numbers over the coordinates, repeated along the leg's axes to broadcast against its tensor."""
    for index, axis in enumerate(leg.axes):
        if axis.every > 1:
            counts = [1] * values.ndim
            counts[index] = axis.every
            values = values.repeat(counts) if axis.tiled else values.repeat_interleave(axis.every, index)
    order = sorted(range(len(leg.axes)), key=lambda index: leg.axes[index].axis)
    values = values.permute(order)
    shape = [1] * ndim
    for index, number in zip(order, values.shape, strict=True):
        shape[leg.axes[index].axis] = number
    return values.reshape(shape)


def gather(tensor: Tensor, leg: TensorLeg) -> Tensor:
    """Return the sums of a tensor over everything that shares a coordinate: the adjoint of `spread`."""
    axes = [axis.axis for axis in leg.axes]
    rest = [index for index in range(tensor.ndim) if index not in axes]
    result = tensor.permute([*axes, *rest])
    result = result.flatten(len(axes)).sum(-1) if rest else result
    for index, axis in enumerate(leg.axes):
        if axis.every > 1:
            size = result.shape[index] // axis.every
            parts = (axis.every, size) if axis.tiled else (size, axis.every)
            result = result.unflatten(index, parts).sum(index if axis.tiled else index + 1)
    return result


def scale(symmetry: ProbedSymmetry, tensors: Mapping[str, Tensor], powers: Tensor) -> dict[str, Tensor]:
    """Return every leg multiplied by two to the `powers` of its coordinates, times its degree."""
    moved = dict(tensors)
    for leg in symmetry.legs:
        tensor = tensors[leg.name]
        factor = torch.exp2(leg.degree * spread(powers, leg, tensor.ndim))
        moved[leg.name] = (wide(tensor) * factor).to(tensor.dtype)
    return moved


def shift(symmetry: ProbedSymmetry, tensors: Mapping[str, Tensor], amounts: Tensor) -> dict[str, Tensor]:
    """Return every leg with the amounts of its coordinates added, times its degree."""
    moved = dict(tensors)
    for leg in symmetry.legs:
        tensor = tensors[leg.name]
        moved[leg.name] = (wide(tensor) + leg.degree * spread(amounts, leg, tensor.ndim)).to(tensor.dtype)
    return moved


def mix(
    symmetry: ProbedSymmetry, tensors: Mapping[str, Tensor], choice: Tensor, matrices: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Return every leg multiplied along its last axis by the first or second matrix, as `choice` over the other
    coordinates
    says; legs of degree −1 by the inverse transposed, which is the second of each pair."""
    moved = dict(tensors)
    for leg in symmetry.legs:
        tensor = tensors[leg.name]
        last = leg.axes[-1].axis
        laid = wide(tensor).movedim(last, -1)
        which = 0 if leg.degree > 0 else 1
        first, second = (laid @ pair[which].T for pair in matrices)
        others = TensorLeg(name=leg.name, index=leg.index, output=leg.output, axes=leg.axes[:-1])
        bits = spread(choice, others, tensor.ndim) if leg.axes[:-1] else choice
        result = torch.where(bits.bool(), first.movedim(-1, last), second.movedim(-1, last))
        moved[leg.name] = result.to(tensor.dtype)
    return moved


def outer(left: Tensor, right: Tensor, leg: TensorLeg) -> Tensor:
    """Return Σ left_i right_j over everything but the coordinates: a matrix for each of the other coordinates."""
    axes = [axis.axis for axis in leg.axes]
    rest = [index for index in range(left.ndim) if index not in axes]

    def laid(tensor: Tensor) -> Tensor:
        ordered = tensor.permute(*axes[:-1], *rest, axes[-1])
        return ordered.flatten(len(axes) - 1, -2) if rest else ordered.unsqueeze(-2)

    result = laid(left).transpose(-1, -2) @ laid(right)
    for index, axis in enumerate(leg.axes[:-1]):
        if axis.every > 1:
            size = result.shape[index] // axis.every
            parts = (axis.every, size) if axis.tiled else (size, axis.every)
            result = result.unflatten(index, parts).sum(index if axis.tiled else index + 1)
    return result


def generator_part(group: Group, matrix: Tensor, pairs: str) -> Tensor:
    """Return what of Σ dT_i T_j vanishes for this group of matrices."""
    if group is Group.ROTATION:
        return matrix - matrix.transpose(-1, -2)
    if group is Group.PAIRED:
        size = matrix.shape[-1]
        first = torch.arange(0, size, 2) if pairs == "adjacent" else torch.arange(size // 2)
        second = first + 1 if pairs == "adjacent" else first + size // 2
        trace = matrix[..., first, first] + matrix[..., second, second]
        turn = matrix[..., second, first] - matrix[..., first, second]
        return torch.stack((trace, turn), -1)
    return matrix
