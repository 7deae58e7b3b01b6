"""The search for scalings and translations: of one input, or of two against each other, axis by axis, then jointly."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from conserved.inference.probing.axis_moves import Axis, axes_of, coordinates_of, move, probed, view_of
from conserved.inference.probing.noise import by_row, rms, wide
from conserved.inference.probing.numerical_function import NumericalFunction, Values
from conserved.inference.probing.probed_kinds import RowTranslation
from conserved.symmetry import Kind, Leg, Scaling, Symmetry, View
from conserved.tolerances import COARSE_UNIT

SCALING, TRANSLATION = Scaling(), RowTranslation()

NEARLY = 1e-2
"""A relative change by moves up to a factor of four below which a scaling counts as holding up to that change."""

_NOISE, _ROUNDING = 10.0, 16.0
"""How many standard deviations of the function's noise, and roundings of its outputs, a symmetric move may leave."""

_TYPICAL, _TELLING = 5.0, 8.0
"""Roundings a symmetric move may leave on average; and how many times that a move that is no symmetry must change."""

_DIVISORS, _FEW = 6, 16


@dataclass(slots=True, kw_only=True)
class Scanner:
    """A function at its inputs, with what is needed to say whether a move left it alone."""

    function: NumericalFunction
    outs: Values
    noise: Values
    unit: float
    deadline: float
    passes: int = 0
    known: dict[tuple[str, bool], bool] = field(default_factory=dict)
    errors: dict[Symmetry, float] = field(default_factory=dict)
    """The largest relative change of an output, by row, that moves along a confirmed symmetry left."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(2024))

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Inputs and outputs by name."""
        named = dict(zip(self.function.names, self.function.values, strict=True))
        return named | dict(zip(self.function.out_names, self.outs, strict=True))

    def run(self, moved: Mapping[str, Tensor]) -> Values | None:
        """Return the outputs at moved inputs; None if the function refuses them or overflows."""
        self.passes += 1
        try:
            outputs = self.function.outputs([moved[name] for name in self.function.names])
        except Exception:  # a kernel may refuse inputs in any way it likes
            return None
        if any(out.shape != before.shape for out, before in zip(outputs, self.outs, strict=True)):
            return None
        return outputs if all(bool(torch.isfinite(out).all()) for out in outputs) else None

    def fits(self, index: int, outputs: Tensor, expected: Tensor) -> tuple[bool, float]:
        """Return whether an output is what a move predicts, up to noise; and the largest relative difference by row."""
        gap = (wide(outputs) - wide(expected)).abs()
        size = by_row(wide(expected).square()).sqrt()
        before = by_row(wide(self.outs[index]).square()).sqrt()
        growth = (size / before.clamp_min(1e-300)).clamp(1.0, 1e6)
        limit = _NOISE * self.noise[index] * growth + _ROUNDING * self.unit * (size + wide(expected).abs())
        typical = (self.noise[index] * growth).square().mean().sqrt() + self.unit * wide(
            expected
        ).square().mean().sqrt()
        exact = bool((gap <= limit).all()) and bool(gap.square().mean().sqrt() <= _TYPICAL * typical)
        if self.coarse:
            exact = bool((gap == 0).all())
        if self.few and not exact:
            return False, 1.0
        rows = by_row(gap.square()).sqrt() / size.clamp_min(float(size.max()) * 1e-6 + 1e-300)
        return exact, float(rows.max()) if rows.numel() else 0.0

    @property
    def few(self) -> bool:
        """A few numbers, such as a mean loss: they nearly follow many moves that are no symmetries."""
        return sum(out.numel() for out in self.outs) < _FEW

    @property
    def coarse(self) -> bool:
        """A few numbers computed in half precision: only what leaves every bit alone says something."""
        return self.few and self.unit > COARSE_UNIT

    def responds_to(self, name: str, *, shift: bool = False) -> bool:
        """Return whether the outputs show it when an input is multiplied, or shifted, at random.

        If they do not, a move proves nothing.
        """
        if (name, shift) not in self.known:
            tensors = self.tensors
            signs = self.field(tensors[name].shape, (-1.0, 1.0))
            size = rms(tensors[name]) or 1.0
            moved = wide(tensors[name]) + signs * size if shift else wide(tensors[name]) * torch.exp2(signs)
            outputs = self.run(tensors | {name: moved.to(tensors[name].dtype)})
            self.known[name, shift] = outputs is not None and self._shows(outputs)
        return self.known[name, shift]

    def _shows(self, values: Values) -> bool:
        """Return whether every output that changed at all, and at least one, changed far beyond its rounding."""
        changed = []
        for out, before, noise in zip(values, self.outs, self.noise, strict=True):
            if not torch.equal(out, before):
                rounding = _TYPICAL * (rms(noise) + self.unit * rms(before))
                changed.append(rms(wide(out) - wide(before)) > _TELLING * rounding)
        return bool(changed) and all(changed)

    def field(self, sizes: Sequence[int], choices: Sequence[float]) -> Tensor:
        """Return random numbers from `choices` over the coordinates, not all equal where there is more than one."""
        options = torch.tensor(choices, dtype=torch.float64)
        signs = options[torch.randint(len(choices), tuple(sizes), generator=self.generator)]
        flat = signs.view(-1)
        if flat.numel() > 1 and bool((flat == flat[0]).all()):
            flat[0] = options[0] if flat[0] != options[0] else options[1]
        return signs.to(self.outs[0].device)

    def view(self, name: str, axes: Sequence[Axis]) -> View:
        """Return a view of the input or output of that name, with a row for every coordinate of some axes."""
        return view_of(name, self.tensors[name].shape, axes)

    def inputs(self, symmetry: Symmetry) -> tuple[Leg, ...]:
        """Return the legs that are inputs of the function."""
        return tuple(leg for leg in symmetry.legs if leg.view.parameter in self.function.names)

    def confirmed(self, symmetry: Symmetry, error: float, *, exact: bool = True) -> Symmetry:
        """Return a symmetry with the error that its moves left, which is its ε if it is more than noise."""
        result = symmetry if exact else replace(symmetry, epsilon=error)
        self.errors[result] = error
        return result


def measure_move(scanner: Scanner, symmetry: Symmetry, element: Tensor) -> tuple[bool, float] | None:
    """Return whether the outputs follow a move along a candidate up to noise, and the largest relative difference.

    The result is None if the function refuses the moved inputs.
    """
    moved = move(symmetry, scanner.tensors, element)
    outputs = scanner.run(moved)
    if outputs is None:
        return None
    verdicts = [
        scanner.fits(index, out, moved[name])
        for index, (name, out) in enumerate(zip(scanner.function.out_names, outputs, strict=True))
    ]
    return all(exact for exact, _ in verdicts), max(error for _, error in verdicts)


_UP, _BOTH = (1.0, 2.0), (-2.0, -1.0, 1.0, 2.0)
"""Powers of two to move by; none is zero, for an entry that does not move proves nothing."""

_MOST_ROUNDS, _MANY_COORDINATES = 16, 64
"""Random moves that confirm a symmetry; up to how many coordinates all pairs of them are distinguished."""

_SMALL_SHIFT, _SMALL_SHIFT_COARSE = 5 * 2.0**-12, 5 * 2.0**-6
"""A shift, relative to the size of an input, that is no power of two: thousands of roundings in single precision, ten
in half precision."""

_FARTHEST = 10
"""The power of two by which a shift may exceed the size of the inputs that it moves."""

_FINE = (torch.float32, torch.float64)


def confirm(scanner: Scanner, symmetry: Symmetry) -> Symmetry | None:
    """Return the symmetry with the error that more random moves leave, or None if one of them refutes it."""
    errors, exact = [], True
    drawn: list[Tensor] = []
    scaling = symmetry.kind == SCALING
    sizes = coordinates_of(symmetry.legs[0].view)
    # floor(x + 1) = floor(x) + 1: a shift that holds for moves of all powers of two must hold for small ones too.
    small = _SMALL_SHIFT if scanner.function.precision in _FINE else _SMALL_SHIFT_COARSE
    shifts = (0.5, 1.0, 2.0, 4.0, small)
    rounds = 4 if scaling else 5
    for round_ in range(_MOST_ROUNDS):
        if round_ >= rounds and _separate(drawn):
            break
        upwards = round_ < 2
        if scaling:
            drawn.append(scanner.field(sizes, _UP if upwards else _BOTH))
            element = element_of(SCALING, drawn[-1])
        else:
            drawn.append(scanner.field(sizes, (-1.0, -0.5, 0.5, 1.0)))
            size = _shift_size(scanner, symmetry) * shifts[round_ % len(shifts)]
            element = element_of(TRANSLATION, drawn[-1] * size)
        outcome = measure_move(scanner, symmetry, element)
        nearly = NEARLY if upwards else 16 * NEARLY
        if outcome is None or not (outcome[0] or (scaling and outcome[1] <= nearly)):
            return None
        exact &= outcome[0]
        errors.append(outcome[1])
    return scanner.confirmed(symmetry, max(errors if exact else errors[:2]), exact=exact)


def element_of(kind: Kind, amounts: Tensor) -> Tensor:
    """Return the element that multiplies every coordinate by two to the power of an amount, or adds the amount."""
    return torch.exp2(amounts).reshape(-1) if kind == SCALING else amounts.reshape(-1)


def _separate(fields: Sequence[Tensor]) -> bool:
    """Return whether every two coordinates moved differently at least once.

    Two coordinates that the function exchanges look alike if they always move together.
    """
    moves = torch.stack([field.flatten() for field in fields], 1)
    # Among many coordinates a function that exchanges some exchanges others too, and one pair is enough to see it.
    return moves.shape[0] > _MANY_COORDINATES or moves.unique(dim=0).shape[0] == moves.shape[0]


def _shift_size(scanner: Scanner, symmetry: Symmetry) -> float:
    """Return how far to shift: by the size of the inputs, or as far as one of them alone has to move to be seen well.

    Biases near zero move the outputs so little that what another layer makes of a shift is hidden in rounding.
    """
    inputs = scanner.inputs(symmetry)
    size = max(rms(scanner.tensors[leg.view.parameter]) for leg in inputs) or 1.0
    size = 2.0 ** round(torch.tensor(size).log2().item())
    if len(inputs) < 2:
        return size
    alone = replace(symmetry, legs=inputs[:1])
    element = torch.full((symmetry.n,), size, dtype=torch.float64)
    outs = scanner.run(move(alone, scanner.tensors, element))
    if outs is None:
        return size
    seen = max(rms(wide(a) - wide(b)) / (rms(b) or 1.0) for a, b in zip(outs, scanner.outs, strict=True))
    return size * 2.0 ** max(0, min(_FARTHEST, round(-torch.tensor(seen).log2().item()))) if seen else size


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
            choices = _UP if kind == SCALING else (-1.0, -0.5, 0.5, 1.0)
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
            powers = scanner.field((tensors[left].shape[a] // axis_left.every,), _UP)
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
