"""A law's derivation as plain data: how every tensor moves that the law's motion goes through, and by which steps.

What is written can be checked without the inference that found it, by `conserved.inference.checker`. The motion is
one of the law's own: its legs scaled by numbers drawn once, which is all of a torus up to chance, and for a general
linear group the rows that its matrices act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import lsqr

from conserved.inference.capture import Operation, Ref
from conserved.inference.engine import View
from conserved.inference.symmetries import Assembly
from conserved.inference.types import Field, Type, spread
from conserved.inference.typing import Typing
from conserved.symmetry import GeneralLinear, Symmetry

LARGEST = 2_000_000
"""Entries of the largest parameter whose motion is written out."""


class Unwritten(Exception):
    """A law whose derivation is not written out, and why."""


def written(typing: Typing, assembly: Assembly, symmetry: Symmetry) -> dict[str, Any]:
    """The derivation of a law.

    Raises:
        Unwritten: for translations, whose images are known by their axes alone, and for models too large.
    """
    return _Writer(typing, assembly, symmetry).written()


class _Writer:
    def __init__(self, typing: Typing, assembly: Assembly, symmetry: Symmetry) -> None:
        if symmetry.kind.linear:
            raise Unwritten("shifts that were multiplied with data are known by the axes they vary along alone")
        self.typing, self.assembly, self.symmetry = typing, assembly, symmetry
        self.program = typing.program
        sizes = [int(np.prod(leg.view.shape)) for leg in symmetry.legs]
        if max(sizes) > LARGEST:
            raise Unwritten("its parameters are too large to write out; follow a smaller model of the same kind")
        generator = np.random.default_rng(0)
        paired = "complex" in symmetry.kind.code
        count = symmetry.n // 2 if paired else symmetry.n
        numbers = generator.permutation(np.arange(1, 64 + 3 * count))[:count].astype(np.float64)
        if symmetry.kind.code == "one_scale":
            numbers = np.full(symmetry.n, numbers[0])
        self.numbers = np.repeat(numbers, 2) if paired else numbers
        self.whole = self._parameters()
        self.charges = self._charges()
        self.rows = self._rows()

    def _parameters(self) -> dict[str, np.ndarray]:
        """The charge of every entry of the law's parameters, from its legs alone."""
        found: dict[str, np.ndarray] = {}
        for leg in self.symmetry.legs:
            view = leg.view
            flat = found.setdefault(view.parameter, np.zeros(int(np.prod(view.shape))))
            places = view.matrix(torch.arange(flat.size).reshape(view.shape)).numpy()
            scale = self.numbers if len(self.numbers) == places.shape[0] else np.full(places.shape[0], self.numbers[0])
            np.add.at(flat, places, float(leg.degree) * scale[:, None])
        return {
            name: flat.reshape(self.program.values[self.program.parameters[name]].shape) for name, flat in found.items()
        }

    def _charges(self) -> np.ndarray:
        """The charge of every atom: the solution of the equations that moves the parameters as the law does."""
        solution = self.assembly.charges
        rows, targets = [], []
        for name, regions in self.typing.engine.regions.items():
            for region in regions:
                if not region.type.factors:
                    continue
                sizes = tuple(chosen.size for chosen in region.sets)
                total: Any = 0
                for one in region.type.factors:
                    index = np.broadcast_to(spread(one, range(len(sizes)), sizes), sizes).reshape(-1)
                    total = total + solution.rows(index) * float(one.weight)
                rows.append(total)
                known = self.whole.get(name)
                targets.append(
                    np.zeros(int(np.prod(sizes))) if known is None else known[np.ix_(*region.sets)].reshape(-1)
                )
        matrix, target = sparse.vstack(rows).tocsr(), np.concatenate(targets)
        coordinates = lsqr(matrix, target, atol=1e-15, btol=1e-15, iter_lim=50_000)[0]
        if float(np.abs(matrix @ coordinates - target).max(initial=0.0)) > 1e-6 * float(
            np.abs(target).max(initial=1.0)
        ):
            raise Unwritten("its motion is not among those that were found")
        return np.asarray(solution.expand @ coordinates)

    def _rows(self) -> dict[int, int]:
        """For every class of atoms that a general linear group mixes its row, from 1 on."""
        if not isinstance(self.symmetry.kind, GeneralLinear):
            return {}
        found: dict[int, int] = {}
        part = self.assembly.parts[self.symmetry.name][0]
        atoms = part.region.type.factors[part.factor].atoms.reshape(-1)[part.places.reshape(-1)]
        for row, atom in enumerate(np.sort(atoms)):
            found[int(self.assembly.classes[atom])] = row + 1
        return found

    def written(self) -> dict[str, Any]:
        """All of it."""
        values: dict[str, Any] = {}
        steps = []
        begins: dict[str, list[int]] = {}
        for number in self.typing.live:
            operation = self.program.operations[number]
            involved = [*operation.inputs(), *operation.results]
            entries = {value: self._value(value) for value in involved}
            if not any(entry is not None and (entry["charges"] or "rows" in entry) for entry in entries.values()):
                continue
            made = [self.typing.known.get(value) for value in operation.results]
            if made and isinstance(made[0], View) and made[0].offset:
                # What moves is the sum of the parameter and a number.
                begins.setdefault(made[0].name, []).extend(operation.results)
            elif not (operation.results and operation.results[0] in self.typing.deferred):
                steps.append(self._step(operation))
            values |= {
                str(v): e if e is not None else {"shape": list(self.program.values[v].shape), "charges": []}
                for v, e in entries.items()
            }
        for name, value in self.program.parameters.items():
            if str(value) in values:
                begins.setdefault(name, []).append(value)
        return {
            "law": self.symmetry.name,
            "kind": self.symmetry.kind.code,
            "epsilon": self.symmetry.epsilon,
            "begins": begins,
            "values": values,
            "steps": steps,
            "outputs": [value for value in self.program.outputs if str(value) in values],
        }

    def _step(self, operation: Operation) -> dict[str, Any]:
        arguments: list[Any] = [_plain(one) for one in operation.args]
        name = operation.name
        deferred = [value for value in operation.inputs() if value in self.typing.deferred]
        if deferred:
            left, right = self.typing.deferred[deferred[0]]
            name, arguments = "conserved::summed_product", [_plain(left), _plain(right), *arguments[1:]]
        return {
            "operation": name,
            "arguments": arguments,
            "results": [value for value in operation.results if value in self.typing.known] or operation.results[:1],
            "module": operation.module,
            "line": operation.line,
        }

    def _value(self, value: int) -> dict[str, Any] | None:
        """How a tensor moves; None if it does not."""
        described = self.program.values[value]
        name = described.parameter
        known = self.typing.known.get(value)
        entry: dict[str, Any] = {"shape": list(described.shape), "charges": []}
        if isinstance(known, View):
            if known.offset == 0 and any(
                leg.view.parameter == known.name and leg.view.offset for leg in self.symmetry.legs
            ):
                return None
            return self._read(known, entry) if known.name in self.whole else None
        if name is not None and name in self.whole:
            view = self.typing.engine.parameter(name, described.shape)
            return self._read(view, entry)
        constant = described.constant
        if not isinstance(known, Type):
            return entry | {"zero": True} if constant is not None and not bool(constant.any()) else None
        if known.zero:
            entry["zero"] = True
        for one in known.factors:
            charge = float(one.weight) * self.charges[one.atoms]
            if one.virtual and not np.abs(charge).max(initial=0.0) > 1e-9 and not one.dims:
                continue
            if one.virtual:
                raise Unwritten("it passes through entries that are looked up by numbers")
            if np.abs(charge).max(initial=0.0) > 1e-9:
                entry["charges"].append({"axes": list(one.dims), "array": np.round(charge, 9).tolist()})
            self._labelled(entry, one)
        return entry

    def _labelled(self, entry: dict[str, Any], one: Field) -> None:
        if not self.rows:
            return
        classes = self.assembly.classes[one.atoms]
        row = np.vectorize(lambda c: self.rows.get(int(c), 0), otypes=[np.int64])(classes)
        if row.any():
            fine = self.assembly.engine.partition.fine[one.atoms]
            copies = np.unique(fine, return_inverse=True)[1].reshape(one.atoms.shape)
            copies = copies * one.atoms.size + _occurrence(one.atoms)
            entry["rows"] = {"axes": list(one.dims), "array": row.tolist()}
            entry["copies"] = {"axes": list(one.dims), "array": copies.tolist()}

    def _read(self, view: View, entry: dict[str, Any]) -> dict[str, Any]:
        """A part of a parameter, through the index it is read by."""
        shape = tuple(entry["shape"])
        if any(one.virtual for one in view.coordinates):
            raise Unwritten("it passes through entries that are looked up by numbers")
        # Along axes that the parameter was repeated along, every repetition is a copy of its own.
        axes = sorted({dim for one in view.coordinates for dim in one.dims})
        sizes_read = tuple(shape[dim] for dim in axes)
        index = tuple(np.broadcast_to(spread(one, axes, sizes_read), sizes_read) for one in view.coordinates)
        charge = self.whole[view.name][index]
        if np.abs(charge).max(initial=0.0) > 1e-9:
            entry["charges"].append({"axes": axes, "array": np.round(charge, 9).tolist()})
        if self.rows:
            row = np.zeros(self.whole[view.name].shape, dtype=np.int64)
            copy = np.zeros_like(row)
            for region in self.typing.engine.regions.get(view.name, []):
                sizes = tuple(chosen.size for chosen in region.sets)
                for one in region.type.factors:
                    part: dict[str, Any] = {}
                    self._labelled(part, one)
                    if part:
                        where = tuple(slice(None) if d in one.dims else None for d in range(len(sizes)))
                        inner = np.broadcast_to(np.asarray(part["rows"]["array"])[where], sizes)
                        number = np.broadcast_to(np.asarray(part["copies"]["array"])[where], sizes)
                        outside = np.ravel_multi_index(
                            tuple(
                                np.indices(sizes)[d] if d not in one.dims else np.zeros(sizes, dtype=np.int64)
                                for d in range(len(sizes))
                            ),
                            sizes,
                        )
                        mixed = inner > 0
                        row[np.ix_(*region.sets)] = np.where(mixed, inner, row[np.ix_(*region.sets)])
                        copy[np.ix_(*region.sets)] = np.where(
                            mixed, number * int(np.prod(sizes)) + outside, copy[np.ix_(*region.sets)]
                        )
            if row[index].any():
                entry["rows"] = {"axes": axes, "array": row[index].tolist()}
                entry["copies"] = {"axes": axes, "array": copy[index].tolist()}
        return entry


def _occurrence(atoms: np.ndarray) -> np.ndarray:
    """For every entry how often its atom occurred before: entries of one atom belong to different copies."""
    flat = atoms.reshape(-1)
    order = np.argsort(flat, kind="stable")
    first = np.concatenate([[True], np.diff(flat[order]) != 0])
    begins = np.maximum.accumulate(np.where(first, np.arange(flat.size), 0))
    found = np.empty(flat.size, dtype=np.int64)
    found[order] = np.arange(flat.size) - begins
    return found.reshape(atoms.shape)


def _plain(argument: Any) -> Any:
    """An argument as plain data: tensors by number."""
    if isinstance(argument, Ref):
        return {"value": argument.value}
    if isinstance(argument, list | tuple):
        return [_plain(one) for one in argument]
    if isinstance(argument, Mapping):
        return {str(key): _plain(one) for key, one in argument.items()}
    return argument if isinstance(argument, int | float | str | bool) or argument is None else str(argument)
