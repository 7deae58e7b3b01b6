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
    need,
    same_numbers,
    spread,
    taken,
)

MASKED = -1e4
"""Numbers below this stand for minus infinity: their exponentials vanish in every precision, shifted or not."""

_NAMESPACES = ("", "aten", "prims", "conserved")
"""Whose operations the rules are about."""

CheckerRule = Callable[["CheckedStep"], "Motion | Sequence[Motion | None]"]
RULES: dict[str, CheckerRule] = {}


def rule(*names: str) -> Callable[[CheckerRule], CheckerRule]:
    """Register a rule for operations of these names."""

    def register(function: CheckerRule) -> CheckerRule:
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
        need(agree and same_mixed(one.mixed, scales[0].mixed), "what is added does not move alike")
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


def same_mixed(a: Mixed | None, b: Mixed | None) -> bool:
    """Whether entries are mixed alike, or not at all in both."""
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
