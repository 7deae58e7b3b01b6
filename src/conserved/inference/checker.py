"""Checks the derivation of a law step by step, with rules of its own.

A derivation (see `conserved.inference.derivation_record`) is plain data: the operations of a program in order, and a
law, that is, the entries of parameters that its group moves. The checker draws one direction of the group at random,
moves the parameters along it, and works out for one operation after the other how its results move
(`conserved.inference.checker_rules`). The law is proved if no output moves. Which directions are symmetries is a linear
space, so one that was drawn from 2⁴⁰ numbers for every coordinate stands for all of them. Where derivations also say
how tensors move, as the inference has it, that must agree. Nothing is shared with the inference that wrote them.

A step without a rule makes whatever depends on it unchecked, never right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from conserved.inference import checker_contractions, checker_places, checker_reductions  # noqa: F401  (their rules)
from conserved.inference.checker_rules import RULES, CheckedStep, plain_name, values_in
from conserved.inference.motions import (
    CLOSE,
    LARGEST_NUMBER,
    Array,
    Mixed,
    Motion,
    Unchecked,
    Wrong,
    added,
    level,
    need,
    same_numbers,
)

SEES_EVERYTHING = frozenset(
    (
        *("exp", "log", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu", "sin", "cos", "erf", "expm1", "log1p"),
        *("mish", "celu", "selu", "hardswish", "hardsigmoid", "log_sigmoid_forward", "round", "floor", "ceil", "tan"),
        *("mse_loss", "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy_with_logits", "huber_loss"),
        *(
            "smooth_l1_loss",
            "exp2",
            "atan",
            "acos",
            "asin",
            "sinh",
            "log2",
            "log10",
            "hardshrink",
            "softshrink",
            "atan2",
        ),
        *("binary_cross_entropy", "sinc", "cosh", "glu", "local_scalar_dense", "prod", "cumprod"),
    )
)
"""Functions that are right only for tensors that do not move."""


KEEPS_ORDER = ("view", "unsafe_view", "reshape", "clone", "to_copy", "alias", "unsqueeze", "squeeze", "contiguous")


@dataclass(slots=True)
class Report:
    """What was checked: how many steps follow, and what does not or has no rule."""

    steps: int = 0
    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    sized: list[str] = field(default_factory=list)
    """Steps that follow only at this size: a share of one entry, a sum over one, a look-up by fixed numbers."""

    @property
    def ok(self) -> bool:
        """Whether every step follows and no output moves."""
        return not self.wrong and not self.unchecked


@dataclass(frozen=True, slots=True)
class _Failed:
    """A value whose motion is not known, and why."""

    why: str
    unchecked: bool


def check(derivation: Mapping[str, Any]) -> Report:
    """Move the parameters of a law and follow the program; no output may move.

    Args:
        derivation: a law and a program, as `LawSet.derivation.written(law)` writes them, perhaps read from a file.
    """
    return _Walk(derivation["program"], derivation["law"], derivation.get("types", {})).report()


def motions_of(derivation: Mapping[str, Any]) -> dict[int, Motion]:
    """How every tensor of a program moves with a law, by its number; those that do not move are left out."""
    walk = _Walk(derivation["program"], derivation["law"], {})
    walk.report()
    return walk.motions


class _Walk:
    def __init__(self, program: Mapping[str, Any], law: Mapping[str, Any], types: Mapping[str, Any]) -> None:
        self.program, self.law, self.types = program, law, types
        self.values = {int(key): value for key, value in program["values"].items()}
        self.soft = bool(law.get("epsilon"))
        self.motions: dict[int, Motion] = {}
        self.failed: dict[int, _Failed] = {}
        self.centred: dict[int, frozenset[int]] = {}
        self.means: dict[int, tuple[int, frozenset[int]]] = {}
        self.same: dict[int, int] = {}
        """Values that hold the entries of another one, in order."""
        self.found = Report()

    def report(self) -> Report:
        """Everything."""
        for name, motion in moved_parameters(self.law, self.program).items():
            value = int(self.program["parameters"][name])
            if name in self.program.get("hooked", ()) or name in self.program.get("shared", ()):
                self.failed[value] = _Failed(f"{name} has a hook, or shares memory with another parameter", False)
            self.motions[value] = motion
        for step in self.program["steps"]:
            self._step(step)
        classes = self.program.get("classes")
        for value in self.program["outputs"]:
            self._judge(int(value), classes, "an output moves")
        for value in self.program.get("read", ()):
            self._judge(int(value), None, "a number that decides moves")
        return self.found

    def _step(self, record: Mapping[str, Any]) -> None:
        operands = values_in(record["arguments"]) + values_in(record["named"])
        name = plain_name(record["operation"])
        # Whole numbers do not move a little: they are constant around almost every point, and no gradient flows there.
        made = [value for value in record["results"] if not self.values[value].get("whole")]
        if not made:
            return
        self._note(record, name, operands)
        failed = next((self.failed[value] for value in operands if value in self.failed), None)
        if failed is not None:
            if not (name == "div" and self._equal(operands)):
                self.failed.update(dict.fromkeys(made, failed))
            else:
                self.found.sized.append(f"{name} in {record['module'] or 'the program'}, {record['line']}")
            return
        moving = any(value in self.motions and not self.motions[value].still for value in operands)
        if not moving and not self._followed(name, operands):
            return
        step = CheckedStep(record, self.values, self.motions, self.soft, self.centred, self.means)
        try:
            results = self._results(step, moving)
            self.found.steps += moving
            if moving and step.sized:
                self.found.sized.append(f"{name} in {record['module'] or 'the program'}, {record['line']}")
            for value, motion in zip(record["results"], results, strict=False):
                self._keep(value, motion)
        except (Wrong, Unchecked) as problem:
            if moving:
                where = f"{name} in {record['module'] or 'the program'}, {record['line']}"
                reason = _Failed(f"{where}: {problem}", isinstance(problem, Unchecked))
                self.failed.update(dict.fromkeys(made, reason))

    def _followed(self, name: str, operands: Sequence[int]) -> bool:
        """Whether an operation on what does not move matters: zeros move in any way, centred tensors sum to zero."""
        if name in ("zeros", "new_zeros", "zeros_like", "zero"):
            return True
        if any(value in self.motions or self.values[value].get("zero") for value in operands):
            return True
        return self.law["kind"] == "translation" and name in ("mean", "sub", "native_layer_norm")

    def _note(self, record: Mapping[str, Any], name: str, operands: Sequence[int]) -> None:
        """Remember values that are the same entries again, and pass on along which axis a tensor sums to zero."""
        if len(operands) != 1:
            return
        (value,), result = operands, record["results"][0]
        shape, other = (tuple(self.values[v]["shape"]) for v in (value, result))
        summed = name in ("sum", "mean") and prod(shape) == prod(other)
        if summed or name in KEEPS_ORDER:
            self.same[result] = self.same.get(value, value)
            if shape and other and len(shape) - 1 in self.centred.get(value, ()) and shape[-1] == other[-1]:
                self.centred[result] = frozenset({len(other) - 1})

    def _equal(self, operands: Sequence[int]) -> bool:
        """Whether two operands hold the same entries."""
        return len(operands) == 2 and len({self.same.get(value, value) for value in operands}) == 1

    def _results(self, step: CheckedStep, moving: bool) -> list[Motion | None]:
        record = step.record
        if record.get("stopped") and moving:
            raise Wrong("no gradient flows through what moves")
        function = RULES.get(step.name)
        results: list[Motion | None]
        if function is not None:
            given = function(step)
            results = list(given) if not isinstance(given, Motion) else [given]
        elif step.name in SEES_EVERYTHING:
            need(not moving, "it sees every scale and shift")
            results = [None]
        elif moving:
            raise Unchecked("no rule here")
        else:
            return []
        if len(results) < len(record["results"]) and record["operation"].partition(".")[0].endswith("_"):
            results += [results[0]] * (len(record["results"]) - len(results))
        for value in record["results"]:
            if value in self.program.get("hooked_values", ()):
                need(all(one is None or one.still for one in results), "a hook changes the gradient of what moves")
        return results

    def _keep(self, value: int, motion: Motion | None) -> None:
        if motion is None:
            return
        shape = tuple(self.values[value]["shape"])
        assert motion.shape == shape or prod(motion.shape) == prod(shape), (motion.shape, shape)
        if motion.shape != shape:
            motion = Motion(shape, motion.charge, motion.mixed, motion.shift, motion.images, motion.zero)
        if not motion.still or motion.zero is not None:
            self.motions[value] = motion
        written = self.types.get(str(value))
        if written is not None and not motion.vanishes:
            agree = same_numbers(motion.grid(), written_charges(written, shape))
            need(agree, "the tensor does not move as it is written")

    def _judge(self, value: int, classes: int | None, why: str) -> None:
        if value in self.failed:
            reason = self.failed[value]
            (self.found.unchecked if reason.unchecked else self.found.wrong).append(reason.why)
            return
        motion = self.motions.get(value)
        if motion is None or motion.still:
            return
        if classes is None or motion.scaled:
            self.found.wrong.append(why)
            return
        try:
            level(motion, [classes], why)
        except Wrong:
            self.found.wrong.append(why)


def written_charges(written: Iterable[Mapping[str, Any]], shape: tuple[int, ...]) -> Array:
    """The charges of a tensor as a derivation writes them: arrays over some of its axes, to be added up."""
    total = np.zeros(shape)
    for one in written:
        array = np.asarray(one["array"], dtype=np.float64)
        index = tuple(slice(None) if axis in one["axes"] else None for axis in range(len(shape)))
        total = total + array[index]
    return total


def direction(law: Mapping[str, Any], count: int) -> Array:
    """The numbers that stand for a direction of a law's group: drawn, but the same for everyone who asks."""
    generator = np.random.default_rng([len(law["legs"]), count, 2026])
    return generator.integers(LARGEST_NUMBER // 4, LARGEST_NUMBER, count).astype(np.float64)


def moved_parameters(law: Mapping[str, Any], program: Mapping[str, Any]) -> dict[str, Motion]:
    """How the parameters move in one direction of a law's group."""
    found: dict[str, Motion] = {}
    kind = law["kind"]
    for leg in law["legs"]:
        name = leg["parameter"]
        shape = tuple(program["values"][str(program["parameters"][name])]["shape"])
        places = np.asarray(leg["places"], dtype=np.int64)
        one = _moved_leg(law, leg, places, shape)
        known = found.get(name)
        if known is None:
            found[name] = one
            continue
        mixed = [m for m in (known.mixed, one.mixed) if m is not None]
        both = added(known, one)
        found[name] = Motion(
            shape,
            known.charge + one.charge,
            _together(mixed, prod(shape)) if mixed else None,
            both.shift,
        )
    if kind not in ("general_linear", "complex_scaling", "scaling", "one_scale", "translation"):
        raise Unchecked(f"no rule for the kind {kind}")
    return found


def _together(mixed: Sequence[Mixed], size: int) -> Mixed | None:
    rows, columns, weights = (
        np.concatenate(parts) for parts in zip(*((m.rows, m.columns, m.weights) for m in mixed), strict=True)
    )
    return Mixed.of(rows, columns, weights, size)


def _moved_leg(law: Mapping[str, Any], leg: Mapping[str, Any], places: Array, shape: tuple[int, ...]) -> Motion:
    size, (rows, columns), degree = prod(shape), places.shape, float(leg["degree"])
    charge, shift = np.zeros(size), np.zeros(size)
    kind = law["kind"]
    if kind == "translation":
        _add(shift, places, degree * direction(law, columns)[None])
        return Motion(shape, charge, None, shift)
    if kind == "general_linear":
        matrix = direction(law, rows * rows).reshape(rows, rows)
        matrix = matrix if degree > 0 else -matrix.T
        _add(charge, places, np.diag(matrix)[:, None])
        r, c = (array.reshape(-1) for array in np.nonzero(~np.eye(rows, dtype=bool)))
        weights = np.repeat(matrix[r, c], columns)
        return Motion(shape, charge, Mixed.of(places[r].reshape(-1), places[c].reshape(-1), weights, size))
    if kind == "one_scale":
        numbers = np.full(rows, direction(law, 1)[0])
    elif kind == "complex_scaling":
        numbers = np.repeat(direction(law, rows // 2), 2)
    else:
        numbers = direction(law, rows)
    _add(charge, places, degree * numbers[:, None])
    offset = float(leg.get("offset", 0.0))
    return Motion(shape, charge, None, charge * offset if abs(offset) > CLOSE * 1e-9 else None)


def _add(total: Array, places: Array, numbers: Array) -> None:
    """Add numbers at places, at places that occur twice twice."""
    np.add.at(total, places.reshape(-1), np.broadcast_to(numbers, places.shape).reshape(-1))
