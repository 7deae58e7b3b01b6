"""A PyTorch function as a program: its ATen graph, every operator rewritten in the few elementary ones.

Operators that only move data are run once on a tensor of positions, which gives the list that `take` needs; so one rule
serves all of them. What depends on neither parameters nor inputs is computed while tracing and becomes a constant, exact
as the floating-point number it is. An operator without a rule is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from conserved.certify.program import Node, Program, checked
from conserved.discover.function import Function, Unsuitable, written_out


class NoRule(Unsuitable):
    """An operator has no rule in ball arithmetic; the message names it."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A node under construction: its place, shape and kind."""

    place: int
    shape: tuple[int, ...]
    discrete: bool


@dataclass(slots=True, eq=False)
class Builder:
    """Nodes so far, and the elementary operators as methods."""

    size: int
    nodes: list[Node] = field(default_factory=list)

    def node(self, op: str, *inputs: Ref, shape: Sequence[int], **rest: Any) -> Ref:
        """Append an operation."""
        places = tuple(item.place for item in inputs)
        fresh = Node(op=op, inputs=places, shape=tuple(shape), **rest)
        fresh = checked(fresh, [self.nodes[i] for i in places], op, self.size)
        self.nodes.append(fresh)
        return Ref(len(self.nodes) - 1, fresh.shape, fresh.discrete)

    def constant(self, value: Tensor | float | int | bool) -> Ref:
        """Numbers known while tracing."""
        tensor = torch.as_tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)
        real = tensor.is_floating_point()
        if tensor.is_complex():
            raise NoRule("Complex numbers have no rule in ball arithmetic; write them as pairs of reals.")
        values = tensor.to(torch.float64 if real else torch.int64).flatten().tolist()
        return self.node("constant", shape=tensor.shape, values=tuple(values), discrete=not real)

    def real(self, a: Ref) -> Ref:
        """As reals."""
        return self.node("real", a, shape=a.shape) if a.discrete else a

    def take(self, inputs: Sequence[Ref], places: Tensor) -> Ref:
        """Entries of the inputs, joined; −1 is a zero."""
        flat = places.flatten().numpy().astype(np.int64)
        if len(inputs) == 1 and inputs[0].shape == tuple(places.shape) and np.array_equal(flat, np.arange(len(flat))):
            return inputs[0]
        return self.node("take", *inputs, shape=places.shape, places=flat)

    def expand(self, a: Ref, shape: Sequence[int]) -> Ref:
        """Broadcast to a shape."""
        return self.take([a], positions(a.shape).broadcast_to(tuple(shape)))

    def together(self, *items: Any) -> list[Ref]:
        """Operands broadcast to one shape and one kind."""
        refs = [item if isinstance(item, Ref) else self.constant(item) for item in items]
        shape = torch.broadcast_shapes(*(ref.shape for ref in refs))
        if any(not ref.discrete for ref in refs):
            refs = [self.real(ref) for ref in refs]
        return [self.expand(ref, shape) for ref in refs]

    def binary(self, op: str, a: Any, b: Any) -> Ref:
        """An operator of two operands, broadcast."""
        left, right = self.together(a, b)
        return self.node(op, left, right, shape=left.shape)

    def add(self, a: Any, b: Any) -> Ref:
        return self.binary("add", a, b)

    def subtract(self, a: Any, b: Any) -> Ref:
        return self.binary("subtract", a, b)

    def multiply(self, a: Any, b: Any) -> Ref:
        return self.binary("multiply", a, b)

    def divide(self, a: Any, b: Any) -> Ref:
        """a/b, with the reciprocal taken before broadcasting."""
        refs = [item if isinstance(item, Ref) else self.constant(item) for item in (a, b)]
        return self.multiply(self.real(refs[0]), self.unary("reciprocal", self.real(refs[1])))

    def unary(self, op: str, a: Ref) -> Ref:
        """An elementary function."""
        a = self.real(a)
        return self.node(op, a, shape=a.shape)

    def negative(self, a: Ref) -> Ref:
        return self.subtract(self.constant(0 if a.discrete else 0.0), a)

    def greater(self, a: Any, b: Any) -> Ref:
        return self.binary("greater", a, b)

    def opposite(self, a: Ref) -> Ref:
        """Not, of a mask."""
        return self.subtract(self.constant(1), a)

    def choose(self, condition: Ref, a: Any, b: Any) -> Ref:
        """a where the condition holds, else b."""
        left, right = self.together(a, b)
        shape = torch.broadcast_shapes(condition.shape, left.shape)
        parts = [self.expand(item, shape) for item in (condition, left, right)]
        return self.node("choose", *parts, shape=shape)

    def sum(self, a: Ref, axes: Sequence[int] | None, keepdim: bool = False) -> Ref:
        """Over axes."""
        n = len(a.shape)
        over = sorted({axis % n for axis in axes}) if axes else list(range(n))
        kept = [axis for axis in range(n) if axis not in over]
        rows = positions(a.shape).permute(*kept, *over).reshape(*(a.shape[i] for i in kept), -1) if n else None
        if rows is None:
            return a
        total = self.node("sum", self.take([a], rows), shape=rows.shape[:-1])
        return self.reshape(total, [1 if i in over else a.shape[i] for i in range(n)]) if keepdim else total

    def mean(self, a: Ref, axes: Sequence[int] | None, keepdim: bool = False) -> Ref:
        """The sum over the number of terms: an exact division, so that what is centred sums to exactly zero."""
        total = self.sum(a, axes, keepdim)
        count = int(np.prod(a.shape)) // int(np.prod(total.shape))
        return self.divide(total, self.constant(count))

    def reshape(self, a: Ref, shape: Sequence[int]) -> Ref:
        return self.take([a], positions(a.shape).reshape(tuple(shape)))

    def swap(self, a: Ref) -> Ref:
        """Last two axes exchanged."""
        return self.take([a], positions(a.shape).mT)

    def matmul(self, a: Ref, b: Ref) -> Ref:
        a, b = self.real(a), self.real(b)
        return self.node("matmul", a, b, shape=(*a.shape[:-1], b.shape[-1]))

    def gather(self, a: Ref, index: Ref) -> Ref:
        """Entries of the flattened a at computed places."""
        return self.node("gather", a, index, shape=index.shape)

    def along(self, index: Ref, shape: Sequence[int], axis: int) -> Ref:
        """Places in a flattened tensor of a shape, for an index along one axis as torch.gather understands it."""
        axis %= len(shape)
        place = positions(shape).narrow(axis, 0, 1)
        place = place[tuple(slice(None) if i == axis else slice(0, n) for i, n in enumerate(index.shape))]
        stride = int(np.prod(shape[axis + 1 :]))
        return self.add(self.multiply(index, stride), self.constant(place.expand(index.shape)))


def positions(shape: Sequence[int]) -> Tensor:
    """0, 1, 2, … in a shape."""
    return torch.arange(int(np.prod(shape))).reshape(tuple(shape))


def trace(function: Function, theta: Tensor, x: Any) -> Program:
    """The program of f for inputs of the shapes of x."""
    leaves, spec = tree_flatten(x)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(t: Tensor, *given: Tensor) -> Tensor:
        whole = list(leaves)
        for place, tensor in zip(tensors, given, strict=True):
            whole[place] = tensor
        return function(t, tree_unflatten(whole, spec))

    inputs = [leaves[i] for i in tensors]
    with written_out():
        try:
            graph = make_fx(call, decomposition_table=core_aten_decompositions())(theta, *inputs)
            # Decompositions write in place, so mutations are removed after them.
            graph = make_fx(torch.func.functionalize(graph, remove="mutations"))(theta, *inputs).graph
        except Exception as problem:
            raise Unsuitable(
                f"The function could not be traced to a graph: {type(problem).__name__}: {problem} "
                "Its control flow must not depend on values."
            ) from problem
    return _lowered(graph, function.size, inputs)


def _lowered(graph: fx.Graph, size: int, inputs: Sequence[Tensor]) -> Program:
    builder = Builder(size)
    values: dict[fx.Node, Any] = {}
    given = iter(range(-1, len(inputs)))
    output: Any = None
    for node in graph.nodes:
        if node.op == "placeholder":
            which = next(given)
            if which < 0:
                values[node] = builder.node("parameters", shape=(size,))
            else:
                tensor = inputs[which]
                values[node] = builder.node(
                    "input", shape=tensor.shape, which=which, discrete=not tensor.is_floating_point()
                )
        elif node.op == "get_attr":
            values[node] = getattr(graph.owning_module, node.target)
        elif node.op == "output":
            output = fx.node.map_arg(node.args[0], values.__getitem__)
        else:
            args, kwargs = (fx.node.map_arg(item, values.__getitem__) for item in (node.args, node.kwargs))
            values[node] = _operation(builder, node.target, args, dict(kwargs))
    if not isinstance(output, Ref):
        raise Unsuitable("The output depends on neither the parameters nor the input.")
    return pruned(Program(nodes=tuple(builder.nodes), output=builder.real(output).place, size=size))


def _operation(builder: Builder, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    known: list[bool] = []
    tree_map(lambda item: known.append(not isinstance(item, Ref)), (args, kwargs))
    if all(known):
        return target(*args, **kwargs)
    name = getattr(getattr(target, "overloadpacket", None), "__name__", getattr(target, "__name__", str(target)))
    if name == "getitem":
        return target(*args)
    from conserved.certify.operators import MOVES, RULES

    if name in RULES:
        return RULES[name](builder, *args, **kwargs)
    if name in MOVES:
        return _move(builder, target, args, kwargs)
    raise NoRule(
        f"The operator {target} has no rule in ball arithmetic. Write the function with other operators, "
        "or add a rule to conserved/certify/operators.py."
    )


def _move(builder: Builder, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that moves data on positions, counted from 1 so that a zero it fills in can be told."""
    data: list[Ref] = []
    joined = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    items = [item if isinstance(item, Ref) else builder.constant(item) for item in joined]
    if any(not item.discrete for item in items):
        items = [builder.real(item) for item in items]
    start = 1
    counted = []
    for item in items:
        data.append(item)
        counted.append(positions(item.shape) + start)
        start += counted[-1].numel()
    first: Any = counted if isinstance(args[0], list | tuple) else counted[0]
    if any(isinstance(item, Ref) for item in tree_flatten((args[1:], kwargs))[0]):
        raise NoRule(f"The operator {target} with a computed index has no rule in ball arithmetic.")
    found = target(first, *args[1:], **{k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")})
    return tree_map(lambda places: builder.take(data, places - 1), found)


def pruned(program: Program) -> Program:
    """Without nodes the output does not need; inputs stay, so that samples keep their shape."""
    needed = {program.output} | {i for i, node in enumerate(program.nodes) if node.op in ("input", "parameters")}
    for place in range(len(program.nodes) - 1, -1, -1):
        if place in needed:
            needed.update(program.nodes[place].inputs)
    order = {old: new for new, old in enumerate(sorted(needed))}
    nodes = []
    for old in sorted(needed):
        node = program.nodes[old]
        nodes.append(
            Node(
                op=node.op,
                inputs=tuple(order[i] for i in node.inputs),
                shape=node.shape,
                discrete=node.discrete,
                places=node.places,
                values=node.values,
                which=node.which,
            )
        )
    return Program(nodes=tuple(nodes), output=order[program.output], size=program.size)
