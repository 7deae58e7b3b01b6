r"""Gradient fields and brackets of a program for many samples at once: the rules of `differentiate` on whole arrays.

Every value has a leading axis for the samples, of length one where it is the same for all of them. Numbers are plain
float64, to choose words with, or intervals (`intervals`), to prove their brackets independent. Reverse mode and
nilpotent directions are as in `differentiate` and `jets`, which is the reference this is tested against; what is not
written here (`NotBatchedError`) is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import matmul
from typing import Any

import flint
import numpy as np

from conserved.certificates.arithmetic import Array, ElementaryFunctions, Floats, UndecidedError
from conserved.certificates.intervals import Interval
from conserved.certificates.jets import Jet, apply, derivative
from conserved.certificates.program import UNARY, Node, Program
from conserved.errors import ConservedError

SampleArray = Any
"""An array of floats, or an `Interval`."""


class NotBatchedError(ConservedError, NotImplementedError):
    """Something in a program has to be computed sample by sample."""


@dataclass(frozen=True, slots=True)
class FloatArrays(ElementaryFunctions):
    """Plain float64."""

    def exact(self, values: Array) -> SampleArray:
        """Return floating-point numbers as they are."""
        return values

    def apply(self, function: str, a: SampleArray) -> SampleArray:
        return Floats().apply(function, a)

    def full(self, shape: tuple[int, ...], value: int) -> SampleArray:
        return np.full((1,) * len(shape), float(value))

    def two_over_root_pi(self, shape: tuple[int, ...]) -> SampleArray:
        return np.array(2 / math.sqrt(math.pi))

    def move(self, change: Callable[[Array], Array], a: SampleArray) -> SampleArray:
        """Return a rearrangement of entries."""
        return change(a)

    def together(self, change: Callable[..., Array], *items: SampleArray) -> SampleArray:
        """Return a rearrangement of the entries of several arrays."""
        return change(*items)

    def sum_last(self, a: SampleArray) -> SampleArray:
        """Return the sum over the last axis."""
        return a.sum(-1)

    def gathered(self, add: Callable[[Array], Array], a: SampleArray, longest: int) -> SampleArray:
        """Return sums of at most `longest` entries each."""
        return add(a)

    def bounds(self, a: SampleArray) -> tuple[Array, Array]:
        """Return lower and upper ends."""
        return a, a


@dataclass(frozen=True, slots=True)
class IntervalArrays(ElementaryFunctions):
    """Float64 with proved error bounds."""

    def exact(self, values: Array) -> SampleArray:
        return Interval.exact(values)

    def apply(self, function: str, a: SampleArray) -> SampleArray:
        return a.apply(function)

    def full(self, shape: tuple[int, ...], value: int) -> SampleArray:
        return Interval.exact(np.full((1,) * len(shape), float(value)))

    def two_over_root_pi(self, shape: tuple[int, ...]) -> SampleArray:
        exact = 2 / flint.arb.const_sqrt_pi()
        middle = float(exact.mid())
        return Interval(np.array(middle), np.array(2 * float(abs(exact - middle).abs_upper()) + 2.0**-60))

    def move(self, change: Callable[[Array], Array], a: SampleArray) -> SampleArray:
        return a.move(change)

    def together(self, change: Callable[..., Array], *items: SampleArray) -> SampleArray:
        return Interval(change(*(a.middle for a in items)), change(*(a.radius for a in items)))

    def sum_last(self, a: SampleArray) -> SampleArray:
        return a.sum_last()

    def gathered(self, add: Callable[[Array], Array], a: SampleArray, longest: int) -> SampleArray:
        return a.gathered(add, longest)

    def bounds(self, a: SampleArray) -> tuple[Array, Array]:
        wide = a.radius * (1 + 2.0**-50) + 2.0**-1000
        slack = np.where(a.radius == 0, 0.0, wide + 2.0**-52 * np.abs(a.middle))
        return a.middle - slack, a.middle + slack


Arrays = FloatArrays | IntervalArrays


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Inputs, one array for each tensor with the samples along its first axis, and output directions likewise."""

    x: tuple[Array, ...]
    v: Array
    known: Mapping[int, SampleArray] = field(default_factory=dict)
    """Values of nodes at θ that are known better than a run would compute them."""


class SampleBatch:
    """A program at one θ, run on many samples at once."""

    def __init__(self, program: Program, arrays: Arrays) -> None:
        self.program, self.arrays = program, arrays
        self._orders: dict[int, tuple[Array, Array, int]] = {}

    def point(self, theta: Sequence[float]) -> Jet:
        """Return θ, the same for all samples."""
        return Jet({0: self.arrays.exact(np.array([theta], dtype=np.float64))})

    def bracket(self, theta: Jet, word: Sequence[Samples]) -> Jet:
        """Return […[[X_0, X_1], X_2]…, X_k] at θ."""
        *inner, last = word
        if not inner:
            return self.gradient(theta, last)
        forward, backward = self.terms(theta, inner, last)
        return forward - backward

    def terms(self, theta: Jet, inner: Sequence[Samples], last: Samples) -> tuple[Jet, Jet]:
        """Return DX·A and DA·X for A the bracket of the inner samples and X the field of the last."""
        bit = theta.bit << 1 or 1
        a = self.bracket(theta, inner)
        both = self.gradient(theta + a.times_direction(bit), last)
        back = self.bracket(theta + both.without(bit).times_direction(bit), inner)
        return both.along(bit), back.along(bit)

    def gradient(self, theta: Jet, samples: Samples) -> Jet:
        """Return ∇_θ ⟨f(x; θ), v⟩, one row for each sample."""
        program = self.program
        values = self._run(theta, samples)
        adjoints: dict[int, Jet] = {program.output: Jet({0: self.arrays.exact(samples.v)})}
        for index in range(program.output, -1, -1):
            if not program.moving[index] or index not in adjoints or program.nodes[index].op == "parameters":
                continue
            node = program.nodes[index]
            passed = self._backward(node, adjoints.pop(index), [values[i] for i in node.inputs], values[index])
            for source, term in zip(node.inputs, passed, strict=True):
                if term is not None and program.moving[source]:
                    adjoints[source] = adjoints[source] + term if source in adjoints else term
        gradients = [adjoints[p] for p, node in enumerate(program.nodes) if node.op == "parameters" and p in adjoints]
        return gradients[0] if gradients else Jet({})

    def _run(self, theta: Jet, samples: Samples) -> list[Any]:
        values: list[Any] = []
        for index, node in enumerate(self.program.nodes):
            value = self._forward(node, [values[i] for i in node.inputs], theta, samples.x)
            values.append(Jet({**value.parts, 0: samples.known[index]}) if index in samples.known else value)
        return values

    def _forward(self, node: Node, inputs: list[Any], theta: Jet, x: Sequence[Array]) -> Any:
        op, arrays = node.op, self.arrays
        if op == "parameters":
            return theta
        if op == "input":
            given = x[node.which]
            return given if node.discrete else Jet({0: arrays.exact(given)})
        if op == "constant":
            values = np.array(node.values, dtype=np.int64 if node.discrete else np.float64).reshape(1, *node.shape)
            return values if node.discrete else Jet({0: arrays.exact(values)})
        if op == "real":
            if inputs[0].size and np.abs(inputs[0]).max() > 2**53:
                raise NotBatchedError("Whole numbers beyond 2⁵³ are no floating-point numbers.")
            return Jet({0: arrays.exact(inputs[0].astype(np.float64))})
        if op in UNARY:
            return apply(arrays, op, inputs[0])
        if op == "stop":
            return inputs[0]
        if op in ("greater", "order", "equal"):
            moving = any(self.program.moving[i] for i in node.inputs)
            return self._compared(op, inputs, moving)
        if node.discrete:
            return self._whole(node, inputs)
        if op == "matmul":
            return inputs[0].product(inputs[1], matmul)
        if op == "sum":
            return inputs[0].map(arrays.sum_last)
        if op in ("add", "subtract", "multiply"):
            a, b = inputs
            return a + b if op == "add" else a - b if op == "subtract" else a * b
        if op == "choose":
            return self._joined(lambda a, b: np.asarray(np.where(inputs[0], a, b)), inputs[1:])
        if op == "take":
            return self._joined(lambda *parts: _take(node, parts), inputs)
        if op == "gather":
            index = _flat_index(inputs[1], math.prod(self.program.nodes[node.inputs[0]].shape))
            return self._moved(lambda p: _pick(p, index, node.shape), inputs[0])
        if op == "scatter":
            index = _flat_index(inputs[1], math.prod(node.shape))
            return self._joined(lambda a, b: _replace(a, index, b), (inputs[0], inputs[2]))
        raise NotBatchedError(f"{op} is computed sample by sample.")

    def _moved(self, change: Callable[[Array], Array], a: Jet) -> Jet:
        """Return a rearrangement of entries, of every coefficient."""
        return a.map(lambda part: self.arrays.move(change, part))

    def _joined(self, change: Callable[..., Array], inputs: Sequence[Jet]) -> Jet:
        """Return a linear map of several operands together; a coefficient that one of them lacks is zero."""
        parts: dict[int, SampleArray] = {}
        for key in {key for item in inputs for key in item.parts}:
            zeros = (self.arrays.exact(np.zeros((1, *item.value.shape[1:]))) for item in inputs)
            parts[key] = self.arrays.together(
                change, *(item.parts.get(key, zero) for item, zero in zip(inputs, zeros, strict=True))
            )
        return Jet(parts)

    def _whole(self, node: Node, inputs: list[Array]) -> Array:
        """Return whole numbers, where machine integers hold them exactly."""
        sizes = [int(np.abs(a).max(initial=0)) for a in inputs]
        if node.op in ("add", "subtract", "multiply"):
            if (sizes[0] + 1) * (sizes[1] + 1) >= 2**62:
                raise NotBatchedError("Whole numbers could overflow.")
            a, b = inputs
            return np.asarray(a + b if node.op == "add" else a - b if node.op == "subtract" else a * b)
        if node.op == "sum":
            if sizes[0] * inputs[0].shape[-1] >= 2**62:
                raise NotBatchedError("Whole numbers could overflow.")
            return np.asarray(inputs[0].sum(-1))
        if node.op == "take":
            return _take(node, inputs)
        if node.op == "choose":
            return np.where(inputs[0], inputs[1], inputs[2])
        if node.op == "gather":
            return _pick(inputs[0], _flat_index(inputs[1], math.prod(inputs[0].shape[1:])), node.shape)
        if node.op == "scatter":
            return _replace(inputs[0], _flat_index(inputs[1], math.prod(node.shape)), inputs[2])
        raise NotBatchedError(f"{node.op} of whole numbers is computed sample by sample.")

    def _compared(self, op: str, inputs: list[Any], moving: bool) -> Array:
        if not isinstance(inputs[0], Jet):
            first, *rest = inputs
            if op == "order":
                return np.argsort(-first, axis=-1, kind="stable")
            return np.asarray(first > rest[0] if op == "greater" else first == rest[0]).astype(np.int64)
        low, high = self.arrays.bounds(inputs[0].value)
        if op == "order":
            return _order(low, high, moving and isinstance(self.arrays, IntervalArrays))
        other_low, other_high = self.arrays.bounds(inputs[1].value)
        above, below = low > other_high, high < other_low
        if not isinstance(self.arrays, IntervalArrays):
            return above.astype(np.int64)
        open_still = ~above & ~below & (moving | ~(high <= other_low))
        if open_still.any():
            raise UndecidedError("A kink lies inside an interval.")
        return above.astype(np.int64)

    def _backward(self, node: Node, g: Jet, inputs: list[Any], value: Any) -> list[Jet | None]:
        """Return what an adjoint passes on to the inputs of its node: the transposed derivative."""
        op = node.op
        if op == "add":
            return [g, g]
        if op == "subtract":
            return [g, -g]
        if op == "stop":
            return [None]
        if op == "sum":
            length = inputs[0].value.shape[-1]
            return [self._moved(lambda p: np.repeat(p[..., None], length, -1), g)]
        if op in UNARY:
            return [g * derivative(self.arrays, op, inputs[0], value)]
        if op == "multiply":
            return [g * inputs[1], g * inputs[0]]
        if op == "matmul":
            a, b = (self._moved(lambda p: np.swapaxes(p, -1, -2), item) for item in inputs)
            return [g.product(b, matmul), a.product(g, matmul)]
        if op == "choose":
            chosen = inputs[0]
            first = self._moved(lambda p: np.where(chosen, p, 0.0), g)
            return [None, first, self._moved(lambda p: np.where(chosen, 0.0, p), g)]
        if op == "gather":
            return [self._gathered_back(node, g, inputs), None]
        if op == "scatter":
            index = _flat_index(inputs[1], math.prod(node.shape))
            shape = inputs[2].value.shape[1:]
            retained = self._moved(lambda p: _replace(p, index, np.zeros((1, *shape))), g)
            return [retained, None, self._moved(lambda p: _pick(p, index, shape), g)]
        if op == "take":
            return self._taken_back(node, g, [item.value.shape[1:] for item in inputs])
        raise NotBatchedError(f"{op} is differentiated sample by sample.")

    def _gathered_back(self, node: Node, g: Jet, inputs: list[Any]) -> Jet:
        shape = inputs[0].value.shape[1:]
        size = math.prod(shape)
        index = _flat_index(inputs[1], size)

        def add(p: Array) -> Array:
            flat = p.reshape(len(p), -1)
            gathered = np.zeros((len(flat), size))
            rows = np.arange(len(flat))[:, None]
            np.add.at(gathered, (rows, np.broadcast_to(index, flat.shape)), flat)
            return gathered.reshape(len(p), *shape)

        return g.map(lambda part: self.arrays.gathered(add, part, index.shape[1]))

    def _taken_back(self, node: Node, g: Jet, shapes: Sequence[tuple[int, ...]]) -> list[Jet | None]:
        assert node.places is not None
        ends = np.cumsum([0, *map(math.prod, shapes)]).tolist()
        if id(node) not in self._orders:
            order = np.argsort(node.places, kind="stable")
            targets, starts, counts = np.unique(node.places[order], return_index=True, return_counts=True)
            self._orders[id(node)] = (order, starts, int(counts.max(initial=1)))
        order, starts, longest = self._orders[id(node)]
        targets = node.places[order][starts] if len(starts) else starts

        def add(p: Array) -> Array:
            flat = p.reshape(len(p), -1)
            sums = np.zeros((len(flat), ends[-1] + 1))
            if len(targets):
                sums[:, targets] = flat[:, order] if longest == 1 else np.add.reduceat(flat[:, order], starts, axis=1)
            return sums

        joined = g.map(lambda part: self.arrays.gathered(add, part, longest))

        def piece(low: int, high: int, shape: tuple[int, ...]) -> Jet:
            return self._moved(lambda p: p[:, low:high].reshape(len(p), *shape), joined)

        return [piece(low, high, shape) for low, high, shape in zip(ends[:-1], ends[1:], shapes, strict=True)]


def _take(node: Node, parts: Sequence[Array]) -> Array:
    """Return entries of the inputs, joined; the place −1 is the zero put at the end."""
    count = max(len(part) for part in parts)
    flat = [np.broadcast_to(part.reshape(len(part), -1), (count, math.prod(part.shape[1:]))) for part in parts]
    joined = np.concatenate([*flat, np.zeros((count, 1), dtype=parts[0].dtype)], axis=1)
    return joined[:, node.places].reshape(count, *node.shape)


def _flat_index(index: Array, size: int) -> Array:
    if index.size and not (int(index.min()) >= 0 and int(index.max()) < size):
        raise NotBatchedError("A computed index is outside its tensor.")
    return index.reshape(len(index), -1)


def _pick(part: Array, index: Array, shape: tuple[int, ...]) -> Array:
    flat = part.reshape(len(part), -1)
    count = max(len(flat), len(index))
    flat = np.broadcast_to(flat, (count, flat.shape[1]))
    return np.take_along_axis(flat, np.broadcast_to(index, (count, index.shape[1])), 1).reshape(count, *shape)


def _replace(part: Array, index: Array, values: Array) -> Array:
    """Return entries at computed places replaced by others; a place that is named twice leaves open which one stays."""
    ordered = np.sort(index, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise NotBatchedError("An entry is scattered to twice.")
    count = max(len(part), len(index), len(values))
    flat = np.broadcast_to(part.reshape(len(part), -1), (count, math.prod(part.shape[1:]))).copy()
    indices = np.broadcast_to(index, (count, index.shape[1]))
    np.put_along_axis(flat, indices, np.broadcast_to(values.reshape(len(values), -1), indices.shape), 1)
    return flat.reshape(count, *part.shape[1:])


def _order(low: Array, high: Array, moving: bool) -> Array:
    """Return positions along the last axis, largest first.

    Neighbours that intervals cannot tell apart are undecided.
    """
    order = np.argsort(-(low + high), axis=-1, kind="stable")
    if (low == high).all() and not moving:
        return order
    sorted_low, sorted_high = np.take_along_axis(low, order, -1), np.take_along_axis(high, order, -1)
    apart = sorted_low[..., :-1] > sorted_high[..., 1:]
    equal = (sorted_low[..., :-1] == sorted_high[..., 1:]) & (sorted_high[..., :-1] == sorted_low[..., 1:])
    if not (apart | (equal & ~np.bool_(moving))).all():
        raise UndecidedError("Entries cannot be separated, so their order is undecided.")
    return order


def chunk_size(program: Program, depth: int) -> int:
    """Return how many samples run together: as many as keep all values of a program within some hundred megabytes."""
    entries = sum(math.prod(node.shape) for node in program.nodes)
    return max(1, min(256, (1 << 23) // max(1, entries << depth)))


def stack(samples: Sequence[tuple[tuple[Array, ...], Sequence[int]]]) -> Samples:
    """Return several (x, v) as one batch."""
    tensors = zip(*(x for x, _ in samples), strict=True)
    return Samples(
        tuple(np.stack([np.asarray(t) for t in each]) for each in tensors),
        np.array([v for _, v in samples], dtype=np.float64),
    )
