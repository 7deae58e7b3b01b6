"""The search for groups of matrices: general linear where scalings were found, rotations of pairs, and rotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conserved.inference.probing.axis_moves import Axis, Group, ProbedSymmetry, mix
from conserved.inference.probing.axis_scan import Scanner, measure_move

_LARGEST = 1024
_SMALL = 8
_ENTRIES = 2**24
"""Matrices of at most this side, and this many entries over all coordinates, are worth an identity."""


def mixing_symmetries(scanner: Scanner, symmetries: Sequence[ProbedSymmetry]) -> list[ProbedSymmetry]:
    """Return the given symmetries and the matrix groups that contain their scalings."""
    result = list(symmetries)
    for symmetry in symmetries:
        if symmetry.group is Group.SCALING and not scanner.late:
            result += _linear(scanner, symmetry)
    return result + _rotations(scanner, result)


def _linear(scanner: Scanner, symmetry: ProbedSymmetry) -> list[ProbedSymmetry]:
    """Return GL(n) on each coordinate whose scalings hold entry by entry, rotations where they hold for pairs."""
    result: list[ProbedSymmetry] = []
    if len(symmetry.legs) < 2 or any(abs(leg.degree) != 1 for leg in symmetry.legs):
        return result
    for index, size in enumerate(symmetry.sizes):
        steps = {leg.axes[index].every for leg in symmetry.legs}
        layouts = {leg.axes[index].tiled for leg in symmetry.legs}
        if len(steps) > 1 or len(layouts) > 1 or scanner.late:
            continue
        every = steps.pop()
        width = size * every
        others = [number for other, number in enumerate(symmetry.sizes) if other != index]
        entries = width * width
        for number in others:
            entries *= number
        if every > 2 or width > _LARGEST or entries > _ENTRIES:
            continue
        group = Group.GENERAL_LINEAR if every == 1 else Group.PAIRED
        legs = tuple(
            replace(leg, axes=(*leg.axes[:index], *leg.axes[index + 1 :], Axis(axis=leg.axes[index].axis)))
            for leg in symmetry.legs
        )
        pairs = "" if every == 1 else ("halves" if layouts.pop() else "adjacent")
        wider = ProbedSymmetry(group=group, sizes=(*others, width), legs=legs, pairs=pairs)
        checked = _confirm(scanner, wider)
        result += [checked] if checked is not None else []
    return result


def _rotations(scanner: Scanner, symmetries: Sequence[ProbedSymmetry]) -> list[ProbedSymmetry]:
    """Return rotations of the last axes of one or two inputs, and of outputs of that width, where no larger group is
    known.
    """
    if scanner.coarse:
        return []
    tensors = scanner.tensors
    names = scanner.function.names
    general = {
        frozenset(leg.name for leg in symmetry.inputs)
        for symmetry in symmetries
        if symmetry.group in (Group.GENERAL_LINEAR, Group.PAIRED)
    }
    result: list[ProbedSymmetry] = []
    groups: list[tuple[str, ...]] = [(name,) for name in names]
    groups += [(left, right) for index, left in enumerate(names) for right in names[index + 1 :]]
    for group in groups:
        width = tensors[group[0]].shape[-1] if tensors[group[0]].ndim else 0
        if not 2 <= width <= _LARGEST or scanner.late or frozenset(group) in general:
            continue
        if any(tensors[name].ndim < 2 or tensors[name].shape[-1] != width for name in group):
            continue
        if not all(scanner.responds_to(name, Group.ROTATION) for name in group):
            continue
        for along in (False, True):
            outs = (
                [name for name in scanner.function.out_names if tensors[name].shape[-1:] == (width,)] if along else []
            )
            if along and not outs:
                continue
            legs = tuple(scanner.leg(name, (Axis(axis=tensors[name].ndim - 1),)) for name in (*group, *outs))
            checked = _confirm(scanner, ProbedSymmetry(group=Group.ROTATION, sizes=(width,), legs=legs))
            if checked is not None:
                result.append(_by_batch(scanner, checked))
                break
    return result


def _by_batch(scanner: Scanner, symmetry: ProbedSymmetry) -> ProbedSymmetry:
    """Return the rotation chosen again for every index of leading axes that all legs share, where that holds too."""
    shapes = [scanner.tensors[leg.name].shape for leg in symmetry.legs]
    shared = [axis for axis in range(min(map(len, shapes)) - 1) if len({shape[axis] for shape in shapes}) == 1]
    axes: list[int] = []
    for axis in shared:
        wider = _with_axes(symmetry, [*axes, axis], shapes[0])
        entries = 1
        for size in (*wider.sizes, wider.sizes[-1]):
            entries *= size
        if shapes[0][axis] > 1 and entries <= _ENTRIES and _confirm(scanner, wider) is not None:
            axes.append(axis)
    return _with_axes(symmetry, axes, shapes[0])


def _with_axes(symmetry: ProbedSymmetry, axes: Sequence[int], shape: Sequence[int]) -> ProbedSymmetry:
    legs = tuple(replace(leg, axes=(*(Axis(axis=axis) for axis in axes), leg.axes[-1])) for leg in symmetry.legs)
    return replace(symmetry, legs=legs, sizes=(*(shape[axis] for axis in axes), symmetry.sizes[-1]))


def _confirm(scanner: Scanner, symmetry: ProbedSymmetry) -> ProbedSymmetry | None:
    """Return the symmetry if a few random moves, more where each moves little, leave nothing but noise."""
    errors = []
    for _ in range(3 if symmetry.sizes[-1] >= _SMALL else 8):
        matrices = [_matrix(scanner, symmetry) for _ in range(2)]
        choice = scanner.field(symmetry.sizes[:-1], (0.0, 1.0))
        degrees = measure_move(scanner, symmetry, mix(symmetry, scanner.tensors, choice, matrices))
        if degrees is None or not degrees[0]:
            return None
        errors.append(degrees[1])
    return replace(symmetry, error=max(errors))


def _matrix(scanner: Scanner, symmetry: ProbedSymmetry) -> tuple[Tensor, Tensor]:
    """Return a random element of the group that moves every entry, and its inverse transposed, both of small exact
    numbers.
    """
    size, generator = symmetry.sizes[-1], scanner.generator
    matrix = torch.zeros(size, size, dtype=torch.float64)
    inverse = torch.zeros(size, size, dtype=torch.float64)
    if symmetry.group is Group.PAIRED:
        first = torch.arange(0, size, 2) if symmetry.pairs == "adjacent" else torch.arange(size // 2)
        second = first + 1 if symmetry.pairs == "adjacent" else first + size // 2
    else:
        order = torch.randperm(size, generator=generator)
        first, second = order[: size // 2], order[size // 2 : 2 * (size // 2)]
        if size % 2:
            matrix[order[-1], order[-1]] = inverse[order[-1], order[-1]] = 1.0
    blocks = {
        Group.GENERAL_LINEAR: ((1.0, 1.0, 0.0, 1.0), (1.0, 0.0, -1.0, 1.0)),
        Group.PAIRED: ((1.0, -1.0, 1.0, 1.0), (0.5, -0.5, 0.5, 0.5)),
        Group.ROTATION: ((0.6, -0.8, 0.8, 0.6), (0.6, -0.8, 0.8, 0.6)),
    }
    for target, block in zip((matrix, inverse), blocks[symmetry.group], strict=True):
        for row, column, value in zip(
            (first, first, second, second), (first, second, first, second), block, strict=True
        ):
            target[row, column] = value
    device = scanner.outs[0].device
    return matrix.to(device), inverse.to(device)
