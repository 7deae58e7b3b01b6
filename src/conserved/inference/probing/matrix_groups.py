"""The search for groups of matrices: general linear where scalings were found, complex scalings, and rotations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from conserved.inference.probing.axis_moves import Axis, axes_of, coordinates_of, probed, view_of
from conserved.inference.probing.probed_kinds import BlockGeneralLinear, BlockRotation
from conserved.inference.probing.scanner import SCALING, Scanner, measure_move
from conserved.symmetry import ComplexScaling, Kind, Symmetry

_LARGEST = 1024
_SMALL = 8
_ENTRIES = 2**24
"""Matrices of at most this side, and this many entries over all coordinates, are worth an identity."""

_SHEAR, _TURN = ((1.0, 1.0), (0.0, 1.0)), ((0.6, -0.8), (0.8, 0.6))
"""How two rows are mixed by a general matrix and by a rotation: by small numbers that halves hold almost exactly."""


def mixing_symmetries(scanner: Scanner, symmetries: Sequence[Symmetry]) -> list[Symmetry]:
    """Return the given symmetries and the matrix groups that contain their scalings."""
    result = list(symmetries)
    for symmetry in symmetries:
        if symmetry.kind == SCALING and not scanner.late:
            result += _linear(scanner, symmetry)
    return result + _rotations(scanner, result)


def _linear(scanner: Scanner, symmetry: Symmetry) -> list[Symmetry]:
    """Return GL(n) on coordinates that scale entry by entry, and complex scalings where they scale by pairs."""
    result: list[Symmetry] = []
    if len(symmetry.legs) < 2 or any(abs(degree) != 1 for degree in symmetry.degrees):
        return result
    axes = [axes_of(leg.view) for leg in symmetry.legs]
    sizes = coordinates_of(symmetry.legs[0].view)
    for index, size in enumerate(sizes):
        if len({(own[index].every, own[index].tiled) for own in axes}) > 1 or scanner.late:
            continue
        every = axes[0][index].every
        width = size * every
        if every > 2 or width > _LARGEST or width * width * prod(sizes) // size > _ENTRIES:
            continue
        kind: Kind = BlockGeneralLinear(width) if every == 1 else ComplexScaling()
        legs = [
            (
                view_of(
                    leg.view.parameter,
                    leg.view.shape,
                    (*own[:index], *own[index + 1 :], own[index]),
                    pairs=every == 2,
                ),
                leg.degree,
            )
            for leg, own in zip(symmetry.legs, axes, strict=True)
        ]
        checked = _confirm(scanner, probed(kind, legs))
        result += [checked] if checked is not None else []
    return result


def _rotations(scanner: Scanner, symmetries: Sequence[Symmetry]) -> list[Symmetry]:
    """Return rotations of the last axes of one or two inputs, and of outputs of that width, where no larger group is
    known.
    """
    if scanner.coarse:
        return []
    tensors = scanner.tensors
    names = scanner.function.names
    general = {
        frozenset(leg.view.parameter for leg in scanner.inputs(symmetry))
        for symmetry in symmetries
        if symmetry.kind.rotates
    }
    result: list[Symmetry] = []
    groups: list[tuple[str, ...]] = [(name,) for name in names]
    groups += [(left, right) for index, left in enumerate(names) for right in names[index + 1 :]]
    for group in groups:
        width = tensors[group[0]].shape[-1] if tensors[group[0]].ndim else 0
        if not 2 <= width <= _LARGEST or scanner.late or frozenset(group) in general:
            continue
        if any(tensors[name].ndim < 2 or tensors[name].shape[-1] != width for name in group):
            continue
        if not all(scanner.responds_to(name) for name in group):
            continue
        for along in (False, True):
            outs = (
                [name for name in scanner.function.out_names if tensors[name].shape[-1:] == (width,)] if along else []
            )
            if along and not outs:
                continue
            checked = _confirm(scanner, _rotation(scanner, [*group, *outs], ()))
            if checked is not None:
                result.append(_by_batch(scanner, checked))
                break
    return result


def _rotation(scanner: Scanner, names: Sequence[str], batch: Sequence[int]) -> Symmetry:
    """Return a rotation of the last axis of some tensors, one for every index along the axes `batch`."""
    shapes = {name: scanner.tensors[name].shape for name in names}
    width = shapes[names[0]][-1]
    legs = [
        (scanner.view(name, [Axis(axis=axis) for axis in (*batch, len(shape) - 1)]), 1)
        for name, shape in shapes.items()
    ]
    return probed(BlockRotation(width), legs)


def _by_batch(scanner: Scanner, symmetry: Symmetry) -> Symmetry:
    """Return the rotation chosen again for every index of leading axes that all legs share, where that holds too."""
    shapes = [leg.view.shape for leg in symmetry.legs]
    shared = [axis for axis in range(min(map(len, shapes)) - 1) if len({shape[axis] for shape in shapes}) == 1]
    axes: list[int] = []
    result = symmetry
    for axis in shared:
        if shapes[0][axis] == 1 or result.n * shapes[0][axis] * shapes[0][-1] > _ENTRIES:
            continue
        wider = _confirm(scanner, _rotation(scanner, symmetry.parameters, [*axes, axis]))
        if wider is not None:
            axes.append(axis)
            result = wider
    return result


def _confirm(scanner: Scanner, symmetry: Symmetry) -> Symmetry | None:
    """Return the symmetry if a few random moves, more where each moves little, leave nothing but noise."""
    errors = []
    for _ in range(3 if getattr(symmetry.kind, "width", symmetry.n) >= _SMALL else 8):
        outcome = measure_move(scanner, symmetry, _element(scanner, symmetry))
        if outcome is None or not outcome[0]:
            return None
        errors.append(outcome[1])
    return scanner.confirmed(symmetry, max(errors))


def _element(scanner: Scanner, symmetry: Symmetry) -> Tensor:
    """Return a random element of the group that moves every entry, made of small exact numbers."""
    if isinstance(symmetry.kind, ComplexScaling):
        signs = scanner.field((symmetry.n // 2,), (-1.0, 1.0))
        return torch.complex(torch.ones_like(signs), signs)
    assert isinstance(symmetry.kind, BlockGeneralLinear | BlockRotation)
    block = _TURN if isinstance(symmetry.kind, BlockRotation) else _SHEAR
    blocks = symmetry.n // symmetry.kind.width
    pair = torch.stack([_mixing(scanner, symmetry.kind.width, block) for _ in range(2)]).to(scanner.outs[0].device)
    return pair[scanner.field((blocks,), (0.0, 1.0)).long()]


def _mixing(scanner: Scanner, width: int, block: tuple[tuple[float, float], ...]) -> Tensor:
    """Return a matrix that mixes rows two by two, in a random order and either sense.

    A sum of numbers that are not negative is none either: only differences take them across the kink of a relu.
    """
    order = torch.randperm(width, generator=scanner.generator)
    first, second = order[: width // 2], order[width // 2 : 2 * (width // 2)]
    senses = 2.0 * torch.randint(2, first.shape, generator=scanner.generator, dtype=torch.float64) - 1
    matrix = torch.eye(width, dtype=torch.float64)
    for rows, numbers in zip((first, second), block, strict=True):
        for columns, number in zip((first, second), numbers, strict=True):
            matrix[rows, columns] = number if rows is columns else number * senses
    return matrix
