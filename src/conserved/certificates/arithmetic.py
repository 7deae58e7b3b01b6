"""Numbers a program can be run with: float64, to choose what to prove, and Arb's balls, to prove it.

A ball is a midpoint and a radius; every operation returns a ball that contains the exact result for all numbers in the
balls it was given. A comparison that balls leave open raises `UndecidedError`; the caller tries again with more bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import flint
import numpy as np
from numpy.typing import NDArray

from conserved.certificates.program import Node
from conserved.errors import ConservedError

Array = NDArray[Any]
"""Entries are floats, balls or symbols; discrete values are int64."""


class UndecidedError(ConservedError, ArithmeticError):
    """A comparison cannot be decided: a kink or a tie lies inside the balls."""


class ElementaryFunctions(ABC):
    """Functions of numbers that differentiation needs beyond +, − and ×."""

    @abstractmethod
    def apply(self, function: str, a: Any) -> Any:
        """Return an elementary function, entry by entry."""

    @abstractmethod
    def full(self, shape: tuple[int, ...], value: int) -> Any:
        """Return one whole number everywhere, or in a shape that broadcasts to this one."""

    @abstractmethod
    def two_over_root_pi(self, shape: tuple[int, ...]) -> Any:
        """Return 2/√π, the derivative of erf at 0, likewise."""


class Numbers(ElementaryFunctions):
    """Operations on numbers that a program needs beyond +, − and ×, which NumPy takes from the numbers themselves."""

    @abstractmethod
    def array(self, values: Sequence[float | int | Fraction], shape: tuple[int, ...]) -> Array:
        """Return exact numbers as an array."""

    @abstractmethod
    def matmul(self, a: Array, b: Array) -> Array:
        """Return a batch of matrix products."""

    @abstractmethod
    def greater(self, node: Node, a: Array, b: Array, moving: bool) -> Array:
        """Return 1 where a > b; equal numbers are a kink, and undecided, if they move with θ."""

    @abstractmethod
    def order(self, node: Node, a: Array, moving: bool) -> Array:
        """Return positions along the last axis, largest first; ties are undecided if they move with θ."""

    def shortcut(self, node: Node, inputs: Sequence[dict[int, Array]]) -> dict[int, Array] | None:
        """Return the value of a node, where it can be had without computing it."""
        return None

    def settle(self, parts: dict[int, Array], node: Node) -> dict[int, Array]:
        """Simplify the value of a node; by default, return it unchanged."""
        return parts

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """Return the same number everywhere, since numbers of no kind change in place."""
        scalar = self.array([value], ())
        return np.full(shape, scalar[()], dtype=scalar.dtype)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return an array of exact zeros."""
        return self.full(shape, 0)

    def real(self, a: Array) -> Array:
        """Return whole numbers as numbers of this kind."""
        return self.array([int(v) for v in a.ravel()], a.shape)


class Floats(Numbers):
    """float64: fast, and only ever used to choose."""

    def array(self, values: Sequence[float | int | Fraction], shape: tuple[int, ...]) -> Array:
        return np.array([float(v) for v in values], dtype=np.float64).reshape(shape)

    def apply(self, function: str, a: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(_FLOAT[function](a), dtype=np.float64)

    def matmul(self, a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(a, b))

    def greater(self, node: Node, a: Array, b: Array, moving: bool) -> Array:
        return (a > b).astype(np.int64)

    def order(self, node: Node, a: Array, moving: bool) -> Array:
        return np.argsort(-a, axis=-1, kind="stable").astype(np.int64)

    def two_over_root_pi(self, shape: tuple[int, ...]) -> Array:
        return np.full(shape, 2 / math.sqrt(math.pi))


_FLOAT: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
    "tanh": np.tanh,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "sin": np.sin,
    "cos": np.cos,
}


class Balls(Numbers):
    """Arb's real balls at the precision of the surrounding `precision` block."""

    def array(self, values: Sequence[float | int | Fraction], shape: tuple[int, ...]) -> Array:
        balls = np.empty(len(values), dtype=object)
        balls[:] = [ball(v) for v in values]
        return balls.reshape(shape)

    def apply(self, function: str, a: Array) -> Array:
        return _each(BALL_FUNCTIONS[function], a)

    def matmul(self, a: Array, b: Array) -> Array:
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        if not a.size or not b.size:
            return self.zeros((*a.shape[:-1], columns))
        left, right = a.reshape(-1, rows * inner), b.reshape(-1, inner * columns)
        products = np.empty((len(left), rows * columns), dtype=object)
        for index, (x, y) in enumerate(zip(left, right, strict=True)):
            product = flint.arb_mat(rows, inner, x.tolist()) * flint.arb_mat(inner, columns, y.tolist())
            products[index, :] = product.entries()
        return products.reshape(*a.shape[:-1], columns)

    def greater(self, node: Node, a: Array, b: Array, moving: bool) -> Array:
        pairs = zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)
        return np.array([_above(x, y, moving) for x, y in pairs], dtype=np.int64).reshape(a.shape)

    def order(self, node: Node, a: Array, moving: bool) -> Array:
        rows = a.reshape(-1, a.shape[-1])
        orders = np.empty(rows.shape, dtype=np.int64)
        for index, row in enumerate(rows):
            middle = np.array([float(v.mid()) for v in row])
            orders[index] = np.argsort(-middle, kind="stable")
            for first, second in zip(orders[index][:-1], orders[index][1:], strict=True):
                if not row[first] > row[second] and (moving or not row[first] == row[second]):
                    raise UndecidedError(
                        f"Entries {first} and {second} cannot be separated, so their order is undecided."
                    )
        return orders.reshape(a.shape)

    def two_over_root_pi(self, shape: tuple[int, ...]) -> Array:
        return np.full(shape, 2 / flint.arb.const_sqrt_pi(), dtype=object)


def _above(x: flint.arb, y: flint.arb, moving: bool) -> int:
    if x > y:
        return 1
    if x < y or (not moving and x <= y):
        return 0
    raise UndecidedError(f"Whether {x.str(8)} is greater than {y.str(8)} is open: a kink lies inside the ball.")


def ball(value: float | int | Fraction) -> flint.arb:
    """Return a number as a ball; exact unless it is a fraction that has no finite binary expansion."""
    if isinstance(value, Fraction):
        return flint.arb(flint.fmpq(value.numerator, value.denominator))
    return flint.arb(value)


def _each(function: Callable[[flint.arb], flint.arb], a: Array) -> Array:
    values = np.empty(a.size, dtype=object)
    values[:] = [function(v) for v in a.ravel().tolist()]
    return values.reshape(a.shape)


BALL_FUNCTIONS: dict[str, Callable[[flint.arb], flint.arb]] = {
    "exp": flint.arb.exp,
    "log": flint.arb.log,
    "sqrt": flint.arb.sqrt,
    "reciprocal": lambda v: 1 / v,
    "tanh": flint.arb.tanh,
    "sigmoid": lambda v: 1 / (1 + (-v).exp()),
    "erf": flint.arb.erf,
    "sin": flint.arb.sin,
    "cos": flint.arb.cos,
}


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Compute with balls of this many bits."""
    before = flint.ctx.prec
    flint.ctx.prec = bits
    try:
        yield
    finally:
        flint.ctx.prec = before
