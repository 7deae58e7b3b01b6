"""A PyTorch function as a program: its ATen graph, every operator rewritten in the few elementary ones.

Operators that only move data are run once on a tensor of positions, which gives the list that `take` needs; so one rule
serves all of them. What depends on neither parameters nor inputs is computed while tracing and becomes a constant,
exact as the floating-point number it is. An operator without a rule is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from conserved.certify.builder import Builder, NoRule, Ref, positions
from conserved.certify.operators import MOVES, RULES
from conserved.certify.program import Node, Program
from conserved.discover.function import Function, Unsuitable, written_out


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's own, but for two that would compare values where the function meant is smooth."""
    smooth = (torch.ops.aten._safe_softmax.default, torch.ops.aten.softplus.default)
    return {target: rule for target, rule in core_aten_decompositions().items() if target not in smooth}


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
            decomposed = make_fx(call, decomposition_table=_decompositions())(theta, *inputs)
            # Decompositions write in place, so mutations are removed after them.
            graph = make_fx(torch.func.functionalize(decomposed, remove="mutations"))(theta, *inputs).graph
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
    joined = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    items = [item if isinstance(item, Ref) else builder.constant(item) for item in joined]
    if any(not item.discrete for item in items):
        items = [builder.real(item) for item in items]
    counted: list[Tensor] = []
    for item in items:
        counted.append(positions(item.shape) + 1 + sum(before.numel() for before in counted))
    first: Any = counted if isinstance(args[0], list | tuple) else counted[0]
    if any(isinstance(item, Ref) for item in tree_flatten((args[1:], kwargs))[0]):
        raise NoRule(f"The operator {target} with a computed index has no rule in ball arithmetic.")
    found = target(first, *args[1:], **{k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")})
    return tree_map(lambda places: builder.take(items, places - 1), found)


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
