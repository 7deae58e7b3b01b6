r"""Running a program on jets, its gradient by reverse mode, and Lie brackets of gradients.

No derivative here comes from PyTorch. The rules are: `jets` for the elementary functions, the transposes below for the
rest. Running forwards on θ + ε a and then backwards gives the gradient field and its derivative along a together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from conserved.certificates.arithmetic import Array, Numbers
from conserved.certificates.jets import Jet, apply, derivative
from conserved.certificates.program import UNARY, MalformedError, Node, Program

ProgramValue = Any
"""A real value is a `Jet`, a discrete one an array of whole numbers; programs are checked to mix the two rightly."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An input x, one array for each tensor, and a direction v of the output."""

    x: tuple[Array, ...]
    v: Array


def run(
    program: Program, numbers: Numbers, theta: Jet, x: Sequence[Array], *, stopped: bool = False
) -> list[ProgramValue]:
    """Return the value of every node.

    `stopped` says that directions end where backpropagation does, at `stop`: then the coefficient of a direction is
    its product with the transposed backward pass, instead of the derivative of the value.
    """
    values: list[ProgramValue] = []
    for index, node in enumerate(program.nodes):
        inputs = [values[i] for i in node.inputs]
        jets = [value.parts for value in inputs if isinstance(value, Jet)]
        parts = None if node.discrete or not jets else numbers.shortcut(node, jets)
        value = Jet(parts) if parts is not None else _forward(program, numbers, index, inputs, theta, x)
        if stopped and node.op == "stop":
            value = Jet({0: value.value})
        values.append(Jet(numbers.settle(value.parts, node)) if isinstance(value, Jet) else value)
    return values


def _forward(
    program: Program, numbers: Numbers, position: int, inputs: list[ProgramValue], theta: Jet, x: Sequence[Array]
) -> ProgramValue:
    node = program.nodes[position]
    op = node.op
    if op == "parameters":
        return theta
    if op == "input":
        return x[node.which] if node.discrete else Jet({0: x[node.which]})
    if op == "constant":
        if node.discrete:
            return np.array(node.values, dtype=np.int64).reshape(node.shape)
        return Jet({0: numbers.array(node.values, node.shape)})
    if op == "real":
        return Jet({0: numbers.real(inputs[0])})
    if op in UNARY:
        return apply(numbers, op, inputs[0])
    if op == "stop":
        return inputs[0]
    if op == "matmul":
        return inputs[0].product(inputs[1], numbers.matmul)
    if op in ("greater", "order", "equal"):
        moving = any(program.moving[i] for i in node.inputs)
        return _compare(numbers, node, inputs, moving)
    if op == "choose":
        return _together(numbers, lambda a, b: np.asarray(np.where(inputs[0], a, b)), inputs[1:])
    if op == "scatter":
        return _together(numbers, lambda a, b: _replace(inputs[1], a, b), inputs[::2])
    if op == "gather":
        index = _inside(inputs[1], prod(program.nodes[node.inputs[0]].shape))
        return _linear(lambda part: part.ravel()[index], inputs[0])
    if op == "sum":
        return _linear(lambda part: part.sum(-1), inputs[0]) if isinstance(inputs[0], Jet) else _total(inputs[0])
    if op == "take":
        return _take(numbers, node, inputs)
    a, b = inputs
    if isinstance(a, Jet):
        return a + b if op == "add" else a - b if op == "subtract" else a * b
    return _exact(op, a, b)


_WHOLE = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}


def _exact(op: str, a: Array, b: Array) -> Array:
    """Return whole numbers, exactly: in machine integers where these cannot overflow, in Python's otherwise."""
    left, right = _size(a), _size(b)
    if (left * right if op == "multiply" else left + right) < 2**63:
        return np.asarray(_WHOLE[op](a, b))
    return _narrow(np.asarray(_WHOLE[op](a.astype(object), b.astype(object))))


def _total(a: Array) -> Array:
    if _size(a) * a.shape[-1] < 2**63:
        return np.asarray(a.sum(-1))
    return _narrow(np.asarray(a.astype(object).sum(-1)))


def _size(a: Array) -> int:
    return max(abs(int(a.max())), abs(int(a.min()))) if a.size else 0


def _narrow(a: Array) -> Array:
    if _size(a) >= 2**63:
        raise MalformedError("A whole number grows beyond 2⁶³, which programs do not have.")
    return a.astype(np.int64)


def _inside(index: Array, size: int) -> Array:
    """Return a computed index, if it lies in 0 … size − 1: counted from the end, one place would look like two."""
    if index.size and not (int(index.min()) >= 0 and int(index.max()) < size):
        raise MalformedError(f"A computed index lies outside 0 … {size - 1}.")
    return index


def _compare(numbers: Numbers, node: Node, inputs: list[ProgramValue], moving: bool) -> Array:
    if isinstance(inputs[0], Jet):
        a = inputs[0].value
        if node.op == "order":
            return numbers.order(node, a, moving)
        return numbers.greater(node, a, inputs[1].value, moving)
    first, *rest = inputs
    if node.op == "order":
        return np.argsort(-first, axis=-1, kind="stable")
    return np.asarray(first > rest[0] if node.op == "greater" else first == rest[0]).astype(np.int64)


def _linear(move: Callable[[Array], Array], a: ProgramValue) -> ProgramValue:
    """Return a linear map, applied to every coefficient of a jet."""
    return a.map(move) if isinstance(a, Jet) else np.asarray(move(a))


def _together(numbers: Numbers, move: Callable[..., Array], items: Sequence[ProgramValue]) -> ProgramValue:
    """Return a map that is linear in several operands together; a coefficient that one of them lacks is zero."""
    if not isinstance(items[0], Jet):
        return move(*items)
    none = [numbers.zeros(item.value.shape) for item in items]
    keys = {key for item in items for key in item.parts}
    pairs = list(zip(items, none, strict=True))
    return Jet({key: move(*(item.parts.get(key, zero) for item, zero in pairs)) for key in keys})


def _take(numbers: Numbers, node: Node, inputs: list[ProgramValue]) -> ProgramValue:
    """Return entries of the inputs, joined; the place −1 is the zero put at the end."""
    indices = node.places
    assert indices is not None
    if len(inputs) == 1 and (indices.size == 0 or int(indices.min()) >= 0):
        return _linear(lambda part: part.ravel()[indices].reshape(node.shape), inputs[0])
    zero = np.zeros(1, np.int64) if node.discrete else numbers.zeros((1,))

    def taken(*parts: Array) -> Array:
        return np.concatenate([*(part.ravel() for part in parts), zero])[indices].reshape(node.shape)

    return _together(numbers, taken, inputs)


def _replace(index: Array, a: Array, b: Array) -> Array:
    _inside(index, a.size)
    if len(np.unique(index)) != index.size:
        raise MalformedError("An entry is scattered to twice; which one stays is left open.")
    flat = a.ravel().copy()
    flat[index.ravel()] = b.ravel()
    return flat.reshape(a.shape)


def gradient(program: Program, numbers: Numbers, theta: Jet, sample: Sample) -> Jet:
    """Return ∇_θ ⟨f(x; θ), v⟩, a jet in the directions of θ."""
    values = run(program, numbers, theta, sample.x)
    adjoints: dict[int, Jet] = {program.output: Jet({0: sample.v})}
    for index in range(program.output, -1, -1):
        node = program.nodes[index]
        if not program.moving[index] or index not in adjoints or node.op == "parameters":
            continue
        passed = _backward(numbers, node, adjoints.pop(index), values, index)
        for source, term in zip(node.inputs, passed, strict=True):
            if term is not None and program.moving[source]:
                adjoints[source] = adjoints[source] + term if source in adjoints else term
    (theta_place,) = (index for index, node in enumerate(program.nodes) if node.op == "parameters")
    return adjoints[theta_place] if theta_place in adjoints else Jet({0: numbers.zeros((program.size,))})


def _backward(numbers: Numbers, node: Node, g: Jet, values: list[ProgramValue], index: int) -> list[Jet | None]:
    """Return what an adjoint passes on to the inputs of its node: the transposed derivative."""
    op = node.op
    inputs = [values[i] for i in node.inputs]
    if op == "add":
        return [g, g]
    if op == "subtract":
        return [g, -g]
    if op == "sum":
        shape = inputs[0].value.shape
        return [g.map(lambda part: np.broadcast_to(part[..., None], shape))]
    if op == "stop":
        return [None]
    if op in UNARY:
        return [g * derivative(numbers, op, inputs[0], values[index])]
    if op == "multiply":
        return [g * inputs[1], g * inputs[0]]
    if op == "matmul":
        a, b = (item.map(lambda part: np.swapaxes(part, -1, -2)) for item in inputs)
        return [g.product(b, numbers.matmul), a.product(g, numbers.matmul)]
    return _move_back(numbers, node, g, inputs)


def _move_back(numbers: Numbers, node: Node, g: Jet, inputs: list[ProgramValue]) -> list[Jet | None]:
    """Return the transposes of operators that move entries."""
    shapes = [item.value.shape if isinstance(item, Jet) else item.shape for item in inputs]
    if node.op == "choose":
        chosen, none = inputs[0], numbers.zeros(node.shape)
        return [None, g.map(lambda p: np.where(chosen, p, none)), g.map(lambda p: np.where(chosen, none, p))]
    if node.op == "scatter":
        index, none = inputs[1], numbers.zeros(shapes[2])
        return [g.map(lambda p: _replace(index, p, none)), None, g.map(lambda p: p.ravel()[index])]
    if node.op == "gather":
        index = inputs[1].ravel()
        return [g.map(lambda p: _add_up(numbers, index, p, prod(shapes[0])).reshape(shapes[0])), None]
    indices = node.places
    assert indices is not None
    ends = np.cumsum([0, *map(prod, shapes)]).tolist()
    joined = g.map(lambda p: _add_up(numbers, indices, p, ends[-1] + 1))
    spans = zip(ends[:-1], ends[1:], shapes, strict=True)
    return [Jet({k: p[low:high].reshape(shape) for k, p in joined.parts.items()}) for low, high, shape in spans]


def _add_up(numbers: Numbers, indices: Array, part: Array, size: int) -> Array:
    """Return the transpose of taking entries: each is added back where it came from."""
    total = numbers.zeros((size,))
    flat = part.ravel()
    if len(np.unique(indices)) == len(indices):
        total[indices] = flat
    else:
        np.add.at(total, indices, flat)
    return total


def bracket(program: Program, numbers: Numbers, theta: Jet, word: Sequence[Sample]) -> Jet:
    """Return […[[X_0, X_1], X_2]…, X_k] at θ, for the gradient fields X_i of the samples of a word."""
    *inner, last = word
    if not inner:
        return gradient(program, numbers, theta, last)
    bit = theta.bit << 1 or 1
    a = bracket(program, numbers, theta, inner)
    both = gradient(program, numbers, theta + a.times_direction(bit), last)
    back = bracket(program, numbers, theta + both.without(bit).times_direction(bit), inner)
    return both.along(bit) - back.along(bit)
