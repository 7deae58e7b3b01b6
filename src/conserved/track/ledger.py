"""The account of one step for every law: one pass over the parameters.

Legs are read parameter by parameter, so that few temporaries exist at a time, and their numbers p(B_i, B_j) are added
up over the legs of each law. On a GPU legs that lie in memory alike wait for each other and are read at once. Laws of
one kind and size lie on one *shelf*, one row each, where all that follows is a few operations on whole shelves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from conserved import fused
from conserved.batch import Batch, BatchLeg, Plan
from conserved.kind import Degree, Kind, Translation
from conserved.sheaf import Sheaf, plain
from conserved.symmetry import Symmetry, Tensors, full_precision, moment_map, working_dtype
from conserved.track.combination import Scalar
from conserved.track.expansion import Expansion, Slot, StepWeights, Weights

_TEMPORARY = 1 << 25
"""Entries of parameters whose steps are expanded together: for each of them a rule may make a tensor."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Laws of one kind and size: `places` are their numbers in the law set, in the order of the rows."""

    kind: Kind
    n: int
    m: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one pass found for the laws of a shelf, one row each."""

    law: Float[Tensor, "laws numbers"]
    """h(θ') after the step."""
    sizes: Float[Tensor, "laws rows"]
    """Sums of squares of the rows of all legs: what rounding errors are in proportion to."""
    first: Mapping[str, Float[Tensor, "laws numbers"]]
    """First order by cause, without the gradient itself."""
    slope: Float[Tensor, "laws numbers"]
    """First order of the gradient at rate one; zero for an exact law."""
    second: Float[Tensor, "laws numbers"]
    moved: Float[Tensor, " laws"]
    """‖U‖² over the legs."""
    steepness: Float[Tensor, " laws"]
    """The largest entry the gradient's first order could have, at rate one, if nothing cancelled."""
    rate: Scalar | Float[Tensor, "laws 1"]


@dataclass(slots=True)
class _Sums:
    """Legs of one batch whose steps have equal coefficients, added up."""

    weights: StepWeights
    rate: Scalar
    slots: tuple[Slot, ...]
    plus: list[Tensor] = field(default_factory=list)
    """For every leg of positive degree, the forms of all slots, one row each."""
    minus: list[Tensor] = field(default_factory=list)
    absolute: list[Tensor] = field(default_factory=list)
    """For linear laws: sums of the absolute values of the parameter and of its gradient."""

    def add(self, forms: Tensor, degree: Degree) -> None:
        (self.plus if degree > 0 else self.minus).append(forms if abs(degree) == 1 else abs(degree) * forms)

    def signed(self) -> tuple[Tensor, Tensor]:
        """The sum over all legs with their signs, and without, for every slot."""
        plus, minus = _over_legs(self.plus), _over_legs(self.minus)
        if plus is None:
            assert minus is not None
            return -minus, minus
        return (plus, plus) if minus is None else (plus - minus, plus + minus)


@dataclass(frozen=True, slots=True)
class _Read:
    """One leg of one batch: the tensors of its parameter's step, and the sums that take what is read."""

    number: int
    position: int
    sources: tuple[Tensor, ...]
    gradient: tuple[Scalar, ...] | None
    sums: _Sums


def _side_by_side(held: Sequence[_Sums]) -> list[_Sums]:
    """Merge batches that have the same legs, so that later operations run once for all of them."""
    if len(held) == 1 or len({(len(one.plus), len(one.minus)) for one in held}) > 1:
        return list(held)

    def joined(side: str) -> list[Tensor]:
        return [torch.cat(legs, 1) for legs in zip(*(getattr(one, side) for one in held), strict=True)]

    first = held[0]
    return [
        _Sums(
            first.weights,
            first.rate,
            first.slots,
            plus=joined("plus"),
            minus=joined("minus"),
            absolute=joined("absolute"),
        )
    ]


def _over_legs(legs: list[Tensor]) -> Tensor | None:
    """Stacked once and summed once, however many legs there are."""
    if not legs:
        return None
    return legs[0] if len(legs) == 1 else torch.stack(legs).sum(0)


class Ledger:
    """Evaluates laws and the account of a step for a fixed set of symmetries."""

    def __init__(self, symmetries: Sequence[Symmetry], theta: Tensors, *, dtype: torch.dtype | None = None) -> None:
        self.symmetries = tuple(symmetries)
        plan = Plan.of(self.symmetries)
        self._batches = plan.batches
        self._uses: dict[str, list[tuple[int, int]]] = defaultdict(list)
        grouped: dict[tuple[Kind, int, int, torch.device], list[int]] = defaultdict(list)
        self._dtypes: list[torch.dtype] = []
        for number, batch in enumerate(self._batches):
            first = self.symmetries[batch.members[0]]
            device = theta[first.parameters[0]].device
            grouped[first.kind, first.n, _columns(first), device].append(number)
            self._dtypes.append(working_dtype([theta[leg.view.parameter] for leg in batch.legs], dtype))
            for position, leg in enumerate(batch.legs):
                self._uses[leg.view.parameter].append((number, position))
        self._lies = [
            [_lies(self.symmetries[batch.members[0]], leg, dtype) for leg in batch.legs]
            for batch, dtype in zip(self._batches, self._dtypes, strict=True)
        ]
        self._members = list(grouped.values())
        self.shelves = tuple(
            Shelf(kind, n, m, tuple(place for number in numbers for place in self._batches[number].members))
            for (kind, n, m, _), numbers in grouped.items()
        )
        self.parameters = tuple(self._uses)
        self._like = theta[self.parameters[0]]
        # Where layers are read together, their parameters' steps are expanded together too.
        most = _TEMPORARY if fused.available(self._like.device) else 0
        self._portions = _portions({name: theta[name].numel() for name in self._uses}, most)

    def account(self, expand: Callable[[Sequence[str]], Sequence[Expansion]]) -> list[Account]:
        """The account of a step for every shelf; `expand` gives the steps of some parameters when their turn comes."""
        sums: list[dict[Hashable, _Sums]] = [{} for _ in self._batches]
        known: dict[tuple[Hashable, bool], StepWeights] = {}
        waiting: dict[Hashable, list[_Read]] = defaultdict(list)
        with torch.no_grad(), full_precision(self._like):
            for names in self._portions:
                made = False
                for name, expansion in zip(names, expand(names), strict=True):
                    types = _types(expansion.sources)
                    made = made or expansion.made
                    for number, position in self._uses[name]:
                        read = self._noted(sums[number], number, position, expansion, known)
                        lies = self._lies[number][position]
                        if types is None or lies is None:
                            self._read(read)
                        else:
                            waiting[lies, types, read.sums.slots].append(read)
                if made:
                    self._read_together(waiting)
            self._read_together(waiting)
            return [self._shelved(numbers, sums) for numbers in self._members]

    def _noted(
        self,
        sums: dict[Hashable, _Sums],
        number: int,
        position: int,
        expansion: Expansion,
        known: dict[tuple[Hashable, bool], StepWeights],
    ) -> _Read:
        """What is to be read of one leg, and which sums of its batch it belongs to."""
        batch = self._batches[number]
        if batch.legs[position].view.offset:
            expansion = expansion.shifted()
        key, linear = expansion.key, self.symmetries[batch.members[0]].kind.linear
        if key not in sums:
            if (key, linear) not in known:
                known[key, linear] = expansion.weights(linear=linear)
            weights = known[key, linear]
            sums[key] = _Sums(weights, expansion.rate, weights.slots())
        return _Read(number, position, expansion.sources, expansion.gradient, sums[key])

    def _read(self, read: _Read) -> None:
        """Add one leg to the sums of its batch."""
        batch, dtype = self._batches[read.number], self._dtypes[read.number]
        leg, symmetry = batch.legs[read.position], self.symmetries[batch.members[0]]
        kind, degree, offset = symmetry.kind, symmetry.legs[read.position].degree, leg.view.offset
        first, *rest = (_matrices(batch, leg, source, point=place == 0) for place, source in enumerate(read.sources))
        legs = [first, *rest[:-1], offset * rest[-1]] if offset else [first, *rest]
        if kind.linear:
            # The moment map at a point is the sum of the rows of the direction, whatever the point.
            chosen = [legs[j].to(dtype) for _, j in read.sums.slots]
            forms = torch.stack([moment_map(kind, (1,), (chosen[0],), (direction,)) for direction in chosen])
            shown = [0] if read.gradient is None else [0, _index(read.gradient)]
            assert isinstance(kind, Translation)
            absolute = kind.column_sizes([legs[j] for j in shown], dtype)
            read.sums.absolute.append(abs(degree) * absolute)
        else:
            forms = kind.pairings(legs, read.sums.slots, dtype)
        read.sums.add(forms, degree)

    def _read_together(self, waiting: dict[Hashable, list[_Read]]) -> None:
        """Add the legs that wait to the sums of their batches, those that lie alike in one go."""
        for reads in waiting.values():
            first = reads[0]
            batch = self._batches[first.number]
            layout = batch.legs[first.position].layout
            assert layout is not None
            sheaves = [Sheaf(column, layout) for column in zip(*(read.sources for read in reads), strict=True)]
            kind = self.symmetries[batch.members[0]].kind
            forms = kind.pairings(sheaves, first.sums.slots, torch.float32)
            for read, mine in zip(reads, forms.unbind(1), strict=True):
                owner = self._batches[read.number]
                size = len(owner.members)
                whole = mine if mine.shape[1] == size else mine.expand(-1, size, *mine.shape[2:])
                read.sums.add(whole, self.symmetries[owner.members[0]].legs[read.position].degree)
        waiting.clear()

    def _shelved(self, numbers: Sequence[int], sums: Sequence[dict[Hashable, _Sums]]) -> Account:
        """Put the sums of all batches of a shelf together."""
        keys = {key for number in numbers for key in sums[number]}
        kind = self.symmetries[self._batches[numbers[0]].members[0]].kind
        if len(keys) == 1:
            (key,) = keys
            return _accounted(kind, [sums[number][key] for number in numbers])
        pieces = [_mixed([_accounted(kind, [held]) for held in sums[number].values()]) for number in numbers]
        return _stacked(pieces)


def _portions(entries: Mapping[str, int], most: int) -> list[list[str]]:
    """Parameters in order, as many at a time as have at most so many entries together; a larger one by itself."""
    found: list[list[str]] = []
    room = -1
    for name, count in entries.items():
        if count > room:
            found.append([])
            room = most
        found[-1].append(name)
        room -= count
    return found


def _lies(symmetry: Symmetry, leg: BatchLeg, dtype: torch.dtype) -> Hashable | None:
    """Equal for legs that lie in memory alike and can be read together; None for one that is read by itself."""
    alone = leg.view.offset or dtype != torch.float32 or not symmetry.kind.in_sheaves(symmetry.n)
    return None if alone or leg.layout is None else (symmetry.kind, leg.layout)


def _types(sources: Sequence[Tensor]) -> tuple[torch.dtype, ...] | None:
    """The types of tensors that kernels can read."""
    device = sources[0].device
    if not fused.available(device):
        return None
    found = tuple(source.dtype for source in sources)
    readable = all(kind in fused.TYPES for kind in found) and all(plain(source, device) for source in sources)
    return found if readable else None


def _columns(symmetry: Symmetry) -> int:
    """The columns that matter to the size of a law: only a translation's law has any."""
    return symmetry.m if symmetry.kind.linear else 0


def _matrices(batch: Batch, leg: BatchLeg, source: Tensor, *, point: bool) -> Tensor:
    found = leg.matrices({leg.view.parameter: source}, point=point)
    return found if len(found) == len(batch.members) else found.expand(len(batch.members), -1, -1)


def _index(gradient: Sequence[Scalar]) -> int:
    return next(j for j, weight in enumerate(gradient) if isinstance(weight, Tensor) or weight != 0)


def _weighed(forms: Tensor, slots: tuple[Slot, ...], weights: Weights) -> Tensor:
    """Σ weight · form."""
    total: Tensor | None = None
    for slot, weight in weights.items():
        form = forms[slots.index(slot)]
        if total is None:
            total = form * weight
        elif isinstance(weight, Tensor):
            total = total + form * weight
        else:
            total.add_(form, alpha=weight)
    return torch.zeros_like(forms[0]) if total is None else total


def _accounted(kind: Kind, held: Sequence[_Sums]) -> Account:
    """The account of batches whose legs all step with the same coefficients."""
    weights, slots, rate = held[0].weights, held[0].slots, held[0].rate
    held = _side_by_side(held)
    sums = [one.signed() for one in held]
    forms = _cat([kind.coordinates(kind.polar(difference)) for difference, _ in sums], 1)
    if kind.linear:
        absolute = _cat([_added(one.absolute) for one in held], 1)
        sizes, moved = absolute[0], forms.new_zeros(forms.shape[1])
        steepness = absolute[1].amax(-1) if len(absolute) > 1 else torch.zeros_like(moved)
    else:
        spread = _cat([kind.sizes(total) for _, total in sums], 1)
        sizes = spread[0]
        moved = _weighed(spread, slots, weights.second).sum(-1)
        steep = _weighed(spread, slots, weights.steepness).amax(-1)
        steepness = 2 * (steep.clamp(min=0) * sizes.amax(-1)).sqrt()
    return Account(
        law=forms[0],
        sizes=sizes,
        first={cause: _weighed(forms, slots, part) for cause, part in weights.first.items()},
        slope=_weighed(forms, slots, weights.slope),
        second=_weighed(forms, slots, weights.second),
        moved=moved,
        steepness=steepness,
        rate=rate,
    )


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _mixed(parts: list[Account]) -> Account:
    """One batch whose legs step with different coefficients.

    Only a common rate times the gradient leaves a law alone. What a leg moves at another rate than the first is a cause
    of its own.
    """
    if len(parts) == 1:
        return parts[0]
    # A leg that did not move has no rate; it is held against those that did.
    common = next((part.rate for part in parts if isinstance(part.rate, Tensor) or part.rate != 0), 0.0)
    first: dict[str, Tensor] = {}
    for part in parts:
        unequal = {"rates": (part.rate - common) * part.slope} if part.rate is not common else {}
        for cause, value in (*part.first.items(), *unequal.items()):
            first[cause] = first[cause] + value if cause in first else value
    return Account(
        law=_added([part.law for part in parts]),
        sizes=_added([part.sizes for part in parts]),
        first=first,
        slope=_added([part.slope for part in parts]),
        second=_added([part.second for part in parts]),
        moved=_added([part.moved for part in parts]),
        steepness=_added([part.steepness for part in parts]),
        rate=common,
    )


def _added(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


def _stacked(pieces: list[Account]) -> Account:
    """Batches of one shelf, one after the other."""
    causes = dict.fromkeys(cause for piece in pieces for cause in piece.first)
    rates = [torch.ones_like(piece.law[:, :1]) * piece.rate for piece in pieces]
    return Account(
        law=_cat([piece.law for piece in pieces], 0),
        sizes=_cat([piece.sizes for piece in pieces], 0),
        first={
            cause: _cat([piece.first.get(cause, torch.zeros_like(piece.law)) for piece in pieces], 0)
            for cause in causes
        },
        slope=_cat([piece.slope for piece in pieces], 0),
        second=_cat([piece.second for piece in pieces], 0),
        moved=_cat([piece.moved for piece in pieces], 0),
        steepness=_cat([piece.steepness for piece in pieces], 0),
        rate=_cat(rates, 0),
    )


def rounding(shelf: Shelf, symmetries: Sequence[Symmetry], theta: Tensors, dtype: torch.dtype | None) -> list[float]:
    """For each law of a shelf, the rounding error of one step over the size of its terms.

    Storing θ' rounds every entry once, and the update that is read back carries a few rounding errors of its own:
    3 ε of the parameters' type. Summing N products in the working type leaves 4 √N ε with overwhelming probability
    (Higham and Mary, 2019), in the law before and after and in the account.
    """
    found = []
    for place in shelf.places:
        symmetry = symmetries[place]
        stored = max(torch.finfo(theta[name].dtype).eps for name in symmetry.parameters)
        work = torch.finfo(working_dtype([theta[name] for name in symmetry.parameters], dtype)).eps
        terms = sum(symmetry.kind.terms(leg.view.n, leg.view.m) for leg in symmetry.legs)
        found.append(3 * stored + 4 * sqrt(terms) * work)
    return found
