"""A function at its inputs, and whether its outputs follow a move of them up to the noise of the function."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conserved.inference.probing.axis_moves import Axis, coordinates_of, move, view_of
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

_FEW = 16
"""Outputs below which many moves that are no symmetries are nearly followed."""


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


UP, _BOTH = (1.0, 2.0), (-2.0, -1.0, 1.0, 2.0)
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
            drawn.append(scanner.field(sizes, UP if upwards else _BOTH))
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
