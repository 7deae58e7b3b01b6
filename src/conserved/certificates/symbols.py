r"""Symbols: exact algebra in which running a program along a law's gradient either gives zero or proves nothing.

A symbol is a quotient of polynomials with rational coefficients. Its letters are *atoms*: parameters, inputs, and the
values of nodes. A law h is conserved iff the output does not move along ∇h, so the program is run on θ + ε ∇h(θ):

- where a value does not move (the coefficient of ε is the zero polynomial) it is replaced by a fresh letter, because
  nothing else about it is needed; polynomials therefore stay as small as the piece of the network between two legs;
- exp u, tanh u, … of something that moves are letters too; their derivatives are polynomials in them (`jets`);
- √u is a letter whose square is replaced by u;
- a value that moves in proportion to itself, by a single term, is replaced by a letter that moves so.

Letters are treated as independent though they are not. That can hide a law, and cannot invent one: what is zero for
independent letters is zero for all values of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import flint
import numpy as np

from conserved.certificates.arithmetic import Array, Numbers
from conserved.certificates.program import Node
from conserved.errors import ConservedError

Polynomial = dict[tuple[int, ...], flint.fmpq]
"""Coefficients by monomial; a monomial is the sorted tuple of its letters, each as often as its power."""

_UNIT = flint.fmpq(1)
_ONE: Polynomial = {(): _UNIT}
_MINUS_INFINITY = 0
"""The letter of −∞, which masks put into scores; its exponential is 0."""
_TWO_OVER_ROOT_PI = 1
_KEEPING = ("take", "gather", "scatter", "choose", "constant", "parameters", "input", "real", "exp", "stop")
"""Operators that make no new values, or whose value may be a number though their input is a letter."""


class TooLargeError(ConservedError, ArithmeticError):
    """The argument would take more terms than it is allowed."""


MOST_WORDS = 64_000_000
"""Words of eight bytes that one argument may take: half a gigabyte of terms, their letters and their digits."""

MOST_DIGITS = 16_384
"""Words of the longest coefficient: a million bits, where those of laws have a few hundred."""

_TERM = 32
"""Words of one term: an entry of a dictionary, a tuple, and a quotient of integers."""


def words_of(polynomial: Polynomial) -> int:
    """Return the memory of a polynomial, in words: terms, letters, and digits of coefficients."""
    return sum(_TERM + len(key) + value.height_bits() // 32 for key, value in polynomial.items())


@dataclass(slots=True)
class Budget:
    """Products of terms that may still be computed, and memory that may still be taken, over a whole argument."""

    left: int
    words: int = MOST_WORDS
    pending: int = 0
    """Words of products made since the last node was finished."""

    def product(self, a: Polynomial, b: Polynomial) -> Polynomial:
        """Return the product of two polynomials; stops when there is nothing left."""
        if a is _ONE or b is _ONE:
            return b if a is _ONE else a
        self.left -= len(a) * len(b)
        if self.left < 0:
            raise TooLargeError("The symbolic argument needs too many terms.")
        # What the product takes at most, before it is made.
        digits = _longest(a) + _longest(b)
        if digits > MOST_DIGITS:
            raise TooLargeError("The symbolic argument needs too many digits.")
        self._room(len(a) * len(b) * (_TERM + digits))
        product = _product(a, b)
        self.pending += len(product) * _TERM
        self._room(0)
        return product

    def keep(self, symbols: Iterable[Symbol]) -> None:
        """Count the symbols of a node, which stay until the argument ends; products made on the way there are gone."""
        self.pending = 0
        for symbol in symbols:
            self.words -= words_of(symbol.above) + (0 if symbol.below is _ONE else words_of(symbol.below))
            self._room(0)

    def _room(self, words: int) -> None:
        if self.pending + words > self.words:
            raise TooLargeError("The symbolic argument needs too much memory.")


def _longest(polynomial: Polynomial) -> int:
    """Return words of the longest coefficient."""
    return max((value.height_bits() for value in polynomial.values()), default=0) // 32


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """above / below, two polynomials."""

    above: Polynomial
    below: Polynomial
    budget: Budget

    @property
    def number(self) -> flint.fmpq | None:
        """Its value if it has no letters."""
        if not self.above:
            return flint.fmpq(0)
        if self.below is _ONE and len(self.above) == 1:
            return self.above.get(())
        return None

    @property
    def letter(self) -> int | None:
        """The letter of a symbol that consists of one letter; None for any other symbol."""
        if self.below is _ONE and len(self.above) == 1:
            ((monomial, coefficient),) = self.above.items()
            if len(monomial) == 1 and coefficient == 1:
                return monomial[0]
        return None

    @property
    def plain(self) -> bool:
        """Whether it is a number or a letter."""
        return self.number is not None or self.letter is not None

    def __add__(self, other: Symbol) -> Symbol:
        if not self.above:
            return other
        if not other.above:
            return self
        if self.below is other.below or self.below == other.below:
            return Symbol(_plus(self.above, other.above), self.below, self.budget)
        times = self.budget.product
        above = _plus(times(self.above, other.below), times(other.above, self.below))
        return Symbol(above, times(self.below, other.below), self.budget)

    def __neg__(self) -> Symbol:
        return Symbol({key: -value for key, value in self.above.items()}, self.below, self.budget)

    def __sub__(self, other: Symbol) -> Symbol:
        return self + (-other)

    def __mul__(self, other: Symbol) -> Symbol:
        if not self.above or not other.above:
            return Symbol({}, _ONE, self.budget)
        times = self.budget.product
        return Symbol(times(self.above, other.above), times(self.below, other.below), self.budget)

    def inverse(self) -> Symbol:
        """Return 1 over it."""
        return Symbol(self.below, self.above, self.budget)


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    return _collect(itertools.chain(a.items(), b.items()))


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    pairs = itertools.product(a.items(), b.items())
    return _collect((tuple(sorted(left + right)), x * y) for (left, x), (right, y) in pairs)


def _collect(terms: Iterable[tuple[tuple[int, ...], flint.fmpq]]) -> Polynomial:
    """Add up terms of equal monomials; those that cancel are left out."""
    result: Polynomial = {}
    for key, value in terms:
        result[key] = result[key] + value if key in result else value
    return {key: value for key, value in result.items() if value}


@dataclass(slots=True, eq=False)
class Symbols(Numbers):
    """A run of a program on symbols; `decided` holds what comparisons gave for the sample it is about."""

    decided: Mapping[Node, Array]
    budget: Budget
    letters: int = 2
    roots: dict[int, Symbol] = field(default_factory=dict)
    """Letters that are square roots, and of what."""
    known: dict[Any, Symbol] = field(default_factory=dict)
    _numbers: dict[float | Fraction, Symbol] = field(default_factory=dict)
    """Numbers that were met: a constant of a program has few different entries."""

    def fresh(self) -> Symbol:
        """Return a new letter."""
        self.letters += 1
        return self.spell(self.letters - 1)

    def spell(self, letter: int) -> Symbol:
        """Return a letter as a symbol."""
        return Symbol({(letter,): _UNIT}, _ONE, self.budget)

    def fresh_array(self, shape: tuple[int, ...]) -> Array:
        """Return new letters."""
        return _objects([self.fresh() for _ in range(int(np.prod(shape)))], shape)

    def array(self, values: Sequence[float | int | Fraction], shape: tuple[int, ...]) -> Array:
        return _objects([self._number(v) for v in values], shape)

    def _number(self, value: float | int | Fraction) -> Symbol:
        symbol = self._numbers.get(value)
        if symbol is None:
            if value == float("-inf"):
                symbol = self.spell(_MINUS_INFINITY)
            else:
                exact = Fraction(value)
                symbol = self._constant(flint.fmpq(exact.numerator, exact.denominator))
            self._numbers[value] = symbol
        return symbol

    def _constant(self, exact: flint.fmpq) -> Symbol:
        return Symbol({(): exact} if exact else {}, _ONE, self.budget)

    def apply(self, function: str, a: Array) -> Array:
        return _objects([self._function(function, v) for v in a.ravel().tolist()], a.shape)

    def _function(self, function: str, u: Symbol) -> Symbol:
        if function == "reciprocal" and u.above:
            return u.inverse() if u.number is None else self._constant(1 / u.number)
        if function == "exp" and (not u.above or _is_minus_infinity(u)):
            return self._number(0 if u.above else 1)
        key = (function, tuple(sorted(u.above.items())), tuple(sorted(u.below.items())))
        if key not in self.known:
            self.known[key] = self.fresh()
            if function == "sqrt":
                self.roots[self.letters - 1] = u
        return self.known[key]

    def shortcut(self, node: Node, inputs: Sequence[dict[int, Array]]) -> dict[int, Array] | None:
        """Return fresh letters where nothing moves; None where numbers or masked scores have to be computed."""
        if node.op in _KEEPING or any(1 in parts for parts in inputs):
            return None
        if all(v.number is not None or v.letter == _MINUS_INFINITY for parts in inputs for v in parts[0].ravel()):
            return None
        return {0: self.fresh_array(node.shape)}

    def matmul(self, a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(a, b))

    def greater(self, node: Node, a: Array, b: Array, moving: bool) -> Array:
        return self.decided[node]

    def order(self, node: Node, a: Array, moving: bool) -> Array:
        return self.decided[node]

    def two_over_root_pi(self, shape: tuple[int, ...]) -> Array:
        return _objects([self.spell(_TWO_OVER_ROOT_PI)] * int(np.prod(shape)), shape)

    def settle(self, parts: dict[int, Array], node: Node) -> dict[int, Array]:
        """Replace values that do not move by letters."""
        value = parts[0]
        moves = parts.get(1)
        if moves is None and node.op in _KEEPING:
            return parts
        flat = value.ravel().tolist()
        given_rates = [None] * len(flat) if moves is None else moves.ravel().tolist()
        reduced, rates = [], []
        zero = self._number(0)
        for v, rate in zip(flat, given_rates, strict=True):
            still = rate is None or not rate.above or self.is_zero(rate)
            if not v.plain:
                if still:
                    v = self.fresh()
                elif (factor := _ratio(rate, v)) is not None:
                    v = self.fresh()
                    rate = factor * v
            reduced.append(v)
            rates.append(zero if still else rate)
        result = {0: _objects(reduced, value.shape)}
        if any(rate.above for rate in rates):
            result[1] = _objects(rates, value.shape)
        # Values of all nodes stay until the argument ends.
        self.budget.keep((*reduced, *rates))
        return result

    def is_zero(self, symbol: Symbol) -> bool:
        """Return whether it is zero, squares of roots replaced by what they are roots of."""
        above = symbol.above
        while above:
            twice = (letter for key in above for letter in key if letter in self.roots and key.count(letter) > 1)
            root = next(twice, None)
            if root is None:
                return False
            above = self._squares_replaced(above, root)
        return True

    def _squares_replaced(self, above: Polynomial, root: int) -> Polynomial:
        """Replace ρ^(2k) by (a/b)^k everywhere, and multiply by the power of b that leaves a polynomial."""
        inside, times = self.roots[root], self.budget.product
        highest = max(key.count(root) // 2 for key in above)
        powers = [(_ONE, _ONE)]
        for _ in range(highest):
            a, b = powers[-1]
            powers.append((times(a, inside.above), times(b, inside.below)))
        total: Polynomial = {}
        for key, value in above.items():
            count = key.count(root)
            rest = tuple(letter for letter in key if letter != root) + (root,) * (count % 2)
            factor = times(powers[count // 2][0], powers[highest - count // 2][1])
            total = _plus(total, times({tuple(sorted(rest)): value}, factor))
        return total


def _is_minus_infinity(u: Symbol) -> bool:
    """Return whether u is −∞ times a positive number, plus what is finite."""
    masked = [key for key in u.above if key[:1] == (_MINUS_INFINITY,)]
    return masked == [(_MINUS_INFINITY,)] and u.below is _ONE and u.above[masked[0]] > 0


def _ratio(rate: Symbol, value: Symbol) -> Symbol | None:
    """Return q with rate = q · value, if q is a single term and both have the same denominator."""
    if len(rate.above) != len(value.above) or rate.below != value.below:
        return None
    first = next(iter(value.above))
    for key in rate.above:
        quotient = _divide(key, first)
        if quotient is not None:
            term = {quotient: rate.above[key] / value.above[first]}
            if _product(term, value.above) == rate.above:
                return Symbol(term, _ONE, rate.budget)
    return None


def _divide(monomial: tuple[int, ...], by: tuple[int, ...]) -> tuple[int, ...] | None:
    remaining = list(monomial)
    for letter in by:
        if letter not in remaining:
            return None
        remaining.remove(letter)
    return tuple(remaining)


def _objects(values: Sequence[Symbol], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(shape)
