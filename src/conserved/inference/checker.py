"""Checks a written derivation of a law, step by step, with rules of its own.

A derivation (see `conserved.inference.written`) lists the operations of a program that a law's motion goes through and
says for every tensor how each of its entries moves: by a *charge* c, x → e^{tc} x, and for a general linear group also
by a *row*, x_row → Σ A[row, row'] x_row' among the entries of one *copy*. This file states once more what each
operation does to such motions, on plain arrays of numbers, and shares no code with the inference that wrote the
derivation. A step it has no rule for makes the derivation unchecked, never right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

CLOSE = 1e-6


class Wrong(Exception):
    """A step does not follow."""


class Unchecked(Exception):
    """A step there is no rule for here."""


@dataclass(frozen=True, slots=True)
class Motion:
    """How the entries of one tensor move: charges, rows (0 for none) and copies, each an array of the tensor's shape.

    A tensor of zeros moves in any way.
    """

    charge: np.ndarray
    row: np.ndarray
    copy: np.ndarray
    zero: bool = False

    @property
    def still(self) -> bool:
        return bool((np.abs(self.charge) < CLOSE).all()) and not self.row.any()

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Motion:
        """The motion after entries were put elsewhere."""
        return Motion(move(self.charge), move(self.row), move(self.copy), self.zero)


@dataclass(slots=True)
class Report:
    """What was checked: how many steps follow, and which do not or have no rule."""

    steps: int = 0
    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every step follows."""
        return not self.wrong and not self.unchecked and self.steps > 0


def check(derivation: Mapping[str, Any]) -> Report:
    """Check every step of a derivation, that its outputs do not move, and that its parameters are where it begins."""
    report = Report()
    shapes = {int(key): tuple(entry["shape"]) for key, entry in derivation["values"].items()}
    motions = {int(key): motion(entry) for key, entry in derivation["values"].items()}
    soft = bool(derivation.get("epsilon"))
    for step in derivation["steps"]:
        where = f"{step['operation']} in {step['module'] or 'the program'}, {step['line']}"
        try:
            apply(step, motions, shapes, soft)
            report.steps += 1
        except Wrong as problem:
            report.wrong.append(f"{where}: {problem}")
        except Unchecked as problem:
            report.unchecked.append(f"{where}: {problem}")
    for value in derivation["outputs"]:
        if value in motions and not motions[value].still:
            report.wrong.append("an output moves")
    made = {value for step in derivation["steps"] for value in step["results"]}
    made |= {value for begins in derivation["begins"].values() for value in begins}
    for value, found in motions.items():
        if value not in made and not found.still:
            report.wrong.append(f"value {value} moves, and nothing moves it")
    return report


def motion(entry: Mapping[str, Any]) -> Motion:
    """The motion of a tensor as it is written: arrays over some of its axes."""
    shape = tuple(entry["shape"])

    def whole(one: Mapping[str, Any]) -> np.ndarray:
        array = np.asarray(one["array"])
        index = tuple(slice(None) if axis in one["axes"] else None for axis in range(len(shape)))
        return np.broadcast_to(array[index], shape)

    charge = np.zeros(shape)
    for one in entry.get("charges", ()):
        charge = charge + whole(one)
    row, copy = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    if "rows" in entry:
        row = whole(entry["rows"]).astype(np.int64)
        copy = whole(entry["copies"]).astype(np.int64)
        # Entries that differ along an axis the rows do not run along belong to different copies.
        axes = [axis for axis in range(len(shape)) if axis not in entry["rows"]["axes"]]
        index = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), dtype=np.int64)
        for axis in axes:
            copy = copy * shape[axis] + index[axis].reshape(shape)
    return Motion(charge, row, copy, bool(entry.get("zero")))


def need(holds: bool | np.bool_, why: str) -> None:
    """Refuse a step that does not follow."""
    if not holds:
        raise Wrong(why)


def alike(a: Motion, b: Motion) -> bool:
    """Whether two tensors move in the same way."""
    return bool(
        (np.abs(a.charge - b.charge) < CLOSE).all() and (a.row == b.row).all() and same_copies(a.row, a.copy, b.copy)
    )


def same_copies(row: np.ndarray, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two numberings of copies put the same entries together."""
    chosen = row.reshape(-1) > 0
    left, right = a.reshape(-1)[chosen], b.reshape(-1)[chosen]
    pairs = {(int(x), int(y)) for x, y in zip(left, right, strict=True)}
    return len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs})


SEES_EVERYTHING = (
    *("softmax", "log_softmax", "safe_softmax", "exp", "log", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu"),
    *("sin", "cos", "erf", "expm1", "log1p", "mish", "celu", "selu", "hardswish", "hardsigmoid"),
)
"""Functions that are right only for tensors that do not move."""


def apply(
    step: Mapping[str, Any], motions: Mapping[int, Motion], shapes: Mapping[int, tuple[int, ...]], soft: bool
) -> None:
    """One step: the motions of its results follow from those of its operands."""
    name = _name(step)
    results = [motions[n] for n in step["results"]]
    rule = RULES.get(name)
    operands = [motions[n] for n in values_in(step["arguments"])]
    if all(one.still for one in operands) and all(one.still or one.zero for one in results):
        return
    if rule is not None:
        rule(step, motions, shapes, soft)
        return
    if name.endswith("softmax") and shapes[step["results"][0]][_given(step, 1)] == 1:
        need(all(one.still for one in results), "a share of one does not move")
        return
    if name in SEES_EVERYTHING:
        need(all(one.still for one in (*operands, *results)), "it sees every scale")
        return
    raise Unchecked("no rule here")


def values_in(arguments: Any) -> list[int]:
    """The numbers of the tensors among arguments."""
    if isinstance(arguments, Mapping) and "value" in arguments:
        return [int(arguments["value"])]
    if isinstance(arguments, Sequence) and not isinstance(arguments, str):
        return [n for one in arguments for n in values_in(one)]
    return []


RULES: dict[str, Callable[[Mapping[str, Any], Mapping[int, Motion], Mapping[int, tuple[int, ...]], bool], None]] = {}


def rule(*names: str) -> Callable[[Any], Any]:
    """Register a rule for operations of these names."""

    def register(function: Any) -> Any:
        for name in names:
            RULES[name] = function
        return function

    return register


def _given(step: Mapping[str, Any], place: int, default: Any = None) -> Any:
    arguments = step["arguments"]
    return arguments[place] if place < len(arguments) else default


def _operand(step: Mapping[str, Any], motions: Mapping[int, Motion], place: int) -> Motion | None:
    given = _given(step, place)
    return motions[given["value"]] if isinstance(given, Mapping) and "value" in given else None


@rule(
    "view",
    "unsafe_view",
    "reshape",
    "t",
    "transpose",
    "permute",
    "expand",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "clone",
    "to_copy",
    "alias",
    "split",
    "split_with_sizes",
    "unbind",
    "detach",
    "contiguous",
    "flip",
    "repeat",
)
def _moves(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """Entries in new places take their motions along."""
    source = _operand(step, motions, 0)
    assert source is not None
    name = _name(step)
    if name == "detach":
        need(source.still, "no gradient flows through what moves")
    start = 0
    for number, value in enumerate(step["results"]):
        shape = shapes[value]
        if name in ("expand", "repeat"):
            expected = _repeated(source, shape, _given(step, 1) if name == "repeat" else None)
        else:
            put = _put(step, source.charge.ndim, shape, number, start)
            expected = source.moved(put)
            start += shape[_given(step, 2, 0)] if name.startswith("split") else 0
        _complete(source, expected)
        need(motions[value].zero or alike(expected, motions[value]), "entries are moved otherwise than they are put")


def _name(step: Mapping[str, Any]) -> str:
    """The name of an operation without namespace, overload and marks."""
    return str(step["operation"]).split("::")[-1].rsplit(".", 1)[0].strip("_")


def _put(
    step: Mapping[str, Any], count: int, shape: tuple[int, ...], number: int, start: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Where an operation puts entries, as a function of arrays with `count` axes."""
    name = _name(step)

    def take(axis: int, chosen: int | slice, x: np.ndarray) -> np.ndarray:
        index: list[int | slice] = [slice(None)] * x.ndim
        index[axis] = chosen
        return np.asarray(x[tuple(index)])

    if name in ("t", "transpose"):
        a, b = (_given(step, 1, 0), _given(step, 2, 1)) if count > 1 else (0, 0)
        return partial(np.swapaxes, axis1=a, axis2=b)
    if name == "permute":
        return partial(np.transpose, axes=_given(step, 1))
    if name == "flip":
        return partial(np.flip, axis=tuple(_given(step, 1)))
    if name == "select":
        return partial(take, _given(step, 1, 0), int(_given(step, 2)))
    if name == "slice":
        return partial(take, _given(step, 1, 0), slice(_given(step, 2), _given(step, 3), _given(step, 4, 1)))
    if name == "unbind":
        return partial(take, _given(step, 1, 0), number)
    if name.startswith("split"):
        axis = _given(step, 2, 0)
        return partial(take, axis, slice(start, start + shape[axis]))
    return partial(np.reshape, shape=shape)


def _repeated(source: Motion, shape: tuple[int, ...], times: Sequence[int] | None) -> Motion:
    """Entries repeated along axes: every repetition is a copy of its own."""
    expected = source.moved(lambda x: np.broadcast_to(x, shape) if times is None else np.tile(x, times))
    if not expected.row.any():
        return expected
    copy, index = expected.copy, np.indices(shape)
    old = (1,) * (len(shape) - source.row.ndim) + source.row.shape
    for axis, (before, size) in enumerate(zip(old, shape, strict=True)):
        if before != size:
            copy = copy * (size // before) + index[axis] // before
    return Motion(expected.charge, expected.row, copy, expected.zero)


def _complete(source: Motion, part: Motion) -> None:
    """What is taken of a copy is all of it or nothing."""
    rows = int(source.row.max(initial=0))
    if rows and part.row.any():
        _, counts = np.unique(part.copy[part.row > 0], return_counts=True)
        need((counts % rows == 0).all(), "only some of the entries that are mixed are taken")


@rule("mm", "bmm")
def _contraction(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """Σ_k x[…n,k] y[…k,m]: charges add up to something that does not depend on k; rows meet their duals or stay."""
    x, y = _operand(step, motions, 0), _operand(step, motions, 1)
    assert x is not None
    assert y is not None
    _contracted(x, y, motions[step["results"][0]])


def _contracted(x: Motion, y: Motion, z: Motion) -> None:
    if x.zero or y.zero:
        return

    def batched(one: Motion) -> Motion:
        return one if one.charge.ndim == 3 else one.moved(lambda array: array[None])

    x, y, z = batched(x), batched(y), batched(z)
    for b in range(x.charge.shape[0]):
        total = x.charge[b][:, :, None] + y.charge[b][None]
        need((np.abs(total - total[:, :1]) < CLOSE).all(), "what is summed does not move alike")
        need((np.abs(total[:, 0] - z.charge[b]) < CLOSE).all(), "the result moves otherwise")
        left, right, out = x.row[b], y.row[b], z.row[b]
        along_k = (left != left[:, :1]).any() or (right != right[:1]).any() or (left.any() and right.any())
        if along_k:
            need((left == left[:1]).all() and (right == right[:, :1]).all(), "rows depend on what stays")
            need((left[0] == right[:, 0]).all(), "rows do not meet their duals")
            chosen = left[0] > 0
            opposite = x.charge[b][:, chosen][:, None] + y.charge[b][chosen].T[None]
            need((np.abs(opposite - opposite[:, :, :1]) < CLOSE).all(), "rows do not meet their duals")
            for n in range(left.shape[0]):
                need(same_copies(left[0], x.copy[b][n], y.copy[b][:, 0]), "copies are paired across")
            for m in range(right.shape[1]):
                need(same_copies(left[0], y.copy[b][:, m], x.copy[b][0]), "copies are paired across")
            need(not out.any(), "a space that was summed over is left")
        else:
            expected = left[:, :1] + right[:1]
            need((expected == out).all(), "rows of the result are not those of the operands")


@rule("add", "sub")
def _sum(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """Both operands and the result move alike; a small number beside squares is a norm's ε."""
    out = motions[step["results"][0]]
    shape = shapes[step["results"][0]]
    for place in (0, 1):
        one = _operand(step, motions, place)
        if one is None:
            need(out.still or soft or _given(step, place, 0) == 0, "a number does not move")
            continue
        if not one.zero:
            wide = one.moved(lambda x: np.broadcast_to(x, shape))
            need((np.abs(wide.charge - out.charge) < CLOSE).all() and (wide.row == out.row).all(), "not moved alike")


@rule("addmm")
def _addmm(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """A product of matrices to which something is added that moves as the product does."""
    bias, x, y = (_operand(step, motions, place) for place in range(3))
    assert bias is not None
    assert x is not None
    assert y is not None
    out = motions[step["results"][0]]
    _contracted(x, y, out)
    wide = bias.moved(lambda array: np.broadcast_to(array, out.charge.shape))
    need((np.abs(wide.charge - out.charge) < CLOSE).all() and (wide.row == out.row).all(), "not moved alike")


@rule("mul", "div")
def _product(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """Charges add up. Rows stay where the other factor is the same for all entries that are mixed."""
    out = motions[step["results"][0]]
    shape = shapes[step["results"][0]]
    total = np.zeros(shape)
    for place, sign in ((0, 1), (1, -1 if "div" in step["operation"] else 1)):
        one = _operand(step, motions, place)
        if one is None:
            continue
        total = total + sign * np.broadcast_to(one.charge, shape)
        other = _operand(step, motions, 1 - place)
        if one.row.any():
            if other is not None:
                met = np.arange(other.charge.size).reshape(other.charge.shape)
                mixed = np.broadcast_to(one.row, shape) > 0
                pairs = np.stack([np.broadcast_to(one.copy, shape)[mixed], np.broadcast_to(met, shape)[mixed]])
                apart = np.unique(pairs, axis=1)
                need(np.unique(apart[0]).size == apart.shape[1], "the other factor differs between rows")
            need((np.broadcast_to(one.row, shape) == out.row).all(), "rows of the result are not those of the operand")
    need((np.abs(total - out.charge) < CLOSE).all(), "charges do not add up")


@rule("pow", "sqrt", "rsqrt", "reciprocal", "relu", "abs", "neg", "leaky_relu", "square")
def _power(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """x^p, and what is homogeneous: p times the charge, no mixing (a change of sign excepted)."""
    x, out = _operand(step, motions, 0), motions[step["results"][0]]
    assert x is not None
    name = _name(step)
    degree = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0}.get(name, 1.0)
    degree = float(_given(step, 1)) if name == "pow" else degree
    need(name == "neg" or not x.row.any(), "it mixes nothing")
    need((np.abs(degree * x.charge - out.charge) < CLOSE).all(), "not that power")
    need((x.row == out.row).all(), "rows of the result are not those of the operand")


@rule("sum", "mean")
def _reduction(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """What is summed moves alike; rows do not run along what is summed."""
    x, out = _operand(step, motions, 0), motions[step["results"][0]]
    assert x is not None
    axes = _given(step, 1)
    count = x.charge.ndim
    chosen = (
        tuple(range(count))
        if axes in (None, [])
        else tuple(a % count for a in ([axes] if isinstance(axes, int) else axes))
    )
    for array in (x.charge, x.row.astype(float)):
        first = array
        for axis in chosen:
            first = np.take(first, [0], axis)
        need((np.abs(array - first) < CLOSE).all(), "what is summed does not move alike")
        result = out.charge if array is x.charge else out.row
        need((np.abs(first.reshape(result.shape) - result) < CLOSE).all(), "the result moves otherwise")


@rule("native_layer_norm", "fused_rms_norm")
def _norm(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """Forgets a scale that is common along its axes, up to ε; what comes out moves as gain and bias do."""
    x, out = _operand(step, motions, 0), motions[step["results"][0]]
    assert x is not None
    axes = tuple(range(x.charge.ndim - len(_given(step, 1)), x.charge.ndim))
    first = x.charge
    for axis in axes:
        first = np.take(first, [0], axis)
    need((np.abs(x.charge - first) < CLOSE).all() and not x.row.any(), "what is normalised does not move alike")
    need(bool((np.abs(first) < CLOSE).all()) or soft, "exact only without ε")
    expected = np.zeros(x.charge.shape)
    gain, bias = _operand(step, motions, 2), _operand(step, motions, 3)
    if gain is not None:
        expected = np.broadcast_to(gain.charge, expected.shape)
    if bias is not None and not bias.zero:
        need((np.abs(bias.charge - (gain.charge if gain is not None else 0)) < CLOSE).all(), "gain and bias differ")
    need((np.abs(expected - out.charge) < CLOSE).all() and not out.row.any(), "the result moves otherwise")


@rule("embedding")
def _embedding(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """All rows of the table move alike."""
    table, out = _operand(step, motions, 0), motions[step["results"][0]]
    assert table is not None
    need((np.abs(table.charge - table.charge[:1]) < CLOSE).all() and (table.row == table.row[:1]).all(), "rows differ")
    need((np.abs(out.charge - table.charge[0]) < CLOSE).all() and (out.row == table.row[0]).all(), "not that row")


def _at(index: tuple[slice, ...], x: np.ndarray) -> np.ndarray:
    return np.asarray(x[index])


@rule("cat", "stack")
def _join(step: Any, motions: Any, shapes: Any, soft: bool) -> None:
    """Tensors side by side keep their motions."""
    parts = [motions[n] for n in values_in(_given(step, 0))]
    axis = _given(step, 1, 0)
    out = motions[step["results"][0]]
    if "stack" in step["operation"]:
        parts = [one.moved(lambda x: np.expand_dims(x, axis)) for one in parts]
    start = 0
    for one in parts:
        index = [slice(None)] * out.charge.ndim
        index[axis] = slice(start, start + one.charge.shape[axis])
        start += one.charge.shape[axis]
        chosen = tuple(index)
        there = out.moved(partial(_at, chosen))
        need(one.zero or alike(one, there), "entries are moved otherwise than they are put")
