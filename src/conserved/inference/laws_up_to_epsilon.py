r"""Laws up to ε made exact: how a law's scales enter every normalisation that forgets them.

Under the motion of a law, what a norm divides by scales as e^{ct}; the norm forgets that but for its ε. With s the mean
square that is normalised and y the output, the loss changes by Σ c ε/(s + ε) ⟨y, ∂L/∂y⟩ instead of by zero. The charges
c are read off the solved typing; the rest is measured where the model runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conserved.errors import ConservedError
from conserved.inference.rules import base_name
from conserved.inference.symmetries.unnamed_symmetry import LegPart
from conserved.inference.types.engine import SoftenedCharges
from conserved.inference.types.system import Solution
from conserved.inference.typing import Typing
from conserved.symmetry import Symmetry

FUNCTIONS = ("native_layer_norm", "fused_rms_norm", "rms_norm", "native_group_norm", "native_batch_norm")
"""Operations that normalise and have ε as an argument; a name may be longer."""


@dataclass(frozen=True, slots=True, eq=False)
class ForgottenScale:
    """One normalisation of a program that forgets the scales of a law."""

    module: str
    function: bool
    """Whether it is one operation; otherwise it is written out, and `module` is where."""
    call: int
    """Its number among the normalisations of that kind in its module, in the order they run."""
    epsilon: float
    dims: tuple[int, ...]
    """Axes of what is normalised along which the charges differ."""
    charges: np.ndarray
    """For every row of the law, the charge of what is divided by, over these axes."""


class UnsolvedError(ConservedError, ValueError):
    """The motion of a law is not one of the free numbers of the typing."""


class ForgottenScales:
    """Answers, for the laws of one typed program, through which normalisations they pass."""

    def __init__(self, typing: Typing, parts: Mapping[str, list[LegPart]], solution: Solution) -> None:
        self._typing, self._parts = typing, parts
        self._rows = solution.expand[:, np.flatnonzero(solution.soft > 0)].tocsr()
        self._columns = self._rows.tocsc()
        self._numbers = _number_calls(typing)
        self._regions = {id(region): region for regions in typing.engine.regions.values() for region in regions}
        atoms = [
            np.stack([flat, np.full_like(flat, id(region))], 1)
            for region in self._regions.values()
            for factor in region.type.factors
            for flat in [factor.atoms.reshape(-1)]
        ]
        table = np.concatenate(atoms) if atoms else np.zeros((0, 2), dtype=np.int64)
        self._owners = table[np.argsort(table[:, 0], kind="stable")]

    def of(self, symmetry: Symmetry) -> tuple[ForgottenScale, ...]:
        """Return every normalisation through which a law up to ε passes.

        Raises:
            UnsolvedError: if the typing does not determine the motion of the law.

        """
        if symmetry.name not in self._parts or not symmetry.kind.positive:
            raise UnsolvedError(symmetry.name)
        motions = np.stack(list(self._motions(symmetry)))
        forgotten = []
        for softened in self._typing.engine.softened:
            dims, charges = _charges(softened, motions)
            if not np.abs(charges).any():
                continue
            module, function, call = self._numbers[softened.origin]
            forgotten.append(ForgottenScale(module, function, call, float(softened.epsilon), dims, charges))
        return tuple(forgotten)

    def _motions(self, symmetry: Symmetry) -> Iterator[np.ndarray]:
        """Yield for every row of a law the charges of all atoms while it moves."""
        parts = self._parts[symmetry.name]
        own_regions = {id(part.region) for part in parts}
        for row in range(symmetry.n if symmetry.kind.shared == "rows" else 1):
            yield self._motion([self._moved(part, row, symmetry) for part in parts], own_regions, symmetry.name)

    @staticmethod
    def _moved(part: LegPart, row: int, symmetry: Symmetry) -> tuple[float, list[tuple[float, np.ndarray]]]:
        """Return the degree of a leg, and the atoms whose charges add up to it, one set for every factor."""
        factors = part.region.type.factors
        if part.factor < 0:
            return float(part.degree), [(float(factor.weight), factor.atoms.reshape(-1)) for factor in factors]
        factor = factors[part.factor]
        indices = part.indices[row] if symmetry.kind.shared == "rows" else part.indices
        return float(part.degree), [(float(factor.weight), factor.atoms.reshape(-1)[np.asarray(indices).reshape(-1)])]

    def _motion(
        self, legs: Sequence[tuple[float, list[tuple[float, np.ndarray]]]], own_regions: set[int], name: str
    ) -> np.ndarray:
        degree, factors = legs[0]
        candidates = {int(column) for _, atoms in factors for column in self._rows[int(atoms[0])].indices}
        all_atoms = [
            factor.atoms.reshape(-1) for region in own_regions for factor in self._regions[region].type.factors
        ]
        named = np.concatenate([atoms for _, factors in legs for _, atoms in factors])
        others = np.setdiff1d(np.concatenate(all_atoms), named)
        for column in sorted(candidates):
            vector = self._columns[:, column].toarray().reshape(-1)
            scale = _power(factors, vector) / degree
            if (
                np.isfinite(scale)
                and scale
                and all(np.isclose(_power(atoms, vector), power * scale) for power, atoms in legs)
                and not vector[others].any()
                and not any(self._moves(region, vector) for region in self._touched(vector) - own_regions)
            ):
                return np.asarray(vector / scale)
        raise UnsolvedError(name)

    def _touched(self, vector: np.ndarray) -> set[int]:
        atoms = np.flatnonzero(vector)
        low = np.searchsorted(self._owners[:, 0], atoms, "left")
        high = np.searchsorted(self._owners[:, 0], atoms, "right")
        return {int(region) for a, b in zip(low, high, strict=True) for region in np.unique(self._owners[a:b, 1])}

    def _moves(self, region: int, vector: np.ndarray) -> bool:
        """Return whether a motion scales a region; charges of its factors may cancel."""
        factors = [(float(factor.weight), factor.atoms.reshape(-1)) for factor in self._regions[region].type.factors]
        return not abs(_power(factors, vector)) < 1e-9


def _power(factors: Sequence[tuple[float, np.ndarray]], vector: np.ndarray) -> float:
    """Return by which power a motion scales a leg; not a number if its entries move differently."""
    total = 0.0
    for weight, atoms in factors:
        values = vector[atoms]
        if not np.isclose(values, values[0]).all():
            return float("nan")
        total += weight * float(values[0])
    return total


def _number_calls(typing: Typing) -> dict[int, tuple[str, bool, int]]:
    """Return for every operation that forgets a scale: its module, whether it is a function, its number there."""
    soft = {softened.origin for softened in typing.engine.softened}
    counts: dict[tuple[str, bool], int] = {}
    numbers: dict[int, tuple[str, bool, int]] = {}
    for number, operation in enumerate(typing.program.operations):
        name = base_name(operation.name).removeprefix("aten::").lstrip("_")
        function = any(name.startswith(known) for known in FUNCTIONS)
        if function or number in soft:
            key = (operation.module, function)
            numbers[number] = (*key, counts.get(key, 0))
            counts[key] = counts.get(key, 0) + 1
    return numbers


def count_calls(typing: Typing) -> dict[tuple[str, bool], int]:
    """Return how many normalisations run in each module, those that are one operation apart from those written out."""
    return dict(Counter((module, function) for module, function, _ in _number_calls(typing).values()))


def _charges(softened: SoftenedCharges, motions: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the total charge of what is divided by, for every motion, over the axes along which it differs."""
    placed = [field for field in softened.fields if not field.virtual]
    dims = tuple(sorted({dim for field in placed for dim in field.dims}))
    charges: np.ndarray = np.zeros((len(motions),) + (1,) * len(dims))
    for field in softened.fields:
        values = motions[:, field.atoms]
        if field.virtual:
            # Of rows that are chosen by index it is known how they move if all of them move alike.
            flat = values.reshape(len(motions), -1)
            if not np.isclose(flat, flat[:, :1]).all():
                raise UnsolvedError("a normalisation of rows that are chosen by index")
            charges = charges + float(field.weight) * flat[:, 0].reshape(-1, *(1 for _ in dims))
            continue
        order = np.argsort(field.dims)
        shape = [field.atoms.shape[field.dims.index(dim)] if dim in field.dims else 1 for dim in dims]
        charges = charges + float(field.weight) * values.transpose(0, *(1 + order)).reshape(len(motions), *shape)
    return dims, charges
