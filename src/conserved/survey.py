r"""All identities of a plan whose groups scale rows, weighed in a few launches however many layers there are.

For these kinds the moment map is made of sums over single rows. With p going through products of a row of θ and a row
of G, of which each leg has one or several, and r through rows,

    term of a leg    t_ℓ[k] = Σ_{p, r ↦ k} ± Σ_j θ_rj G_rj              μ[k] = Σ_ℓ degree_ℓ t_ℓ[k]
    scale²           Σ_ℓ degree_ℓ² (‖t_ℓ‖² + Σ_{p, r, j} (θ_rj G_rj)²)

A kernel computes the inner sums, for all rows of all legs of all layers; which row goes where does not change, so it is
worked out once and the outer sums are a few additions by index. What changes from step to step is where gradients lie.

The squared norm of a gradient is the moment map of one scale on the gradient with itself, so norms come along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import gcd, prod
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved import fused
from conserved.batch import Batch, Plan
from conserved.launches import Addresses, Draft, Launch, Tile
from conserved.sheaf import Layout, RowProduct, plain
from conserved.symmetry import Tensors

Integers = NDArray[np.int64]
Types = tuple[torch.dtype, torch.dtype]
"""Of a parameter and of its gradient."""

_NORM_ROWS = 256
"""Rows that a gradient is cut into at the most where its norm is taken."""

_COLUMNS = 1024
"""Columns that one program goes through where rows lie next to each other and many fit into a tile."""


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """Where every row product is read, and what it is added to."""

    owners: int
    """How many symmetries are covered, and gradients read."""
    launches: tuple[Launch, ...]
    rows: int
    programs: int
    row_sign: Tensor
    row_leg: Tensor
    leg_degree: Tensor
    leg_number: Tensor
    leg_owner: Tensor
    number_owner: Tensor
    program_owner: Tensor
    program_weight: Tensor

    def weighed(self, points: list[Tensor], directions: list[Tensor]) -> Float[Tensor, "owners 2"]:
        """‖μ(θ, G)‖ and its scale for every symmetry that is covered, and ‖G‖² and its scale for every gradient."""
        device = points[0].device
        where = Addresses.of([*points, *directions])
        sums = torch.empty(self.rows, device=device)
        squares = torch.empty(self.programs, device=device)
        for launch in self.launches:
            launch.run(where, sums, squares)

        def added(count: int, index: Tensor, values: Tensor) -> Tensor:
            return torch.zeros(count, device=device, dtype=torch.float64).index_add_(0, index, values)

        terms = added(len(self.leg_degree), self.row_leg, self.row_sign * sums) * self.leg_degree
        mu = added(len(self.number_owner), self.leg_number, terms)
        scale = added(self.owners, self.leg_owner, terms.square())
        scale.index_add_(0, self.program_owner, self.program_weight * squares)
        return torch.stack((added(self.owners, self.number_owner, mu.square()), scale), -1).sqrt_()


@dataclass(frozen=True, slots=True, eq=False)
class _Outline:
    """What a survey of a plan covers, and the surveys that were made of it, by device and types."""

    batches: tuple[Batch, ...]
    places: tuple[int, ...]
    names: tuple[str, ...]
    surveys: dict[tuple[torch.device, tuple[Types, ...]], Survey] = field(default_factory=dict)


_OUTLINES: WeakKeyDictionary[Plan, _Outline] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class Surveyed:
    """What a survey found."""

    places: tuple[int, ...]
    """The symmetries it covers."""
    table: Float[Tensor, "s 2"]
    """‖μ(θ, G)‖ and its scale, of each."""
    names: tuple[str, ...]
    """The gradients it read."""
    norms: Float[Tensor, " p"]


def surveyed(plan: Plan, theta: Tensors, slopes: Tensors) -> Surveyed | None:
    """Weigh all symmetries that scale rows; None where that cannot be done."""
    if plan not in _OUTLINES:
        _OUTLINES[plan] = _outline(plan)
    outline = _OUTLINES[plan]
    if not outline.names or not fused.available(theta[outline.names[0]].device):
        return None
    points, directions = ([tensors[name] for name in outline.names] for tensors in (theta, slopes))
    device = points[0].device
    if not all(plain(tensor, device) and tensor.dtype in fused.TYPES for tensor in (*points, *directions)):
        return None
    types = tuple((point.dtype, direction.dtype) for point, direction in zip(points, directions, strict=True))
    if (device, types) not in outline.surveys:
        outline.surveys[device, types] = _Drafting(plan, outline, types).survey(device)
    table = outline.surveys[device, types].weighed(points, directions)
    count = len(outline.places)
    return Surveyed(outline.places, table[:count], outline.names, table[count:, 0].sqrt())


def _outline(plan: Plan) -> _Outline:
    def covers(batch: Batch) -> bool:
        kind = plan.symmetries[batch.members[0]].kind
        return all(leg.layout is not None and kind.row_products(leg.layout) is not None for leg in batch.legs)

    covered = [batch for batch in plan.batches if covers(batch)]
    return _Outline(
        tuple(covered),
        tuple(place for batch in covered for place in batch.members),
        tuple(dict.fromkeys(leg.view.parameter for batch in covered for leg in batch.legs)),
    )


class _Drafting:
    """Works out where everything goes."""

    def __init__(self, plan: Plan, outline: _Outline, types: tuple[Types, ...]) -> None:
        self._plan, self._outline = plan, outline
        self._types = dict(zip(outline.names, types, strict=True))
        self._index = {name: number for number, name in enumerate(outline.names)}
        legs = [leg for batch in outline.batches for leg in batch.legs]
        self._sizes = {leg.view.parameter: prod(leg.view.shape) for leg in legs}
        self._parts: dict[str, list[NDArray[np.float64] | Integers]] = defaultdict(list)
        self._counts: dict[str, int] = defaultdict(int)
        self._launches: dict[tuple[Types, Tile], Draft] = defaultdict(Draft)

    def survey(self, device: torch.device) -> Survey:
        """The finished survey, on the device."""
        for batch in self._outline.batches:
            self._add_batch(batch)
        for name in self._outline.names:
            self._add_norm(name)
        first = 0
        launches = []
        for (types, tile), draft in self._launches.items():
            launches.append(draft.launch(types, tile, first, device))
            self._add("program_weight", np.concatenate(draft.weights))
            self._add("program_owner", np.concatenate(draft.owners))
            first = self._counts["program_owner"]

        def index(name: str) -> Tensor:
            return torch.from_numpy(np.concatenate(self._parts[name]).astype(np.int32)).to(device)

        def weight(name: str) -> Tensor:
            return torch.from_numpy(np.concatenate(self._parts[name]).astype(np.float64)).to(device)

        return Survey(
            owners=self._counts["owners"],
            launches=tuple(launches),
            rows=self._counts["row_leg"],
            programs=first,
            row_sign=weight("row_sign"),
            row_leg=index("row_leg"),
            leg_degree=weight("leg_degree"),
            leg_number=index("leg_number"),
            leg_owner=index("leg_owner"),
            number_owner=index("number_owner"),
            program_owner=index("program_owner"),
            program_weight=weight("program_weight"),
        )

    def _add_norm(self, name: str) -> None:
        """⟨G, G⟩ as the only number of a law with one leg."""
        owner = np.array([self._counts["owners"]])
        self._counts["owners"] += 1
        number = self._add("number_owner", owner)
        leg = self._add("leg_number", np.array([number]))
        self._add("leg_owner", owner)
        self._add("leg_degree", np.ones(1))
        entries = self._sizes[name]
        rows = gcd(entries, _NORM_ROWS)
        layout = Layout(
            0,
            batch=((1, 0), (1, 0)),
            rows=((1, 0), (rows, entries // rows)),
            columns=((1, 0), (entries // rows, 1)),
        )
        product = RowProduct(layout, layout, step=0)
        out = self._add("row_leg", np.full(rows, leg))
        self._add("row_sign", np.ones(rows))
        source = self._index[name] + len(self._index)
        kind = self._types[name][1]
        self._launches[(kind, kind), Tile.of(product)].add(product, (source, source), 0.0, out, owner, 0.0)

    def _add(self, name: str, values: NDArray[np.float64] | Integers) -> int:
        """Append, and say where that begins."""
        begin = self._counts[name]
        self._parts[name].append(values.reshape(-1))
        self._counts[name] += values.size
        return begin

    def _add_batch(self, batch: Batch) -> None:
        first = self._plan.symmetries[batch.members[0]]
        size = first.kind.identities(first.n, first.m)
        owners = self._counts["owners"] + np.arange(len(batch.members))
        self._counts["owners"] += len(batch.members)
        numbers = self._add("number_owner", np.repeat(owners, size)) + np.arange(len(owners) * size)
        for degree, leg in zip(first.degrees, batch.legs, strict=True):
            assert leg.layout is not None
            begin = self._add("leg_number", numbers)
            self._add("leg_owner", np.repeat(owners, size))
            self._add("leg_degree", np.full(len(numbers), float(degree)))
            source = self._index[leg.view.parameter]
            sources = (source, source + len(self._index))
            products = first.kind.row_products(leg.layout)
            assert products is not None
            for read in _short(product if degree > 0 else product.swapped() for product in products):
                draft = self._launches[self._types[leg.view.parameter], Tile.of(read)]
                for members in _read_members(read, len(owners)):
                    rows = np.arange(read.first.count("rows"))
                    where = begin + members[:, None] * size + read.start + read.step * rows
                    out = self._add("row_leg", where)
                    self._add("row_sign", np.full(where.size, float(read.sign)))
                    draft.add(read, sources, leg.view.offset, out, owners[members], float(degree) ** 2)


def _short(products: Iterable[RowProduct]) -> Iterator[RowProduct]:
    """The same products with few columns each, where going through all of them would take one program too long."""
    for product in products:
        far, (size, stride) = product.first.columns
        if far[0] > 1 or size <= _COLUMNS or product.first.rows[1][1] != 1:
            yield product
            continue
        for begin in range(0, size, _COLUMNS):
            columns = (far, (min(_COLUMNS, size - begin), stride))
            first, second = (
                replace(layout, offset=layout.offset + begin * stride, columns=columns)
                for layout in (product.first, product.second)
            )
            yield replace(product, first=first, second=second)


def _read_members(product: RowProduct, count: int) -> Iterator[Integers]:
    """Members of a batch that one reading serves: all in order, or, if they share one leg, each by itself."""
    if product.first.count("batch") == count:
        yield np.arange(count)
    else:
        yield from np.arange(count).reshape(-1, 1)
