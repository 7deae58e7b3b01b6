"""Building a program: the elementary operators as methods that broadcast and mix kinds as PyTorch does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conserved.certificates.program import Node
from conserved.certificates.validate import WHOLE, fitting
from conserved.discovery.inputs import UnsuitableError


class NoRuleError(UnsuitableError):
    """An operator has no rule in ball arithmetic; the message names it."""


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A node under construction: its place, shape and kind."""

    index: int
    shape: tuple[int, ...]
    discrete: bool
    boolean: bool = False
    """Whether PyTorch calls it a truth value: its entries are 0 and 1, and some operators treat it differently."""


@dataclass(slots=True, eq=False)
class Builder:
    """Nodes so far, and the elementary operators as methods."""

    size: int
    nodes: list[Node] = field(default_factory=list)
    limits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Between which whole numbers PyTorch's integers of a node can count."""

    def node(self, op: str, *inputs: NodeRef, shape: Sequence[int], **rest: Any) -> NodeRef:
        """Append an operation."""
        indices = tuple(item.index for item in inputs)
        fresh = Node(op=op, inputs=indices, shape=tuple(shape), **rest)
        fresh = fitting(fresh, [self.nodes[i] for i in indices], op, self.size)
        self.nodes.append(fresh)
        return NodeRef(len(self.nodes) - 1, fresh.shape, fresh.discrete)

    def constant(self, value: Tensor | float | int | bool) -> NodeRef:
        """Return numbers known while tracing."""
        tensor = torch.as_tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)
        if tensor.is_complex():
            raise NoRuleError("Complex numbers have no rule in ball arithmetic; write them as pairs of reals.")
        real = tensor.is_floating_point()
        values = tensor.to(torch.float64 if real else torch.int64).flatten()
        if real and bool((values.isnan() | (values == torch.inf)).any()):
            raise NoRuleError("A constant is NaN or +∞, which have no rule in ball arithmetic; masks are made with −∞.")
        if not real and bool((values.abs() > WHOLE).any()):
            raise NoRuleError("A constant is a whole number beyond 2⁵³, which programs do not have.")
        ref = self.node("constant", shape=tensor.shape, values=tuple(values.tolist()), discrete=not real)
        return replace(ref, boolean=tensor.dtype == torch.bool)

    def ref(self, item: NodeRef | Tensor | float | int | bool) -> NodeRef:
        """Return a node, made of a constant if need be."""
        return item if isinstance(item, NodeRef) else self.constant(item)

    def full(self, shape: Sequence[int], value: float | int, discrete: bool) -> NodeRef:
        """Return one number everywhere."""
        return self.constant(torch.full(tuple(shape), value, dtype=torch.int64 if discrete else torch.float64))

    def truth(self, item: NodeRef | Tensor | float | int | bool) -> NodeRef:
        """Return 1 where a number is not zero."""
        ref = self.ref(item)
        if not ref.discrete:
            raise NoRuleError("Whether a real is zero has no rule in ball arithmetic.")
        if ref.boolean:
            return ref
        return self.opposite(self.node("equal", ref, self.full(ref.shape, 0, True), shape=ref.shape))

    def real(self, a: NodeRef) -> NodeRef:
        """Return a node as reals."""
        return self.node("real", a, shape=a.shape) if a.discrete else a

    def take(self, inputs: Sequence[NodeRef], indices: Tensor) -> NodeRef:
        """Return entries of the inputs, joined; −1 is a zero."""
        flat = indices.flatten().numpy().astype(np.int64)
        if len(inputs) == 1 and inputs[0].shape == tuple(indices.shape) and np.array_equal(flat, np.arange(len(flat))):
            return inputs[0]
        return self.node("take", *inputs, shape=indices.shape, places=flat)

    def expand(self, a: NodeRef, shape: Sequence[int]) -> NodeRef:
        """Broadcast to a shape."""
        return self.take([a], positions(a.shape).broadcast_to(tuple(shape)))

    def together(self, *items: Any) -> list[NodeRef]:
        """Return operands broadcast to one shape and one kind."""
        refs = [self.ref(item) for item in items]
        shape = torch.broadcast_shapes(*(ref.shape for ref in refs))
        if any(not ref.discrete for ref in refs):
            refs = [self.real(ref) for ref in refs]
        return [self.expand(ref, shape) for ref in refs]

    def binary(self, op: str, a: Any, b: Any) -> NodeRef:
        """Return an operator of two operands, broadcast."""
        left, right = self.together(a, b)
        return self.node(op, left, right, shape=left.shape)

    add = partialmethod(binary, "add")
    subtract = partialmethod(binary, "subtract")
    multiply = partialmethod(binary, "multiply")
    greater = partialmethod(binary, "greater")

    def divide(self, a: Any, b: Any) -> NodeRef:
        """Return a/b, with the reciprocal taken before broadcasting."""
        return self.multiply(self.real(self.ref(a)), self.unary("reciprocal", self.ref(b)))

    def unary(self, op: str, a: NodeRef) -> NodeRef:
        """Return an elementary function."""
        a = self.real(a)
        return self.node(op, a, shape=a.shape)

    def negative(self, a: NodeRef) -> NodeRef:
        return self.subtract(self.constant(0 if a.discrete else 0.0), a)

    def opposite(self, a: NodeRef) -> NodeRef:
        """Return the negated mask."""
        return self.subtract(self.constant(1), a)

    def choose(self, condition: Any, a: Any, b: Any) -> NodeRef:
        """Return a where the condition holds, else b."""
        condition = self.ref(condition)
        left, right = self.together(a, b)
        shape = torch.broadcast_shapes(condition.shape, left.shape)
        parts = [self.expand(item, shape) for item in (condition, left, right)]
        return self.node("choose", *parts, shape=shape)

    def sum(self, a: NodeRef, axes: Sequence[int] | None, keepdim: bool = False) -> NodeRef:
        """Return the sum over axes."""
        n = len(a.shape)
        if not n:
            return a
        over = sorted({axis % n for axis in axes}) if axes else list(range(n))
        remaining = [axis for axis in range(n) if axis not in over]
        count = int(np.prod([a.shape[i] for i in over]))
        shape = [a.shape[i] for i in remaining]
        if count:
            rows = positions(a.shape).permute(*remaining, *over).reshape(*shape, count)
            total = self.node("sum", self.take([a], rows), shape=shape)
        else:
            total = self.full(shape, 0, a.discrete)
        return self.reshape(total, [1 if i in over else a.shape[i] for i in range(n)]) if keepdim else total

    def mean(self, a: NodeRef, axes: Sequence[int] | None, keepdim: bool = False) -> NodeRef:
        """Return the sum over the number of terms: an exact division, so that what is centred sums to exactly zero."""
        total = self.sum(a, axes, keepdim)
        return self.divide(total, self.constant(int(np.prod(a.shape)) // max(1, int(np.prod(total.shape)))))

    def reshape(self, a: NodeRef, shape: Sequence[int]) -> NodeRef:
        return self.take([a], positions(a.shape).reshape(tuple(shape)))

    def matmul(self, a: Any, b: Any) -> NodeRef:
        a, b = self.real(self.ref(a)), self.real(self.ref(b))
        return self.node("matmul", a, b, shape=(*a.shape[:-1], b.shape[-1]))

    def gather(self, a: NodeRef, index: NodeRef) -> NodeRef:
        """Return entries of the flattened a at computed places."""
        return self.node("gather", a, index, shape=index.shape)

    def along(self, index: NodeRef, shape: Sequence[int], axis: int) -> NodeRef:
        """Return flat positions in a tensor of a shape, for an index along one axis as in `torch.gather`."""
        axis %= len(shape)
        offsets = positions(shape).narrow(axis, 0, 1)
        offsets = offsets[tuple(slice(None) if i == axis else slice(0, n) for i, n in enumerate(index.shape))]
        stride = int(np.prod(shape[axis + 1 :]))
        return self.add(self.multiply(index, stride), self.constant(offsets.expand(index.shape)))


def positions(shape: Sequence[int]) -> Tensor:
    """Return 0, 1, 2, … in a shape."""
    return torch.arange(int(np.prod(shape))).reshape(tuple(shape))
