"""The function of a certificate: a straight-line program over a few elementary operators, as plain data.

Every operator is one line of the table below; `docs/programs.md` is their specification. Broadcasting, slicing,
reshaping, joining and padding are all `take`: a list of places in the flattened inputs (−1 for a zero), so that one
rule and its transpose cover every movement of data.

    constant      numbers written in the program; a real one may be −∞, which masks put into scores
    parameters    the vector θ; exactly once in a program
    input         one tensor of the sample x
    add, subtract, multiply            entry by entry, equal shapes
    matmul        batches of matrix products
    sum           over the last axis
    take          out[i] = (all inputs, flattened and joined)[places[i]]
    exp, log, sqrt, reciprocal, tanh, sigmoid, erf, sin, cos
    stop          the value of a, through which backpropagation passes nothing
    real          whole numbers as reals
    greater       1 where a > b, else 0
    order         positions of the entries along the last axis, largest first, the lower position first among equals
    equal         1 where whole numbers are equal, else 0
    choose        a where the condition is not 0, else b
    gather        out[i] = a[index[i]], with a computed index into the flattened a
    scatter       a with a[index[i]] replaced by b[i]; no place twice

Values are real or discrete (whole numbers: token ids, masks, indices). Discrete values never move with θ; where they
are decided by comparing reals that do, the program is piecewise analytic. Indices lie in 0 … n − 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conserved.errors import InvalidInputError

Places = NDArray[np.int64]

UNARY = ("exp", "log", "sqrt", "reciprocal", "tanh", "sigmoid", "erf", "sin", "cos")

_DECISIONS = ("greater", "order", "equal")


class MalformedError(InvalidInputError, ValueError):
    """A certificate or a program in it is not well formed; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One operation: its name, the nodes it reads, the shape of its value, and what else it needs."""

    op: str
    inputs: tuple[int, ...] = ()
    shape: tuple[int, ...]
    discrete: bool = False
    places: Places | None = None
    """The list of a `take`."""
    values: tuple[float, ...] | tuple[int, ...] = ()
    """Numbers of a `constant`: whole ones if discrete, otherwise floating-point numbers, taken as exact."""
    which: int = 0
    """Position of an `input` among the tensors of the sample."""

    def record(self) -> dict[str, Any]:
        """Return plain data; real constants as hexadecimal floating point, which is exact."""
        result: dict[str, Any] = {"op": self.op, "inputs": list(self.inputs), "shape": list(self.shape)}
        if self.op in ("constant", "input"):
            result["discrete"] = self.discrete
        if self.op == "constant":
            result["values"] = [v if self.discrete else float(v).hex() for v in self.values]
        elif self.op == "input":
            result["which"] = self.which
        elif self.op == "take":
            assert self.places is not None
            result["places"] = self.places.tolist()
        return result


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
        flags: list[bool] = []
        for node in self.nodes:
            fed = any(flags[i] for i in node.inputs)
            flags.append(node.op == "parameters" or (fed and not node.discrete))
        return tuple(flags)

    @cached_property
    def decisions(self) -> tuple[int, ...]:
        """Nodes that compare values which depend on θ or on real inputs; between their jumps f is analytic."""
        real: list[bool] = []
        result = []
        for index, node in enumerate(self.nodes):
            leaf = node.op == "parameters" or (node.op == "input" and not node.discrete)
            real.append(leaf or any(real[i] for i in node.inputs))
            if node.op in _DECISIONS and real[-1]:
                result.append(index)
        return tuple(result)

    @property
    def analytic(self) -> bool:
        """Whether f is analytic in θ and in its real inputs."""
        return not self.decisions

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"nodes": [node.record() for node in self.nodes], "output": self.output, "size": self.size}
