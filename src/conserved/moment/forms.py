r"""Bilinear forms of one leg, from the products its kind is made of: written once, for every backend.

A backend computes two things, for several pairs of legs at a time and in one pass over memory: products of equal rows,
Σ_j a_ij b_ij, and outer products A Bᵀ; with `sizes` also the sum of the squares of all products of entries. Its root is
the size the form would have if those products had random signs, and, times the unit of rounding, what independent
rounding errors of B leave in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.symmetry.kind import Degree
from conserved.symmetry.pairs import Pair
from conserved.symmetry.products import BlockOuterProducts, Products, RowProducts

FormValues = tuple[Tensor, Tensor | None]
"""Values, a row for every pair, and with `sizes` the sums of squares."""


class Backend(ABC):
    """Computes products of legs, which are whatever it reads: matrices, or matrices that lie in many tensors."""

    @abstractmethod
    def faced(self, legs: Sequence[Any], faces: str) -> Sequence[Any]:
        """Return legs with what counts as their rows as rows."""

    @abstractmethod
    def row_of_units(self, leg: Any, unit: int, row: int) -> Any:
        """Return one row of every unit."""

    @abstractmethod
    def row_products(
        self, legs: Sequence[Any], pairs: Sequence[Pair], dtype: torch.dtype, *, sizes: bool
    ) -> FormValues:
        """Return Σ_j a_ij b_ij for every row i and every pair of legs."""

    @abstractmethod
    def row_totals(self, leg: Any, dtype: torch.dtype, *, sizes: bool) -> FormValues:
        """Return Σ_j b_ij for every row i of a leg, and the sum of all squares."""

    @abstractmethod
    def outer_products(
        self, legs: Sequence[Any], pairs: Sequence[Pair], dtype: torch.dtype, *, sizes: bool
    ) -> FormValues:
        """Return a Bᵀ for every pair of legs."""


@dataclass(frozen=True, slots=True)
class WantedNumbers:
    """Which numbers are computed of every leg."""

    law: bool = False
    """Only the part of μ that laws are made of."""
    absolute: bool = False
    """Every sign plus and every entry its absolute value: the largest |μ| if nothing cancelled."""
    sizes: bool = False


@dataclass(frozen=True, slots=True)
class ProductList:
    """The products for some pairs of sources, and how they are added up."""

    rows: tuple[tuple[int, int | None], ...]
    """Of a source, the row of every unit; None stands for all rows."""
    products: tuple[Pair, ...]
    """Pairs of rows; or of sources, where outer products are taken."""
    sums: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    """By pair and number of a unit, products and their signs."""
    whole: bool
    """Whether products are of all rows, and are added up by unit."""

    plain: bool
    """Whether values are the products as they come."""


def product_list(products: Products, pairs: tuple[Pair, ...], degree: Degree, wanted: WantedNumbers) -> ProductList:
    """Return what is multiplied for pairs of sources; a leg of negative degree contributes μ(B, A)."""
    return _recipe(products, pairs, degree < 0, wanted)


@cache
def _recipe(products: Products, pairs: tuple[Pair, ...], turned: bool, wanted: WantedNumbers) -> ProductList:
    if not isinstance(products, RowProducts):
        return ProductList((), tuple((j, i) for i, j in pairs) if turned else pairs, (), False, True)
    numbers = products.symmetric if wanted.law else tuple(range(products.width))
    every = {(row, row, 1) for row in range(products.unit)}
    # Where every row is paired with itself, all rows are read as they lie.
    complete = products.unit > 1 and all(
        {(t.first, t.second, t.sign) for t in products.into(k)} == every for k in numbers
    )
    rows: dict[tuple[int, int | None], int] = {}
    slots: dict[Pair, int] = {}
    sums = []
    for i, j in pairs:
        a, b = (j, i) if turned else (i, j)
        parts = []
        for number in numbers:
            terms: list[tuple[int | None, int | None, int]] = [
                (term.first, term.second, 1 if wanted.absolute else term.sign) for term in products.into(number)
            ]
            if i == j and number not in products.symmetric and not wanted.absolute:
                # Antisymmetric: of a leg with itself it is zero.
                terms = []
            part = []
            for first, second, sign in [(None, None, 1)] if complete else terms:
                x, y = (rows.setdefault(row, len(rows)) for row in ((a, first), (b, second)))
                part.append((slots.setdefault((min(x, y), max(x, y)), len(slots)), sign))
            parts.append(tuple(part))
        sums.append(tuple(parts))
    plain = sums == [(((index, 1),),) for index in range(len(slots))]
    return ProductList(tuple(rows), tuple(slots), tuple(sums), complete, plain)


def forms(
    backend: Backend,
    products: Products,
    degree: Degree,
    legs: Sequence[Any],
    pairs: tuple[Pair, ...],
    constants: Sequence[float],
    dtype: torch.dtype,
    wanted: WantedNumbers,
) -> FormValues:
    """Return for a leg of degree ±1 what μ(A, B) is, up to that sign, for every pair of sources; a row for each.

    Args:
        backend: what computes products.
        products: what μ is made of.
        degree: only its sign matters: a negative leg contributes μ(B, A).
        legs: the leg of every source, as the backend reads it.
        pairs: pairs of sources.
        constants: of every source 1 if it is a point, and 0 if it is a direction.
        dtype: the precision of the results.
        wanted: which part, and whether sums of squares come with it.

    """
    recipe = product_list(products, pairs, degree, wanted)
    if isinstance(products, BlockOuterProducts):
        return _block_forms(backend, products, legs, recipe, dtype, wanted)
    if not isinstance(products, RowProducts):
        return backend.outer_products(legs, recipe.products, dtype, sizes=wanted.sizes)
    if not products.terms:
        # A group without law or identity, such as the exchange of equal units.
        nothing = legs[0].new_zeros((len(pairs), *legs[0].shape[:-2]), dtype=dtype)
        return nothing.unsqueeze(-1)[..., :0], nothing if wanted.sizes else None
    faced = backend.faced(legs, products.faces)
    if products.lifted:
        # Where A is a point its rows are ones, where it is a direction zeros.
        totals = {j: backend.row_totals(faced[j], dtype, sizes=wanted.sizes) for j in {j for _, j in pairs}}
        values = [totals[j][0] if constants[i] else torch.zeros_like(totals[j][0]) for i, j in pairs]
        squares = [square * constants[i] for i, j in pairs if (square := totals[j][1]) is not None]
        return stack(values), stack(squares) if squares else None
    rows = [
        faced[source] if row is None else backend.row_of_units(faced[source], products.unit, row)
        for source, row in recipe.rows
    ]
    return assemble_forms(products, recipe, *backend.row_products(rows, recipe.products, dtype, sizes=wanted.sizes))


def _block_forms(
    backend: Backend,
    products: BlockOuterProducts,
    legs: Sequence[Tensor],
    recipe: ProductList,
    dtype: torch.dtype,
    wanted: WantedNumbers,
) -> FormValues:
    """Return outer products of every block of rows, which are one more batch axis."""
    blocks = [leg.unflatten(-2, (-1, products.width)) for leg in legs]
    values, squares = backend.outer_products(blocks, recipe.products, dtype, sizes=wanted.sizes)
    if products.antisymmetric:
        values = values + values.mT if wanted.absolute else values - values.mT
        squares = None if squares is None else 2 * squares
    return values, None if squares is None else squares.sum(-1)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape along a new first axis; one alone is not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack([*tensors])


def assemble_forms(products: Products, recipe: ProductList, sums: Tensor, squares: Tensor | None) -> FormValues:
    """Return forms of all pairs from the products of a recipe."""
    if not isinstance(products, RowProducts):
        return sums, squares
    if products.faces == "entries":
        sums = sums.squeeze(-1) if sums.shape[-1] == 1 else sums.sum(-1)
    if recipe.whole:
        sums = sums.unflatten(-1, (-1, products.unit)).sum(-1)
    if recipe.plain:
        return sums, squares
    values = []
    for numbers in recipe.sums:
        columns = [_signed_sum(sums, part) for part in numbers]
        values.append(columns[0] if len(columns) == 1 else torch.stack(columns, -1))
    stacked = values[0].unsqueeze(0) if len(values) == 1 else torch.stack(values)
    if squares is None:
        return stacked, None
    spread = [sum(squares[index] for part in numbers for index, _ in part) for numbers in recipe.sums]
    return stacked, torch.stack([torch.as_tensor(total) for total in spread])


def _signed_sum(each: Tensor, part: Sequence[tuple[int, int]]) -> Tensor:
    if not part:
        return torch.zeros_like(each[0])
    (first, sign), *rest = part
    total = each[first] if sign > 0 else -each[first]
    for index, sign in rest:
        total = total + each[index] if sign > 0 else total - each[index]
    return total


@dataclass(slots=True)
class Sums:
    """Forms of the legs of some symmetries, to be added up; a row for every pair, then one for every symmetry."""

    pairs: tuple[Pair, ...]
    absolute: bool = False
    """Whether all legs count as positive."""
    plus: list[Tensor] = field(default_factory=list)
    """Of every leg of positive degree, times it."""
    minus: list[Tensor] = field(default_factory=list)
    """Of every leg of negative degree, times its absolute value."""
    scales: list[Tensor] = field(default_factory=list)
    """With `sizes`: of every leg ‖term‖² + ‖term as if its products had random signs‖²."""
    columns: list[Tensor] = field(default_factory=list)
    """For linear laws, where asked for: bounds of the sums of absolute values."""

    def add(self, forms: FormValues, degree: Degree, *, stacked: tuple[int, int] | None = None) -> None:
        """Add one leg, or the legs of several layers at once.

        Args:
            forms: the forms of the leg, and with `sizes` the squares of their terms.
            degree: the degree of the leg.
            stacked: (legs, batch) where the forms are of so many legs of several layers, leg after leg, with this batch
                size.
        """
        values, squares = forms
        if squares is not None:
            scale = _norms(values, squares.ndim).square() + squares
            scale = scale if abs(degree) == 1 else degree**2 * scale
            self.scales.append(scale if stacked is None else _together(scale, *stacked))
        values = values if stacked is None else _together(values, *stacked)
        (self.plus if degree > 0 or self.absolute else self.minus).append(
            values if abs(degree) == 1 else abs(degree) * values
        )

    def signed(self) -> Float[Tensor, "pairs ..."]:
        """Return μ, for every pair."""
        plus, minus = _over_legs(self.plus), _over_legs(self.minus)
        if plus is None:
            assert minus is not None
            return -minus
        return plus if minus is None else plus - minus

    def unsigned(self) -> Float[Tensor, "pairs ..."]:
        """Return μ with all legs counted as positive, for every pair."""
        plus, minus = _over_legs(self.plus), _over_legs(self.minus)
        if plus is None:
            assert minus is not None
            return minus
        return plus if minus is None else plus + minus

    def sizes(self) -> Float[Tensor, "pairs *batch 2"]:
        """Return ‖μ‖, and the scale that an identity is held against.

        A wrong gradient leaves a μ as large as the terms of single legs; rounding leaves its unit times the scale,
        whatever the size and number of the legs.
        """
        scale = _over_legs(self.scales)
        assert scale is not None
        return torch.stack((_norms(self.signed(), scale.ndim), scale.sqrt()), -1)


def _together(entries: Tensor, legs: int, batch: int) -> Tensor:
    """Reshape (pairs, legs · layers, batch, …) to (pairs, layers · batch, …); repeat a leg that a batch shares."""
    layers = entries if legs == 1 else entries.unflatten(1, (legs, -1)).sum(1)
    return layers.expand(-1, -1, batch, *layers.shape[3:]).flatten(1, 2)


def _over_legs(legs: list[Tensor]) -> Tensor | None:
    """Stack results once and sum them once, however many legs there are."""
    if len(legs) < 3:
        return None if not legs else legs[0] if len(legs) == 1 else legs[0] + legs[1]
    return torch.stack(torch.broadcast_tensors(*legs)).sum(0)


def _norms(values: Float[Tensor, "..."], batch: int) -> Float[Tensor, "..."]:
    """Return the norm over all axes after the first `batch` ones."""
    return torch.linalg.vector_norm(values.flatten(batch) if values.ndim > batch else values.unsqueeze(-1), dim=-1)


def working_dtype(types: Iterable[torch.dtype], dtype: torch.dtype | None) -> torch.dtype:
    """Return the precision laws are computed in: `dtype` if given, else the legs' common one and at least float32."""
    return dtype or reduce(torch.promote_types, types, torch.float32)


@contextmanager
def full_precision(devices: Iterable[str]) -> Iterator[None]:
    """Keep a surrounding autocast region, or TF32, from computing laws below the working precision.

    Args:
        devices: the types of the devices that are computed on, such as "cpu" or "cuda".

    """
    kinds = set(devices)
    with ExitStack() as undo:
        # There is nothing to keep away from a device without values (meta), which readers refuse in their own words.
        for kind in filter(torch.amp.is_autocast_available, kinds):
            if torch.is_autocast_enabled(kind):
                undo.enter_context(torch.autocast(kind, enabled=False))
        if "cuda" in kinds:
            switch = torch.backends.cuda.matmul
            name, exact = ("fp32_precision", "ieee") if hasattr(switch, "fp32_precision") else ("allow_tf32", False)
            undo.callback(setattr, switch, name, getattr(switch, name))
            setattr(switch, name, exact)
        yield
