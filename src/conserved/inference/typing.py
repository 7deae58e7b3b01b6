"""The walk over a program that gives every value its type, and the equations that its result must satisfy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from conserved.inference.program.captured_program import CHECKPOINT, CapturedProgram, Operation, ValueRef
from conserved.inference.reading_progress import PROGRESS
from conserved.inference.rules import RULES, Known, Step, TypingRule, base_name, fix_all, same_value
from conserved.inference.types.engine import Engine, ReadPart
from conserved.inference.types.parameter_types import known_type, whole_parameter
from conserved.inference.types.tensor_type import FIXED, Type


@dataclass(slots=True)
class Typing:
    """Types of all values that the result depends on, and the operations that had no rule."""

    program: CapturedProgram
    engine: Engine
    known: dict[int, Known]
    live: list[int]
    rules: Mapping[str, TypingRule] = field(default_factory=lambda: RULES)
    unknown: Counter[str] = field(default_factory=Counter)
    stopped: list[int] = field(default_factory=list)
    """Operations through which no gradient is recorded although the result depends on them."""
    custom: set[str] = field(default_factory=set)
    """Autograd functions whose forward was followed: their backward is their author's."""
    reached: set[str] = field(default_factory=set)
    """Parameters that the result depends on."""
    deferred: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Products that are only summed up, which makes them contractions."""
    repeated: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """The first result of every operation that may be written down twice."""
    assumed: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Charges that went through an autograd function, by its name."""
    assumed_parameters: set[str] = field(default_factory=set)
    """Parameters that went through an autograd function, or have a hook on a part, before their first use."""


def type_program(
    program: CapturedProgram,
    classes: int | None = None,
    *,
    fix_outputs: bool = True,
    rules: Mapping[str, TypingRule] = RULES,
) -> Typing:
    """Type a program.

    Args:
        program: what was captured.
        classes: the axis of the outputs that cross-entropy is taken along; without it, any loss may follow the outputs.
        fix_outputs: whether outputs must not move at all. If not, they may move in any way their types allow.
        rules: the rule of every operator, by name.
    """
    engine = Engine()
    known: dict[int, Known] = {}
    typing = Typing(program, engine, known, _live(program), rules)
    program.restrict(typing.live)
    for name, value in program.parameters.items():
        if program.values[value].parameter is None or program.values[value].dtype.is_complex:
            # The moment map is one of real numbers: a complex parameter does not move.
            continue
        known[value] = whole_parameter(name, program.values[value].shape)
    shared = set(program.shared)
    typing.deferred = _summed_products(typing)
    PROGRESS.enter("typing operations", len(typing.live))
    for PROGRESS.done, number in enumerate(typing.live):
        engine.origin = number
        _step(typing, program.operations[number], shared)
    engine.origin = len(program.operations)
    for value in program.read:
        result = known.get(value, FIXED)
        if isinstance(result, Type):
            engine.zero(result)
    for value in program.outputs:
        result = known.get(value, FIXED)
        step = Step(engine, program, Operation("output", (), {}, [], "", ""), known, typing.deferred)
        type_ = step.type(ValueRef(value)) if isinstance(result, ReadPart) else result
        known[value] = type_
        if not fix_outputs:
            continue
        if classes is None:
            engine.zero(type_)
        else:
            count = len(program.values[value].shape)
            engine.zero(Type(type_.factors))
            engine.forget_shift(type_, [classes + count if classes < 0 else classes])
    for name in shared:
        for region in engine.regions.get(name, []):
            engine.zero(region.type)
    return typing


def _step(typing: Typing, operation: Operation, shared: set[str]) -> None:
    program, known = typing.program, typing.known
    step = Step(typing.engine, program, operation, known, typing.deferred)
    inputs = operation.inputs()
    typing.reached.update(name for number in inputs if (name := program.values[number].parameter) is not None)
    moving = [number for number in inputs if number in typing.deferred or not _is_fixed(known.get(number, FIXED))]
    name = base_name(operation.name)
    if name not in _KEEPS_STRANDS:
        for number in inputs:
            known_input = known.get(number)
            result = known_type(typing.engine, known_input) if isinstance(known_input, ReadPart) else known_input
            if result is not None:
                typing.engine.let_go(result)
    if operation.results and operation.results[0] in typing.deferred:
        return
    # A write in place is followed by the rule of the operator that it is a form of.
    rule = typing.rules.get(operation.name.rsplit(".", 1)[0]) or typing.rules.get(name)
    if not moving and not name.endswith(
        ("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty")
    ):
        before = [known.get(n) for n in inputs]
        # A state may start as the number zero, which scales with everything: so does its product with a decay.
        times_zero = name == "aten::mul" and any(_is_zero(argument) for argument in operation.args)
        if not times_zero and not any(
            isinstance(known_input, Type) and (known_input.zero or known_input.centred) for known_input in before
        ):
            return
    if operation.stopped and moving:
        typing.stopped.append(typing.engine.origin)
        fix_all(step)
        return
    if rule is None:
        typing.unknown[name] += 1
        fix_all(step)
        return
    again = _earlier_result(typing, operation, name)
    if again is not None:
        known[operation.results[0]] = again
        return
    given = rule(step)
    results = list(given) if isinstance(given, Sequence) else [given]
    if len(results) < len(operation.results):
        # An operation in place: its last result is the new value of what it wrote to.
        results += [results[0]] * (len(operation.results) - len(results))
    _mark(typing, operation, [*(known.get(number) for number in inputs), *results])
    hooked = any(number in program.hooked_values for number in operation.results)
    for number, type_ in zip(operation.results, results, strict=False):
        if hooked:
            # A hook may change the gradient here: what passes through is assumed, as through a function of its author.
            _assume(typing, "a hook", type_)
            if isinstance(type_, Type):
                typing.engine.steady(type_)
        dtype = program.values[number].dtype
        if (dtype.is_floating_point or dtype.is_complex) and (
            isinstance(type_, ReadPart) or type_.zero or type_.centred or not type_.fixed
        ):
            known[number] = typing.engine.moving(type_) if isinstance(type_, Type) else type_


_KEEPS_STRANDS = {
    f"aten::{name}"
    for name in (
        *("mm", "bmm", "addmm", "linear", "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze"),
        *("squeeze", "expand", "alias", "clone", "contiguous", "_to_copy", "slice", "select", "split", "unbind"),
        *("split_with_sizes", "native_layer_norm", "native_group_norm", "_softmax", "_log_softmax", "_safe_softmax"),
    )
}
"""Operations whose rules know what becomes of rows that move by numbers of their own; before any other, they do not."""


_REPEATED = {"aten::sub", "aten::add", "aten::mean", "aten::sum"}
"""Operations that programs write down twice for one value, as x − mean(x) in a norm."""


def _earlier_result(typing: Typing, operation: Operation, name: str) -> Known | None:
    """Return the type of an earlier result of the same operation on the same values: both shifts are one."""
    if name not in _REPEATED or operation.custom or len(operation.results) != 1:
        return None
    if operation.results[0] in typing.program.hooked_values or operation.name.split(".")[0].endswith("_"):
        return None
    key = (operation.name, repr(operation.args), repr(operation.kwargs))
    first = typing.repeated.setdefault(key, operation.results[0])
    return typing.known.get(first) if first != operation.results[0] else None


def _mark(typing: Typing, operation: Operation, known: list[Known | None]) -> None:
    """Record the charges that pass through an autograd function, whose backward is its author's."""
    if operation.custom in ("", CHECKPOINT):
        return
    typing.custom.add(operation.custom)
    for value in known:
        _assume(typing, operation.custom, value)


def _assume(typing: Typing, why: str, value: Known | None) -> None:
    """Record that laws through a value are assumed, because its author wrote its gradient."""
    type_ = known_type(typing.engine, value) if isinstance(value, ReadPart) else value
    if isinstance(value, ReadPart) and type_ is None:
        # It gets a type at its first use, which comes later.
        typing.assumed_parameters.add(value.name)
    elif isinstance(type_, Type):
        typing.assumed.setdefault(why, []).extend(field.atoms for field in type_.factors)


def _summed_products(typing: Typing) -> dict[int, tuple[Any, Any]]:
    """Return products of two tensors that nothing but one sum uses."""
    program = typing.program
    users: dict[int, list[str]] = {}
    for number in typing.live:
        operation = program.operations[number]
        for value in operation.inputs():
            users.setdefault(value, []).append(base_name(operation.name))
    outputs = set(program.outputs)
    products = {}
    for number in typing.live:
        operation = program.operations[number]
        if (
            base_name(operation.name) != "aten::mul"
            or operation.name.startswith("aten::mul_")
            or len(operation.args) < 2
        ):
            continue
        left, right = operation.args[:2]
        result = operation.results[0]
        if (
            isinstance(left, ValueRef)
            and isinstance(right, ValueRef)
            and left.value != right.value
            and result not in outputs
            and not operation.stopped
            and not operation.custom
            and users.get(result) in (["aten::sum"], ["aten::mean"])
            and all(
                program.values[ref.value].shape and program.values[ref.value].constant is None for ref in (left, right)
            )
        ):
            products[result] = (left, right)
    return products


def _is_zero(argument: Any) -> bool:
    return isinstance(argument, int | float) and not isinstance(argument, bool) and argument == 0


def _is_fixed(known: Known) -> bool:
    return isinstance(known, Type) and known.fixed


def _live(program: CapturedProgram) -> list[int]:
    """Return operations that the outputs depend on, in order."""
    step = Step(Engine(), program, Operation("", (), {}, [], "", ""), {}, {})
    needed = set(program.outputs)
    # A number that Python reads out of a tensor may decide anything: it must not move.
    needed.update(value for value in program.read if program.values[value].dtype.is_floating_point)
    operations = []
    for number in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[number]
        if needed.isdisjoint(operation.results):
            continue
        operations.append(number)
        if (
            base_name(operation.name) == "aten::div"
            and len(operation.args) > 1
            and same_value(step, *operation.args[:2])
        ):
            continue
        for value in operation.inputs():
            dtype = program.values[value].dtype
            if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
                needed.add(value)
    return operations[::-1]
