r"""Sparse linear relations between rates of change: the null space of their samples, made readable.

A null space has no preferred basis, but laws have: few terms, small rational coefficients. Gauss–Jordan elimination
gives such a basis up to relations that say nothing about the function (the squared lengths of a matrix's rows add up
to the same number as those of its columns); these are taken out again wherever that makes a relation shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from conserved.discovery.features import Feature, Rates

EXACT = 1e-9
"""A relation violated by less than this, relative to its terms, holds up to rounding."""

NEARLY = 1e-3
"""A relation violated by less than this holds up to something small, such as a normalisation's ε."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Σ coefficient · rate = 0, and by how much it is violated relative to its terms."""

    terms: dict[Feature, float]
    violation: float

    @property
    def exact(self) -> bool:
        return self.violation < EXACT


def relations(rates: Rates, *, exact: bool = True) -> list[Relation]:
    """Return a sparse basis of all linear relations between the features that move, modulo the trivial ones.

    Without `exact` only those that hold up to something small, where there are any.
    """
    features = rates.features
    scale = rates.sizes.square().mean(0).sqrt()
    # Fields have length one: a feature this small is itself rounding, and must not be scaled up to a signal.
    alive = scale > 1e-12 * scale.max()
    matrix = rates.values / torch.where(alive, scale, 1)
    # A feature whose rate is rounding against its own terms is a relation of one term.
    silent = alive & (matrix.abs().amax(0) < EXACT)
    selected = [Relation({f: 1.0}, float(matrix[:, i].abs().max())) for i, f in enumerate(features) if silent[i]]
    keep = (alive & ~silent).nonzero().flatten()
    if len(keep):
        moving = [features[i] for i in keep.tolist()]
        selected += _null_relations(moving, matrix[:, keep], scale[keep], rates.sizes[:, keep], exact=exact)
    return selected if exact else [relation for relation in selected if not relation.exact]


def _null_relations(
    features: list[Feature], matrix: Tensor, scale: Tensor, sizes: Tensor, *, exact: bool
) -> list[Relation]:
    _, values, right = torch.linalg.svd(matrix, full_matrices=False)
    vanishing, nearly = (_first_drop(values, limit) for limit in (EXACT, NEARLY))
    if not exact and nearly >= vanishing:
        return []
    trivial = _trivial(features)
    rows = [row.cpu() for row in _reduce(right[vanishing:] / scale, _FINE)]
    rows = _independent(_shorten(rows, trivial, _FINE) if exact else rows, trivial, _FINE)
    if nearly < vanishing:
        # Vectors that nearly vanish are known only to that precision, and so are their coefficients.
        blur = float(values[nearly] / values[nearly - 1])
        resolution = _FINE if blur < _FINE.zero else _COARSE
        wide = [row.cpu() for row in _reduce(right[nearly:] / scale, resolution)]
        rows = rows + _independent(_shorten(wide, trivial, resolution), [*trivial, *rows], resolution)
    relations = [_relation(features, row, matrix * scale, sizes) for row in rows]
    # The worst of many samples: where what is normalised happens to be small, ε weighs more.
    return [relation for relation in relations if relation.violation < 10 * NEARLY]


def _first_drop(values: Float[Tensor, " F"], limit: float) -> int:
    """Return where small singular values begin.

    Only a drop sets them apart: a spectrum that fades out has no relations.
    """
    small = (values < limit * values[0]).nonzero().flatten()
    first = int(small[0]) if len(small) else len(values)
    cuts = (i for i in range(max(first, 1), len(values)) if values[i] < 0.1 * values[i - 1])
    return next(cuts, len(values))


@dataclass(frozen=True, slots=True)
class _Resolution:
    """The resolution of coefficients: what counts as zero, and how many decimals of a ratio are compared."""

    zero: float
    decimals: int


_FINE = _Resolution(1e-5, 6)
_COARSE = _Resolution(1e-2, 1)


def _reduce(rows: Float[Tensor, "k F"], resolution: _Resolution) -> Float[Tensor, "k F"]:
    """Eliminate by Gauss–Jordan with complete pivoting on scaled rows."""
    rows = rows.clone()
    for index in range(len(rows)):
        sizes = rows[index:].abs()
        pivot = int(sizes.argmax())
        row, column = index + pivot // rows.shape[1], pivot % rows.shape[1]
        if rows[row, column] == 0:
            return rows[:index]
        rows[[index, row]] = rows[[row, index]]
        rows[index] /= rows[index, column].clone()
        others = torch.arange(len(rows)) != index
        rows[others] -= rows[others, column : column + 1] * rows[index]
    return torch.where(rows.abs() < 0.1 * resolution.zero, 0, rows)


def _trivial(features: list[Feature]) -> list[Tensor]:
    """Return relations that hold trivially: sums over the rows of one parameter agree along any of its axes."""
    groups: dict[tuple[str, str], dict[int, list[int]]] = {}
    for index, feature in enumerate(features):
        groups.setdefault((feature.sort, feature.parameter), {}).setdefault(feature.axis, []).append(index)
    result = []
    for axes in groups.values():
        first, *others = axes.values()
        for other in others:
            row = torch.zeros(len(features), dtype=torch.float64)
            row[first], row[other] = 1, -1
            result.append(row)
    return result


def _shorten(rows: list[Tensor], trivial: list[Tensor], resolution: _Resolution) -> list[Tensor]:
    """Subtract multiples of other rows and of trivial relations from each row while that leaves fewer terms.

    A relation can hide behind trivial ones (the last neuron's, as the sum over all neurons less the others), so each
    row is also tried from where a few trivial relations take it. Rows are short and many: in NumPy, a small operation
    costs a fraction of one in PyTorch.
    """
    known = [relation.numpy() for relation in trivial]
    arrays = sorted((row.numpy() for row in rows), key=np.count_nonzero)
    improved = True
    while improved:
        improved = False
        table = np.stack(arrays) if arrays else np.zeros((0, 0))
        for index in range(len(arrays)):
            best = _shortest(arrays[index], table, index, known, resolution)
            if np.count_nonzero(best) < np.count_nonzero(arrays[index]):
                arrays[index] = table[index] = best
                improved = True
        arrays = sorted((row for row in arrays if row.any()), key=np.count_nonzero)
    return [torch.from_numpy(row) for row in arrays]


def _shortest(
    row: np.ndarray, table: np.ndarray, index: int, trivial: list[np.ndarray], resolution: _Resolution
) -> np.ndarray:
    """Return the shortest row within reach, over rows that may be as long or longer on the way."""
    best = start = _descend(row, table, index, resolution)
    frontier, seen = [start], {_signature(start)}
    for _ in range(_EFFORT):
        if not frontier:
            break
        current = frontier.pop(0)
        for neighbour in _neighbours(current, table, index, trivial, resolution):
            further = _descend(neighbour, table, index, resolution)
            if (signature := _signature(further)) not in seen:
                seen.add(signature)
                frontier.append(further)
                best = min(best, further, key=np.count_nonzero)
    return best


def _neighbours(
    row: np.ndarray, table: np.ndarray, index: int, trivial: list[np.ndarray], resolution: _Resolution
) -> Iterator[np.ndarray]:
    """Yield the row without a trivial relation, or with all rows along one axis exchanged for their equals."""
    for relation in trivial:
        if not _has_half(row, relation):
            continue
        yield _less(row, relation, resolution)
        for side in (relation > 0, relation < 0):
            inside = (table[:, side & (row != 0)] != 0).any(1)
            inside[index] = False
            exchanged = row
            for k in np.flatnonzero(inside):
                exchanged = _less(exchanged, table[k], resolution)
            yield exchanged


def _signature(row: np.ndarray) -> bytes:
    return row.round(4).tobytes()


def _has_half(row: np.ndarray, relation: np.ndarray) -> bool:
    present = relation[row != 0]
    sides = (present > 0, relation > 0), (present < 0, relation < 0)
    return any(2 * np.count_nonzero(part) >= np.count_nonzero(side) for part, side in sides)


_EFFORT = 40
"""How many rows are looked at from where trivial relations take one."""

_CAREFUL = 64
"""Up to so many candidates, each step takes the best of them; beyond, all that fit are taken in turn."""


def _descend(row: np.ndarray, table: np.ndarray, index: int, resolution: _Resolution) -> np.ndarray:
    """Subtract multiples of other rows while that leaves fewer terms."""
    lengths = np.count_nonzero(table, axis=1)
    lengths[index] = 2 * table.shape[1] + 1
    while True:
        overlap = np.count_nonzero(table[:, row != 0], axis=1)
        candidates = np.flatnonzero(2 * overlap > lengths)
        best = row
        if len(candidates) > _CAREFUL:
            for k in np.flatnonzero(overlap == lengths):
                best = _less(best, table[k], resolution)
        elif len(candidates):
            shorter = _each_less(row, table[candidates], resolution)
            best = shorter[np.count_nonzero(shorter, axis=1).argmin()]
        if np.count_nonzero(best) >= np.count_nonzero(row):
            return row
        row = best


def _less(row: np.ndarray, other: np.ndarray, resolution: _Resolution) -> np.ndarray:
    """Return `row` less the multiple of `other` that cancels most of its entries."""
    result: np.ndarray = _each_less(row, other[None], resolution)[0]
    return result


def _each_less(row: np.ndarray, others: np.ndarray, resolution: _Resolution) -> np.ndarray:
    """Return `row` less a multiple of each of the others.

    The multiple is the ratio of entries that occurs most often, and the smallest of several such ratios.

    Where an entry is zero there is no ratio; what is not a number is sorted to the end, and is equal to nothing.
    """
    indices = np.flatnonzero(row)
    known = others[:, indices]
    if not known.size:
        return np.repeat(row[None], len(others), axis=0)
    with np.errstate(divide="ignore"):
        ratios = np.where(known != 0, (row[indices] / known).round(resolution.decimals), np.nan)
    ratios.sort(axis=1)
    order = np.arange(ratios.shape[1])
    first = np.ones(ratios.shape, dtype=bool)
    first[:, 1:] = ratios[:, 1:] != ratios[:, :-1]
    start = np.maximum.accumulate(np.where(first, order, 0), axis=1)
    most = ratios[np.arange(len(ratios)), (order - start).argmax(1)]
    shorter = row - most[:, None] * others
    return np.where(np.isnan(shorter), row, np.where(np.abs(shorter) < resolution.zero, 0, shorter))


def _independent(rows: list[Tensor], known: list[Tensor], resolution: _Resolution) -> list[Tensor]:
    """Return shortest rows first, each only if it is independent of the known relations and of those before it."""
    basis: list[Tensor] = []

    def is_new(row: Tensor) -> bool:
        residual = row.clone()
        for _ in range(2):
            for vector in basis:
                residual = residual - (residual @ vector) * vector
        length = torch.linalg.vector_norm(residual)
        if length < 10 * resolution.zero * torch.linalg.vector_norm(row):
            return False
        basis.append(residual / length)
        return True

    for relation in known:
        is_new(relation)
    return [row for row in rows if is_new(row)]


def _relation(features: list[Feature], row: Tensor, values: Tensor, sizes: Tensor) -> Relation:
    """Return a row as terms with readable coefficients.

    Coefficients lose traces of noise and become fractions of small numbers where these fit.
    """
    entries = (row.abs() > 1e-3 * row.abs().max()).nonzero().flatten().tolist()
    smallest = min(abs(float(row[i])) for i in entries)
    sign = 1 if float(row[entries[0]]) > 0 else -1
    raw = [sign * float(row[i]) / smallest for i in entries]

    def violation(weights: list[float]) -> float:
        factors = torch.tensor(weights, dtype=torch.float64, device=values.device)
        gaps = (values[:, entries] @ factors).abs()
        bounds = sizes[:, entries] @ factors.abs()
        return float((gaps / torch.where(bounds > 0, bounds, 1)).max())

    plain = [_rational(weight) for weight in raw]
    exact, tidy = violation(raw), violation(plain)
    weights, size = (plain, tidy) if tidy <= max(10 * exact, EXACT) else (raw, exact)
    return Relation({features[i]: weight for i, weight in zip(entries, weights, strict=True)}, size)


def _rational(value: float) -> float:
    """Return the nearby fraction of small numbers, if there is one."""
    near = float(Fraction(value).limit_denominator(12))
    return near if abs(near - value) < 1e-2 * max(1, abs(value)) else value
