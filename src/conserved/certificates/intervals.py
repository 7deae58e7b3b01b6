r"""Whole arrays of real numbers enclosed by float64 midpoints and radii, with proved bounds of every rounding error.

An array of intervals [m − r, m + r] is two float64 arrays. Each operation rounds to nearest (IEEE 754), so its result
m is off by at most u |m| with u = 2⁻⁵³, or by less than 2⁻¹⁰⁷⁴ where it underflows; a sum of n products, in any order
and with or without fused operations, is off by at most (n + 2) 2u Σ|terms|. Those errors are added to the radius that
the operands' radii give. Radii are themselves rounded: all their terms are positive, so multiplying by 1 + 2⁻³⁰ makes
up for up to 2²⁰ roundings, and adding 2⁻¹⁰⁰⁰ for every underflow on the way. Elementary functions are taken from Arb.

Balls of arbitrary precision (`arithmetic`) do the same entry by entry, much more slowly. What 53 bits leave open is
asked again there.
"""

from __future__ import annotations

from dataclasses import dataclass

import flint
import numpy as np

from conserved.certificates.arithmetic import BALL_FUNCTIONS, Array, precision

_U = 2.0**-53
_WIDER = 1 + 2.0**-30
_TINY = 2.0**-1000
_LONGEST = 1 << 20
"""Terms of the longest sum whose radius `_WIDER` makes up for."""
_FUNCTION_BITS = 80


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """Numbers within `radius` of `middle`, entry by entry. ±∞ with radius 0 is that infinity."""

    middle: Array
    radius: Array

    @staticmethod
    def exact(values: Array) -> Interval:
        """Return floating-point numbers as they are."""
        return Interval(values, np.zeros_like(values))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.middle.shape

    def __neg__(self) -> Interval:
        return Interval(-self.middle, self.radius)

    def __add__(self, other: Interval) -> Interval:
        middle = self.middle + other.middle
        radius = (self.radius + other.radius + _U * np.abs(middle)) * _WIDER
        infinite = np.isinf(middle)
        if infinite.any():
            # A true infinity plus anything finite is that infinity; an overflow is not known.
            known = _is_infinity(self) & np.isfinite(other.radius) | _is_infinity(other) & np.isfinite(self.radius)
            radius = np.where(infinite, np.where(known, 0.0, np.inf), radius)
        return Interval(middle, radius)

    def __sub__(self, other: Interval) -> Interval:
        return self + (-other)

    def __mul__(self, other: Interval) -> Interval:
        middle = self.middle * other.middle
        left, right = np.abs(self.middle), np.abs(other.middle)
        spread = left * other.radius + self.radius * (right + other.radius) + _U * np.abs(middle)
        return Interval(middle, spread * _WIDER + _TINY)

    def __matmul__(self, other: Interval) -> Interval:
        length = self.shape[-1]
        _allowed(length)
        left, right = np.abs(self.middle), np.abs(other.middle)
        middle = self.middle @ other.middle
        rounding = (length + 2) * 2 * _U * left
        spread = (rounding + self.radius) @ right + (left + self.radius) @ other.radius
        return Interval(middle, spread * _WIDER + length * _TINY)

    def move(self, change: object) -> Interval:
        """Return a rearrangement of entries, applied to midpoints and radii alike."""
        assert callable(change)
        return Interval(change(self.middle), change(self.radius))

    def sum_last(self) -> Interval:
        """Return the sum over the last axis."""
        length = self.shape[-1]
        _allowed(length)
        size = np.abs(self.middle).sum(-1)
        radius = (self.radius.sum(-1) + (length + 2) * 2 * _U * size) * _WIDER
        return Interval(self.middle.sum(-1), radius)

    def gathered(self, add: object, longest: int) -> Interval:
        """Return sums of at most `longest` entries each, formed by a function that adds entries of an array."""
        assert callable(add)
        _allowed(longest)
        if longest <= 1:
            return self.move(add)
        size = add(np.abs(self.middle))
        return Interval(add(self.middle), (add(self.radius) + (longest + 2) * 2 * _U * size) * _WIDER)

    def apply(self, function: str) -> Interval:
        """Return an elementary function, entry by entry."""
        if function == "reciprocal":
            return self._reciprocal()
        if function == "sqrt":
            return self._square_root()
        if function == "exp" and np.isneginf(self.middle).any():
            masked = np.isneginf(self.middle) & (self.radius == 0)
            rest = Interval(np.where(masked, 0.0, self.middle), self.radius).apply(function)
            return Interval(np.where(masked, 0.0, rest.middle), np.where(masked, 0.0, rest.radius))
        middle, radius = np.empty(self.middle.size), np.empty(self.middle.size)
        ball = BALL_FUNCTIONS[function]
        with precision(_FUNCTION_BITS):
            pairs = zip(self.middle.ravel().tolist(), self.radius.ravel().tolist(), strict=True)
            for index, (m, r) in enumerate(pairs):
                value = ball(flint.arb(m, r)) if np.isfinite(m) and np.isfinite(r) else flint.arb(0, float("inf"))
                near = float(value.mid())
                middle[index] = near
                radius[index] = float(abs(value - near).abs_upper()) if np.isfinite(near) else np.inf
        known = np.isfinite(middle) & np.isfinite(radius)
        enclosure = np.where(known, middle, 0.0), np.where(known, radius * _WIDER + _TINY, np.inf)
        return Interval(enclosure[0].reshape(self.shape), enclosure[1].reshape(self.shape))

    def _reciprocal(self) -> Interval:
        """Return |1/x − 1/m| ≤ r / (|m| (|m| − r)) for x within r of m."""
        size = np.abs(self.middle)
        with np.errstate(all="ignore"):
            middle = 1 / self.middle
            least = (size - self.radius) * (1 - 2.0**-50)
            radius = (self.radius / (size * least) + _U * np.abs(middle)) * _WIDER + _TINY
        return _where_known(middle, radius, np.isfinite(size) & (least > 2.0**-400))

    def _square_root(self) -> Interval:
        """Return |√x − √m| ≤ r / √(m − r) for x within r of m > r; the root of a float is correctly rounded."""
        with np.errstate(all="ignore"):
            middle = np.sqrt(self.middle)
            least = (self.middle - self.radius) * (1 - 2.0**-50)
            radius = (self.radius / np.sqrt(least) + _U * middle) * _WIDER + _TINY
        return _where_known(middle, radius, np.isfinite(self.middle) & (least > 2.0**-500))


def _is_infinity(a: Interval) -> Array:
    return np.asarray(np.isinf(a.middle) & (a.radius == 0))


def _where_known(middle: Array, radius: Array, known: Array) -> Interval:
    return Interval(np.where(known, middle, 0.0), np.where(known, radius, np.inf))


def _allowed(length: int) -> None:
    if length > _LONGEST:
        raise OverflowError(f"A sum of {length:,} terms is longer than its rounding is accounted for.")


def round_outward(balls: Array) -> Interval:
    """Return balls rounded outwards to float64."""
    middle = np.array([float(ball.mid()) for ball in balls.ravel().tolist()])
    spread = zip(balls.ravel().tolist(), middle.tolist(), strict=True)
    radius = np.array([float(abs(b - m).abs_upper()) if np.isfinite(m) else np.inf for b, m in spread])
    return _where_known(middle, radius * _WIDER + _TINY, np.isfinite(middle) & np.isfinite(radius)).move(
        lambda part: part.reshape(balls.shape)
    )


def rounds_to_nearest() -> bool:
    """Return whether this process computes as the bounds assume.

    The bounds assume rounding to nearest, and that small numbers are not flushed to zero.
    """
    unit, half = np.float64(1.0), np.array([2.0**-53, 2.0**-52])
    small = np.array([2.0**-540]) * np.array([2.0**-530])
    return bool(((unit + half) == [1.0, 1.0 + 2.0**-52]).all() and ((unit - half / 2)[0] == 1.0) and small[0] > 0)


def independence_bounds(rows: Interval) -> Array:
    """Return upper bounds of the row sums of |I − M P| for rows of intervals; all below 1 prove them independent.

    P is a floating-point pseudo-inverse of the midpoints, scaled by powers of two, and exact by definition. With A the
    midpoints, |I − M P| ≤ |I − A P| + |radii| |P|, and A P is known up to (D + 2) 2u |A| |P|; of these only row sums
    are needed.
    """
    count, size = rows.shape
    known = np.isfinite(rows.middle).all() and np.isfinite(rows.radius).all()
    nothing = np.full(count, np.inf)
    if count > size or not known or not rounds_to_nearest():
        return nothing
    with np.errstate(divide="ignore"):
        exponents = -np.log2(np.abs(rows.middle).max(axis=1)).round()
    if not np.isfinite(exponents).all():
        return nothing
    powers = np.ldexp(1.0, exponents.astype(np.int64))
    # Powers of two scale exactly as long as nothing underflows, which the smallest radius allows for.
    middle, radius = rows.middle * powers[:, None], rows.radius * powers[:, None] + _TINY
    inverse = _right_inverse(middle)
    if inverse is None or not np.isfinite(inverse).all():
        return nothing
    _allowed(size)
    product = middle @ inverse
    product[np.arange(count), np.arange(count)] -= 1
    weight = np.abs(inverse).sum(axis=1)
    spread = ((size + 4) * 2 * _U * np.abs(middle) + radius) @ weight
    # The diagonal's subtraction of 1 rounds once more.
    bound = (np.abs(product).sum(axis=1) * (1 + 4 * _U) + 2 * _U + spread) * _WIDER + size * _TINY
    return np.where(np.isnan(bound), np.inf, bound)


def _right_inverse(a: Array) -> Array | None:
    """Return a right inverse of a full-row-rank matrix, by QR of its transpose and one refinement."""
    try:
        q, r = np.linalg.qr(a.T)
        inverse = np.linalg.solve(r, q.T).T
    except np.linalg.LinAlgError:
        return None
    refined = inverse @ (2 * np.eye(len(a)) - a @ inverse)
    return np.asarray(refined if np.isfinite(refined).all() else inverse)
