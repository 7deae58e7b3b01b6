"""Laws of maps whose inputs are linearly dependent: entries that are equal, zero, or add up to a constant.

For y = W x and any loss, ∂L/∂W = δ xᵀ. If Σ_k n_k x_k = 0 for every input, then Σ_k n_k ∂L/∂W[:, k] = 0, and the linear
law Σ_k n_k W[:, k] is conserved. With a bias the relation may have a constant: Σ_k n_k x_k + n_0 = 0. They are found
over a prime field (`random_field`), in programs whose tensors are small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from conserved.inference.further_laws.random_field import DRAWS, LARGEST, FieldProgram, null_space
from conserved.inference.program.captured_program import Operation, ValueRef
from conserved.inference.rules import base_name
from conserved.inference.types.echelon import Echelon, Equation
from conserved.inference.types.engine import fraction
from conserved.inference.typing import Typing
from conserved.symmetry import Leg, Symmetry, Translation, View

MOST_OPERATIONS = 400
"""Longer programs are not followed over the field."""


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """The one operation in which a parameter meets data: its entries there, with the summed axis last."""

    name: str
    entries: np.ndarray
    """Numbers of the parameter's entries from one on: (outputs, inputs)."""
    rows: np.ndarray
    """Numbers of the data, (places, inputs), modulo the prime."""
    bias: str = ""
    """A parameter that is added to the outputs, one entry for each."""


def dependent_inputs(typing: Typing, known: Sequence[Symmetry]) -> list[Symmetry]:
    """Return the linear laws that follow from linear relations between inputs of maps.

    Args:
        typing: the typed program.
        known: laws that were found otherwise; what follows from them is not listed again.
    """
    program = typing.program
    shapes = {name: program.values[value].shape for name, value in program.parameters.items()}
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    if len(typing.live) > MOST_OPERATIONS or sum(sizes.values()) > LARGEST or program.shared:
        return []
    field = FieldProgram(program, typing.live)
    span = _Span(sizes)
    for symmetry in known:
        if symmetry.kind.linear and symmetry.exact:
            span.add(symmetry.legs)
    laws = []
    numbers: Counter[str] = Counter()
    for use in _uses(typing, field):
        for relation in _relations(use):
            legs = _legs(use, relation, shapes[use.name])
            if legs and span.add(legs):
                module, _, leaf = use.name.rpartition(".")
                part = str(numbers[use.name]) if leaf == "weight" else f"{leaf}.{numbers[use.name]}"
                numbers[use.name] += 1
                laws.append(Symmetry(block=module, family="dependent_inputs", part=part, kind=Translation(), legs=legs))
    return laws


class _Span:
    """The span of the linear laws so far, over all entries of all parameters."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        starts = np.concatenate([[0], np.cumsum(list(sizes.values()))])
        self._start = {name: int(start) for name, start in zip(sizes, starts, strict=False)}
        self._echelon = Echelon()

    def add(self, legs: Sequence[Leg]) -> bool:
        """Add the numbers of a law; return whether one of them was new."""
        vectors: list[Equation] = [{} for _ in range(legs[0].view.m)]
        for leg in legs:
            view = leg.view
            degree = fraction(leg.degree) or Fraction(leg.degree)
            entries = view.matrix(torch.arange(int(np.prod(view.shape)), device="cpu").reshape(view.shape)).numpy()
            for vector, column in zip(vectors, (self._start[view.parameter] + entries.T).tolist(), strict=True):
                for entry in column:
                    vector[entry] = vector.get(entry, 0) + degree
        before = self._echelon.rank
        for vector in vectors:
            self._echelon.add({entry: value for entry, value in vector.items() if value})
        return self._echelon.rank > before


def _uses(typing: Typing, field: FieldProgram) -> Iterator[ParameterUse]:
    """Yield contractions of parameters that occur nowhere else."""
    program = typing.program
    uses_by_name: dict[str, list[Operation]] = {}
    for number in typing.live:
        operation = program.operations[number]
        moved = {value for value in operation.results if value in field.entries}
        for value in operation.inputs():
            if value in field.entries and not moved:
                uses_by_name.setdefault(field.entries[value][0], []).append(operation)
    outputs = {field.entries[value][0] for value in program.outputs if value in field.entries}
    single = {name: uses[0] for name, uses in uses_by_name.items() if len(uses) == 1 and name not in outputs}
    for name, operation in single.items():
        if not operation.custom and not operation.stopped and name not in program.hooked:
            yield from _uses_in_contraction(name, operation, field, single)


def _uses_in_contraction(
    name: str, operation: Operation, field: FieldProgram, single: dict[str, Operation]
) -> Iterator[ParameterUse]:
    kind = base_name(operation.name)
    if kind == "aten::mul":
        yield from _uses_as_gain(name, operation, field)
        return
    if kind == "aten::convolution":
        yield from _uses_in_convolution(name, operation, field)
        return
    if kind not in ("aten::mm", "aten::bmm", "aten::addmm"):
        return
    left, right = operation.args[-2:]
    own, other = (left, right) if _holds(left, name, field) else (right, left)
    numbers = field.of(other)
    if numbers is None or not numbers.size or not _holds(own, name, field) or operation.kwargs:
        return
    entries = field.entries[own.value][1]
    data = numbers
    if own is right:
        entries, data = np.swapaxes(entries, -1, -2), np.swapaxes(data, -1, -2)
    # Now outputs × inputs for the parameter, inputs × places for the data.
    bias = ""
    if kind == "aten::addmm" and isinstance(operation.args[0], ValueRef) and operation.args[0].value in field.entries:
        bias, index = field.entries[operation.args[0].value]
        if single.get(bias) is not operation or index.ndim != 1 or own is left or index.size != entries.shape[0]:
            bias = ""
    if entries.ndim == 2:
        yield ParameterUse(name, entries, _rows(np.swapaxes(data, 1, 2)), bias)
    elif bool((entries == entries[:1]).all()):
        # The same map for every index of the batch: its inputs are those of all of them.
        yield ParameterUse(name, entries[0], _rows(np.swapaxes(data, 2, 3)))
    elif np.unique(entries).size == entries.size:
        for batch in range(entries.shape[0]):
            yield ParameterUse(name, entries[batch], _rows(np.swapaxes(data[:, batch], 1, 2)))


def _uses_in_convolution(name: str, operation: Operation, field: FieldProgram) -> Iterator[ParameterUse]:
    """Yield a convolution as a linear map of channels, with one output for every position of its kernel."""
    data, weight, transposed, groups = (operation.args[index] for index in (0, 1, 6, 8))
    numbers = field.of(data)
    if numbers is None or not numbers.size or transposed or groups != 1 or not _holds(weight, name, field):
        return
    entries = np.moveaxis(field.entries[weight.value][1], 1, -1)
    yield ParameterUse(name, entries.reshape(-1, entries.shape[-1]), _rows(np.moveaxis(numbers, 2, -1)))


def _uses_as_gain(name: str, operation: Operation, field: FieldProgram) -> Iterator[ParameterUse]:
    """Yield entries of a gain that only multiply zeros, as maps of one input each."""
    left, right = operation.args[:2]
    own, other = (left, right) if _holds(left, name, field) else (right, left)
    numbers = field.of(other)
    if numbers is None or not _holds(own, name, field):
        return
    entries = field.entries[own.value][1]
    count = max(entries.ndim, numbers.ndim - 1)
    spread = np.broadcast_arrays(
        entries.reshape((1,) * (count - entries.ndim) + entries.shape),
        (numbers != 0).any(0).reshape((1,) * (count - numbers.ndim + 1) + numbers.shape[1:]),
    )
    reached = np.unique(spread[0][spread[1]])
    for entry in np.setdiff1d(entries, reached):
        yield ParameterUse(name, np.array([[entry]]), np.zeros((1, 1), dtype=np.int64))


def _holds(ref: Any, name: str, field: FieldProgram) -> bool:
    return isinstance(ref, ValueRef) and ref.value in field.entries and field.entries[ref.value][0] == name


def _rows(data: np.ndarray) -> np.ndarray:
    """Return all draws and places below each other."""
    return data.reshape(-1, data.shape[-1])


def _relations(use: ParameterUse) -> list[list[Fraction]]:
    """Return linear relations between the inputs of a map; the last coefficient is that of its bias, if it has one."""
    rows = use.rows
    if use.bias:
        rows = np.concatenate([rows, np.ones((rows.shape[0], 1), dtype=np.int64)], 1)
    # With as many places as inputs and more, chance cannot make a relation.
    return null_space(rows) if rows.shape[0] >= rows.shape[1] + DRAWS // 2 or not rows.any() else []


def _legs(use: ParameterUse, relation: list[Fraction], shape: tuple[int, ...]) -> tuple[Leg, ...]:
    """Return a leg for every coefficient: the entries of the map that it multiplies, a column for each output."""
    groups: dict[Fraction, list[int]] = {}
    for index, number in enumerate(relation[: use.entries.shape[1]]):
        if number:
            groups.setdefault(number, []).append(index)
    legs = []
    for number, operations in groups.items():
        view = _view(use.name, shape, use.entries[:, operations].T - 1)
        if view is None:
            return ()
        legs.append(Leg(view, _degree(number)))
    if use.bias and relation[-1]:
        outputs = use.entries.shape[0]
        legs.append(Leg(View.of(use.bias, (outputs,), grid=(1, outputs), axes=0), _degree(relation[-1])))
    return tuple(legs)


def _degree(number: Fraction) -> int | float:
    return number.numerator if number.denominator == 1 else float(number)


def _view(name: str, shape: tuple[int, ...], entries: np.ndarray) -> View | None:
    """Return the view whose rows and columns are these entries of a parameter, if its axes can show them."""
    size = int(np.prod(shape))
    index = np.arange(size).reshape(shape)
    for axis in range(len(shape)):
        faced = np.moveaxis(index, axis, 0).reshape(shape[axis], -1)
        rows = [int(np.flatnonzero((faced == row[0]).any(1))[0]) for row in entries]
        picked = np.isin(faced[rows], entries)
        if (picked == picked[:1]).all() and picked[0].sum() == entries.shape[1]:
            columns = np.flatnonzero(picked[0])
            if not np.array_equal(faced[rows][:, columns], entries):
                continue
            rest = [shape[d] for d in range(len(shape)) if d != axis]
            if columns.size == faced.shape[1]:
                return View.of(name, shape, axes=axis, rows=tuple(rows))
            return _pick(name, shape, axis, rows, columns, rest)
    return None


def _pick(
    name: str, shape: tuple[int, ...], axis: int, rows: list[int], columns: np.ndarray, rest: list[int]
) -> View | None:
    """Return a view of some of the columns: a range along one of the other axes."""
    where = np.unravel_index(columns, rest) if rest else ()
    pick: dict[int, Any] = {}
    others = [d for d in range(len(shape)) if d != axis]
    for dim, part in zip(others, where, strict=True):
        chosen = np.unique(part)
        if chosen.size == shape[dim]:
            continue
        if bool((np.diff(chosen) != 1).any()):
            return None
        pick[dim] = (int(chosen[0]), int(chosen[-1]) + 1)
    if int(np.prod([pick[d][1] - pick[d][0] if d in pick else shape[d] for d in others])) != columns.size:
        return None
    return View.of(name, shape, axes=axis, rows=tuple(rows), pick=pick)
