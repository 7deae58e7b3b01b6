"""Axes of a plot: from values to places on paper, and the ticks beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conserved.report.numerals import superscript

Tick = tuple[float, str]
"""A place along the axis, and what is written there."""

_MOST_CATEGORIES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One axis: `low` and `high` are in units of the axis, which for a logarithmic one are powers of ten."""

    low: float
    high: float
    log: bool = False
    categories: tuple[str, ...] = ()
    start: float = 0.0
    end: float = 1.0

    def raw(self, value: Any) -> float | None:
        """Return a value in units of the axis; None for what has no place on it."""
        if self.categories:
            label = str(value)
            return float(self.categories.index(label)) if label in self.categories else _number(value)
        result = _number(value)
        if result is None or not self.log:
            return result
        return math.log10(result) if result > 0 else None

    def at(self, value: Any) -> float | None:
        """Return where a value is on paper."""
        raw_value = self.raw(value)
        return None if raw_value is None else self.along(raw_value)

    def along(self, raw: float) -> float:
        """Return where something in units of the axis is on paper."""
        return self.start + (raw - self.low) / (self.high - self.low) * (self.end - self.start)

    def inside(self, coordinate: float) -> bool:
        """Return whether a place is on the axis, with a little room for rounding."""
        first, last = sorted((self.start, self.end))
        return first - 0.5 <= coordinate <= last + 0.5

    def ticks(self, layout: Mapping[str, Any]) -> list[Tick]:
        """Return the layout's own ticks, or round numbers, whole powers of ten, or every category."""
        own = layout.get("tickvals")
        if isinstance(own, Sequence) and not isinstance(own, str):
            texts = layout.get("ticktext") or [_plain(value) for value in own]
            chosen = [(self.at(value), str(text)) for value, text in zip(own, texts, strict=False)]
            return [
                (coordinate, text) for coordinate, text in chosen if coordinate is not None and self.inside(coordinate)
            ]
        if self.categories:
            step = -(-len(self.categories) // _MOST_CATEGORIES)
            return [(self.along(float(n)), text) for n, text in enumerate(self.categories) if n % step == 0]
        if self.log:
            shown = _decades(self.low, self.high)
            text = _power if all(value == round(value) for value in shown) else _between
            return [(self.along(value), text(value)) for value in shown]
        return [(self.along(value), _plain(value)) for value in _round_numbers(self.low, self.high)]


def scale_of(values: Sequence[Any], layout: Mapping[str, Any], *, zero: bool = False) -> Scale:
    """Return an axis that shows all values; `zero` is for bars, which begin there."""
    kind = layout.get("type")
    texts = [value for value in values if isinstance(value, str)]
    if kind == "category" or (kind is None and texts):
        names = tuple(dict.fromkeys(str(value) for value in values if value is not None))
        flip = layout.get("autorange") == "reversed"
        ends = (len(names) - 0.5, -0.5) if flip else (-0.5, max(len(names), 1) - 0.5)
        return Scale(low=ends[0], high=ends[1], categories=names)
    log = kind == "log"
    numbers = [value for raw in values if (value := _number(raw)) is not None and (value > 0 or not log)]
    given = layout.get("range")
    if isinstance(given, Sequence) and len(given) == 2 and all(_number(end) is not None for end in given):
        return Scale(low=float(given[0]), high=float(given[1]), log=log)
    if not numbers:
        return Scale(low=0.0, high=1.0, log=log)
    if zero or layout.get("rangemode") == "tozero":
        numbers = numbers if log else [*numbers, 0.0]
    least, most = float(min(numbers)), float(max(numbers))
    low, high = (math.log10(least), math.log10(most)) if log else (least, most)
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
        room = 0.5 if log else max(abs(high) * 0.1, 1e-300)
        low, high = low - room, high + room
    room = 0.04 * (high - low)
    fixed = (zero or layout.get("rangemode") == "tozero") and not log
    return Scale(
        low=low if fixed and low == 0 else low - room, high=high if fixed and high == 0 else high + room, log=log
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _round_numbers(low: float, high: float, about: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between two numbers, about so many."""
    span = abs(high - low)
    unit = 10.0 ** math.floor(math.log10(span / about))
    step = min((unit * times for times in (1, 2, 5, 10)), key=lambda size: abs(span / size - about))
    first, last = sorted((low, high))
    start = math.ceil(first / step - 1e-9)
    return [index * step + 0.0 for index in range(start, math.floor(last / step + 1e-9) + 1)]


def _decades(low: float, high: float, most: int = 7) -> list[float]:
    """Return whole powers of ten; where fewer than two fit, 2 and 5 times them as well."""
    first, last = sorted((low, high))
    exponents = list(range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1))
    if len(exponents) >= 2:
        step = -(-len(exponents) // most)
        return [float(exponent) for exponent in exponents if exponent % step == 0]
    between = [
        exponent + math.log10(times)
        for exponent in range(math.floor(first), math.ceil(last) + 1)
        for times in (1, 2, 5)
    ]
    return [value for value in between if first <= value <= last] or [float(exponent) for exponent in exponents]


def _power(exponent: float) -> str:
    rounded = round(exponent)
    return {0: "1", 1: "10"}.get(rounded, f"10{superscript(rounded)}")


def _between(exponent: float) -> str:
    """Return a number on a logarithmic axis that shows few powers of ten."""
    value = 10.0**exponent
    if 1e-3 <= value < 1e4:
        return f"{value:.3g}"
    exponent_floor = math.floor(exponent + 1e-9)
    return f"{value / 10.0**exponent_floor:.0f}×10{superscript(exponent_floor)}"


def _plain(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    text = f"{value:,.0f}" if abs(value) >= 1000 and value == round(value) and abs(value) < 1e7 else f"{value:.6g}"
    return text.replace("-", "−")
