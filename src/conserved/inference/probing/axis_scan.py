"""The search for scalings and translations: of one input, or of two against each other, axis by axis, then jointly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from conserved.inference.probing.axis_moves import Axis, axes_of, move, probed, view_of
from conserved.inference.probing.noise import rms, wide
from conserved.inference.probing.numerical_function import Values
from conserved.inference.probing.scanner import NEARLY, SCALING, TRANSLATION, UP, Scanner, confirm, element_of
from conserved.symmetry import Kind, Symmetry

_DIVISORS = 6
"""Numbers of entries that may share a coordinate which are tried for an axis."""


def _divides(size: int, count: int) -> list[Axis]:
    """Return how an axis of `size` may carry `count` coordinates; the axis itself is filled in later."""
    if count == 0 or size % count:
        return []
    every = size // count
    return [Axis(axis=0)] if every == 1 else [Axis(axis=0, every=every), Axis(axis=0, every=every, tiled=True)]


def followers(
    scanner: Scanner, kind: Kind, values: Values, powers: Tensor, degrees: Sequence[float], index: int
) -> tuple[Axis | None, ...] | None:
    """Return for each output the axis along which it moved with the field, None where it stayed.

    The result is None if an output neither moved with the field nor stayed.
    """
    axes: list[Axis | None] = []
    for position, out in enumerate(values):
        before = scanner.outs[position]
        if degrees[position] == 0:
            exact, error = scanner.fits(position, out, before)
            if not (exact or (kind == SCALING and error <= NEARLY)):
                return None
            axes.append(None)
            continue
        order = sorted(range(before.ndim), key=lambda axis: (axis != index, axis))
        options = [
            replace(option, axis=axis) for axis in order for option in _divides(before.shape[axis], powers.numel())
        ]
        for option in options:
            view = view_of("", before.shape, (option,))
            matrix = kind.act(element_of(kind, powers), view.matrix(wide(before)), degrees[position])
            exact, error = scanner.fits(position, out, view.written(wide(before), matrix))
            if exact or (kind == SCALING and error <= NEARLY):
                axes.append(option)
                break
        else:
            return None
    return tuple(axes)


def _degrees(scanner: Scanner, values: Values, kind: Kind, amount: float) -> list[float] | None:
    """Return by which power each output follows a common factor, or by which multiple a common shift.

    The result is None if an output follows neither.
    """
    degrees = []
    for index, out in enumerate(values):
        before, after = wide(scanner.outs[index]), wide(out)
        if kind == SCALING:
            ratio = float((before * after).sum() / before.square().sum().clamp_min(1e-300))
            degree = round(2 * torch.tensor(min(max(ratio, 1e-30), 1e30)).log2().item() / amount) / 2
            expected = before * 2.0 ** (degree * amount)
        else:
            degree = round(2 * float((after - before).mean()) / amount) / 2
            expected = before + degree * amount
        exact, error = scanner.fits(index, out, expected)
        if abs(degree) > 4 or not (exact or (kind == SCALING and error <= NEARLY)):
            return None
        degrees.append(degree)
    return degrees


def _carriers(shape: Sequence[int], axis: int, *, divisors: bool) -> list[Axis]:
    """Return an axis with a coordinate for each entry, then with one for several entries."""
    size = shape[axis]
    if size < 2:
        return []
    result = [Axis(axis=axis)]
    if divisors:
        few = [every for every in range(2, size) if size % every == 0][:_DIVISORS]
        result += [Axis(axis=axis, every=every, tiled=tiled) for every in few for tiled in (False, True)]
    elif size % 2 == 0 and size > 2:
        result += [Axis(axis=axis, every=2), Axis(axis=axis, every=2, tiled=True)]
    return result


def _together(
    scanner: Scanner, kind: Kind, legs: Sequence[tuple[str, float]], columns: Sequence[Mapping[str, Axis]]
) -> list[Symmetry]:
    """Return one symmetry with all coordinates if they hold jointly, else one for each."""

    def made(chosen: Sequence[Mapping[str, Axis]]) -> Symmetry:
        moving = (
            (scanner.view(name, [column[name] for column in chosen if name in column]), degree) for name, degree in legs
        )
        return probed(kind, moving)

    distinct: list[Mapping[str, Axis]] = []
    for column in columns:
        if all(column[name].axis != other[name].axis for other in distinct for name in column if name in other):
            distinct.append(column)
    joint = confirm(scanner, made(distinct))
    if joint is not None or len(distinct) < 2:
        return [joint] if joint is not None else []
    return [alone for column in distinct if (alone := confirm(scanner, made([column]))) is not None]


def _alone(scanner: Scanner, kind: Kind, name: str) -> list[Symmetry]:
    """Return symmetries that move one input, with or without the outputs."""
    tensor = scanner.tensors[name]
    size = rms(tensor)
    if (size == 0 and kind == SCALING) or not scanner.responds_to(name, shift=kind == TRANSLATION):
        return []
    amount = 2.0 if kind == SCALING else 2.0 ** round(torch.tensor(size or 1.0).log2().item())
    uniform = probed(kind, [(scanner.view(name, ()), 1.0)])
    outputs = scanner.run(move(uniform, scanner.tensors, element_of(kind, _number(amount))))
    degrees = None if outputs is None else _degrees(scanner, outputs, kind, amount)
    if degrees is None:
        return []
    outs = [(out, degree) for out, degree in zip(scanner.function.out_names, degrees, strict=True) if degree]
    legs = [(name, 1.0), *outs]
    columns: list[dict[str, Axis]] = []
    for axis in range(tensor.ndim):
        still = not outs and axis > 0
        for carrier in _carriers(tensor.shape, axis, divisors=still):
            if scanner.late:
                break
            count = tensor.shape[axis] // carrier.every
            choices = UP if kind == SCALING else (-1.0, -0.5, 0.5, 1.0)
            amounts = scanner.field((count,), choices) * (1.0 if kind == SCALING else amount)
            by_index = probed(kind, [(scanner.view(name, (carrier,)), 1.0)])
            after = scanner.run(move(by_index, scanner.tensors, element_of(kind, amounts)))
            along = None if after is None else followers(scanner, kind, after, amounts, degrees, axis)
            if along is not None:
                moving = zip(scanner.function.out_names, along, strict=True)
                columns.append({name: carrier} | {out: where for out, where in moving if where is not None})
                break
    return _together(scanner, kind, legs, columns)


def _number(amount: float) -> Tensor:
    return torch.tensor(amount, dtype=torch.float64)


def _against(scanner: Scanner, left: str, right: str, alone: Sequence[Symmetry]) -> list[Symmetry]:
    """Return scalings of two inputs.

    Either one input moves against the other and the outputs stay, or both move with the outputs.
    """
    if not (scanner.responds_to(left) and scanner.responds_to(right)):
        return []
    single = {symmetry.legs[0].view.parameter for symmetry in alone}
    ways = [_partner_degree(scanner, left, right, alone)] + ([] if {left, right} <= single else [1.0])
    for degree in ways:
        uniform = probed(SCALING, [(scanner.view(left, ()), 1.0), (scanner.view(right, ()), degree)])
        outputs = scanner.run(move(uniform, scanner.tensors, element_of(SCALING, _number(2.0))))
        degrees = None if outputs is None else _degrees(scanner, outputs, SCALING, 2.0)
        if degrees is None or (degree > 0) != any(degrees):
            continue
        outs = [(name, power) for name, power in zip(scanner.function.out_names, degrees, strict=True) if power]
        columns = _columns_of_two(scanner, left, right, degree, degrees, alone)
        if columns or not {left, right} & single:
            return _together(scanner, SCALING, [(left, 1.0), (right, degree), *outs], columns)
    return []


def _columns_of_two(
    scanner: Scanner,
    left: str,
    right: str,
    degree: float,
    degrees: Sequence[float],
    alone: Sequence[Symmetry],
) -> list[dict[str, Axis]]:
    """Return the pairs of axes of two inputs that scale together, each with the axes of the outputs that follow."""
    tensors = scanner.tensors
    done = {
        name: {
            axis.axis
            for symmetry in alone
            for leg in scanner.inputs(symmetry)
            if leg.view.parameter == name
            for axis in axes_of(leg.view)
        }
        for name in (left, right)
    }
    columns: list[dict[str, Axis]] = []
    pairs = sorted(product(range(tensors[left].ndim), range(tensors[right].ndim)), key=lambda pair: pair[0] != pair[1])
    for a, b in pairs:
        used = any(column[left].axis == a or column[right].axis == b for column in columns)
        if used or scanner.late or (a in done[left] and b in done[right]):
            continue
        for axis_left, other in _match_axes(tensors[left].shape[a], tensors[right].shape[b]):
            column = {left: replace(axis_left, axis=a), right: replace(other, axis=b)}
            powers = scanner.field((tensors[left].shape[a] // axis_left.every,), UP)
            views = (scanner.view(name, (column[name],)) for name in (left, right))
            trial = probed(SCALING, zip(views, (1.0, degree), strict=True))
            after = scanner.run(move(trial, tensors, element_of(SCALING, powers)))
            along = None if after is None else followers(scanner, SCALING, after, powers, degrees, a)
            if along is not None:
                moving = zip(scanner.function.out_names, along, strict=True)
                columns.append(column | {out: where for out, where in moving if where is not None})
                break
    return columns


def _partner_degree(scanner: Scanner, left: str, right: str, alone: Sequence[Symmetry]) -> float:
    """Return minus one, or what two inputs' own degrees of homogeneity make it."""
    own: dict[str, float] = {}
    for symmetry in alone:
        outs = [leg.degree for leg in symmetry.legs if leg.view.parameter in scanner.function.out_names]
        if outs:
            own.setdefault(symmetry.legs[0].view.parameter, outs[0])
    if left in own and right in own:
        return -own[left] / own[right]
    return -1.0


def _match_axes(size: int, other: int) -> list[tuple[Axis, Axis]]:
    """Return how two axes may carry the same coordinates."""
    if min(size, other) < 2:
        return []
    plain = Axis(axis=0)
    if size == other:
        both = [(plain, plain)]
        if size % 2 == 0 and size > 2:
            adjacent, strided = Axis(axis=0, every=2), Axis(axis=0, every=2, tiled=True)
            both += [(adjacent, adjacent), (strided, strided)]
        return both
    if size % other == 0:
        return [(option, plain) for option in _divides(size, other)]
    if other % size == 0:
        return [(plain, option) for option in _divides(other, size)]
    return []


def scalings(scanner: Scanner) -> list[Symmetry]:
    """Return scalings of one input, then of two inputs against each other."""
    names = scanner.function.names
    alone = [symmetry for name in names for symmetry in _alone(scanner, SCALING, name)]
    pairs = [(left, right) for index, left in enumerate(names) for right in names[index + 1 :]]
    return alone + [
        symmetry for left, right in pairs if not scanner.late for symmetry in _against(scanner, left, right, alone)
    ]


def translations(scanner: Scanner) -> list[Symmetry]:
    """Return shifts of one input, with or without the outputs, and of two inputs of one shape against each other."""
    names = scanner.function.names
    alone = [symmetry for name in names if not scanner.late for symmetry in _alone(scanner, TRANSLATION, name)]
    free = [name for name in names if all(symmetry.legs[0].view.parameter != name for symmetry in alone)]
    for index, left in enumerate(free):
        for right in free[index + 1 :]:
            shape = scanner.tensors[left].shape
            if shape != scanner.tensors[right].shape or scanner.late:
                continue
            if not (scanner.responds_to(left, shift=True) and scanner.responds_to(right, shift=True)):
                continue
            axes = [Axis(axis=axis) for axis in range(len(shape))]
            legs = [(scanner.view(left, axes), 1.0), (scanner.view(right, axes), -1.0)]
            both = confirm(scanner, probed(TRANSLATION, legs))
            alone += [both] if both is not None else []
    return alone
