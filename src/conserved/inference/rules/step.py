"""The table of operators, and what an entry of it is given: an operation with the types of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from conserved.inference.program.captured_program import CapturedProgram, Operation, ValueRef
from conserved.inference.types.engine import ENTRIES, Engine, ReadPart
from conserved.inference.types.parameter_types import first_use, known_type
from conserved.inference.types.reindexing import Move
from conserved.inference.types.tensor_type import FIXED, ZERO, Type, Virtual

Known = Type | ReadPart


@dataclass(slots=True)
class Step:
    """One operation of a program with the types of its inputs: the argument of every typing rule."""

    engine: Engine
    program: CapturedProgram
    operation: Operation
    known: dict[int, Known]
    deferred: dict[int, tuple[Any, Any]]
    """Products that are only summed up: their operands."""

    def shape(self, ref: Any) -> tuple[int, ...]:
        """Return the shape of an operand.

        Args:
            ref: an argument of the operation.

        Returns:
            Its shape; () for a Python number.
        """
        return self.program.values[ref.value].shape if isinstance(ref, ValueRef) else ()

    def constant(self, ref: Any) -> Tensor | None:
        """Return the value of an operand that depends on neither parameters nor inputs.

        Args:
            ref: an argument of the operation.

        Returns:
            The tensor, or None if the value is not known.
        """
        return self.program.values[ref.value].constant if isinstance(ref, ValueRef) else None

    def floating(self, ref: Any) -> bool:
        """Return whether an operand is a tensor of floating-point numbers.

        Args:
            ref: an argument of the operation.

        Returns:
            False also for Python numbers.
        """
        return isinstance(ref, ValueRef) and self.program.values[ref.value].dtype.is_floating_point

    def raw(self, ref: Any) -> Known:
        """Return the type of an operand as far as it is known, without deciding anything about it.

        Args:
            ref: an argument of the operation.

        Returns:
            Its type; or, for a part of a parameter that was not used yet, that part.
        """
        if not isinstance(ref, ValueRef):
            return ZERO if isinstance(ref, int | float) and ref == 0 else FIXED
        result = self.known.get(ref.value, FIXED)
        if isinstance(result, ReadPart):
            return known_type(self.engine, result) or result
        return result

    def type(self, ref: Any, *, entries: bool = True, role: str = "gain") -> Type:
        """Return the type of an operand; a parameter that is used for the first time gets one here.

        Args:
            ref: an argument of the operation.
            entries: whether each entry of such a parameter may have a shift of its own, and not one along an axis.
            role: how such a parameter is used ("map", "gain", "bias", "table"); laws are named by it.

        Returns:
            The type: which entries move together, and how.
        """
        result = self.raw(ref)
        if isinstance(result, ReadPart):
            dims = sorted({dim for coordinate in result.coordinates for dim in coordinate.dims})
            sizes = [self.shape(ref)[dim] for dim in dims]
            virtual, counts = virtual_axes(result)
            if prod(sizes) * prod(counts) <= ENTRIES:
                fields = [self.engine.fresh(dims, sizes, virtual, counts)]
            else:
                fields = [self.engine.fresh((dim,), (size,)) for dim, size in zip(dims, sizes, strict=True)]
            result = first_use(self.engine, result, fields, role=role, entries=entries)
        return result

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """Return an argument of the operation by its position or its name.

        Args:
            index: the position in the operator's schema.
            name: the keyword under which it may have been passed instead.
            default: the value if it was not passed.

        Returns:
            The argument as it was recorded: a reference to a tensor, or a plain value.
        """
        args = self.operation.args
        return args[index] if index < len(args) else self.operation.kwargs.get(name, default)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.program.values[self.operation.results[0]].shape


TypingRule = Callable[[Step], Sequence[Known] | Known]

RULES: dict[str, TypingRule] = {}


def rule(*names: str) -> Callable[[TypingRule], TypingRule]:
    """Register a typing rule for operators; `conserved.register_operator` is this function.

    Args:
        *names: names without overload, such as "aten::mul" or "package::name"; without "::" they belong to aten.

    Returns:
        A decorator for the rule: a function from a `Step` to the types of its results. It replaces an earlier rule.
    """

    def register(function: TypingRule) -> TypingRule:
        for name in names:
            RULES[name if "::" in name else f"aten::{name}"] = function
        return function

    return register


def virtual_axes(view: ReadPart) -> tuple[list[Virtual], list[int]]:
    """Return the looked-up axes of a part of a parameter."""
    axes: list[Virtual] = []
    counts: list[int] = []
    for coordinate in view.coordinates:
        for n, axis in enumerate(coordinate.virtual):
            if not any(axis.same(known) for known in axes):
                axes.append(axis)
                counts.append(coordinate.atoms.shape[n])
    return axes, counts


def moved(known: Known, move: Move) -> Known:
    """Return a type or a part of a parameter after a move."""
    return known.moved(move) if isinstance(known, ReadPart) else move.type(known)


def at(dim: int, count: int) -> int:
    """Return an axis counted from the front."""
    return dim + count if dim < 0 else dim


def wide(shape: Sequence[int]) -> set[int]:
    """Return axes with more than one entry."""
    return {dim for dim, size in enumerate(shape) if size != 1}


def base_name(name: str) -> str:
    """Return the name of an operation without its overload and without the mark of writing in place."""
    stem = name.rsplit(".", 1)[0]
    return stem[:-1] if stem.endswith("_") and not stem.endswith("__") else stem


def number(ref: Any, s: Step) -> float | None:
    """Return the value of an operand that is one known number."""
    if isinstance(ref, int | float) and not isinstance(ref, bool):
        return float(ref)
    constant = s.constant(ref)
    if constant is not None and constant.numel() == 1 and constant.dtype != torch.bool and not constant.is_complex():
        return float(constant)
    return None


def same_value(s: Step, left: Any, right: Any) -> bool:
    """Return whether two operands are one value, so that their product is a square and their quotient one.

    The same entries in other places are not: x[:, None] · x[None, :] is an outer product.
    """
    return (
        isinstance(left, ValueRef)
        and isinstance(right, ValueRef)
        and origin_of(s, left) == origin_of(s, right)
        and _wide_from_the_end(s.shape(left)) == _wide_from_the_end(s.shape(right))
    )


def _wide_from_the_end(shape: Sequence[int]) -> list[int]:
    """Return axes with more than one entry, counted from the last as broadcasting does."""
    return [dim - len(shape) for dim, size in enumerate(shape) if size != 1]


def origin_of(s: Step, ref: ValueRef) -> int:
    """Return the value that copies, reshapings without new axes and sums over one entry lead back to."""
    value = ref.value
    while True:
        maker = s.program.maker(value)
        if maker is None or base_name(maker.name) not in _COPIES:
            return value
        source = maker.inputs()[0]
        if prod(s.program.values[source].shape) != prod(s.program.values[value].shape):
            return value
        if [d for d in s.program.values[source].shape if d != 1] != [
            d for d in s.program.values[value].shape if d != 1
        ]:
            return value
        value = source


_COPIES = {
    f"aten::{name}"
    for name in ("clone", "_to_copy", "view", "_unsafe_view", "unsqueeze", "squeeze", "sum", "alias", "expand", "amax")
}


def fix_all(s: Step) -> Type:
    """Fix all inputs of an operation, and with them its output: no law passes through it.

    Args:
        s: the operation.

    Returns:
        The type of a value that does not move.
    """
    for number_ in s.operation.inputs():
        if s.program.values[number_].dtype.is_floating_point or s.program.values[number_].dtype.is_complex:
            s.engine.zero(s.type(ValueRef(number_)))
    return FIXED


def norm_like(s: Step, ref: Any) -> bool:
    """Return whether a value is a norm or a root of a sum of squares, so that a small number added to it is an ε."""
    maker = s.program.maker(ref.value)
    while maker is not None and base_name(maker.name) in (
        "aten::clone",
        "aten::_to_copy",
        "aten::expand",
        "aten::view",
    ):
        maker = s.program.maker(maker.inputs()[0])
    return maker is not None and base_name(maker.name) in (
        "aten::sqrt",
        "aten::linalg_vector_norm",
        "aten::norm",
        "aten::std",
        "aten::var",
        "aten::abs",
    )
