"""The function of a certificate: a straight-line program over a few elementary operators, as plain data.

Every operator is one line of the table below. Broadcasting, slicing, reshaping, joining and padding are all `take`: a
list of places in the flattened inputs (−1 for a zero), so that one rule and its transpose cover every movement of data.

    constant      numbers written in the program
    parameters    the vector θ
    input         one tensor of the sample x
    add, subtract, multiply            entry by entry, equal shapes
    matmul        batches of matrix products
    sum           over the last axis
    take          out[i] = (all inputs, flattened and joined)[places[i]]
    exp, log, sqrt, reciprocal, tanh, sigmoid, erf, sin, cos
    real          whole numbers as reals
    greater       1 where a > b, else 0
    order         positions of the entries along the last axis, largest first
    equal         1 where whole numbers are equal, else 0
    choose        a where the condition is 1, else b
    gather        out[i] = a[index[i]], with a computed index into the flattened a
    scatter       a with a[index[i]] replaced by b[i]

Values are real or discrete (whole numbers: token ids, masks, indices). Discrete values never move with θ; where they
are decided by comparing reals that do, the program is piecewise analytic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

UNARY = ("exp", "log", "sqrt", "reciprocal", "tanh", "sigmoid", "erf", "sin", "cos")

_INPUTS = {
    **dict.fromkeys(("constant", "parameters", "input"), 0),
    **dict.fromkeys((*UNARY, "sum", "real", "order"), 1),
    **dict.fromkeys(("add", "subtract", "multiply", "matmul", "greater", "equal", "gather"), 2),
    **dict.fromkeys(("choose", "scatter"), 3),
}
_DECISIONS = ("greater", "order", "equal")

_LARGEST = 10_000_000
"""Entries of the largest tensor a program read from a file may have."""


class Malformed(ValueError):
    """A certificate or a program in it is not well formed; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One operation: its name, the nodes it reads, the shape of its value, and what else it needs."""

    op: str
    inputs: tuple[int, ...] = ()
    shape: tuple[int, ...]
    discrete: bool = False
    places: Places | None = None
    """Of `take`."""
    values: tuple[float, ...] | tuple[int, ...] = ()
    """Of `constant`: whole numbers if discrete, otherwise floating-point numbers, taken as exact."""
    which: int = 0
    """Of `input`: which tensor of the sample."""

    def record(self) -> dict[str, Any]:
        """Plain data; real constants as hexadecimal floating point, which is exact."""
        found: dict[str, Any] = {"op": self.op, "inputs": list(self.inputs), "shape": list(self.shape)}
        if self.op in ("constant", "input"):
            found["discrete"] = self.discrete
        if self.op == "constant":
            found["values"] = [v if self.discrete else float(v).hex() for v in self.values]
        elif self.op == "input":
            found["which"] = self.which
        elif self.op == "take":
            assert self.places is not None
            found["places"] = self.places.tolist()
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """f(x; θ): nodes in an order in which they can be computed, and the one that is the output, a vector."""

    nodes: tuple[Node, ...]
    output: int
    size: int
    """D, the number of parameters."""

    @property
    def outputs(self) -> int:
        return self.nodes[self.output].shape[0]

    @cached_property
    def input_nodes(self) -> tuple[Node, ...]:
        """The tensors of a sample, in order."""
        return tuple(sorted((node for node in self.nodes if node.op == "input"), key=lambda node: node.which))

    @cached_property
    def moving(self) -> tuple[bool, ...]:
        """For each node whether its real value depends on θ."""
        found: list[bool] = []
        for node in self.nodes:
            fed = any(found[i] for i in node.inputs)
            found.append(node.op == "parameters" or (fed and not node.discrete))
        return tuple(found)

    @cached_property
    def decisions(self) -> tuple[int, ...]:
        """Nodes that compare values which depend on θ or on real inputs; between their jumps f is analytic."""
        real: list[bool] = []
        found = []
        for place, node in enumerate(self.nodes):
            leaf = node.op == "parameters" or (node.op == "input" and not node.discrete)
            real.append(leaf or any(real[i] for i in node.inputs))
            if node.op in _DECISIONS and real[-1]:
                found.append(place)
        return tuple(found)

    @property
    def analytic(self) -> bool:
        """Whether f is analytic in θ and in its real inputs."""
        return not self.decisions

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"nodes": [node.record() for node in self.nodes], "output": self.output, "size": self.size}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Program:
        """Read a program and check it: a file is not trusted."""
        nodes: list[Node] = []
        size = whole_number(record.get("size"), "size", least=1)
        for place, item in enumerate(_sequence(record.get("nodes"), "nodes")):
            nodes.append(_read(item, nodes, f"node {place}", size))
        output = whole_number(record.get("output"), "output", most=len(nodes) - 1)
        if nodes[output].discrete or len(nodes[output].shape) != 1:
            raise Malformed("The output of the program is not a vector of reals.")
        program = Program(nodes=tuple(nodes), output=output, size=size)
        if [node.which for node in program.input_nodes] != list(range(len(program.input_nodes))):
            raise Malformed("The inputs of the program are not numbered 0, 1, ….")
        return program


def whole_number(value: Any, name: str, *, least: int = 0, most: int = 2**31) -> int:
    """A whole number within limits, or a message."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Malformed(f"{name} is {value!r}; expected a whole number from {least} to {most}.")
    return value


def _sequence(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Malformed(f"{name} is {type(value).__name__}; expected a list.")
    return value


def _read(item: Any, before: Sequence[Node], name: str, size: int) -> Node:
    if not isinstance(item, dict) or not isinstance(op := item.get("op"), str):
        raise Malformed(f"{name} is not an operation.")
    name = f"{name} ({op})"
    inputs = tuple(
        whole_number(i, f"an input of {name}", most=len(before) - 1) for i in _sequence(item.get("inputs"), name)
    )
    shape = tuple(whole_number(s, f"shape of {name}") for s in _sequence(item.get("shape"), name))
    if prod(shape) > _LARGEST:
        raise Malformed(f"{name} has {prod(shape):,} entries, more than {_LARGEST:,}.")
    places: Places | None = None
    values: tuple[float, ...] | tuple[int, ...] = ()
    discrete = bool(item.get("discrete", False))
    if op == "take":
        places = np.array(_sequence(item.get("places"), name), dtype=np.int64)
    elif op == "constant":
        values = tuple(_number(v, discrete, name) for v in _sequence(item.get("values"), name))
    node = Node(
        op=op,
        inputs=inputs,
        shape=shape,
        discrete=discrete,
        places=places,
        values=values,
        which=whole_number(item.get("which", 0), f"which of {name}"),
    )
    return checked(node, [before[i] for i in inputs], name, size)


def _number(value: Any, discrete: bool, name: str) -> float | int:
    if discrete:
        return whole_number(value, f"a value of {name}", least=-(2**53), most=2**53)
    try:
        return float.fromhex(value)
    except (TypeError, ValueError):
        raise Malformed(f"{value!r} in {name} is not a hexadecimal floating-point number.") from None


def checked(node: Node, inputs: Sequence[Node], name: str, size: int) -> Node:
    """The node, with what its operator decides filled in; raises `Malformed` where shapes or kinds do not fit."""
    op, shape = node.op, node.shape
    if op not in _INPUTS and op != "take":
        raise Malformed(f"{name} is not an operator of programs.")
    if op != "take" and len(inputs) != _INPUTS[op]:
        raise Malformed(f"{name} has {len(inputs)} inputs; expected {_INPUTS[op]}.")
    if op == "take" and not inputs:
        raise Malformed(f"{name} has no inputs.")
    kinds = [item.discrete for item in inputs]
    shapes = [item.shape for item in inputs]
    entries = prod(shape)
    discrete = node.discrete
    if op == "constant":
        fits = len(node.values) == entries
    elif op == "input":
        fits = True
    elif op == "parameters":
        fits, discrete = shape == (size,), False
    elif op in ("add", "subtract", "multiply"):
        fits, discrete = shapes == [shape, shape] and kinds[0] == kinds[1], kinds[0]
    elif op == "matmul":
        a, b = shapes
        fits, discrete = (
            len(a) == len(b) >= 2 and (*a[:-1], b[-1]) == shape and a[:-2] == b[:-2] and a[-1] == b[-2] > 0,
            False,
        )
        fits = fits and not any(kinds)
    elif op == "sum":
        fits, discrete = shapes[0][:-1] == shape, kinds[0]
        fits = fits and len(shapes[0]) > 0 and shapes[0][-1] > 0
    elif op == "take":
        assert node.places is not None
        total = sum(prod(item) for item in shapes)
        fits = len(node.places) == entries and bool(((node.places >= -1) & (node.places < total)).all())
        fits, discrete = fits and len(set(kinds)) == 1, kinds[0]
    elif op in UNARY:
        fits, discrete = shapes == [shape] and not kinds[0], False
    elif op == "real":
        fits, discrete = shapes == [shape] and kinds[0], False
    elif op == "order":
        fits, discrete = shapes == [shape] and len(shape) > 0, True
    elif op == "greater":
        fits, discrete = shapes == [shape, shape] and kinds[0] == kinds[1], True
    elif op == "equal":
        fits, discrete = shapes == [shape, shape] and all(kinds), True
    elif op == "choose":
        fits, discrete = shapes == [shape] * 3 and kinds[0] and kinds[1] == kinds[2], kinds[1]
    elif op == "gather":
        fits, discrete = shapes[1] == shape and kinds[1], kinds[0]
    else:
        fits, discrete = shapes[0] == shape and shapes[1] == shapes[2] and kinds[1], kinds[0]
        fits = fits and kinds[0] == kinds[2]
    if not fits:
        raise Malformed(f"{name} does not fit its inputs: shapes {shapes} and result {shape}.")
    return Node(
        op=op,
        inputs=node.inputs,
        shape=shape,
        discrete=discrete,
        places=node.places,
        values=node.values,
        which=node.which,
    )
