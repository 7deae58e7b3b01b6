"""The error that rounding of intermediate results explains: every result of an operator is rounded at random.

A sort of nearly equal numbers, a difference of large terms and a mean over equal entries answer to rounding by more
than their inputs show. Moving the inputs by a rounding does not see that; rounding every result does (Parker, Monte
Carlo Arithmetic, 1997). Kernels are opaque: within one operator nothing is rounded, so that an operator whose own
backward loses digits is not excused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conserved._torch_compat import TorchDispatchMode, schema_of, tree_leaves
from conserved.inference.probing.noise import by_row, rms, wide
from conserved.inference.probing.numerical_function import NumericalFunction
from conserved.tolerances import COARSE_UNIT, UNIT

_DRAWS = 24
"""Random roundings; a sort or a maximum that is nearly tied is decided otherwise in some of them."""

_ORDINARY = 16.0
"""Roundings of its size by which a well-conditioned gradient may vary. The noise of nearby points covers them, and
nothing is excused."""

_TYPICAL = 4.0
"""Medians of its changes above which the largest one is another decision: of 24 normal changes it is 3.3 medians."""

_QUARTER = 6
"""Of 24 changes sorted by size, the first quartile: a decision that half of them turn does not move it."""

_TYPICAL_QUARTERS = 8.5
"""The same in first quartiles: 2.7 standard deviations of normal changes, of which the largest of 24 has 2.2."""


_SORTED = 1024
"""Entries below which sorting them costs no more than a table of hashes does."""

_TABLE = 22
"""Binary digits of a hash: operands of a million entries fill a quarter of the table."""

_ODD = 0x1E3779B97F4A7C15
"""An odd number near 2**61 divided by the golden ratio: products with it spread over their leading digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingSpread:
    """The variation of outputs and gradients when intermediate results are rounded again.

    Attributes:
        outs: the standard deviation of each output, by row.
        grads: the standard deviation of each gradient by row, where it is far more than a few roundings; else zero.
        decisions: by entry of each gradient, the largest change, where it is far more than the usual one; else zero.
    """

    outs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    decisions: tuple[Tensor, ...]


class _RoundAtRandom(TorchDispatchMode):
    """Adds a random rounding to every result that is not found among the operands: selections round nothing."""

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self._unit = unit
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = tree_leaves((args, kwargs))
        floats = [leaf for leaf in operands if isinstance(leaf, Tensor) and leaf.dtype in UNIT]
        returns = schema_of(func).returns
        if not floats or any(item.alias_info is not None and not item.alias_info.is_write for item in returns):
            return result
        numbers = [float(leaf) for leaf in operands if isinstance(leaf, int | float)]
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype in UNIT and leaf.numel():
                self._round(leaf, floats, numbers)
        return result

    def _round(self, result: Tensor, operands: Sequence[Tensor], numbers: Sequence[float]) -> None:
        known = [operand.to(result.dtype) for operand in operands if operand is not result]
        if any(operand.shape == result.shape and torch.equal(operand, result) for operand in known):
            return
        known = [operand.flatten() for operand in known]
        known.append(torch.tensor([0.0, *numbers], device=result.device).to(result.dtype))
        same = _occurs(result.abs(), torch.cat(known).abs())
        # Up to one spacing: what is of this precision already would not move by less, and results of several roundings
        # that agree in it may lie that far apart.
        size = 2 * self._unit
        drawn = torch.rand(result.shape, generator=self._generator, dtype=torch.float64).to(result.device) * 2 - 1
        result.copy_(torch.where(same, result, (wide(result) * (1 + size * drawn)).to(result.dtype)))


def _occurs(entries: Tensor, among: Tensor) -> Tensor:
    """Return which entries are found among others, as `torch.isin` does, which sorts them all."""
    if among.numel() < _SORTED:
        return torch.isin(entries, among)
    table = torch.zeros(1 << _TABLE, dtype=torch.bool, device=entries.device)
    key, other = _hashed(entries), _hashed(among)
    table[other] = True
    possible = table[key]
    if not possible.any() or entries.dtype.itemsize == 2:
        return possible
    table.zero_()[key[possible]] = True
    return possible.masked_scatter(possible, torch.isin(entries[possible], among[table[other]]))


def _hashed(tensor: Tensor) -> Tensor:
    """Return numbers below 2**22 that depend on the bits of each entry; in half precision they are the bits."""
    if tensor.dtype.itemsize == 2:
        return tensor.contiguous().view(torch.int16).long()
    bits = tensor.contiguous().view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int64).long()
    return (bits * _ODD >> (62 - _TABLE)) & ((1 << _TABLE) - 1)


def rounding_spread(
    function: NumericalFunction, values: Sequence[Tensor], gradients: Sequence[Tensor], unit: float
) -> RoundingSpread:
    """Measure how outputs and gradients of a function vary when every intermediate result is rounded again.

    Args:
        function: the function; where it is compiled, it is run as it was written.
        values: its inputs.
        gradients: output gradients.
        unit: the relative error of one rounding.

    Returns:
        The spread; zero everywhere if the function cannot be run so.
    """
    function = function.uncompiled
    outs, input_grads = function.gradients(values, gradients)
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(values, input_grads, strict=True)]
    before = [wide(tensor) for tensor in (*outs, *grads)]
    generator = torch.Generator().manual_seed(function.seed)
    inside: list[list[Tensor]] = [[] for _ in before]
    at_inputs: list[list[Tensor]] = [[] for _ in before]
    try:
        for draw in range(_DRAWS):
            with _RoundAtRandom(unit, function.seed + draw):
                inside = _with_changes(inside, before, *function.gradients(values, gradients))
            if unit > COARSE_UNIT:
                moved = [_moved(value, unit, generator) for value in values]
                at_inputs = _with_changes(at_inputs, before, *function.gradients(moved, gradients))
    except Exception:  # a function may refuse a mode or a point in any way it likes
        inside = at_inputs = [[torch.zeros_like(old)] for old in before]
    spreads = [by_row(torch.stack(change).square().mean(0)).sqrt() for change in inside]
    large, decisions = [], []
    for old, change, other, spread in list(zip(before, inside, at_inputs, spreads, strict=True))[len(outs) :]:
        size = by_row(old.square()).sqrt().clamp_min(rms(old))
        large.append(torch.where(spread > _ORDINARY * unit * size, spread, 0.0))
        decided = _decided(change, (len(change) - 1) // 2, _TYPICAL)
        if other:
            decided = torch.maximum(decided, _decided(other, _QUARTER - 1, _TYPICAL_QUARTERS))
        decisions.append(decided)
    return RoundingSpread(outs=tuple(spreads[: len(outs)]), grads=tuple(large), decisions=tuple(decisions))


def _moved(value: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """Return an input moved by a rounding of its tensor's size.

    An operator that computes a cell or an order from it may decide otherwise: within an operator nothing is rounded.
    """
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    return (wide(value) + unit * rms(value) * drawn).to(value.dtype)


def _with_changes(
    changes: Sequence[list[Tensor]], before: Sequence[Tensor], outs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[list[Tensor]]:
    """Return the changes with those of one more draw; a gradient that is missing has not changed."""
    after = [old if new is None else wide(new) for new, old in zip((*outs, *grads), before, strict=True)]
    drawn = [(new - old).abs().nan_to_num(0.0, 0.0, 0.0) for new, old in zip(after, before, strict=True)]
    return [[*own, change] for own, change in zip(changes, drawn, strict=True)]


def _decided(changes: Sequence[Tensor], rank: int, typical: float) -> Tensor:
    """Return the largest change of each entry where it is far more than the usual one of its row; else zero.

    The usual one is the change of a rank in the order of size, and `typical` says how many of it are far more.
    """
    every = torch.stack(list(changes))
    usual = by_row(every.sort(0).values[min(rank, len(every) - 1)].square()).sqrt()
    largest = every.amax(0)
    return torch.where(largest > typical * usual, largest, 0.0)
