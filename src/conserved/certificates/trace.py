"""A PyTorch function as a program: its ATen graph, every operator rewritten in the few elementary ones.

Operators that only move data are run once on a tensor of positions, which gives the list that `take` needs; so one rule
serves all of them. What depends on neither parameters nor inputs is computed while tracing and becomes a constant,
exact as the floating-point number it is. An operator without a rule is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from conserved._torch_compat import (
    core_aten_decompositions,
    traced_with_fake_tensors,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from conserved.certificates.builder import Builder, NodeRef, NoRuleError, positions
from conserved.certificates.operators import MOVES, RULES, WRITES
from conserved.certificates.program import MalformedError, Program
from conserved.certificates.ranges import TypeLimits
from conserved.certificates.stopped_gradients import stops_marked
from conserved.certificates.validate import well_formed
from conserved.discovery.function import ParameterFunction, without_fused_kernels
from conserved.discovery.inputs import UnsuitableError


def trace(function: ParameterFunction, theta: Tensor, x: Any) -> Program:
    """Return the program of f for inputs of the shapes of x."""
    return trace_with_limits(function, theta, x)[0]


def trace_with_limits(function: ParameterFunction, theta: Tensor, x: Any) -> tuple[Program, TypeLimits]:
    """Return the program, and the range of PyTorch's integer type for each of its nodes."""
    leaves, spec = tree_flatten(x)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(t: Tensor, *given: Tensor) -> Tensor:
        all_leaves = list(leaves)
        for index, tensor in zip(tensors, given, strict=True):
            all_leaves[index] = tensor
        with stops_marked():
            return function(t, tree_unflatten(all_leaves, spec))

    inputs = [leaves[i] for i in tensors]
    # One mode for the shapes of all values: without it, one is made for every value of the graph.
    with without_fused_kernels(), traced_with_fake_tensors():
        try:
            decomposed = make_fx(call, decomposition_table=core_aten_decompositions_used())(theta, *inputs)
            # Decompositions write in place, so mutations are removed after them.
            graph = make_fx(torch.func.functionalize(decomposed, remove="mutations"))(theta, *inputs).graph
        except UnsuitableError:
            raise
        except Exception as problem:
            raise UnsuitableError(
                f"The function could not be traced to a graph: {type(problem).__name__}: {problem} "
                "Its control flow must not depend on values."
            ) from problem
    return _lower(graph, function.size, inputs)


@cache
def core_aten_decompositions_used() -> dict[Any, Callable[..., Any]]:
    """Return PyTorch's decompositions except two: one compares values of a smooth function, one has a rule of its own.

    They are collected once, because PyTorch searches all of its operators for them.
    """
    own = (torch.ops.aten._safe_softmax.default, torch.ops.aten.softplus.default)
    return {target: rule for target, rule in core_aten_decompositions().items() if target not in own}


def _lower(graph: fx.Graph, size: int, inputs: Sequence[Tensor]) -> tuple[Program, TypeLimits]:
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
                values[node] = _input(builder, inputs[which], which)
        elif node.op == "get_attr":
            values[node] = getattr(graph.owning_module, node.target)
        elif node.op == "output":
            output = fx.node.map_arg(node.args[0], values.__getitem__)
        else:
            args, kwargs = (fx.node.map_arg(item, values.__getitem__) for item in (node.args, node.kwargs))
            values[node] = _operation(builder, node, args, dict(kwargs))
    if not isinstance(output, NodeRef):
        raise UnsuitableError(
            "Expected an output that depends on the parameters or the input, got a constant. Check that it is "
            "not detached."
        )
    program = Program(nodes=tuple(builder.nodes), output=builder.real(output).index, size=size)
    return prune(program, builder.limits)


def _input(builder: Builder, tensor: Tensor, which: int) -> NodeRef:
    if tensor.is_complex():
        raise NoRuleError("Complex inputs have no rule in ball arithmetic; pass them as pairs of reals.")
    ref = builder.node("input", shape=tensor.shape, which=which, discrete=not tensor.is_floating_point())
    return replace(ref, boolean=tensor.dtype == torch.bool)


def _operation(builder: Builder, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    name = getattr(getattr(target, "overloadpacket", None), "__name__", getattr(target, "__name__", str(target)))
    if name == "getitem":
        return target(*args)
    _refuse_impure(target)
    known: list[bool] = []
    tree_map(lambda item: known.append(not isinstance(item, NodeRef)), (args, kwargs))
    if all(known):
        return target(*args, **kwargs)
    if name == "as_strided":
        _refuse_strides(node)
    if name not in (*RULES, *MOVES, *WRITES) or str(target).endswith("view.dtype"):
        raise NoRuleError(
            f"The operator {target} has no rule in ball arithmetic. Write the function with other operators, "
            "or add a rule to conserved/certificates/operators.py."
        )
    try:
        if name in WRITES:
            result = _write(builder, target, args, kwargs)
        else:
            result = RULES[name](builder, *args, **kwargs) if name in RULES else _move(builder, target, args, kwargs)
        return _require_agreement(builder, target, result, node.meta.get("val"))
    except UnsuitableError:
        raise
    except (
        MalformedError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as problem:
        raise NoRuleError(
            f"The operator {target}, used like this, has no rule in ball arithmetic: {problem}"
        ) from problem


def _refuse_impure(target: Any) -> None:
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        raise UnsuitableError(
            f"Expected a deterministic function, got one that draws random numbers ({target}). Switch that off, "
            "for instance with eval()."
        )
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.is_mutable:
        raise UnsuitableError(
            f"Expected a function that changes nothing, got one that writes to a buffer or an input ({target}). "
            "Call eval(), or return a new tensor."
        )


def _refuse_strides(node: fx.Node) -> None:
    """Refuse `as_strided`, which reads memory; the trace knows tensors only in the order of their entries."""
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if (
        not isinstance(value, Tensor)
        or not value.is_contiguous()
        or value.storage_offset() != 0
        or value.untyped_storage().nbytes() != value.numel() * value.element_size()
    ):
        raise NoRuleError(
            "as_strided of a tensor that is itself a view has no rule in ball arithmetic; index it instead."
        )


def _require_agreement(builder: Builder, target: Any, result: Any, seen: Any) -> Any:
    """Return the result of a rule after comparing it with the shape and the type that PyTorch traced."""
    if isinstance(result, list | tuple):
        given = seen if isinstance(seen, list | tuple) else [None] * len(result)
        return type(result)(_require_agreement(builder, target, *pair) for pair in zip(result, given, strict=True))
    if not isinstance(result, NodeRef) or not isinstance(seen, Tensor):
        return result
    if tuple(seen.shape) != result.shape:
        raise NoRuleError(f"The shape of what {target} gives depends on values; write it with tensors of fixed shape.")
    if seen.is_complex():
        raise NoRuleError(
            f"{target} gives complex numbers, which have no rule in ball arithmetic; write pairs of reals."
        )
    if seen.is_floating_point():
        return builder.real(result)
    if not result.discrete:
        raise NoRuleError(f"{target} of whole numbers has no rule in ball arithmetic.")
    if seen.dtype != torch.bool:
        limits = torch.iinfo(seen.dtype)
        low, high = builder.limits.get(result.index, (limits.min, limits.max))
        builder.limits[result.index] = (max(low, limits.min), min(high, limits.max))
    return replace(result, boolean=seen.dtype == torch.bool)


def _move(builder: Builder, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that moves data on positions, counted from 1 so that a zero it fills in can be recognised."""
    several = isinstance(args[0], list | tuple)
    items, counted = _count(builder, args[0] if several else [args[0]])
    if any(isinstance(item, NodeRef) for item in tree_flatten((args[1:], kwargs))[0]):
        raise NoRuleError(f"The operator {target} with a computed index has no rule in ball arithmetic.")
    kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")}
    moved = target(counted if several else counted[0], *args[1:], **kwargs)
    return tree_map(lambda indices: builder.take(items, indices - 1), moved)


def _write(builder: Builder, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> NodeRef:
    """Write one tensor into another: run the operator on the positions in both."""
    items, counted = _count(builder, args[:2])
    return builder.take(items, target(*counted, *args[2:], **kwargs) - 1)


def _count(builder: Builder, given: Sequence[Any]) -> tuple[list[NodeRef], list[Tensor]]:
    """Return nodes of one kind, and their positions behind one another, counted from 1."""
    items = [builder.ref(item) for item in given]
    if any(not item.discrete for item in items):
        items = [builder.real(item) for item in items]
    counted: list[Tensor] = []
    for item in items:
        counted.append(positions(item.shape) + 1 + sum(before.numel() for before in counted))
    return items, counted


def prune(program: Program, limits: TypeLimits) -> tuple[Program, TypeLimits]:
    """Remove nodes the output does not need; inputs stay, so that samples keep their shape."""
    needed = {program.output} | {i for i, node in enumerate(program.nodes) if node.op in ("input", "parameters")}
    for index in range(len(program.nodes) - 1, -1, -1):
        if index in needed:
            needed.update(program.nodes[index].inputs)
    order = {old: new for new, old in enumerate(sorted(needed))}
    nodes = [replace(program.nodes[old], inputs=tuple(order[i] for i in program.nodes[old].inputs)) for old in order]
    shorter = Program(nodes=tuple(nodes), output=order[program.output], size=program.size)
    return well_formed(shorter), {order[index]: span for index, span in limits.items() if index in order}
