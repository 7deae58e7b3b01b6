r"""All identities of a plan whose groups act on single rows, in a few launches however many layers there are.

For these kinds the moment map is made of sums over single rows. With p going through products of a row of θ and a row
of G, of which each leg has one or several, and r through rows,

    term of a leg    t_ℓ[k] = Σ_{p, r ↦ k} ± Σ_j θ_rj G_rj              μ[k] = Σ_ℓ degree_ℓ t_ℓ[k]
    scale²           Σ_ℓ degree_ℓ² (‖t_ℓ‖² + Σ_{p, r, j} (θ_rj G_rj)²)

A kernel computes the inner sums, for all rows of all legs of all layers, and ‖G‖² and ‖θ‖² on the way. Which row goes
where does not change, so the outer sums are products with three sparse matrices, worked out once:

    sums → terms → moments        (moments², terms², squares) → (‖μ‖², scale²), ‖G‖² and ‖θ‖²

`Plan.evaluate` asks for this where only sizes are wanted; `forms.multiplied` says which rows are multiplied, as for
every other way. What changes from step to step is where gradients lie. What several laws need is read once; and a law
that scales all of a parameter by one number takes the sums that another law reads row by row.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved.moment.batches import Batch
from conserved.moment.forms import WantedNumbers, product_list
from conserved.moment.launches import Addresses, Draft, Launch, Tile
from conserved.moment.layouts import Axes, Layout, PlacedProduct, PlainTensors
from conserved.moment.leg_programs import placed_rows
from conserved.symmetry.kind import Degree
from conserved.symmetry.products import Products, RowProducts
from conserved.symmetry.symmetry import Symmetry

Integers = NDArray[np.int64]
Types = tuple[torch.dtype, torch.dtype]
"""Types of a parameter and of its gradient."""

_NORM_ROWS = 256
"""Maximum row count when only a norm is needed."""

_COLUMNS = 1024
"""Columns that one program goes through where rows lie next to each other and many fit into a tile."""

_NEIGHBOURS = 128
"""The shortest rows that a sum over all entries is read in."""


@dataclass(frozen=True, slots=True, eq=False)
class Norms:
    """Norms of tensors, by the names of their parameters."""

    names: tuple[str, ...]
    values: Float[Tensor, " parameters"]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Norms | None:
        """Return norms built from single numbers."""
        return Norms(tuple(tensors), torch.stack([*tensors.values()])) if tensors else None


@dataclass(frozen=True, slots=True, eq=False)
class RowSizes:
    """‖μ(θ, G)‖ of the symmetries that act on single rows."""

    indices: tuple[int, ...]
    """The symmetries."""
    table: Float[Tensor, "s 2"]
    """‖μ(θ, G)‖ and what it is held against, of each."""
    norms: Norms
    """Norms of all gradients that were read."""
    lengths: Norms
    """Norms of all parameters that were read."""


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """Where every row product is read, and what it is added to."""

    launches: tuple[Launch, ...]
    rows: int
    programs: int
    to_terms: Tensor
    to_moments: Tensor
    to_sizes: Tensor

    def run(self, tensors: PlainTensors) -> Float[Tensor, " sizes"]:
        """Return ‖μ(θ, G)‖ of every symmetry that is covered, then the scale of each, ‖G‖ of every gradient, and every
        ‖θ‖.
        """
        where = Addresses.of(tensors)
        sums = torch.empty(self.rows, device=tensors.device, dtype=torch.float64)
        squares = sums.new_empty(3 * self.programs)
        # Of all three kinds the programs of every launch, cut out at once.
        pieces = torch.split_with_sizes(squares, 3 * [launch.count for launch in self.launches])
        with torch.cuda.device_of(sums):
            for number, launch in enumerate(self.launches):
                launch.run(where, sums, pieces[number :: len(self.launches)])
        terms = self.to_terms @ sums
        moments = self.to_moments @ terms
        return (self.to_sizes @ torch.cat((moments.square(), terms.square(), squares))).sqrt_()


@dataclass(frozen=True, eq=False)
class RowIdentities:
    """The symmetries among some that act on single rows, and the programs that read them, by device and types."""

    symmetries: Sequence[Symmetry]
    all_batches: Sequence[Batch]
    programs: dict[tuple[torch.device, tuple[torch.dtype, ...]], _Program] = field(default_factory=dict)

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Those that are read row by row; the ones that add up whole legs last, as they use what others read."""
        candidates = [
            (batch, [self.products(batch, number) for number in range(len(batch.legs))]) for batch in self.all_batches
        ]
        readable = [(batch, products) for batch, products in candidates if None not in products]
        readable.sort(key=lambda entry: all(product.step == 0 for some in entry[1] for product in some or ()))
        return tuple(batch for batch, _ in readable)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The symmetries."""
        return tuple(index for batch in self.batches for index in batch.members)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters that are read."""
        return tuple(dict.fromkeys(leg.view.parameter for batch in self.batches for leg in batch.legs))

    def products(self, batch: Batch, number: int) -> tuple[PlacedProduct, ...] | None:
        """Return the row products of one leg; None if they cannot be read."""
        layout, products = batch.legs[number].layout, self.symmetries[batch.members[0]].kind.products
        return None if layout is None else _place_products(products, layout, batch.degrees[number])

    def sizes(self, tensors: PlainTensors) -> RowSizes:
        """Return ‖μ(θ, G)‖ of all row identities, and the scales of their residuals.

        Of all parameters, then of all of their gradients.
        """
        count, many = len(self.indices), len(self.names)
        program = self.programs.get((tensors.device, tensors.types))
        if program is None:
            types = (*zip(tensors.types[:many], tensors.types[many:], strict=True),)
            program = self.programs[tensors.device, tensors.types] = _Drafting(self, types).program(tensors.device)
        sums = program.run(tensors)
        sizes, norms, lengths = torch.split_with_sizes(sums, (2 * count, many, many))
        return RowSizes(self.indices, sizes.view(2, count).mT, Norms(self.names, norms), Norms(self.names, lengths))


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """A row product that some launch computes."""

    entries: int
    sums: Integers
    """Where its sums go, a row for each of its batch."""
    launch: tuple[Types, Tile]
    programs: Integers
    """Its programs among those of its launch, a row for each of its batch."""

    def as_one(self) -> _Reading:
        """Return the same without a batch."""
        return replace(self, sums=self.sums.reshape(1, -1), programs=self.programs.reshape(1, -1))


class _Sparse:
    """A sparse matrix that is being written down, in coordinates."""

    def __init__(self) -> None:
        self.height = 0
        self._parts: list[tuple[NDArray[Any], ...]] = []

    def more(self, count: int) -> Integers:
        """Append `count` rows and return their indices."""
        self.height += count
        return np.arange(self.height - count, self.height)

    def add(self, rows: Integers | int, columns: Integers, value: float) -> None:
        self._parts.append(tuple(part.reshape(-1) for part in np.broadcast_arrays(rows, columns, value)))

    def put(self, other: _Sparse, row: int, column: int) -> None:
        """Add another matrix, with its upper left corner here."""
        self._parts += [(rows + row, columns + column, values) for rows, columns, values in other._parts]

    def matrix(self, width: int, device: torch.device) -> Tensor:
        """Return the finished matrix."""
        rows, columns, values = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        order = np.argsort(rows, kind="stable")
        begins = np.concatenate(([0], np.bincount(rows, minlength=self.height).cumsum()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")
            return torch.sparse_csr_tensor(
                torch.from_numpy(begins.astype(np.int32)),
                torch.from_numpy(columns[order].astype(np.int32)),
                torch.from_numpy(values[order].astype(np.float64)),
                (self.height, width),
                check_invariants=False,
            ).to(device)


class _Drafting:
    """Assigns rows and columns of the output matrices to symmetries and their legs."""

    def __init__(self, outline: RowIdentities, types: tuple[Types, ...]) -> None:
        self._outline = outline
        self._types = dict(zip(outline.names, types, strict=True))
        self._index = {name: number for number, name in enumerate(outline.names)}
        legs = [leg for batch in outline.batches for leg in batch.legs]
        self._entries = {leg.view.parameter: prod(leg.view.shape) for leg in legs}
        self._terms, self._moments = _Sparse(), _Sparse()
        self._of_moments, self._of_terms = _Sparse(), _Sparse()
        self._programs: list[tuple[Integers, _Reading, float]] = []
        """Per group of symmetries: indices, how legs are read, and the weight of squared entries in the scale."""
        self._rows = 0
        self._drafts: dict[tuple[Types, Tile], Draft] = defaultdict(Draft)
        self._known: dict[tuple[str, PlacedProduct, float], _Reading] = {}
        self._whole: dict[tuple[str, float], list[_Reading]] = {}
        """For a parameter with a shift, readings of θ ∘ G that cover all of it once."""
        self._gradients: dict[str, list[_Reading]] = {}
        """Readings of G alone that cover all of a parameter once."""

    def program(self, device: torch.device) -> _Program:
        """Return the finished program, on the device."""
        owners = 0
        for batch in self._outline.batches:
            self._add_batch(batch, owners + np.arange(len(batch.members)))
            owners += len(batch.members)
        products = {name: products_of_name for (name, _), products_of_name in self._whole.items()}
        alone = {name: self._norm(name, 0) for name in self._outline.names if name not in products}
        for name in self._outline.names:
            if name not in self._gradients:
                self._gradients[name] = [self._norm(name, 1)]
        first: dict[tuple[Types, Tile], int] = {}
        programs = 0
        for key, draft in self._drafts.items():
            first[key] = programs
            programs += draft.count
        moments, terms = self._moments.height, self._terms.height
        squares = moments + terms
        sizes = _Sparse()
        sizes.more(2 * (owners + len(self._index)))
        sizes.put(self._of_moments, 0, 0)
        sizes.put(self._of_terms, owners, moments)
        for whose, reading, weight in self._programs:
            sizes.add(owners + whose[:, None], squares + first[reading.launch] + reading.programs, weight)
        for number, name in enumerate(self._outline.names, 2 * owners):
            for reading in self._gradients[name]:
                sizes.add(number, squares + programs + first[reading.launch] + reading.programs, 1.0)
            # A parameter that is read alone is the second factor, as a gradient is.
            region = programs if name in alone else 2 * programs
            for reading in [alone[name]] if name in alone else products[name]:
                sizes.add(number + len(self._index), squares + region + first[reading.launch] + reading.programs, 1.0)
        return _Program(
            launches=tuple(draft.launch(types, tile, device) for (types, tile), draft in self._drafts.items()),
            rows=self._rows,
            programs=programs,
            to_terms=self._terms.matrix(self._rows, device),
            to_moments=self._moments.matrix(terms, device),
            to_sizes=sizes.matrix(squares + 3 * programs, device),
        )

    def _add_batch(self, batch: Batch, owners: Integers) -> None:
        first = self._outline.symmetries[batch.members[0]]
        size = first.kind.identities(first.n, first.m)
        moments = self._moments.more(len(owners) * size)
        self._of_moments.add(np.repeat(owners, size), moments, 1.0)
        for number, (degree, leg) in enumerate(zip(first.degrees, batch.legs, strict=True)):
            terms = self._terms.more(len(moments))
            self._moments.add(moments, terms, float(degree))
            self._of_terms.add(np.repeat(owners, size), terms, float(degree) ** 2)
            products = self._outline.products(batch, number)
            assert products is not None
            name, shift = leg.view.parameter, leg.view.offset
            for product in products:
                for reading in self._readings(name, product, shift):
                    rows = np.arange(reading.sums.shape[1])
                    where = terms.reshape(len(owners), size)[:, product.start + product.step * rows]
                    # Members of a batch that share a leg share its sums.
                    self._terms.add(where, reading.sums, float(product.sign))
                    self._programs.append((owners, reading, float(degree) ** 2))

    def _readings(self, name: str, product: PlacedProduct, shift: float) -> list[_Reading]:
        """Return what a product of a parameter and its gradient is read by."""
        layout, entries = product.first, self._entries[name]
        if (
            product.step == 0
            and layout.count("rows") * layout.count("columns") == entries
            and (name, shift) in self._whole
        ):
            return [reading.as_one() for reading in self._whole[name, shift]]
        result = [self._read(name, part, shift) for part in _cut_rows(product)]
        if layout == product.second and sum(reading.entries for reading in result) == entries:
            self._gradients.setdefault(name, result)
            if not product.lifted:
                self._whole.setdefault((name, shift), result)
        return result

    def _read(self, name: str, product: PlacedProduct, shift: float) -> _Reading:
        key = (name, replace(product, start=0, step=1, sign=1), shift)
        if key not in self._known:
            source = self._index[name]
            self._known[key] = self._drafted(product, self._types[name], (source, source + len(self._index)), shift)
        return self._known[key]

    def _norm(self, name: str, which: Literal[0, 1]) -> _Reading:
        """Return a reading of a parameter or of its gradient alone."""
        entries = self._entries[name]
        rows = gcd(entries, _NORM_ROWS)
        layout = Layout(
            0, batch=((1, 0), (1, 0)), rows=((1, 0), (rows, entries // rows)), columns=((1, 0), (entries // rows, 1))
        )
        source = self._index[name] + which * len(self._index)
        kind = self._types[name][which]
        return self._drafted(PlacedProduct(layout, layout, lifted=True), (kind, kind), (source, source), 0.0)

    def _drafted(self, product: PlacedProduct, types: Types, sources: tuple[int, int], shift: float) -> _Reading:
        layout = product.first
        batch, rows = layout.count("batch"), layout.count("rows")
        launch = types, Tile.of(product)
        programs = self._drafts[launch].add(product, sources, shift, self._rows)
        sums = self._rows + np.arange(batch * rows).reshape(batch, rows)
        self._rows += sums.size
        return _Reading(sums.size * layout.count("columns"), sums, launch, programs)


def _place_products(products: Products, layout: Layout, degree: Degree) -> tuple[PlacedProduct, ...] | None:
    """Return what `forms` multiplies of a leg for the pair (θ, G), a row of θ first.

    The result is None if strides do not determine where rows lie.
    """
    recipe = product_list(products, ((0, 1),), degree, WantedNumbers())
    if not isinstance(products, RowProducts) or not recipe.rows or recipe.whole:
        return None
    rows = placed_rows(products, recipe, layout)
    if rows is None:
        return None
    step, placed = 0 if products.faces == "entries" else products.width, []
    for number, part in enumerate(recipe.sums[0]):
        for index, sign in part:
            (_, theta), (_, gradient) = sorted((rows[row] for row in recipe.products[index]), key=itemgetter(0))
            placed.append(PlacedProduct(theta, gradient, number, step, sign, products.lifted))
    return tuple(placed)


def _cut_rows(product: PlacedProduct) -> Iterator[PlacedProduct]:
    """Yield the same product in parts that programs go through quickly.

    A sum over all entries has each of them as a row of its own: they are read as rows that are long. Where rows lie
    next to each other, going through all columns would take one program too long: parts have few columns each.
    """
    far, (size, stride) = product.first.rows
    if product.step == 0 and product.first.count("columns") == 1 and far[0] == 1 and size >= _NEIGHBOURS:
        length = _COLUMNS if size >= _NEIGHBOURS * _COLUMNS else _NEIGHBOURS
        rows = ((1, 0), (size // length, length * stride)), ((1, 0), (length, stride))
        yield _part(product, 0, *rows)
        if size % length:
            yield _part(product, size // length * length * stride, ((1, 0), (1, 0)), ((1, 0), (size % length, stride)))
        return
    far, (size, stride) = product.first.columns
    if far[0] > 1 or size <= _COLUMNS or product.first.rows[1][1] != 1:
        yield product
        return
    for begin in range(0, size, _COLUMNS):
        columns = (far, (min(_COLUMNS, size - begin), stride))
        yield _part(product, begin * stride, product.first.rows, columns)


def _part(product: PlacedProduct, begin: int, rows: Axes, columns: Axes) -> PlacedProduct:
    """Return rows and columns of a product, from an entry on."""
    first, second = (
        replace(layout, offset=layout.offset + begin, rows=rows, columns=columns)
        for layout in (product.first, product.second)
    )
    return replace(product, first=first, second=second)
