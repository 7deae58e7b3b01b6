"""The one door for programs: `read_program` for those in a file, `well_formed` for those that are made.

Both makers and checkers of certificates use it. What passes has exactly one `parameters` node, shapes and kinds that
fit operator by operator, and places and constants within their limits; `docs/programs.md` lists the rules. Indices
that are computed are only known when the program runs; there `differentiate` refuses those outside 0 … n − 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from conserved.certificates.program import UNARY, MalformedError, Node, Program

LARGEST = 10_000_000
"""Entries of the largest tensor a program may have."""

MOST_AXES = 32

WHOLE = 2**53
"""Whole numbers written in a file lie between −WHOLE and WHOLE."""

_INPUTS = {
    **dict.fromkeys(("constant", "parameters", "input"), 0),
    **dict.fromkeys((*UNARY, "stop", "sum", "real", "order"), 1),
    **dict.fromkeys(("add", "subtract", "multiply", "matmul", "greater", "equal", "gather"), 2),
    **dict.fromkeys(("choose", "scatter"), 3),
}
_FIELDS = {"constant": {"discrete", "values"}, "input": {"discrete", "which"}, "take": {"places"}}


def read_program(record: Any) -> Program:
    """Return a program from plain data of a file, which is not trusted."""
    if not isinstance(record, dict):
        raise MalformedError(f"program is {kind_of(record)}; expected an object.")
    only(record, {"nodes", "output", "size"}, "The program")
    size = whole_number(record.get("size"), "size", least=1, most=LARGEST)
    nodes: list[Node] = []
    for index, item in enumerate(sequence(record.get("nodes"), "nodes")):
        nodes.append(_read(item, nodes, f"node {index}", size))
    output = whole_number(record.get("output"), "output", most=len(nodes) - 1)
    return well_formed(Program(nodes=tuple(nodes), output=output, size=size))


def well_formed(program: Program) -> Program:
    """Return the program if its nodes fit each other and it is one function of one θ; else raise `MalformedError`."""
    for index, node in enumerate(program.nodes):
        if any(not 0 <= i < index for i in node.inputs):
            raise MalformedError(f"node {index} ({node.op}) reads a node that does not come before it.")
        name = f"node {index} ({node.op})"
        if fitting(node, [program.nodes[i] for i in node.inputs], name, program.size) is not node:
            raise MalformedError(
                f"{name} is called {'discrete' if node.discrete else 'real'}, which its operator is not."
            )
    count = sum(node.op == "parameters" for node in program.nodes)
    if count != 1:
        raise MalformedError(f"The program has {count} parameters nodes; expected exactly one.")
    output = program.nodes[program.output]
    if output.discrete or len(output.shape) != 1:
        raise MalformedError("The output of the program is not a vector of reals.")
    if [node.which for node in program.input_nodes] != list(range(len(program.input_nodes))):
        raise MalformedError("The inputs of the program are not numbered 0, 1, ….")
    return program


def whole_number(value: Any, name: str, *, least: int = 0, most: int = 2**31) -> int:
    """Return a whole number within limits, or a message."""
    if type(value) is not int or not least <= value <= most:
        raise MalformedError(f"{name} is {format_value(value)}; expected a whole number from {least} to {most}.")
    return value


def real_number(value: Any, name: str, *, masked: bool = False) -> float:
    """Return a finite number written in hexadecimal, or −∞ where a mask may be."""
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError):
        raise MalformedError(
            f"{name} is {format_value(value)}; expected a hexadecimal floating-point number."
        ) from None
    if not math.isfinite(number) and not (masked and number == -math.inf):
        raise MalformedError(f"{name} is not finite.")
    return number


def sequence(value: Any, name: str) -> Sequence[Any]:
    """Return a list, or a message."""
    if not isinstance(value, list):
        raise MalformedError(f"{name} is {kind_of(value)}; expected a list.")
    return value


def only(record: Mapping[str, Any], known: set[str], name: str) -> None:
    """Refuse fields that mean nothing."""
    if unknown := sorted(format_value(key).strip("'") for key in record.keys() - known):
        raise MalformedError(f"{name} has fields that mean nothing: {', '.join(unknown[:5])}.")


def format_value(value: Any) -> str:
    """Return a value of a file in a message: short, on one line, and whatever it is."""
    if type(value) is int and abs(value) > 10**30:
        return f"an integer of {value.bit_length():,} bits"
    text = ascii(value) if isinstance(value, str | int | float | None) else kind_of(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def kind_of(value: Any) -> str:
    """Return what JSON calls a value."""
    return {dict: "an object", list: "a list", str: "text", type(None): "missing"}.get(
        type(value), type(value).__name__
    )


def _read(item: Any, before: Sequence[Node], name: str, size: int) -> Node:
    if not isinstance(item, dict) or not isinstance(op := item.get("op"), str):
        raise MalformedError(f"{name} is not an operation.")
    if op not in _INPUTS and op != "take":
        raise MalformedError(f"{name} ({format_value(op)}) is not an operator of programs.")
    name = f"{name} ({op})"
    only(item, {"op", "inputs", "shape", *_FIELDS.get(op, ())}, name)
    inputs = tuple(
        whole_number(i, f"an input of {name}", most=len(before) - 1) for i in sequence(item.get("inputs"), name)
    )
    shape = tuple(whole_number(s, f"shape of {name}", most=LARGEST) for s in sequence(item.get("shape"), name))
    discrete = item.get("discrete", False)
    if not isinstance(discrete, bool):
        raise MalformedError(f"discrete of {name} is {format_value(discrete)}; expected true or false.")
    _check_size(shape, name)
    own: dict[str, Any] = {}
    if op == "take":
        indices = sequence(item.get("places"), name)
        listed = [whole_number(index, f"a place of {name}", least=-1, most=LARGEST) for index in indices]
        own["places"] = np.array(listed, dtype=np.int64)
    elif op == "constant":
        entries, label = sequence(item.get("values"), name), f"a value of {name}"
        if discrete:
            own["values"] = tuple(whole_number(v, label, least=-WHOLE, most=WHOLE) for v in entries)
        else:
            own["values"] = tuple(real_number(v, label, masked=True) for v in entries)
    elif op == "input":
        own["which"] = whole_number(item.get("which", 0), f"which of {name}")
    node = Node(op=op, inputs=inputs, shape=shape, discrete=discrete, **own)
    return fitting(node, [before[i] for i in inputs], name, size)


def _check_size(shape: tuple[int, ...], name: str) -> None:
    if len(shape) > MOST_AXES:
        raise MalformedError(f"{name} has {len(shape)} axes, more than {MOST_AXES}.")
    if (entries := prod(s for s in shape if s)) > LARGEST:
        raise MalformedError(f"{name} has {entries:,} entries, more than {LARGEST:,}.")


def fitting(node: Node, inputs: Sequence[Node], name: str, size: int) -> Node:
    """Return the node with the kind its operator decides; raise `MalformedError` if shapes or kinds do not fit."""
    op, shape = node.op, node.shape
    if op not in _INPUTS and op != "take":
        raise MalformedError(f"{name} is not an operator of programs.")
    if op != "take" and len(inputs) != _INPUTS[op]:
        raise MalformedError(f"{name} has {len(inputs)} inputs; expected {_INPUTS[op]}.")
    if op == "take" and not inputs:
        raise MalformedError(f"{name} has no inputs.")
    _check_size(shape, name)
    shapes = [item.shape for item in inputs]
    fits, discrete = _fit(node, [item.discrete for item in inputs], shapes, size)
    if not fits:
        raise MalformedError(f"{name} does not fit its inputs: shapes {shapes} and result {shape}.")
    return node if node.discrete == discrete else replace(node, discrete=discrete)


def _fit(node: Node, kinds: list[bool], shapes: list[tuple[int, ...]], size: int) -> tuple[bool, bool]:
    """Return whether shapes and kinds fit, and whether the result is discrete."""
    op, shape = node.op, node.shape
    if op == "constant":
        sound = all(
            type(v) is int and abs(v) <= WHOLE if node.discrete else v == -math.inf or math.isfinite(v)
            for v in node.values
        )
        return sound and len(node.values) == prod(shape), node.discrete
    if op == "input":
        return True, node.discrete
    if op == "parameters":
        return shape == (size,) and not node.discrete, False
    if op in ("add", "subtract", "multiply"):
        return shapes == [shape, shape] and kinds[0] == kinds[1], kinds[0]
    if op == "matmul":
        a, b = shapes
        aligned = len(a) == len(b) >= 2 and a[:-2] == b[:-2] and a[-1] == b[-2] > 0
        return aligned and (*a[:-1], b[-1]) == shape and not any(kinds), False
    if op == "sum":
        return len(shapes[0]) > 0 and shapes[0][:-1] == shape and shapes[0][-1] > 0, kinds[0]
    if op == "take":
        total = sum(map(prod, shapes))
        indices = node.places
        inside = indices is not None and bool(((indices >= -1) & (indices < total)).all())
        return inside and indices is not None and len(indices) == prod(shape) and len(set(kinds)) == 1, kinds[0]
    if op in (*UNARY, "stop"):
        return shapes == [shape] and not kinds[0], False
    if op == "real":
        return shapes == [shape] and kinds[0], False
    if op == "order":
        return shapes == [shape] and len(shape) > 0 and shape[-1] > 0, True
    if op == "greater":
        return shapes == [shape, shape] and kinds[0] == kinds[1], True
    if op == "equal":
        return shapes == [shape, shape] and all(kinds), True
    if op == "choose":
        return shapes == [shape] * 3 and kinds[0] and kinds[1] == kinds[2], kinds[1]
    if op == "gather":
        return shapes[1] == shape and kinds[1], kinds[0]
    return shapes[0] == shape and shapes[1] == shapes[2] and kinds[1] and kinds[0] == kinds[2], kinds[0]
