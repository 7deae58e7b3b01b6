"""A program over random numbers of a prime field, which shows the linear relations that its tensors always satisfy.

Parameters and inputs are drawn; sums, products and quotients are computed exactly modulo a prime; any other function of
single entries is a random function, the same for equal arguments; whatever else there is makes new random numbers. A
linear relation between entries that holds for all draws follows from the program: that two entries are equal, that one
is zero, that shares add up to one. It would hold by chance with probability 2⁻³¹ for each draw that it is tested on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import isfinite
from typing import Any

import numpy as np
import torch

from conserved._torch_compat import tree_map
from conserved.inference.program.captured_program import CapturedProgram, Operation, ValueRef
from conserved.inference.rules.step import base_name

PRIME = (1 << 31) - 1
DRAWS = 32
"""Independent draws of every random number."""
LARGEST = 4096
"""Entries of the largest tensor that is followed; relations of larger ones are not looked for."""

FieldNumbers = np.ndarray
"""Integers modulo PRIME: the draws, then the axes of the tensor."""

_KEEPS_ZERO = {
    f"aten::{name}"
    for name in (
        *("relu", "leaky_relu", "abs", "tanh", "sin", "gelu", "silu", "elu", "sign", "sgn", "clamp_min", "hardtanh"),
        *("sqrt", "celu", "mish", "erf", "asin", "atan", "sinh", "tan", "expm1", "log1p", "hardswish"),
    )
}
_FUNCTIONS = _KEEPS_ZERO | {
    f"aten::{name}"
    for name in (
        *("exp", "sigmoid", "cos", "cosh", "log", "softplus", "rsqrt", "reciprocal", "exp2", "log2", "acos"),
        *("hardsigmoid", "log_sigmoid_forward", "erfc", "clamp", "clamp_max", "pow", "threshold"),
    )
}
"""Functions of single entries; those above map zero to zero, with the arguments that `_zero_stays` allows."""

_MOVES = {
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "unsqueeze", "squeeze"),
        *("expand", "slice", "select", "split", "split_with_sizes", "unbind", "cat", "stack", "flip", "roll", "repeat"),
        *("index_select", "gather", "index", "diagonal", "unfold", "as_strided", "tril", "triu", "movedim", "narrow"),
    )
}
_COPIES = {f"aten::{name}" for name in ("clone", "_to_copy", "alias", "contiguous", "detach", "lift_fresh", "lift")}


class FieldProgram:
    """FieldNumbers for every value of a program, by its number; None for those that are too large."""

    def __init__(self, program: CapturedProgram, live: Sequence[int], seed: int = 0) -> None:
        self.program = program
        self.generator = np.random.default_rng(seed)
        self.numbers: dict[int, FieldNumbers | None] = {}
        self.entries: dict[int, tuple[str, np.ndarray]] = {}
        """Values that hold entries of one parameter: its name, and which of its entries is where, from one on."""
        for name, value in program.parameters.items():
            shape = program.values[value].shape
            if program.values[value].parameter is not None and np.prod(shape) <= LARGEST:
                self.entries[value] = (name, 1 + np.arange(int(np.prod(shape))).reshape(shape))
        for number in live:
            self._run(program.operations[number])

    def of(self, ref: Any) -> FieldNumbers | None:
        """Return the numbers of an operand; drawn if nothing made it."""
        if not isinstance(ref, ValueRef):
            return None
        if ref.value not in self.numbers:
            described = self.program.values[ref.value]
            constant = described.constant
            if int(np.prod(described.shape)) > LARGEST:
                self.numbers[ref.value] = None
            elif constant is not None and constant.is_floating_point():
                self.numbers[ref.value] = self._constant(constant)
            else:
                self.numbers[ref.value] = self._drawn(described.shape)
        return self.numbers[ref.value]

    def _drawn(self, shape: Sequence[int]) -> FieldNumbers:
        return self.generator.integers(1, PRIME, (DRAWS, *shape))

    def _constant(self, tensor: torch.Tensor) -> FieldNumbers:
        flat = [_modular(float(number)) for number in tensor.double().reshape(-1).tolist()]
        return np.broadcast_to(np.array(flat, dtype=np.int64).reshape(tensor.shape), (DRAWS, *tensor.shape))

    def _run(self, operation: Operation) -> None:
        name = base_name(operation.name)
        results: Sequence[FieldNumbers | None] | None = None
        try:
            rule = _ARITHMETIC.get(name)
            if name in _COPIES:
                results = [self.of(operation.args[0])]
            elif name in _MOVES or (name in _ZEROING and _fills_zero(name, operation)):
                results = self._moved(operation)
            elif rule is not None:
                results = [rule(self, operation)]
            elif name in _FUNCTIONS:
                results = [self._function(name, operation)]
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, ZeroDivisionError):
            # A form of an operator that is not handled here makes new numbers, which satisfy no relation.
            results = None
        for index, value in enumerate(operation.results):
            described = self.program.values[value]
            if not (described.dtype.is_floating_point or described.dtype.is_complex):
                continue
            result = results[index] if results is not None and index < len(results) else None
            small = int(np.prod(described.shape)) <= LARGEST
            fits = result is not None and result.shape[1:] == tuple(described.shape)
            self.numbers[value] = result if fits else self._drawn(described.shape) if small else None
        self._note_entries(operation, name)

    def _note_entries(self, operation: Operation, name: str) -> None:
        """Follow the entries of a parameter through operations that only move them."""
        source = [value for value in operation.inputs() if value in self.entries]
        if name in _COPIES and len(source) == 1 and "detach" not in name and not operation.stopped:
            self.entries[operation.results[0]] = self.entries[source[0]]
        elif name in _MOVES and len(source) == 1 and len(operation.inputs()) == 1 and not operation.stopped:
            parameter, index = self.entries[source[0]]
            try:
                moved = self._executed(operation, {source[0]: torch.from_numpy(index)})
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, ZeroDivisionError):
                # A form that is not handled here is a use of the parameter, and not a move of its entries.
                return
            for value, entries in zip(operation.results, moved, strict=False):
                self.entries[value] = (parameter, entries.numpy())

    def _executed(self, operation: Operation, given: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Run an operation on whole numbers that stand for entries."""
        packet, _, overload = operation.name.removeprefix("aten::").partition(".")
        packet = packet[:-1] if packet.endswith("_") else packet
        if packet in ("view", "_unsafe_view", "_reshape_alias"):
            # Entries may lie in another order in memory here than they did in the program.
            packet, overload = "reshape", "default"
            operation = replace(operation, args=operation.args[:2])
        function = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, ValueRef):
                return leaf
            return given[leaf.value] if leaf.value in given else self._known(leaf.value)

        args, kwargs = tree_map(filled, (operation.args, operation.kwargs))
        result = function(*args, **kwargs)
        return list(result) if isinstance(result, list | tuple) else [result]

    def _known(self, value: int) -> torch.Tensor:
        constant = self.program.values[value].constant
        if constant is None:
            raise ValueError("an index that is not known")
        return constant

    def _moved(self, operation: Operation) -> list[FieldNumbers] | None:
        """Return entries in other places: the operation runs on their numbers, with zero for what it fills in."""
        columns, given, start = [np.zeros((DRAWS, 1), dtype=np.int64)], {}, 1
        for value in dict.fromkeys(operation.inputs()):
            described = self.program.values[value]
            if not described.dtype.is_floating_point:
                continue
            numbers = self.of(ValueRef(value))
            if numbers is None:
                return None
            size = int(np.prod(described.shape))
            given[value] = torch.arange(start, start + size, device="cpu").reshape(described.shape)
            columns.append(numbers.reshape(DRAWS, size))
            start += size
        table = np.concatenate(columns, 1)
        return [
            table[:, index.numpy().reshape(-1)].reshape(DRAWS, *index.shape)
            for index in self._executed(operation, given)
        ]

    def _function(self, name: str, operation: Operation) -> FieldNumbers | None:
        x = self.of(operation.args[0])
        if x is None or any(isinstance(arg, ValueRef) for arg in operation.args[1:]):
            return None
        return self.function(f"{name}{operation.args[1:]}{operation.kwargs}", x, zero=_zero_stays(name, operation))

    def function(self, name: str, x: FieldNumbers, *, zero: bool) -> FieldNumbers:
        """Return a random function of single entries: equal entries have equal values."""
        flat = x.reshape(DRAWS, -1)
        salt = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % PRIME
        # One key for an entry from all its draws, then one number for each draw.
        weights = np.random.default_rng(salt).integers(1, PRIME, (2, DRAWS, 1))
        keys = (flat[None] * weights % PRIME).sum(1) % PRIME
        draws = np.random.default_rng(salt + 1).integers(1, PRIME, (3, DRAWS, 1))
        mixed = (keys[0] * draws[0] + (keys[1] * keys[1] % PRIME) * draws[1] % PRIME + draws[2]) % PRIME
        image = mixed * (mixed + keys[0]) % PRIME
        if zero:
            image = np.where((flat == 0).all(0), 0, image)
        return image.reshape(x.shape)


def _zero_stays(name: str, operation: Operation) -> bool:
    if name == "aten::pow":
        return isinstance(operation.args[1], int | float) and operation.args[1] > 0
    if name in ("aten::clamp", "aten::clamp_min", "aten::hardtanh"):
        low, high = ([*operation.args[1:], None, None])[:2]
        return (low is None or low <= 0) and (high is None or high >= 0)
    return name in _KEEPS_ZERO


_ZEROING = {"aten::constant_pad_nd", "aten::masked_fill", "aten::zeros_like", "aten::zeros", "aten::new_zeros"}


def _fills_zero(name: str, operation: Operation) -> bool:
    value = operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("value", 0)
    return (name == "aten::masked_fill" and value == 0) or (name == "aten::constant_pad_nd" and not value)


def _modular(number: float) -> int:
    """Return a number modulo PRIME: exact for simple fractions, one of its own for any other."""
    exact = Fraction(number).limit_denominator(1000) if isfinite(number) else Fraction(0)
    if isfinite(number) and abs(float(exact) - number) <= 1e-12 * max(abs(number), 1.0):
        return exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME
    return int.from_bytes(hashlib.blake2b(repr(number).encode(), digest_size=8).digest(), "big") % PRIME


def product(a: FieldNumbers, b: FieldNumbers) -> FieldNumbers:
    """Return products of matrices modulo PRIME: halves of 16 bits, so that sums stay below 2⁶³."""
    high, low = a >> 16, a & 0xFFFF
    return ((high @ b % PRIME << 16) + low @ b) % PRIME


def inverse(x: FieldNumbers) -> FieldNumbers:
    """Return inverses modulo PRIME, of zero zero."""
    result, power, exponent = np.ones_like(x), x % PRIME, PRIME - 2
    while exponent:
        if exponent & 1:
            result = result * power % PRIME
        power, exponent = power * power % PRIME, exponent >> 1
    return result


def _operand(f: FieldProgram, ref: Any, like: FieldNumbers | None = None) -> FieldNumbers:
    if isinstance(ref, bool) or (not isinstance(ref, ValueRef) and not isinstance(ref, int | float)):
        raise TypeError(ref)
    if isinstance(ref, int | float):
        return np.full((DRAWS,), _modular(float(ref)), dtype=np.int64)
    numbers = f.of(ref)
    if numbers is None:
        raise ValueError("too large")
    return numbers


def _align(*operands: FieldNumbers) -> list[FieldNumbers]:
    """Return operands with as many axes, so that they broadcast behind the draws."""
    count = max(operand.ndim for operand in operands)
    return [operand.reshape(DRAWS, *(1,) * (count - operand.ndim), *operand.shape[1:]) for operand in operands]


def _sum(sign: int) -> Callable[[FieldProgram, Operation], FieldNumbers]:
    def rule(f: FieldProgram, operation: Operation) -> FieldNumbers:
        a, b = _align(_operand(f, operation.args[0]), _operand(f, operation.args[1]))
        alpha = operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("alpha", 1)
        return (a + sign * _modular(float(alpha)) * b) % PRIME

    return rule


def _times(f: FieldProgram, operation: Operation) -> FieldNumbers:
    a, b = _align(_operand(f, operation.args[0]), _operand(f, operation.args[1]))
    return a * b % PRIME


def _over(f: FieldProgram, operation: Operation) -> FieldNumbers:
    if len(operation.args) > 2 or operation.kwargs:
        raise ValueError("rounding")
    a, b = _align(_operand(f, operation.args[0]), _operand(f, operation.args[1]))
    return a * inverse(b) % PRIME


def _reduce(f: FieldProgram, operation: Operation) -> FieldNumbers:
    x = _operand(f, operation.args[0])
    dims = operation.args[1] if len(operation.args) > 1 else None
    keep = bool(operation.args[2]) if len(operation.args) > 2 else bool(operation.kwargs.get("keepdim", False))
    axes = tuple(1 + dim % (x.ndim - 1) for dim in dims) if dims else tuple(range(1, x.ndim))
    total = x.sum(axes, keepdims=keep) % PRIME
    if base_name(operation.name) == "aten::mean":
        total = total * pow(int(np.prod([x.shape[axis] for axis in axes])), -1, PRIME) % PRIME
    return np.asarray(total)


def _mm(f: FieldProgram, operation: Operation) -> FieldNumbers:
    return product(_operand(f, operation.args[0]), _operand(f, operation.args[1]))


def _addmm(f: FieldProgram, operation: Operation) -> FieldNumbers:
    if operation.kwargs:
        raise ValueError("scaled")
    bias, result = _align(
        _operand(f, operation.args[0]), product(_operand(f, operation.args[1]), _operand(f, operation.args[2]))
    )
    return (bias + result) % PRIME


def _softmax(f: FieldProgram, operation: Operation) -> FieldNumbers:
    x = _operand(f, operation.args[0])
    axis = 1 + int(operation.args[1]) % (x.ndim - 1)
    shares = f.function("exp", x, zero=False)
    return shares * inverse(shares.sum(axis, keepdims=True) % PRIME) % PRIME


def _layer_norm(f: FieldProgram, operation: Operation) -> FieldNumbers:
    x = _operand(f, operation.args[0])
    axes = tuple(range(x.ndim - len(operation.args[1]), x.ndim))
    size = pow(int(np.prod([x.shape[axis] for axis in axes])), -1, PRIME)
    centred = (x - x.sum(axes, keepdims=True) % PRIME * size) % PRIME
    # What it is divided by is some number for each row; the other rows do not matter for linear relations within one.
    result = centred * f.generator.integers(1, PRIME, (DRAWS, *centred.sum(axes, keepdims=True).shape[1:])) % PRIME
    for ref, add in ((operation.args[2], False), (operation.args[3], True)):
        if ref is not None:
            result, other = _align(result, _operand(f, ref))
            result = (result + other if add else result * other) % PRIME
    return result


def _index_add(f: FieldProgram, operation: Operation) -> FieldNumbers:
    base, source = _operand(f, operation.args[0]), _operand(f, operation.args[3])
    if operation.kwargs:
        raise ValueError("scaled")
    axis = int(operation.args[1]) % (base.ndim - 1)
    index = f._known(operation.args[2].value)
    total = torch.from_numpy(base.copy()).index_add(1 + axis, index, torch.from_numpy(source.copy()))
    return np.asarray(total.numpy() % PRIME)


def _zeros(f: FieldProgram, operation: Operation) -> FieldNumbers:
    return np.zeros((DRAWS, *f.program.values[operation.results[0]].shape), dtype=np.int64)


def _cumulative(f: FieldProgram, operation: Operation) -> FieldNumbers:
    x = _operand(f, operation.args[0])
    return np.asarray(x.cumsum(1 + int(operation.args[1]) % (x.ndim - 1)) % PRIME)


_ARITHMETIC: dict[str, Callable[[FieldProgram, Operation], FieldNumbers]] = {
    "aten::add": _sum(1),
    "aten::sub": _sum(-1),
    "aten::neg": lambda f, operation: (-_operand(f, operation.args[0])) % PRIME,
    "aten::mul": _times,
    "aten::div": _over,
    "aten::sum": _reduce,
    "aten::mean": _reduce,
    "aten::cumsum": _cumulative,
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::_softmax": _softmax,
    "aten::native_layer_norm": _layer_norm,
    "aten::index_add": _index_add,
    "aten::zeros_like": _zeros,
    "aten::zeros": _zeros,
    "aten::new_zeros": _zeros,
}
"""Operations that are computed exactly."""


def null_space(rows: np.ndarray) -> list[list[Fraction]]:
    """Return linear relations with simple coefficients that every row satisfies: a basis in reduced form.

    Args:
        rows: numbers modulo PRIME, one row for each place and draw.
    """
    matrix = np.unique(rows, axis=0) if rows.shape[0] > 256 else rows
    matrix = matrix.copy() % PRIME
    count = matrix.shape[1]
    pivots: list[int] = []
    rank = 0
    # From the last column on, so that the earlier ones stay free and relations read "this entry equals that one".
    for column in range(count - 1, -1, -1):
        nonzero = np.flatnonzero(matrix[rank:, column])
        if not nonzero.size:
            continue
        chosen = rank + int(nonzero[0])
        matrix[[rank, chosen]] = matrix[[chosen, rank]]
        matrix[rank] = matrix[rank] * pow(int(matrix[rank, column]), -1, PRIME) % PRIME
        others = np.flatnonzero(matrix[:, column])
        others = others[others != rank]
        matrix[others] = (matrix[others] - matrix[others, column][:, None] * matrix[rank][None] % PRIME) % PRIME
        pivots.append(column)
        rank += 1
    relations = []
    for free in sorted(set(range(count)) - set(pivots)):
        numbers = {free: 1} | {pivot: int(-matrix[row, free]) % PRIME for row, pivot in enumerate(pivots)}
        relation = [_simple(numbers.get(column, 0)) for column in range(count)]
        if all(number is not None for number in relation):
            relations.append([number for number in relation if number is not None])
    return relations


def _simple(number: int) -> Fraction | None:
    """Return the fraction with numerator and denominator up to 100 that is a number modulo PRIME, if there is one."""
    for denominator in range(1, 101):
        numerator = number * denominator % PRIME
        numerator -= PRIME if numerator > PRIME // 2 else 0
        if abs(numerator) <= 100:
            return Fraction(numerator, denominator)
    return None
