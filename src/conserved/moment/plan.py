"""How moment maps of a fixed list of symmetries are evaluated, on whatever device their parameters are.

Parameters that are there are read at once: batches of different parameters but equal shapes are concatenated when they
are small, where the cost is in launching the operations and not in the arithmetic. Parameters that a reader hands out a
portion at a time are read once each, leg by leg. On a GPU, kernels of our own read legs of all layers that lie in
memory alike where they are (`triton_backend`, `row_identities`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved.moment import triton_backend
from conserved.moment.batches import Batch, BatchLeg, alike
from conserved.moment.forms import Sums, WantedNumbers, forms, full_precision, working_dtype
from conserved.moment.portions import LegPlace, Part, PortionProgram, Segment, Use, in_portions, together
from conserved.moment.row_identities import Norms, RowIdentities, RowSizes
from conserved.moment.sources import GatheredTensors, Magnitudes, PresentTensors, Reader, Source
from conserved.moment.torch_backend import TORCH
from conserved.symmetry.kind import Degree, Kind
from conserved.symmetry.pairs import Direction, LawPairs, Pair, Point
from conserved.symmetry.symmetry import Leg, Symmetry
from conserved.symmetry.view import View

_SMALL = 1 << 15
"""Legs of at most this many entries are concatenated across parameters."""

_SINGLE = (None, torch.float32)
"""Dtypes that kernels compute in."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Moment maps of every symmetry of a plan."""

    count: int
    parts: tuple[Part, ...]
    rows: RowSizes | None = None
    """With `sizes`, what kernels found of symmetries that act on single rows."""
    norms: Norms | None = None
    """Norms of the last source that came with it, of some parameters."""
    lengths: Norms | None = None
    """Norms of the first source, of some parameters."""

    def values(self, pair: int = 0) -> list[Tensor]:
        """Return μ of one pair of sources.

        Args:
            pair: its place among the pairs that were asked for.

        Returns:
            One tensor for every symmetry, in order.
        """
        by_symmetry: dict[int, Tensor] = {}
        for part, values in zip(self.parts, self._signed, strict=True):
            value, many = values[pair], len(part.members)
            by_symmetry.update(zip(part.members, value.expand(many, *value.shape[1:]).unbind(), strict=True))
        return [by_symmetry[index] for index in range(self.count)]

    @cached_property
    def _signed(self) -> list[Tensor]:
        """μ of all pairs, for every part."""
        return [sums.signed() for part in self.parts for sums in part.sums.values()]

    def sizes(self) -> tuple[list[int], list[Float[Tensor, "_ 2"]]]:
        """Return ‖μ‖ of the first pair and the scale of its terms.

        Each part has the indices of its symmetries, and tables with a row for each.
        """
        indices = [] if self.rows is None else [*self.rows.indices]
        tables = [] if self.rows is None else [self.rows.table]
        for part in self.parts:
            indices += part.members
            (sums,) = part.sums.values()
            tables.append(sums.sizes()[0].expand(len(part.members), 2))
        return indices, tables


@dataclass(frozen=True, eq=False)
class Plan:
    """How to evaluate a fixed list of symmetries with few operations."""

    symmetries: tuple[Symmetry, ...]
    alike: tuple[tuple[Batch, ...], ...]
    """Batches whose legs have the same sizes and lie in memory in the same way."""
    needs: dict[str, str]
    """Every parameter that is read, with the name of a symmetry that reads it."""
    small: int = _SMALL
    """Entries up to which the legs of batches that are alike are concatenated."""
    kernels: bool = True
    """Whether kernels read legs where there are any: writing down what they read pays for many layers."""

    @staticmethod
    def of(symmetries: Sequence[Symmetry], *, kernels: bool = True) -> Plan:
        """Return the plan of some symmetries."""
        needs = {name: symmetry.name for symmetry in reversed(symmetries) for name in symmetry.parameters}
        return Plan(tuple(symmetries), alike([s.polarised for s in symmetries]), needs, kernels=kernels)

    @staticmethod
    def of_matrices(kind: Kind, degrees: Sequence[Degree], shapes: Sequence[Sequence[int]]) -> Plan:
        """Return the plan of legs that are (…, n, m) tensors, one symmetry for every place along their leading axes.

        Args:
            kind: the group.
            degrees: the degree of every leg.
            shapes: the shape of every leg; all have the same leading axes.

        Returns:
            The plan; its `needs` are the names of the legs, in order.
        """
        along = tuple(range(len(shapes[0]) - 2))
        views = [
            View.of(str(number), (*shape,), axes=len(along), pick=dict.fromkeys(along, 0))
            for number, shape in enumerate(shapes)
        ]
        symmetry = Symmetry(block="", family="matrices", kind=kind, legs=tuple(map(Leg, views, degrees)))
        count = prod(shapes[0][:-2])
        batch = Batch(tuple(range(count)), symmetry.degrees, tuple(BatchLeg.of(view, along) for view in views))
        return Plan((symmetry,) * count, ((batch,),), dict.fromkeys(symmetry.parameters, symmetry.name), kernels=False)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle what is planned, not the programs for tensors of this process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Every batch: each symmetry is a member of exactly one."""
        return tuple(batch for batches in self.alike for batch in batches)

    @cached_property
    def units(self) -> tuple[tuple[tuple[Batch, ...], ...], ...]:
        """Batches that are alike, those with small legs together and each of the others alone."""
        groups = []
        for batches in self.alike:
            small = tuple(batch for batch in batches if batch.entries <= self.small)
            large = [(batch,) for batch in batches if batch.entries > self.small]
            groups.append((small, *large) if small else tuple(large))
        return tuple(groups)

    @cached_property
    def entries(self) -> NDArray[np.int64]:
        """How many entries the legs of each symmetry have together."""
        return np.array([symmetry.entries for symmetry in self.symmetries], dtype=np.int64)

    @cached_property
    def epsilons(self) -> NDArray[np.float64]:
        """The ε of each symmetry."""
        return np.array([symmetry.epsilon for symmetry in self.symmetries], dtype=np.float64)

    @cached_property
    def up_to_epsilon(self) -> tuple[Plan, tuple[int, ...]]:
        """The plan of the symmetries that hold up to ε alone, and their indices in this one."""
        return self._of_indices(np.flatnonzero(self.epsilons).tolist())

    @cached_property
    def legs_alone(self) -> Plan:
        """The plan of every leg as a symmetry of its own, in order: its moment map is the term of that leg."""
        return Plan.of([replace(symmetry, legs=(leg,)) for symmetry in self.symmetries for leg in symmetry.legs])

    @cached_property
    def linear(self) -> dict[int, str | None]:
        """Symmetries, by their place, whose laws are linear, each with a parameter that it moves; None if inert."""
        return {
            index: None if symmetry.inert else symmetry.parameters[0]
            for index, symmetry in enumerate(self.symmetries)
            if symmetry.kind.linear
        }

    @cached_property
    def uses(self) -> dict[str, tuple[Use, ...]]:
        """By parameter, the legs that read it, in whatever ways laws see it."""
        groups: dict[str, dict[tuple[bool, float], tuple[list[LegPlace], list[LegPlace]]]] = defaultdict(dict)
        for number, batch in enumerate(self.batches):
            kind = self.symmetries[batch.members[0]].kind
            for position, leg in enumerate(batch.legs):
                ways = groups[leg.view.parameter].setdefault((kind.linear, leg.view.offset), ([], []))
                by_kernels = triton_backend.takes(kind.products, leg.layout, leg.view.n)
                ways[0 if by_kernels else 1].append((number, position))
        return {
            name: tuple(Use(*way, tuple(taken), tuple(others)) for way, (taken, others) in ways.items())
            for name, ways in groups.items()
        }

    @cached_property
    def by_kernels_alone(self) -> bool:
        """Whether kernels compute all products of all legs."""
        return not any(use.others or use.offset for uses in self.uses.values() for use in uses)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many entries each parameter has, by name."""
        return {leg.view.parameter: prod(leg.view.shape) for batch in self.batches for leg in batch.legs}

    @cached_property
    def _entries_read(self) -> list[int]:
        """How many entries each parameter has that is read, in order."""
        return [self.counts[name] for name in self.needs]

    @cached_property
    def divisions(self) -> dict[int, Sequence[Sequence[str]]]:
        """The parameters of each portion, by the number of entries in a portion."""
        return {}

    @cached_property
    def readings(self) -> dict[Hashable, PortionProgram]:
        """Programs for kernels that read portions of parameters, kept for portions that come again."""
        return {}

    @cached_property
    def outlines(self) -> dict[Hashable, tuple[Segment, ...]]:
        """How the results of portions are put together, kept as well."""
        return {}

    @cached_property
    def row_identities(self) -> RowIdentities:
        """Programs for kernels that read all identities of single rows, kept by device and types."""
        return RowIdentities(self.symmetries, self.batches)

    def evaluate(
        self,
        read: Reader | Sequence[Source],
        pairs: Sequence[Pair] = (),
        *,
        sizes: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Moments:
        """Return moment maps of every symmetry, for pairs of sources.

        Args:
            read: points and directions, or their magnitudes; or a reader that hands out parameters in portions.
            pairs: numbers of sources, such as (0, 1) for μ(first, second), as `LawPairs` where only laws are wanted;
                a reader names them itself, and `LawPairs()` says the same to it.
            sizes: whether the norms needed to hold identities against rounding are computed. Nothing waits for the
                device.
            dtype: the precision; by default that of the tensors, at least float32.

        Returns:
            `Moments`: `.values(pair)` is μ of one pair for every symmetry, `.sizes()` the norms.
        """
        law = isinstance(pairs, LawPairs)
        if not isinstance(read, Sequence):
            return Moments(len(self.symmetries), in_portions(self, read, WantedNumbers(law, sizes=sizes), dtype))
        wanted = WantedNumbers(law, any(isinstance(source, Magnitudes) for source in read), sizes)
        tensors = [*chain.from_iterable(map(source.tensors.__getitem__, self.needs) for source in read)]
        if any(hasattr(kind, "full_tensor") for kind in {*map(type, tensors)}):
            gathered = GatheredTensors(read, tuple(pairs))
            moments = in_portions(self, gathered, wanted, dtype)
            return Moments(len(self.symmetries), moments, norms=Norms.of(gathered.norms))
        if self.kernels and not wanted.absolute and dtype in _SINGLE:
            result = self._by_kernels(read, tensors, tuple(pairs), wanted)
            if result is not None:
                return result
        parts: list[Part] = []
        with full_precision(device.type for device in {*map(attrgetter("device"), tensors)}):
            for units in self.units:
                parts += self._apart(units, read, tuple(pairs), wanted, dtype)
        return Moments(len(self.symmetries), tuple(parts))

    def _by_kernels(
        self, sources: Sequence[Source], tensors: Sequence[Tensor], pairs: tuple[Pair, ...], wanted: WantedNumbers
    ) -> Moments | None:
        """Return all symmetries, read by kernels where they can be.

        The result is None where there are no kernels, or where gradients have to be recorded.

        `tensors` are those of all parameters that are read, source by source. Identities that act on single rows come
        with the norms of gradients, if every tensor they need can be read.
        """
        if not tensors or not triton_backend.available(tensors[0].device):
            return None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return None
        if [*map(Tensor.numel, tensors)] != self._entries_read * len(sources):
            return None  # PyTorch's own operations say which of them has another shape
        plain = triton_backend.readable(tensors)
        identities = wanted.sizes and pairs == ((0, 1),) and [*map(type, sources)] == [Point, Direction]
        if not identities or plain is None or not self.row_identities.names:
            if plain is None and not triton_backend.TYPES.issuperset(map(attrgetter("dtype"), tensors)):
                return None
            return Moments(len(self.symmetries), in_portions(self, PresentTensors(sources, pairs), wanted, None))
        rows = self.row_identities.sizes(plain.some(self._read_by_rows))
        rest, indices = self._other_symmetries
        parts = together(rest, PresentTensors(sources, pairs), plain.some(self._read_otherwise), wanted)
        for members in {part.members for part in parts}.difference(self._renumbered):
            self._renumbered[members] = tuple(indices[member] for member in members)
        parts = tuple(replace(part, members=self._renumbered[part.members]) for part in parts)
        return Moments(len(self.symmetries), parts, rows, rows.norms, rows.lengths)

    @cached_property
    def _other_symmetries(self) -> tuple[Plan, tuple[int, ...]]:
        """A plan of the symmetries that act on more than single rows, and their indices in this one."""
        known = frozenset(self.row_identities.indices)
        return self._of_indices([index for index in range(len(self.symmetries)) if index not in known])

    def _of_indices(self, indices: Sequence[int]) -> tuple[Plan, tuple[int, ...]]:
        """Return the plan of some symmetries, and their indices."""
        return Plan.of([self.symmetries[index] for index in indices]), tuple(indices)

    @cached_property
    def _read_by_rows(self) -> NDArray[np.int64]:
        """Numbers of parameters that identities of single rows need, then of their gradients, among all."""
        return self._numbers(self.row_identities.names).T.reshape(-1)

    @cached_property
    def _read_otherwise(self) -> NDArray[np.int64]:
        """Positions of parameters that the other symmetries need, each followed by that of its gradient."""
        return self._numbers((*self._other_symmetries[0].uses,)).reshape(-1)

    def _numbers(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the positions of parameters and their gradients among all tensors read."""
        numbers = {name: number for number, name in enumerate(self.needs)}
        first = np.array([numbers[name] for name in names], dtype=np.int64)
        return np.stack((first, first + len(numbers)), -1)

    @cached_property
    def _renumbered(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Symmetries by their indices in both plans."""
        return {}

    def _apart(
        self,
        units: Sequence[Sequence[Batch]],
        sources: Sequence[Source],
        pairs: tuple[Pair, ...],
        wanted: WantedNumbers,
        dtype: torch.dtype | None,
    ) -> Iterator[Part]:
        """Yield units of batches that are alike, one after the other."""
        constants = tuple(source.constant for source in sources)
        first = self.symmetries[units[0][0].members[0]]
        for unit in units:
            matrices = [
                [[leg.reading.matrices(s.tensors[leg.view.parameter], s.constant) for leg in b.legs] for b in unit]
                for s in sources
            ]
            precision = working_dtype(
                {matrix.dtype for source in matrices for legs in source for matrix in legs}, dtype
            )
            sums = Sums(pairs, wanted.absolute)
            for position, degree in enumerate(units[0][0].degrees):
                legs = [_concatenate([legs[position] for legs in source], unit, precision) for source in matrices]
                legs = [leg.abs() for leg in legs] if wanted.absolute else legs
                sums.add(forms(TORCH, first.kind.products, degree, legs, pairs, constants, precision, wanted), degree)
            yield Part(tuple(member for batch in unit for member in batch.members), {0: sums})


def _concatenate(matrices: Sequence[Tensor], unit: Sequence[Batch], dtype: torch.dtype) -> Tensor:
    """Return one leg of a few batches as one tensor of (symmetries, n, m).

    A single batch is returned as it lies, in its own type.
    """
    if len(unit) == 1:
        return matrices[0]
    parts = (matrix.to(dtype).expand(len(b.members), -1, -1) for matrix, b in zip(matrices, unit, strict=True))
    return torch.cat([*parts])
