"""Moment maps of parameters that are handed out a portion at a time: each is read once, leg by leg.

What a leg adds to its laws is a few numbers, so that nothing of a parameter's size has to be kept. On a GPU all legs of
a portion are read by a program that was written down when such a portion came for the first time (`leg_programs`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from conserved.moment import triton_backend
from conserved.moment.batches import Batch
from conserved.moment.forms import FormValues, Sums, WantedNumbers, forms, full_precision, working_dtype
from conserved.moment.layouts import PlainTensors
from conserved.moment.leg_programs import LegProgram, LegTensors, ProgramLeg
from conserved.moment.sources import PairedTensors, ParameterTensors, PresentTensors, Reader
from conserved.moment.torch_backend import TORCH, column_bounds
from conserved.symmetry.kind import Degree
from conserved.symmetry.pairs import Pair
from conserved.symmetry.symmetry import Symmetry

LegPlace = tuple[int, int]
"""A leg: the number of its batch among all batches, and its position there."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Moment maps of some symmetries, by their indices."""

    members: tuple[int, ...]
    sums: dict[int, Sums] = field(default_factory=dict)
    """By what a reader tells legs apart; sums of legs that it does not tell apart."""

    def expanded(self, key: int) -> Sums:
        """Return sums of legs, those that symmetries share repeated for each of them."""
        sums, size = self.sums[key], len(self.members)
        legs = (sums.plus, sums.minus, sums.scales, sums.columns)
        if all(matrix.shape[1] == size for side in legs for matrix in side):
            return sums

        def spread(legs: list[Tensor]) -> list[Tensor]:
            return [leg if leg.shape[1] == size else leg.expand(-1, size, *leg.shape[2:]) for leg in legs]

        return Sums(sums.pairs, sums.absolute, *map(spread, legs))


@dataclass(frozen=True, slots=True)
class Use:
    """How laws see one parameter: legs of laws that are linear or not, through views with one offset."""

    linear: bool
    offset: float
    by_kernels: tuple[LegPlace, ...]
    """Legs whose products kernels compute."""
    others: tuple[LegPlace, ...]


@runtime_checkable
class BatchedPlan(Protocol):
    """The part of a `Plan` that reading it in portions needs."""

    @property
    def symmetries(self) -> tuple[Symmetry, ...]: ...
    @property
    def alike(self) -> tuple[tuple[Batch, ...], ...]: ...
    @property
    def batches(self) -> tuple[Batch, ...]: ...
    @property
    def uses(self) -> Mapping[str, tuple[Use, ...]]: ...
    @property
    def by_kernels_alone(self) -> bool: ...
    @property
    def counts(self) -> Mapping[str, int]: ...
    @property
    def divisions(self) -> dict[int, Sequence[Sequence[str]]]:
        """By the entries of a portion, the parameters of each."""
        ...

    @property
    def readings(self) -> dict[Hashable, PortionProgram]:
        """Programs for portions that came before."""
        ...

    @property
    def outlines(self) -> dict[Hashable, tuple[Segment, ...]]:
        """How the results of portions that came before are put together."""
        ...


def in_portions(
    plan: BatchedPlan, reader: Reader, wanted: WantedNumbers, dtype: torch.dtype | None
) -> tuple[Part, ...]:
    """Return moment maps of all symmetries of a plan, those of batches that are alike in one part where legs step
    alike.
    """
    names = (*plan.uses,)
    stored = reader.stored(names)
    every = [*chain.from_iterable(stored)]
    types = [dtype or torch.float32] * len(plan.batches)
    # Kernels accumulate in float32 whatever they read. Other types choose the working precision batch by batch.
    if dtype is None and not triton_backend.TYPES.issuperset(map(attrgetter("dtype"), every)):
        by_name = dict(zip(names, stored, strict=True))
        types = [
            working_dtype((tensor.dtype for leg in batch.legs for tensor in by_name[leg.view.parameter]), None)
            for batch in plan.batches
        ]
    devices = {*map(attrgetter("device"), every)}
    reading = _Reading(plan, wanted, types, reader.kernels and not wanted.absolute)
    with full_precision({device.type for device in devices}):
        if reader.portion not in plan.divisions:
            plan.divisions[reader.portion] = _portions(plan.counts, reader.portion)
        for portion in plan.divisions[reader.portion]:
            made = False
            for name, tensors in zip(portion, reader.read(portion), strict=True):
                made = made or tensors.made
                reading.add(name, tensors)
            # Tensors that the reader made (gathered or converted) are read at once, so that one portion at a time is
            # in memory. Tensors that exist anyway wait for the last portion: one launch then reads all of them.
            if made:
                reading.run()
        reading.run()
        if len(devices) == 1:
            return reading.parts(devices.pop())
        device_of = {name: tensors[0].device for name, tensors in zip(names, stored, strict=True)}
        return reading.parts([device_of[batch.legs[0].view.parameter] for batch in plan.batches])


def together(
    plan: BatchedPlan, reader: PresentTensors, tensors: PlainTensors, wanted: WantedNumbers
) -> tuple[Part, ...]:
    """Return moment maps from tensors that exist and that kernels can read.

    The tensors of each parameter follow one another.
    """
    if not plan.uses:
        return ()
    if not plan.by_kernels_alone:
        return in_portions(plan, reader, wanted, None)
    with full_precision({tensors.device.type}):
        reading = _Reading(plan, wanted, (), kernels=True)
        reading.read_together(reader, tensors)
        return reading.parts(tensors.device)


@dataclass(frozen=True, slots=True, eq=False)
class PortionProgram:
    """The tensors of a portion that kernels read, and the leg of each block of results."""

    program: LegProgram
    legs: tuple[tuple[tuple[LegPlace, ...], int], ...]
    """For every block, its legs in order and the key of their steps."""


_Waiting = tuple[str, Use, PairedTensors]
"""A parameter that waits for kernels, and how laws see it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Portion:
    """Results of one portion."""

    made_by: PortionProgram
    results: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Single:
    """The results of one leg of one batch."""

    leg: LegPlace
    key: int
    found: FormValues
    columns: Tensor | None


@dataclass(frozen=True, slots=True)
class SegmentLeg:
    """One leg of batches that are alike, or several legs of a single one that are added up."""

    key: int
    degree: Degree
    by_kernels: bool
    spans: tuple[tuple[int, int, int], ...]
    """Where its results are: in which block from which row to which, or which results of single legs."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Batches that are alike, one after the other, whose legs step alike."""

    members: tuple[int, ...]
    """Indices of symmetries, over all batches."""
    batches: int
    legs: tuple[SegmentLeg, ...]


class _Reading:
    """One reading of all parameters, with the results of every leg."""

    def __init__(self, plan: BatchedPlan, wanted: WantedNumbers, types: Sequence[torch.dtype], kernels: bool) -> None:
        self._plan, self._wanted, self._types = plan, wanted, types
        self._kernels = kernels and all(dtype == torch.float32 for dtype in types)
        self._waiting: list[_Waiting] = []
        self._portions: list[_Portion] = []
        self._singles: list[_Single] = []
        self._pairs: dict[int, tuple[Pair, ...]] = {}

    def add(self, name: str, tensors: ParameterTensors) -> None:
        """Add all legs of one parameter; those for kernels wait for others."""
        for use in self._plan.uses[name]:
            paired = tensors.paired(linear=use.linear, offset=use.offset)
            self._pairs[paired.key] = paired.pairs
            legs = use.others
            # Kernels read as many entries as the laws speak of. Single legs say that a tensor has another shape.
            complete = {*map(Tensor.numel, paired.tensors)} == {self._plan.counts[name]}
            if use.by_kernels and self._kernels and not use.offset and complete:
                self._waiting.append((name, use, paired))
            elif use.by_kernels:
                legs = (*legs, *use.by_kernels)
            if legs:
                self._singles += [self._single(leg, paired) for leg in legs]

    def read_together(self, reader: PresentTensors, tensors: PlainTensors) -> None:
        """Read all legs of all parameters whose tensors follow each other."""
        plan, pairs = self._plan, reader.pairs
        self._pairs[0] = pairs
        signature = pairs, tensors.types, self._wanted
        made_by = plan.readings.get(signature)
        if made_by is None:
            read = zip(plan.uses.items(), reader.read((*plan.uses,)), strict=True)
            waiting = [(name, use, tensors.paired(linear=False, offset=0.0)) for (name, (use,)), tensors in read]
            made_by = plan.readings[signature] = self._program(waiting, tensors.types)
        self._portions.append(_Portion(made_by, made_by.program.run(tensors)))

    def run(self) -> None:
        """Read all that wait: as a rule kernels can read all of them."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        tensors = triton_backend.readable([tensor for _, _, paired in waiting for tensor in paired.tensors])
        if tensors is not None:
            self._run(waiting, tensors)
            return
        # Some tensor cannot be read by kernels, or there are several devices: decide for every parameter alone.
        alike: dict[torch.device, list[_Waiting]] = defaultdict(list)
        for name, use, paired in waiting:
            own = triton_backend.readable(paired.tensors)
            if own is None:
                self._singles += [self._single(leg, paired) for leg in use.by_kernels]
            else:
                alike[own.device].append((name, use, paired))
        for some in alike.values():
            tensors = triton_backend.readable([tensor for _, _, paired in some for tensor in paired.tensors])
            assert tensors is not None
            self._run(some, tensors)

    def _run(self, waiting: Sequence[_Waiting], tensors: PlainTensors) -> None:
        """Read what waits on one device by the program for it."""
        names, _, paired = zip(*waiting, strict=True)
        # A program depends on layouts and types, not on addresses: it serves every later step of a run.
        keys = (*map(attrgetter("key"), paired),)
        pairs = tuple((key, self._pairs[key]) for key in dict.fromkeys(keys))
        signature = names, keys, pairs, tensors.types, self._wanted
        made_by = self._plan.readings.get(signature)
        if made_by is None:
            made_by = self._plan.readings[signature] = self._program(waiting, tensors.types)
        self._portions.append(_Portion(made_by, made_by.program.run(tensors)))

    def _single(self, leg: LegPlace, paired: PairedTensors) -> _Single:
        """Return one leg, by PyTorch's own operations."""
        batch, dtype = self._plan.batches[leg[0]], self._types[leg[0]]
        symmetry, seen = self._plan.symmetries[batch.members[0]], batch.legs[leg[1]]
        degree = batch.degrees[leg[1]]
        legs = [*map(seen.reading.matrices, paired.tensors, paired.constants)]
        columns: Tensor | None = None
        if paired.bounded:
            columns = abs(degree) * column_bounds([legs[index] for index in paired.bounded], dtype)
        legs = [leg_matrix.abs() for leg_matrix in legs] if self._wanted.absolute else legs
        sums = forms(TORCH, symmetry.kind.products, degree, legs, paired.pairs, paired.constants, dtype, self._wanted)
        return _Single(leg, paired.key, sums, columns)

    def _program(self, waiting: Sequence[_Waiting], types: Sequence[torch.dtype]) -> PortionProgram:
        """Return the program of a portion; one leg of batches that are alike makes a block.

        Of a batch without others, all legs that lie alike do.
        """
        plan = self._plan
        # Results of one block are added up or stacked as a whole. Legs of different layers that are alike must stay
        # apart (a block for each position), those of a single batch are summed anyway (one block for all positions).
        groups = [(group, len(batches)) for group, batches in enumerate(plan.alike) for _ in batches]
        blocks: dict[Hashable, tuple[ProgramLeg, list[LegTensors], list[LegPlace], int]] = {}
        first = 0
        for _, use, paired in waiting:
            kinds = (*types[first : first + len(paired.tensors)],)
            for number, position in use.by_kernels:
                batch = plan.batches[number]
                symmetry, layout = plan.symmetries[batch.members[0]], batch.legs[position].layout
                assert layout is not None
                degree = batch.degrees[position]
                strides = layout.from_first()
                leg = ProgramLeg(symmetry.kind.products, degree, strides, paired.pairs, kinds, self._wanted)
                group, several = groups[number]
                slot = group, position if several > 1 else None
                _, tensors, legs, _ = blocks.setdefault((slot, leg, paired.key), (leg, [], [], paired.key))
                tensors.append((first, layout.offset))
                legs.append((number, position))
            first += len(paired.tensors)
        program = LegProgram.of([(leg, tensors) for leg, tensors, _, _ in blocks.values()])
        return PortionProgram(program, tuple((tuple(legs), key) for _, _, legs, key in blocks.values()))

    def parts(self, devices: torch.device | Sequence[torch.device]) -> tuple[Part, ...]:
        """Return everything that was found, put together by segments of batches that are alike and on one device."""
        where = devices if isinstance(devices, torch.device) else (*devices,)
        # The outline depends on which programs ran and which legs were read alone, so it is kept by both.
        programs = (portion.made_by for portion in self._portions)
        made = (*programs, *((single.leg, single.key) for single in self._singles), where)
        segments = self._plan.outlines.get(made)
        if segments is None:
            every = [where] * len(self._plan.batches) if isinstance(where, torch.device) else where
            segments = self._plan.outlines[made] = tuple(self._segments(every))
        forms_of = [
            block.forms(portion.results) for portion in self._portions for block in portion.made_by.program.blocks
        ]
        return tuple(self._part(segment, forms_of) for segment in segments)

    def _segments(self, devices: Sequence[torch.device]) -> Iterator[Segment]:
        """Return how results are put together."""
        plan = self._plan
        # By leg: the key of its pairs and whether kernels computed it; then the block and the row of its result.
        ways: dict[LegPlace, tuple[int, bool]] = {single.leg: (single.key, False) for single in self._singles}
        where: dict[LegPlace, tuple[int, int]] = {single.leg: (i, 0) for i, single in enumerate(self._singles)}
        blocks = [block for portion in self._portions for block in portion.made_by.legs]
        for index, (legs, key) in enumerate(blocks):
            ways |= dict.fromkeys(legs, (key, True))
            where |= {leg: (index, row) for row, leg in enumerate(legs)}
        order = {name: index for index, name in enumerate(plan.uses)}
        number = 0
        for batches in plan.alike:
            numbers = range(number, number + len(batches))
            number += len(batches)
            positions = range(len(batches[0].legs))

            def way_of(batch: int, positions: range = positions) -> Hashable:
                return devices[batch], tuple(ways[batch, position] for position in positions)

            # Neighbours that were read in the same way become one segment, and one operation for all of them.
            for _, neighbours in groupby(numbers, way_of):
                run = [*neighbours]
                # Legs of a single batch that share a block give equal entries: a dictionary keeps one, in order.
                segment_legs: dict[SegmentLeg, None] = {}
                legs_of = plan.batches[run[0]].legs
                # In the order in which parameters are read: the first key is the one that others are compared with.
                for position in sorted(positions, key=lambda leg: order[legs_of[leg].view.parameter]):
                    key, by_kernels = ways[run[0], position]
                    degree = plan.batches[run[0]].degrees[position]
                    spans = tuple(_spans([where[batch, position] for batch in run]))
                    if by_kernels and len(batches) == 1:
                        # All legs that lie alike are in one block, and added up.
                        block = spans[0][0]
                        spans = ((block, 0, len(blocks[block][0])),)
                    segment_legs[SegmentLeg(key, degree, by_kernels, spans)] = None
                members = tuple(member for batch in run for member in plan.batches[batch].members)
                yield Segment(members, len(run), tuple(segment_legs))

    def _part(self, segment: Segment, blocks: Sequence[FormValues]) -> Part:
        """Return sums of the legs of some batches that are alike."""
        size, several = len(segment.members) // segment.batches, segment.batches > 1
        part = Part(segment.members)
        for leg in segment.legs:
            sums = part.sums.get(leg.key)
            if sums is None:
                sums = part.sums[leg.key] = Sums(self._pairs[leg.key], self._wanted.absolute)
            if leg.by_kernels:
                values, squares = (
                    [form[:, begin:end] for i, begin, end in leg.spans if (form := blocks[i][kind]) is not None]
                    for kind in (0, 1)
                )
                forms_of_leg = _cat(values), _cat(squares) if squares else None
                # Rows of a block are layers (kept apart) where batches are alike, and legs (added up) otherwise.
                sums.add(forms_of_leg, leg.degree, stacked=(1 if several else forms_of_leg[0].shape[1], size))
                continue
            singles = [self._singles[i] for i, _, _ in leg.spans]
            values = [single.found[0] for single in singles]
            squares = [single.found[1] for single in singles if single.found[1] is not None]
            bounds = [single.columns for single in singles if single.columns is not None]
            sums.add((_side_by_side(values, size), _side_by_side(squares, size) if squares else None), leg.degree)
            sums.columns += [_side_by_side(bounds, size)] if bounds else []
        return part


def _spans(indices: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the number of a block with the first row and the end of each run of consecutive rows."""
    for (block, _), some in groupby(enumerate(indices), lambda item: (item[1][0], item[1][1] - item[0])):
        rows = [row for _, (_, row) in some]
        yield block, rows[0], rows[-1] + 1


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], 1)


def _side_by_side(parts: Sequence[Tensor], size: int) -> Tensor:
    """Return results of batches of one size; what the members of a batch share is repeated for each."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.expand(-1, size, *part.shape[2:]) for part in parts], 1)


def _portions(entries: Mapping[str, int], most: int) -> list[list[str]]:
    """Return parameters in order, as many at a time as have at most so many entries together.

    A parameter with more entries is a portion by itself.
    """
    portions: list[list[str]] = []
    room = -1
    for name, count in entries.items():
        if count > room:
            portions.append([])
            room = most
        portions[-1].append(name)
        room -= count
    return portions


def reads_together(device: torch.device) -> bool:
    """Return whether layers that are alike are read together on a device: where there are kernels for it."""
    return triton_backend.available(device)
