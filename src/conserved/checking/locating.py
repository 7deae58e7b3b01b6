"""Where a gradient is wrong, in words, and what such a pattern usually means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

_TILES = (8, 16, 32, 64, 128, 256)


def runs_of(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return consecutive numbers as first and last."""
    result: list[tuple[int, int]] = []
    for index in indices:
        if result and index == result[-1][1] + 1:
            result[-1] = (result[-1][0], index)
        else:
            result.append((index, index))
    return result


def where(bad: Tensor, axes: Sequence[str] | None = None) -> str:
    """Return which entries of a tensor are marked, axis by axis.

    Only axes along which some entries are fine are named.
    """
    count = int(bad.sum())
    if count == 0:
        return ""
    if bool(bad.all()) or bad.ndim == 0:
        return "everywhere"
    parts = []
    for axis in range(bad.ndim):
        size = bad.shape[axis]
        others = [other for other in range(bad.ndim) if other != axis]
        marked = (bad.any(dim=tuple(others)) if others else bad).nonzero().flatten().tolist()
        if len(marked) == size:
            continue
        label = axes[axis] if axes else f"axis {axis}"
        parts.append(f"{_span(marked, size)} of {label}")
    share = count / bad.numel()
    if not parts:
        return f"scattered, {share:.0%} of the entries" if share >= 0.005 else f"scattered, {count} entries"
    return ", ".join(parts)


def _span(marked: Sequence[int], size: int) -> str:
    spans = runs_of(marked)
    if len(spans) == 1:
        first, last = spans[0]
        name = f"index {first}" if first == last else f"{first}–{last}"
        if last == size - 1 and first > 0:
            width = size - first
            tile = next((tile for tile in _TILES if first % tile == 0 and width <= tile), None)
            if width == 1:
                return f"{name} (the last one)"
            return f"{name} (the last tile of {tile})" if tile else f"{name} (the last {width})"
        if first == 0:
            return f"{name} (the first{'' if first == last else f' {last + 1}'})"
        return name
    if len(spans) <= 4:
        return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in spans)
    steps = {after - before for before, after in pairwise(marked)}
    if len(steps) == 1:
        return f"every {steps.pop()}th from {marked[0]}"
    return f"{len(marked)} of {size} indices"


def factor(actual: Tensor, expected: Tensor) -> float | None:
    """Return the number c with actual = c·expected, if one explains nearly all of the difference; None otherwise."""
    square = float(expected.square().sum())
    if square == 0 or not math.isfinite(square):
        return None
    result = float((actual * expected).sum()) / square
    remainder = float((actual - result * expected).norm())
    off = float((actual - expected).norm())
    if not math.isfinite(result) or off == 0 or remainder > 0.1 * off:
        return None
    return result


def factor_meaning(name: str, value: float, shapes: Mapping[str, Sequence[int]]) -> str:
    """Return a wrong factor in words, with the number it probably is."""
    if abs(value) < 1e-6:
        return f"d{name} is zero: it is never written, or its branch is detached"
    times = (
        f"d{name} has the wrong sign"
        if abs(value + 1) < 0.02
        else f"d{name} is {value:.3g} times what it should be"
        if value > 1 or value < 0
        else f"d{name} is {1 / value:.3g} times too small"
    )
    return times + _name_factor(abs(value), shapes)


def _name_factor(value: float, shapes: Mapping[str, Sequence[int]]) -> str:
    size = max(value, 1 / value)
    sizes = sorted({number for shape in shapes.values() for number in shape if number > 1})
    ratios = {
        f"{large // small}": large // small
        for large in sizes
        for small in sizes
        if large % small == 0 and large > small
    }
    last = sorted({shape[-1] for shape in shapes.values() if len(shape)})
    for width in last:
        if width > 1 and abs(size / math.sqrt(width) - 1) < 0.02:
            which = "applied twice" if value < 1 else "left out"
            return f", √{width}: a scale 1/√d with d = {width} {which}"
    if abs(size - 2) < 0.04:
        return ": halved, or counted twice"
    if abs(size / math.log(2) - 1) < 0.01 or abs(size * math.log(2) - 1) < 0.01:
        return ", ln 2: a base-2 exponential differentiated as a natural one, or the reverse"
    for width in sizes:
        if abs(size / width - 1) < 0.02:
            return f", the size of an axis ({width}): a mean in place of a sum, or the reverse"
    for ratio in ratios.values():
        if abs(size / ratio - 1) < 0.02:
            return (
                f", the ratio of two axes ({ratio}): a group averaged where it is to be summed, or counted repeatedly"
            )
    return ""


def pattern_meaning(
    name: str, bad: Tensor, actual: Tensor, expected: Tensor, shapes: Mapping[str, Sequence[int]]
) -> str:
    """Return what a difference entry by entry suggests."""
    if not bool(torch.isfinite(actual).all()):
        return f"d{name} contains infinities or NaN"
    if not bool(bad.any()):
        return ""
    inside, right = actual[bad], expected[bad]
    value = factor(inside, right)
    if value is not None:
        return factor_meaning(name, value, shapes)
    shape = shapes.get(name, ())
    for axis in range(bad.ndim):
        if bad.ndim == len(shape) > 1 and 1 < bad.shape[axis] <= 256:
            swapped = _describe_exchange(actual, expected, axis)
            if swapped:
                return f"entries along axis {axis} of d{name} are in another order ({swapped})"
    return ""


def _describe_exchange(actual: Tensor, expected: Tensor, axis: int) -> str:
    """Return whether one tensor is the other with entries along an axis exchanged."""
    left = actual.movedim(axis, 0).flatten(1)
    right = expected.movedim(axis, 0).flatten(1)
    alike = (left @ right.T) / (left.norm(dim=1)[:, None] * right.norm(dim=1)[None, :]).clamp_min(1e-300)
    best = alike.argmax(1)
    order = torch.arange(len(best), device=best.device)
    if bool((alike.max(1).values > 0.999).all()) and not bool((best == order).all()):
        moved = (best != order).nonzero().flatten().tolist()[:4]
        return ", ".join(f"{index} holds {int(best[index])}" for index in moved)
    return ""
