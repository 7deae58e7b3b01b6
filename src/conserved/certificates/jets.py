r"""Jets: numbers with nilpotent directions ε_1, ε_2, …, ε_i² = 0, so that running a program differentiates it.

    f(θ + ε a) = f(θ) + ε Df(θ)·a,      and with two directions the coefficient of ε_1 ε_2 is D²f(θ)(a, b).

A jet maps a set of directions, written as bits, to the array of its coefficient. An elementary function φ of a jet
u + ε w is φ(u) + ε φ'(u) w, with φ' written in elementary functions once, below; every higher derivative follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from conserved.certificates.arithmetic import ElementaryFunctions
from conserved.certificates.intervals import Interval

JetPart = Any
"""An array of numbers, or an `Interval`."""


@dataclass(frozen=True, slots=True, eq=False)
class Jet:
    """Σ_S c_S ε_S over sets S of directions; coefficients that are zero are left out."""

    parts: dict[int, JetPart]

    def __add__(self, other: Jet) -> Jet:
        parts = dict(self.parts)
        for key, part in other.parts.items():
            parts[key] = _array(parts[key] + part) if key in parts else part
        return Jet(parts)

    def __neg__(self) -> Jet:
        return self.map(lambda part: -part)

    def __sub__(self, other: Jet) -> Jet:
        return self + (-other)

    def __mul__(self, other: Jet) -> Jet:
        return self.product(other, lambda a, b: a * b)

    def product(self, other: Jet, times: Callable[[JetPart, JetPart], JetPart]) -> Jet:
        """Return a bilinear product of two jets: directions that meet themselves vanish."""
        parts: dict[int, JetPart] = {}
        for left, a in self.parts.items():
            for right, b in other.parts.items():
                if not left & right:
                    term = _array(times(a, b))
                    parts[left | right] = _array(parts[left | right] + term) if left | right in parts else term
        return Jet(parts)

    def map(self, linear: Callable[[JetPart], JetPart]) -> Jet:
        """Return a linear map of every coefficient."""
        return Jet({key: _array(linear(part)) for key, part in self.parts.items()})

    @property
    def value(self) -> JetPart:
        """The part without any direction."""
        return self.parts[0]

    @property
    def bit(self) -> int:
        """The highest direction, or 0."""
        highest = max(self.parts, default=0)
        return 1 << highest.bit_length() - 1 if highest else 0

    def along(self, bit: int) -> Jet:
        """Return the coefficient of one direction, itself a jet in the others."""
        return Jet({key ^ bit: part for key, part in self.parts.items() if key & bit})

    def without(self, bit: int) -> Jet:
        """Return the part free of one direction."""
        return Jet({key: part for key, part in self.parts.items() if not key & bit})

    def times_direction(self, bit: int) -> Jet:
        """Return ε times a jet that is free of ε."""
        return Jet({key | bit: part for key, part in self.parts.items()})


def _array(part: JetPart) -> JetPart:
    """Return numbers that NumPy made of an array without axes, as an array again."""
    return part if isinstance(part, Interval) else np.asarray(part)


def apply(numbers: ElementaryFunctions, function: str, a: Jet) -> Jet:
    """Return φ of a jet."""
    bit = a.bit
    if not bit:
        return Jet({0: numbers.apply(function, a.value)})
    low = a.without(bit)
    value = apply(numbers, function, low)
    return value + (derivative(numbers, function, low, value) * a.along(bit)).times_direction(bit)


def derivative(numbers: ElementaryFunctions, function: str, a: Jet, value: Jet) -> Jet:
    """Return φ'(a), given φ(a)."""
    return _DERIVATIVES[function](numbers, a, value)


_DERIVATIVES: dict[str, Callable[[ElementaryFunctions, Jet, Jet], Jet]] = {
    "exp": lambda numbers, a, value: value,
    "log": lambda numbers, a, value: apply(numbers, "reciprocal", a),
    "sqrt": lambda numbers, a, value: apply(numbers, "reciprocal", value + value),
    "reciprocal": lambda numbers, a, value: -(value * value),
    "tanh": lambda numbers, a, value: Jet({0: numbers.full(a.value.shape, 1)}) - value * value,
    "sigmoid": lambda numbers, a, value: value - value * value,
    "erf": lambda numbers, a, _: apply(numbers, "exp", -(a * a)) * Jet({0: numbers.two_over_root_pi(a.value.shape)}),
    "sin": lambda numbers, a, value: apply(numbers, "cos", a),
    "cos": lambda numbers, a, value: -apply(numbers, "sin", a),
}
