"""What each operation does to motions, for the checker of derivations: how the results move if the operands do.

The rules are stated on arrays of numbers and share nothing with those of the inference. Operations that only put
entries elsewhere are not described at all: PyTorch runs them on the numbers of the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch

from conserved.inference.motions import (
    CLOSE,
    KEYS,
    Array,
    Mixed,
    Motion,
    MovedImage,
    Unchecked,
    added,
    alike,
    grouped,
    joined,
    level,
    need,
    same_numbers,
    spread,
    taken,
    transposed,
)

MASKED = -1e4
"""Numbers below this stand for minus infinity: their exponentials vanish in every precision, shifted or not."""

_NAMESPACES = ("", "aten", "prims", "conserved")
"""Whose operations the rules are about."""

Rule = Callable[["CheckedStep"], "Motion | Sequence[Motion | None]"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(slots=True)
class CheckedStep:
    """One operation: its arguments and the motions of its operands."""

    record: Mapping[str, Any]
    values: Mapping[int, Mapping[str, Any]]
    motions: Mapping[int, Motion]
    soft: bool
    centred: dict[int, frozenset[int]] = field(default_factory=dict)
    """Values that sum to zero along axes."""
    means: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    """Values that are means of others along axes."""
    sized: bool = False
    """Whether the rule used a size: it need not hold for others."""

    @property
    def name(self) -> str:
        """The operation without namespace, overload and marks."""
        return plain_name(self.record["operation"])

    def given(self, place: int, name: str = "", default: Any = None) -> Any:
        """An argument, by place or by name."""
        arguments = self.record["arguments"]
        found = arguments[place] if place < len(arguments) else self.record["named"].get(name, default)
        return default if found is None else found

    def number_of(self, place: int, name: str = "") -> int | None:
        """The value that an argument is, if it is a tensor."""
        given = self.given(place, name)
        return int(given["value"]) if isinstance(given, Mapping) and "value" in given else None

    def at(self, value: int) -> Motion:
        """How a value moves."""
        found = self.motions.get(value)
        if found is None:
            described = self.values[value]
            found = Motion.still_one(described["shape"], zero=bool(described.get("zero")))
        return found

    def operand(self, place: int, name: str = "") -> Motion | None:
        """How an argument moves; None if it is no tensor."""
        value = self.number_of(place, name)
        return None if value is None else self.at(value)

    def tensor(self, place: int, name: str = "") -> Motion:
        """How an argument moves that must be a tensor."""
        found = self.operand(place, name)
        if found is None:
            raise Unchecked("an argument is no tensor")
        return found

    def shape(self, place: int = 0) -> tuple[int, ...]:
        """The shape of a result."""
        return tuple(self.values[self.record["results"][place]]["shape"])

    def size(self, place: int) -> tuple[int, ...]:
        """The shape of an argument."""
        value = self.number_of(place)
        assert value is not None
        return tuple(self.values[value]["shape"])


def plain_name(operation: str) -> str:
    """The name of an operation without overload and marks; one of another library keeps its namespace, and what it
    does is not known here."""
    space, _, rest = operation.rpartition("::")
    name = rest.partition(".")[0].strip("_")
    return name if space in _NAMESPACES else f"{space}::{name}"


def values_in(arguments: Any) -> list[int]:
    """The numbers of the tensors among arguments."""
    if isinstance(arguments, Mapping):
        if "value" in arguments:
            return [int(arguments["value"])]
        return [n for one in arguments.values() for n in values_in(one)]
    if isinstance(arguments, Sequence) and not isinstance(arguments, str):
        return [n for one in arguments for n in values_in(one)]
    return []


# --- shifts that were multiplied with data --------------------------------------------------------------------------


def labelled(motion: Motion) -> list[Array]:
    """For the shift and every image of a motion: equal numbers at equal entries, −1 where nothing is added."""
    found = []
    if motion.shift is not None and bool((np.abs(motion.shift) > CLOSE).any()):
        _, labels = np.unique(np.round(motion.shift, 3), return_inverse=True)
        found.append(np.where(np.abs(motion.shift) > CLOSE, labels.reshape(-1), -1))
    for one in motion.images:
        if not one.nothing:
            pairs = np.stack([one.labels.astype(np.float64), np.round(one.weights, 9)])
            _, labels = np.unique(pairs, axis=1, return_inverse=True)
            found.append(np.where(one.labels >= 0, labels.reshape(-1), -1))
    return found


def image(labels: Array) -> MovedImage:
    """A new image with these labels."""
    flat = labels.reshape(-1)
    return MovedImage(next(KEYS), flat, np.where(flat >= 0, 1.0, 0.0))


def times_data(motion: Motion, met: Array) -> tuple[MovedImage, ...]:
    """The shifts of an entrywise product with data; `met` says which entry of the data each entry meets."""
    flat = met.reshape(-1)
    width = int(flat.max(initial=0)) + 1
    return tuple(image(np.where(one >= 0, one * width + flat, -1)) for one in labelled(motion))


def _numbers(shape: Sequence[int], wide: Sequence[int]) -> Array:
    """Which entry of a tensor of one shape stands where when it is broadcast to another."""
    return np.broadcast_to(np.arange(prod(shape)).reshape(tuple(shape)), tuple(wide)).reshape(-1)


def _row_labels(labels: Array, rows: int) -> tuple[Array, Array]:
    """Equal rows of labels get one number, −1 if nothing is in them; and which rows are of one label only."""
    table = labels.reshape(rows, -1)
    _, found = np.unique(table, axis=0, return_inverse=True)
    return np.where((table >= 0).any(1), found.reshape(-1), -1), (table == table[:, :1]).all(1)


# --- entries in other places ----------------------------------------------------------------------------------------

SAME = (
    "clone",
    "to_copy",
    "alias",
    "contiguous",
    "lift_fresh",
    "lift",
    "detach",
    "view_as",
    "resolve_conj",
    "positive",
)
ELSEWHERE = (
    *("view", "unsafe_view", "reshape", "reshape_alias", "flatten", "unflatten", "t", "transpose", "permute", "expand"),
    *("unsqueeze", "squeeze", "slice", "select", "split", "split_with_sizes", "unbind", "flip", "repeat", "roll"),
    *("chunk", "movedim", "narrow", "diagonal", "unfold", "tile", "cat", "stack", "tril", "triu", "constant_pad_nd"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "unsafe_split", "swapaxes", "pixel_shuffle", "diag_embed"),
    *(
        "channel_shuffle",
        "pixel_unshuffle",
        "im2col",
        "rot90",
        "concat",
        "hstack",
        "vstack",
        "view_copy",
        "permute_copy",
    ),
)


@rule(*SAME)
def _same(step: CheckedStep) -> Motion:
    """The same entries."""
    found = step.tensor(0)
    if step.name == "detach":
        need(found.still, "no gradient flows through what moves")
    return replace(found, shape=step.shape())


@rule(*ELSEWHERE)
def _elsewhere(step: CheckedStep) -> list[Motion | None]:
    """Entries in other places take their motions along."""
    operands = values_in(step.record["arguments"])
    if step.name == "constant_pad_nd" and any(step.given(1)):
        need(float(step.given(2, "value", 0.0)) == 0 or not step.tensor(0).scaled, "padded with a number")
        need(not step.tensor(0).shifted, "what is padded is not shifted")
    return placed(step, operands)


def placed(step: CheckedStep, operands: Sequence[int], zeros: Sequence[int] = ()) -> list[Motion | None]:
    """Run an operation on the numbers of its operands' entries; index tensors in `zeros` are taken as zeros."""
    motions, starts, start = [], {}, 1
    for value in dict.fromkeys(operands):
        starts[value] = start
        motions.append(step.at(value))
        start += motions[-1].size
    arguments = [_numbered(step, one, starts, zeros) for one in step.record["arguments"]]
    named = {k: _numbered(step, v, starts, zeros) for k, v in step.record["named"].items() if _plain_argument(v)}
    base, _, overload = step.record["operation"].split("::")[-1].partition(".")
    inner = base.rstrip("_") if base.endswith("_") else base
    try:
        operator = getattr(getattr(torch.ops.aten, inner), overload or "default")
        out = operator(*arguments, **named)
    except Exception as problem:
        raise Unchecked(f"it could not be run on numbers of entries: {type(problem).__name__}") from problem
    results = list(out) if isinstance(out, tuple | list) else [out]
    whole = joined(motions)
    shapes = [step.shape(n) for n in range(min(len(results), len(step.record["results"])))]
    return [
        taken(whole, np.round(one.numpy()).astype(np.int64) - 1, shape)
        for one, shape in zip(results, shapes, strict=False)
    ]


def _plain_argument(argument: Any) -> bool:
    return not isinstance(argument, str)


def _numbered(step: CheckedStep, argument: Any, starts: Mapping[int, int], zeros: Sequence[int]) -> Any:
    if isinstance(argument, Mapping) and "value" in argument:
        value = int(argument["value"])
        shape = tuple(step.values[value]["shape"])
        if value in starts:
            return torch.arange(starts[value], starts[value] + prod(shape), dtype=torch.float64).reshape(shape)
        if value in zeros:
            return torch.zeros(shape, dtype=torch.int64)
        constant = step.values[value].get("constant")
        if constant is None:
            raise Unchecked("where entries are put depends on numbers")
        return torch.as_tensor(constant).reshape(shape)
    if isinstance(argument, list | tuple):
        return [_numbered(step, one, starts, zeros) for one in argument]
    return argument


def _positions(geometry: Any) -> Array:
    """The place in memory of every entry of a tensor."""
    shape, strides, offset = geometry
    if len(strides) != len(shape):
        raise Unchecked("memory that is not laid out by strides")
    found = np.full(tuple(shape), offset, dtype=np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        found = found + (np.arange(size) * stride).reshape([-1 if n == axis else 1 for n in range(len(shape))])
    return found.reshape(-1)


@rule("read")
def _read(step: CheckedStep) -> Motion:
    """A view of memory that was written since."""
    base, mine = step.given(1), step.given(2)
    places = _positions(base)
    where = np.full(int(max(places.max(initial=0), _positions(mine).max(initial=0))) + 1, -1, dtype=np.int64)
    where[places] = np.arange(places.size)
    chosen = where[_positions(mine)]
    need((chosen >= 0).all(), "it reads outside what is known")
    return taken(step.tensor(0), chosen, step.shape())


@rule("write")
def _write(step: CheckedStep) -> Motion:
    """Memory of which a part was written."""
    base, part = _positions(step.given(1)), _positions(step.given(3))
    where = np.full(int(max(base.max(initial=0), part.max(initial=0))) + 1, -1, dtype=np.int64)
    where[base] = np.arange(base.size)
    chosen = np.arange(base.size)
    chosen[where[part]] = base.size + np.arange(part.size)
    return taken(joined([step.tensor(0), step.tensor(2)]), chosen, step.shape())


@rule("copy")
def _copy(step: CheckedStep) -> Motion:
    return spread(step.tensor(1), step.shape())


@rule("zeros_like", "zero", "zeros", "new_zeros", "empty_like", "new_empty", "empty")
def _zeros(step: CheckedStep) -> Motion:
    return Motion.still_one(step.shape(), zero=True)


@rule("fill", "full_like", "ones_like", "new_full", "new_ones", "sym_size", "rand_like", "randn_like", "isnan", "isinf")
def _unrelated(step: CheckedStep) -> Motion:
    """What does not depend on the values of its operands, or not on how they move."""
    if step.name == "fill" and step.number_of(1) is not None:
        return spread(step.tensor(1), step.shape())
    return Motion.still_one(step.shape())


# --- sums and products of entries -----------------------------------------------------------------------------------


@rule("add", "sub", "rsub")
def _sum(step: CheckedStep) -> Motion:
    """Both operands move alike; shifts add up. A small number beside squares is a norm's ε."""
    shape, factor = step.shape(), float(step.record["named"].get("alpha", 1) or 1)
    signs = {"add": (1.0, factor), "sub": (1.0, -factor), "rsub": (-factor, 1.0)}[step.name]
    parts = [(step.operand(place), sign) for place, sign in enumerate(signs)]
    tensors = [(spread(one, shape), sign) for one, sign in parts if one is not None]
    numbers = [step.given(place) * sign for place, (one, sign) in enumerate(parts) if one is None]
    if not numbers:
        value, other = step.number_of(0), step.number_of(1)
        if step.name == "sub" and factor == 1 and other in step.means and step.means[other][0] == value:
            step.centred[step.record["results"][0]] = step.means[other][1]
    scales = [one for one, _ in tensors if not one.vanishes]
    for one in scales[1:]:
        agree = same_numbers(one.grid(), scales[0].grid())
        need(agree and _same_mixed(one.mixed, scales[0].mixed), "what is added does not move alike")
    if not scales:
        return replace(tensors[0][0], shape=shape) if not numbers or not any(numbers) else Motion.still_one(shape)
    charge = scales[0].charge
    if scales[0].zero is not None:
        for one in scales[1:]:
            charge = np.where(scales[0].zero, one.charge, charge)
    zero = None
    if all(one.zero is not None for one, _ in tensors) and not any(numbers):
        zero = np.logical_and.reduce([one.zero for one, _ in tensors if one.zero is not None])
    total = Motion(shape, charge, scales[0].mixed, zero=zero)
    for one, sign in tensors:
        total = added(total, one, sign)
    if numbers and any(numbers):
        (number,) = numbers
        total = _beside(replace(total, zero=None), float(number), step.soft)
    return total


def _beside(motion: Motion, number: float, soft: bool) -> Motion:
    """A number was added: δ = c x + s is c (x + a) + s − c a."""
    if not motion.scaled:
        return motion
    motion.unmixed("a number is added to what is mixed")
    shift = (0 if motion.shift is None else motion.shift) - motion.charge * number
    if bool((np.abs(shift) <= CLOSE).all()):
        return replace(motion, shift=None)
    if soft and 0 < number < 0.1 and motion.shift is None:
        return motion
    return replace(motion, shift=shift)


def _same_mixed(a: Mixed | None, b: Mixed | None) -> bool:
    return (a is None and b is None) or (a is not None and a.same(b))


@rule("mul", "div")
def _product(step: CheckedStep) -> Motion:
    """Charges add up. Entries stay mixed where the other factor is one number for all of them."""
    shape = step.shape()
    inverse = -1.0 if step.name == "div" else 1.0
    if inverse < 0 and step.number_of(0) is not None and step.number_of(0) == step.number_of(1):
        return Motion.still_one(shape)
    need(step.record["named"].get("rounding_mode") is None, "it rounds")
    left, right = step.operand(0), step.operand(1)
    if left is None or right is None:
        return _times_number(step, left if left is not None else right, inverse if right is not None else 1.0)
    met = [_numbers(step.size(place), shape) for place in (0, 1)]
    return multiplied(spread(left, shape), spread(right, shape), met[0], met[1], inverse)


def _times_number(step: CheckedStep, motion: Motion | None, power: float) -> Motion:
    """A product with a number, or a number divided by a tensor."""
    assert motion is not None
    motion = spread(motion, step.shape())
    if power < 0:
        motion.unmixed("it is not linear")
        motion.unshifted("it sees every shift")
        return replace(motion, charge=-motion.charge, zero=None)
    number = step.given(1) if step.number_of(0) is not None else step.given(0)
    if not isinstance(number, int | float):
        raise Unchecked("it is multiplied with something unknown")
    factor = 1 / number if step.name == "div" else float(number)
    if factor == 0:
        return Motion.still_one(motion.shape, zero=True)
    shift = None if motion.shift is None else motion.shift * factor
    images = tuple(replace(one, weights=one.weights * factor) for one in motion.images)
    return replace(motion, shift=shift, images=images)


def multiplied(x: Motion, y: Motion, met_x: Array, met_y: Array, inverse: float = 1.0) -> Motion:
    """x · y entry by entry (x / y if `inverse` is −1); `met` says which entry of each factor stands where."""
    if x.vanishes or (y.vanishes and inverse > 0):
        return Motion.still_one(x.shape, zero=True)
    mixed = None
    for one, other in ((x, met_y), (y, met_x)):
        if one.mixed is not None:
            need(inverse > 0 or one is x, "it is not linear")
            need((other[one.mixed.rows] == other[one.mixed.columns]).all(), "the other factor differs between entries")
            need(mixed is None, "both factors are mixed")
            mixed = one.mixed
    masks = [one.zero for one in ((x, y) if inverse > 0 else (x,)) if one.zero is not None]
    zero = np.logical_or.reduce(masks) if masks else None
    images = times_data(x, met_y) + times_data(y, met_x if inverse > 0 else np.arange(y.size))
    return Motion(x.shape, x.charge + inverse * y.charge, mixed, None, images, zero)


DEGREES = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0, "sign": 0.0, "sgn": 0.0, "cosh": 1.0}


@rule(
    *("pow", "sqrt", "rsqrt", "reciprocal", "relu", "abs", "leaky_relu", "square", "sign", "sgn", "threshold"),
    *("rrelu", "clamp_min", "clamp", "hardtanh", "prelu", "prelu_kernel", "native_dropout", "relu6", "angle"),
)
def _power(step: CheckedStep) -> list[Motion | None]:
    """x^p, and functions that keep positive factors: p times the charge, no mixing, no shift."""
    x, name = step.tensor(0), step.name
    degree = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0, "sign": 0.0, "sgn": 0.0}.get(name, 1.0)
    if name == "pow":
        given = step.given(1)
        if not isinstance(given, int | float):
            raise Unchecked("a power that is a tensor")
        degree = float(given)
    if name in ("clamp_min", "clamp", "threshold", "hardtanh", "relu6", "angle"):
        limits = [v for v in (*step.record["arguments"][1:], *step.record["named"].values()) if v is not None]
        if step.soft and name.startswith("clamp") and len(limits) == 1:
            # A length that is kept above ε before it is divided by.
            limits = [v for v in limits if not (isinstance(v, int | float) and 0 < v < 0.1)] or [0]
        need(all(isinstance(v, int | float) and v == 0 for v in limits) and bool(limits), "it sees every scale")
    if name.startswith("prelu"):
        need(step.tensor(1).still, "the slope moves")
    if degree != 1.0 or name != "native_dropout":
        x.unshifted("it sees every shift")
    x.unmixed("it is not linear")
    zero = x.zero if degree > 0 else None
    images = times_data(x, np.arange(x.size)) if x.shifted else ()
    return [Motion(step.shape(), degree * x.charge, None, None, images, zero), None]


@rule("neg")
def _negative(step: CheckedStep) -> Motion:
    x = step.tensor(0)
    shift = None if x.shift is None else -x.shift
    return replace(x, shift=shift, images=tuple(replace(one, weights=-one.weights) for one in x.images))


@rule("glu")
def _gated(step: CheckedStep) -> Motion:
    """One half times a function of the other."""
    x, shape = step.tensor(0), step.shape()
    axis = int(step.given(1, "dim", -1)) % len(x.shape)
    places = np.arange(x.size).reshape(x.shape)
    value, gate = (taken(x, half, shape) for half in np.split(places, 2, axis))
    need(gate.still, "the gate sees every scale and shift")
    return multiplied(value, gate, np.arange(value.size), np.arange(value.size))


@rule("maximum", "minimum", "fmax", "fmin")
def _larger(step: CheckedStep) -> Motion:
    """The larger of two that are scaled alike."""
    shape = step.shape()
    x, y = (spread(step.tensor(place), shape) for place in (0, 1))
    x.unmixed("it is not linear")
    need(alike(x, y), "what is compared does not move alike")
    return x


@rule("gt", "lt", "ge", "le", "eq", "ne")
def _compared(step: CheckedStep) -> Motion:
    """Which is larger does not depend on a common factor, nor on a common shift."""
    x, y = step.operand(0), step.operand(1)
    shape = step.shape()
    if y is None or x is None:
        one = x if x is not None else y
        assert one is not None
        number = step.given(1) if y is None else step.given(0)
        need(one.still or (not one.shifted and one.mixed is None and number == 0), "it sees every scale")
    else:
        need(x.mixed is None and alike(spread(x, shape), spread(y, shape)), "what is compared does not move alike")
    return Motion.still_one(shape)


@rule("where", "masked_fill")
def _chosen(step: CheckedStep) -> Motion:
    """Entries of one or the other; zero is scaled by anything, and minus infinity is moved by nothing."""
    shape = step.shape()
    first = step.name == "where"
    condition, a, b = (0, 1, 2) if first else (1, 0, 2)
    need(step.tensor(condition).still, "what decides moves")
    met = _numbers(step.size(condition), shape)
    parts = []
    for place in (a, b):
        one = step.operand(place)
        value = step.number_of(place)
        number = step.given(place) if one is None else step.values[value].get("number") if value is not None else None
        if one is None:
            one = Motion.still_one(())
        parts.append((spread(one, shape), number))
    for (one, _), (other, number) in (parts, parts[::-1]):
        if other.vanishes or (other.still and isinstance(number, int | float) and (number == 0 or number <= MASKED)):
            if not (number is not None and number <= MASKED):
                one.unshifted("it sees every shift")
            if one.mixed is not None:
                need((met[one.mixed.rows] == met[one.mixed.columns]).all(), "entries that are mixed are masked apart")
            return one
    (x, _), (y, _) = parts
    need(alike(x, y), "the choices do not move alike")
    if x.mixed is not None:
        need((met[x.mixed.rows] == met[x.mixed.columns]).all(), "entries that are mixed are chosen apart")
    return x


# --- contractions ---------------------------------------------------------------------------------------------------


def contracted(x: Motion, y: Motion, sizes: tuple[int, int, int, int], centred: tuple[bool, bool]) -> Motion:
    """Σ_k x[b,n,k] y[b,k,m]. Charges add up to something that does not depend on k.

    With matrices M that mix entries, the coefficient of x[n',k'] y[k,m'] must be that of M_z:
    M_x[(n,k),(n',k')] δ(m,m') + M_y[(k',m),(k,m')] δ(n,n') = M_z[(n,m),(n',m')] δ(k,k').
    """
    batch, rows, inner, columns = sizes
    shape = (batch, rows, columns)
    if x.vanishes or y.vanishes or not prod(sizes):
        return Motion.still_one(shape, zero=True)
    left, right = x.grid().reshape(batch, rows, inner), y.grid().reshape(batch, inner, columns)
    if np.isnan(left).any() or np.isnan(right).any():
        if prod((batch, rows, inner, columns)) > 20_000_000:
            raise Unchecked("too large")
        with np.errstate(all="ignore"):
            total = left[:, :, :, None] + right[:, None]
            first = np.nanmax(np.where(np.isnan(total).all(2, keepdims=True), 0.0, total), 2)
        need(same_numbers(total, first[:, :, None]), "what is summed does not move alike")
        charge = first
    else:
        along = left[:, :1] - left[:, :1, :1]
        need(same_numbers(left - left[:, :, :1], along), "what is summed does not move alike")
        opposite = (right - right[:, :1]).transpose(0, 2, 1)
        need(same_numbers(opposite, -along), "what is summed does not move alike")
        charge = left[:, :, :1] + right[:, :1]
    # Rows and columns of zeros move in any way; what they make is zero.
    empty = (np.asarray(np.isnan(left).all(2)), np.asarray(np.isnan(right).all(1)))
    mixed = _mixed_product(x.mixed, y.mixed, sizes, (left, right))
    zero = (empty[0][:, :, None] | empty[1][:, None]).reshape(-1)
    images = _images_of_product(x, y, sizes, centred)
    return Motion(shape, charge.reshape(-1), mixed, None, images, zero if zero.any() else None)


def _mixed_product(
    x: Mixed | None, y: Mixed | None, sizes: tuple[int, int, int, int], grids: tuple[Array, Array]
) -> Mixed | None:
    empty = (np.asarray(np.isnan(grids[0]).all(2)), np.asarray(np.isnan(grids[1]).all(1)))
    batch, rows, inner, columns = sizes
    why = "entries that are mixed are summed otherwise than their duals"
    tables: list[dict[int, float]] = []
    kept: list[tuple[Array, Array, Array]] = []
    for number, (mixed, stays) in enumerate(((x, rows), (y, columns))):
        tables.append({})
        if mixed is None:
            continue
        shape = (batch, rows, inner) if number == 0 else (batch, inner, columns)
        place, other = np.unravel_index(mixed.rows, shape), np.unravel_index(mixed.columns, shape)
        b, n, k = (place[0], place[1], place[2]) if number == 0 else (place[0], place[2], place[1])
        b2, n2, k2 = (other[0], other[1], other[2]) if number == 0 else (other[0], other[2], other[1])
        need((b == b2).all(), "entries of different products are mixed")
        across = k != k2
        need((n[across] == n2[across]).all(), why)
        keys = (b * inner + k) * inner + k2 if number == 0 else (b * inner + k2) * inner + k
        times = stays - empty[number].sum(1)
        found, weights = grouped(keys[across], mixed.weights[across], times[b[across]], why)
        tables[-1] = dict(zip(found.tolist(), weights.tolist(), strict=True))
        along = ~across
        if along.any():
            keys = (b * stays + n) * stays + n2
            table = np.isnan(grids[number]) if number == 0 else np.isnan(grids[number]).transpose(0, 2, 1)
            here = (b[along], n[along], n2[along])
            need((table[here[0], here[1]] == table[here[0], here[2]]).all(), why)
            times = inner - table[here[0], here[1]].sum(1)
            found, weights = grouped(keys[along], mixed.weights[along], times, why)
            b3, rest = np.divmod(found, stays * stays)
            n3, n4 = np.divmod(rest, stays)
            free = np.arange(columns if number == 0 else rows)
            if number == 0:
                r = ((b3 * rows + n3) * columns)[:, None] + free
                c = ((b3 * rows + n4) * columns)[:, None] + free
            else:
                r = (b3[:, None] * rows + free) * columns + n3[:, None]
                c = (b3[:, None] * rows + free) * columns + n4[:, None]
            kept.append((r.reshape(-1), c.reshape(-1), np.repeat(weights, free.size)))
    left, right = tables
    need(left.keys() == right.keys(), why)
    need(all(abs(left[key] + right[key]) < CLOSE for key in left), why)
    if not kept:
        return None
    parts = [np.concatenate(one) for one in zip(*kept, strict=True)]
    return Mixed.of(parts[0], parts[1], parts[2], batch * rows * columns)


def _images_of_product(
    x: Motion, y: Motion, sizes: tuple[int, int, int, int], centred: tuple[bool, bool]
) -> tuple[MovedImage, ...]:
    """A shift of one factor is an image of data: the same wherever the same row of shifts meets the same data."""
    batch, rows, inner, columns = sizes
    found = []
    for labels in labelled(x):
        row, one = _row_labels(labels, batch * rows)
        row = np.where(one & centred[1], -1, row).reshape(batch, rows, 1)
        data = np.arange(batch * columns).reshape(batch, 1, columns)
        found.append(image(np.where(row >= 0, row * (batch * columns) + data, -1)))
    for labels in labelled(y):
        turned = labels.reshape(batch, inner, columns).transpose(0, 2, 1)
        row, one = _row_labels(turned, batch * columns)
        row = np.where(one & centred[0], -1, row).reshape(batch, 1, columns)
        data = np.arange(batch * rows).reshape(batch, rows, 1)
        found.append(image(np.where(row >= 0, row * (batch * rows) + data, -1)))
    return tuple(one for one in found if not one.nothing)


def matrix_product(step: CheckedStep, a: int, b: int) -> Motion:
    """A product of matrices, with or without a leading axis."""
    x, y = step.tensor(a), step.tensor(b)
    sx, sy = x.shape, y.shape
    sizes = (sx[0], sx[1], sx[2], sy[2]) if len(sx) == 3 else (1, sx[0], sx[1], sy[1])
    flat = []
    for place, axis in ((a, len(sx) - 1), (b, len(sy) - 2)):
        value = step.number_of(place)
        flat.append(value is not None and axis in step.centred.get(value, ()))
    return contracted(x, y, sizes, (flat[0], flat[1]))


@rule("mm", "bmm")
def _matrices(step: CheckedStep) -> Motion:
    return replace(matrix_product(step, 0, 1), shape=step.shape())


@rule("mv", "dot", "vdot")
def _vectors(step: CheckedStep) -> Motion:
    x, y = step.tensor(0), step.tensor(1)
    rows = x.shape[0] if len(x.shape) == 2 else 1
    return replace(contracted(x, y, (1, rows, x.shape[-1], 1), (False, False)), shape=step.shape())


@rule("addmm", "baddbmm", "addmv")
def _matrices_plus(step: CheckedStep) -> Motion:
    """A product to which something is added that moves as the product does."""
    shape = step.shape()
    if step.name == "addmv":
        x, y = step.tensor(1), step.tensor(2)
        total = contracted(x, y, (1, x.shape[0], x.shape[1], 1), (False, False))
    else:
        total = matrix_product(step, 1, 2)
    alpha, beta = (float(step.record["named"].get(name, 1)) for name in ("alpha", "beta"))
    total = replace(total, shape=shape, images=tuple(replace(i, weights=i.weights * alpha) for i in total.images))
    return with_bias(total, spread(step.tensor(0), shape), beta)


def with_bias(total: Motion, bias: Motion, factor: float = 1.0) -> Motion:
    """A sum of which the second part moves as the first."""
    if factor == 0:
        return total
    if not bias.vanishes and not total.vanishes:
        need(same_numbers(bias.grid(), total.grid()), "what is added does not move alike")
        need(_same_mixed(bias.mixed, total.mixed), "what is added does not move alike")
    if total.vanishes:
        total = replace(bias, shift=None, images=())
    return added(replace(total, zero=None), bias, factor)


@rule("convolution", "convolution_overrideable")
def _convolution(step: CheckedStep) -> Motion:
    """A contraction over channels that mixes places: nothing may depend on the place."""
    x, w, bias = step.tensor(0), step.tensor(1), step.operand(2)
    turned, groups = bool(step.given(6, "transposed", False)), int(step.given(8, "groups", 1))
    shape = step.shape()
    channels, out, rank = x.shape[1], shape[1], len(x.shape)
    # Axes along which the kernel does nothing are like samples; along the others nothing may depend on the place.
    free = [n for n in range(2, rank) if w.shape[n] == 1 and shape[n] == x.shape[n] and not _given_at(step, 4, n - 2)]
    free = free if any(x.shape[n] > 1 for n in free) and not turned else []
    bare = replace(x, shift=None, images=())
    small = level(bare, [0, *(n for n in range(2, rank) if n not in free)], "it depends on the place")
    rows, kernel = prod(x.shape[n] for n in free), prod(w.shape[2:])
    small = transposed(replace(small, shape=(groups, channels // groups, rows)), (0, 2, 1), (-1,))
    order = (0, 1, 2, 3) if turned else (0, 2, 1, 3)
    own = (groups, channels // groups, out // groups, kernel)
    own = own if turned else (own[0], own[2], own[1], own[3])
    maps = transposed(replace(w, shape=own, shift=None, images=()), order, (-1,))
    sizes = (groups, rows, channels // groups, out // groups * kernel)
    product = replace(contracted(small, maps, sizes, (False, False)), shape=(groups, rows, out // groups, kernel))
    made = level(product, [3], "it depends on the place in the kernel")
    made = transposed(made, (0, 2, 1, 3), (out, rows))
    where = np.zeros((1,) * rank, dtype=np.int64) + np.arange(out).reshape(1, out, *([1] * (rank - 2))) * rows
    step_size = rows
    for axis in free:
        step_size //= x.shape[axis]
        where = where + np.arange(x.shape[axis]).reshape([-1 if n == axis else 1 for n in range(rank)]) * step_size
    total = taken(made, np.broadcast_to(where, shape), shape)
    places = np.broadcast_to(np.arange(out).reshape(1, out, *([1] * (rank - 2))), shape)
    images: list[MovedImage] = []
    for labels in labelled(w):
        # δz[b,o,p] = Σ s[o,i,u] x[b,i,p+u]: the same for output channels with the same s.
        table = labels.reshape(own)
        table = table.transpose(0, 2, 1, 3) if turned else table
        row, _ = _row_labels(np.ascontiguousarray(table), out)
        group = np.arange(out) // (out // groups)
        row = np.where(row >= 0, row * groups + group, -1).reshape(1, out, *([1] * (len(shape) - 2)))
        data = np.arange(prod(shape) // out).reshape(shape[0], 1, *shape[2:])
        images.append(image(np.broadcast_to(np.where(row >= 0, row * (prod(shape) // out) + data, -1), shape)))
    if x.shifted:
        images.append(image(np.arange(prod(shape))))
    total = replace(total, images=tuple(images))
    if bias is None:
        return total
    wide = taken(bias, places, shape)
    return with_bias(total, wide)


def _given_at(step: CheckedStep, place: int, axis: int) -> int:
    """The entry of a list of numbers, one for each axis, that may be one number for all."""
    given = step.given(place, default=[0])
    return int(given[axis] if axis < len(given) else given[0])
