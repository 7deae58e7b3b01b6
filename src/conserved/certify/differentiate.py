r"""Running a program on jets, its gradient by reverse mode, and Lie brackets of gradients.

No derivative here comes from PyTorch. The rules are: `jets` for the elementary functions, the transposes below for the
rest. Running forwards on θ + ε a and then backwards gives the gradient field and its derivative along a together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conserved.certify.arithmetic import Array, Numbers
from conserved.certify.jets import Jet, apply, slope
from conserved.certify.program import UNARY, Node, Program

Value = Jet | Array
"""A real value is a jet, a discrete one an array of whole numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An input x, one array for each tensor, and a direction v of the output."""

    x: tuple[Array, ...]
    v: Array


def run(program: Program, numbers: Numbers, theta: Jet, x: Sequence[Array]) -> list[Value]:
    """The value of every node."""
    values: list[Value] = []
    for place, node in enumerate(program.nodes):
        inputs = [values[i] for i in node.inputs]
        jets = [value.parts for value in inputs if isinstance(value, Jet)]
        parts = None if node.discrete or not jets else numbers.shortcut(node, jets)
        value = Jet(parts) if parts is not None else _forward(program, numbers, place, inputs, theta, x)
        values.append(Jet(numbers.settle(value.parts, node)) if isinstance(value, Jet) else value)
    return values


def _forward(
    program: Program, numbers: Numbers, place: int, inputs: list[Value], theta: Jet, x: Sequence[Array]
) -> Value:
    node = program.nodes[place]
    op = node.op
    if op == "parameters":
        return theta
    if op == "input":
        return x[node.which] if node.discrete else Jet({0: x[node.which]})
    if op == "constant":
        if node.discrete:
            return np.array(node.values, dtype=np.int64).reshape(node.shape)
        return Jet({0: numbers.array(node.values, node.shape)})
    if op in ("greater", "order"):
        real = [a.value if isinstance(a, Jet) else a for a in inputs]
        moving = any(program.moving[i] for i in node.inputs)
        if not isinstance(inputs[0], Jet):
            return (real[0] > real[1]).astype(np.int64) if op == "greater" else np.argsort(-real[0], -1, kind="stable")
        return numbers.greater(node, real[0], real[1], moving) if op == "greater" else numbers.order(node, real[0], moving)
    if op == "real":
        assert not isinstance(inputs[0], Jet)
        return Jet({0: numbers.real(inputs[0])})
    if op in UNARY:
        assert isinstance(inputs[0], Jet)
        return apply(numbers, op, inputs[0])
    return _moved(numbers, node, inputs) if op in _MOVES else _combined(numbers, op, inputs)


def _combined(numbers: Numbers, op: str, inputs: list[Value]) -> Value:
    a, b = inputs if len(inputs) == 2 else (inputs[0], inputs[0])
    if op == "sum":
        return a.map(lambda part: part.sum(-1)) if isinstance(a, Jet) else a.sum(-1)
    if op == "equal":
        return (a == b).astype(np.int64)  # type: ignore[union-attr]
    if op == "matmul":
        assert isinstance(a, Jet)
        assert isinstance(b, Jet)
        return a.product(b, numbers.matmul)
    if op == "add":
        return a + b  # type: ignore[operator]
    return a - b if op == "subtract" else a * b  # type: ignore[operator]


_MOVES = ("take", "choose", "gather", "scatter")


def _moved(numbers: Numbers, node: Node, inputs: list[Value]) -> Value:
    """Operators that only move entries: linear in each real input, so applied to every coefficient."""
    if node.op in ("choose", "scatter"):
        first, index, second = (inputs[1], inputs[0], inputs[2]) if node.op == "choose" else inputs
        assert not isinstance(index, Jet)
        move = np.where if node.op == "choose" else _replace
        if not isinstance(first, Jet) or not isinstance(second, Jet):
            return move(index, first, second)  # type: ignore[operator]
        zeros = numbers.zeros
        keys = first.parts.keys() | second.parts.keys()
        return Jet(
            {
                key: move(
                    index,
                    first.parts[key] if key in first.parts else zeros(first.value.shape),
                    second.parts[key] if key in second.parts else zeros(second.value.shape),
                )
                for key in keys
            }
        )
    if node.op == "gather":
        a, index = inputs
        assert not isinstance(index, Jet)
        return a.map(lambda part: part.ravel()[index]) if isinstance(a, Jet) else a.ravel()[index]
    places = node.places
    assert places is not None
    jets = [item for item in inputs if isinstance(item, Jet)]
    if not jets:
        flat = np.concatenate([*(np.ravel(item) for item in inputs), np.zeros(1, np.int64)])  # type: ignore[arg-type]
        return flat[places].reshape(node.shape)
    parts = {}
    zero = numbers.zeros((1,))
    for key in {key for jet in jets for key in jet.parts}:
        pieces = [j.parts[key].ravel() if key in j.parts else numbers.zeros((j.value.size,)) for j in jets]
        parts[key] = np.concatenate([*pieces, zero])[places].reshape(node.shape)
    return Jet(parts)


def _replace(index: Array, a: Array, b: Array) -> Array:
    found = a.ravel().copy()
    found[index.ravel()] = b.ravel()
    return found.reshape(a.shape)


def gradient(program: Program, numbers: Numbers, theta: Jet, sample: Sample) -> Jet:
    """∇_θ ⟨f(x; θ), v⟩, a jet in the directions of θ."""
    values = run(program, numbers, theta, sample.x)
    adjoints: dict[int, Jet] = {program.output: Jet({0: sample.v})}
    for place in range(program.output, -1, -1):
        if not program.moving[place] or place not in adjoints:
            continue
        node = program.nodes[place]
        if node.op == "parameters":
            continue
        passed = _backward(numbers, node, adjoints.pop(place), values, place)
        for source, term in zip(node.inputs, passed, strict=True):
            if term is not None and program.moving[source]:
                adjoints[source] = adjoints[source] + term if source in adjoints else term
    for place, node in enumerate(program.nodes):
        if node.op == "parameters" and place in adjoints:
            return adjoints[place]
    return Jet({0: numbers.zeros((program.size,))})


def _backward(numbers: Numbers, node: Node, g: Jet, values: list[Value], place: int) -> list[Jet | None]:
    """What an adjoint passes on to the inputs of its node: the transposed derivative."""
    op = node.op
    inputs = [values[i] for i in node.inputs]
    if op == "add":
        return [g, g]
    if op == "subtract":
        return [g, -g]
    if op == "sum":
        assert isinstance(inputs[0], Jet)
        shape = inputs[0].value.shape
        return [g.map(lambda part: np.broadcast_to(part[..., None], shape))]
    if op in UNARY:
        value = values[place]
        assert isinstance(inputs[0], Jet)
        assert isinstance(value, Jet)
        return [g * slope(numbers, op, inputs[0], value)]
    if op in ("multiply", "matmul"):
        a, b = inputs
        assert isinstance(a, Jet)
        assert isinstance(b, Jet)
        if op == "multiply":
            return [g * b, g * a]
        turned = lambda part: np.swapaxes(part, -1, -2)  # noqa: E731
        return [g.product(b.map(turned), numbers.matmul), a.map(turned).product(g, numbers.matmul)]
    return _moved_back(numbers, node, g, inputs)


def _moved_back(numbers: Numbers, node: Node, g: Jet, inputs: list[Value]) -> list[Jet | None]:
    if node.op == "choose":
        chosen = inputs[0]
        assert not isinstance(chosen, Jet)
        zeros = numbers.zeros(node.shape)
        return [None, g.map(lambda p: np.where(chosen, p, zeros)), g.map(lambda p: np.where(chosen, zeros, p))]
    sizes = [item.value.size if isinstance(item, Jet) else item.size for item in inputs]
    shapes = [item.value.shape if isinstance(item, Jet) else item.shape for item in inputs]
    if node.op == "scatter":
        index = inputs[1]
        assert not isinstance(index, Jet)
        none = numbers.zeros(shapes[2])
        return [
            g.map(lambda p: _replace(index, p, none)),
            None,
            g.map(lambda p: p.ravel()[index.ravel()].reshape(shapes[2])),
        ]
    if node.op == "gather":
        index = inputs[1]
        assert not isinstance(index, Jet)
        return [g.map(lambda p: _added(numbers, index.ravel(), p, sizes[0]).reshape(shapes[0])), None]
    assert node.places is not None
    places, total = node.places, sum(sizes)
    whole = g.map(lambda p: _added(numbers, places, p, total + 1))
    ends = np.cumsum([0, *sizes])
    return [
        whole.map(lambda p, low=low, high=high, shape=shape: p[low:high].reshape(shape))  # type: ignore[misc]
        for low, high, shape in zip(ends[:-1], ends[1:], shapes, strict=True)
    ]


def _added(numbers: Numbers, places: Array, part: Array, size: int) -> Array:
    """The transpose of taking entries: each is added back where it came from."""
    found = numbers.zeros((size,))
    flat = part.ravel()
    if len(np.unique(places)) == len(places):
        found[places] = flat
    else:
        np.add.at(found, places, flat)
    return found


def bracket(program: Program, numbers: Numbers, theta: Jet, word: Sequence[Sample]) -> Jet:
    """[…[[X_0, X_1], X_2]…, X_k] at θ, for the gradient fields X_i of the samples of a word."""
    *inner, last = word
    if not inner:
        return gradient(program, numbers, theta, last)
    bit = theta.bit << 1 or 1
    a = bracket(program, numbers, theta, inner)
    both = gradient(program, numbers, theta + a.times_direction(bit), last)
    back = bracket(program, numbers, theta + both.without(bit).times_direction(bit), inner)
    return both.along(bit) - back.along(bit)
