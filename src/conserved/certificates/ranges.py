"""Between which whole numbers the discrete values of a program stay, so that PyTorch's integers cannot wrap around.

Programs count in whole numbers of any size; PyTorch counts modulo a power of two. The two are the same function where
no integer leaves the range of its type, which intervals show for the inputs of a certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from conserved.certificates.arithmetic import Array
from conserved.certificates.program import Node, Program
from conserved.discovery.inputs import UnsuitableError

WholeRange = tuple[int, int]
TypeLimits = dict[int, WholeRange]
"""For nodes that are integers in PyTorch, the least and the greatest number of their type."""


def refuse_wraparound(program: Program, limits: TypeLimits, inputs: Sequence[tuple[Array, ...]]) -> None:
    """Refuse a function in which an integer may leave the range of its type."""
    spans: list[WholeRange] = []
    for index, node in enumerate(program.nodes):
        spans.append(_span(node, [spans[i] for i in node.inputs], program, inputs) if node.discrete else (0, 0))
        low, high = limits.get(index, spans[-1])
        if not low <= spans[-1][0] <= spans[-1][1] <= high:
            raise UnsuitableError(
                f"Expected whole numbers up to {high:,}, where their type ends, got one that may reach "
                f"{max(spans[-1], key=abs):,} and wrap around. Use smaller numbers, or a wider integer type."
            )


def _span(node: Node, given: list[WholeRange], program: Program, inputs: Sequence[tuple[Array, ...]]) -> WholeRange:
    if node.op == "input":
        return _hull([(int(x[node.which].min()), int(x[node.which].max())) for x in inputs if x[node.which].size])
    if node.op == "constant":
        return _hull([(int(v), int(v)) for v in node.values])
    if node.op in ("greater", "equal"):
        return 0, 1
    if node.op == "order":
        return 0, max(0, node.shape[-1] - 1)
    if node.op == "sum":
        count = program.nodes[node.inputs[0]].shape[-1]
        return given[0][0] * count, given[0][1] * count
    if node.op == "take":
        zero = [(0, 0)] if node.places is not None and bool((node.places < 0).any()) else []
        return _hull(given + zero)
    if node.op == "choose":
        return _hull(given[1:])
    if node.op == "gather":
        return given[0]
    if node.op == "scatter":
        return _hull([given[0], given[2]])
    (a, b), (c, d) = given
    if node.op == "add":
        return a + c, b + d
    if node.op == "subtract":
        return a - d, b - c
    corners = [prod(pair) for pair in ((a, c), (a, d), (b, c), (b, d))]
    return min(corners), max(corners)


def _hull(spans: list[WholeRange]) -> WholeRange:
    return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else (0, 0)
