"""Symmetries made of relations between single entries: which relations are rows of one group, and which group it is."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from conserved.discovery.charges import EXACT, EntryRelation, cancels
from conserved.discovery.layout import Positions, view_of, views_of
from conserved.symmetry import ComplexScaling, GeneralLinear, Kind, Leg, Scaling, Symmetry, Translation

WHOLE = 12
"""Samples on which entries off the diagonal of the moment map are looked at."""

LegTerm = tuple[str, float]
"""Parameter and coefficient, shared by all entries of one leg."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Parameters and fields at random points, flat, and where each parameter lies."""

    points: Float[Tensor, "samples D"]
    fields: Float[Tensor, "samples D"]
    shapes: dict[str, tuple[int, ...]]

    def starts(self) -> dict[str, int]:
        """Return where each parameter begins in the flat vector."""
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        return dict(zip(self.shapes, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A relation with its entries by parameter and coefficient; places are in the flat vector of all parameters."""

    terms: tuple[LegTerm, ...]
    indices: tuple[Positions, ...]

    @property
    def signature(self) -> tuple[tuple[str, float, int], ...]:
        """The key that relations of one symmetry share."""
        return tuple((*term, len(p)) for term, p in zip(self.terms, self.indices, strict=True))


def entry_symmetries(scalings: list[EntryRelation], shifts: list[EntryRelation], entries: Entries) -> list[Symmetry]:
    """Return all symmetries that relations between entries give."""
    return [*entry_translations(shifts, entries), *entry_scalings(scalings, entries)]


def entry_scalings(relations: list[EntryRelation], entries: Entries) -> list[Symmetry]:
    """Return every symmetry that multiplies entries by factors, and the general linear and complex groups they extend
    to.
    """
    result: list[Symmetry] = []
    for rows in _alike(relations, entries):
        result += _scalings(rows, entries)
    return result


def entry_translations(relations: list[EntryRelation], entries: Entries) -> list[Symmetry]:
    """Return every symmetry that adds constants to entries."""
    result: list[Symmetry] = []
    for rows in _alike(relations, entries):
        result += _translations(rows, entries)
    return result


def _alike(relations: list[EntryRelation], entries: Entries) -> list[list[_Row]]:
    """Return relations as rows, those with the same legs together, in order of their first entries."""
    names, starts = list(entries.shapes), np.array(list(entries.starts().values()))
    groups: dict[tuple[tuple[str, float, int], ...], list[_Row]] = defaultdict(list)
    for relation in relations:
        owner = np.searchsorted(starts, relation.indices, side="right") - 1
        legs: dict[tuple[int, float], list[int]] = defaultdict(list)
        for o, c, index in zip(owner.tolist(), relation.coefficients.tolist(), relation.indices.tolist(), strict=True):
            legs[o, c].append(index)
        ordered = sorted(legs.items(), key=lambda item: (-item[0][1], item[0][0]))
        row = _Row(tuple((names[o], c) for (o, c), _ in ordered), tuple(np.array(p) for _, p in ordered))
        groups[row.signature].append(row)
    return [sorted(rows, key=lambda row: row.indices[0][0]) for rows in groups.values()]


def _stack(rows: list[_Row]) -> list[tuple[LegTerm, Positions]]:
    """Return the legs of several rows: term, and positions with one row for each relation."""
    return [(term, np.stack([row.indices[k] for row in rows])) for k, term in enumerate(rows[0].terms)]


def _scalings(rows: list[_Row], entries: Entries) -> Iterator[Symmetry]:
    """Yield general linear where rows mix, complex where planes turn, else scalings."""
    unit = all(abs(coefficient) == 1 for _, coefficient in rows[0].terms)
    mixing = _mixing(_stack(rows), entries) if unit and len(rows) > 1 else torch.eye(len(rows), dtype=torch.bool)
    loose: list[_Row] = []
    for members in cliques(mixing):
        if len(members) > 1:
            yield from _symmetries(GeneralLinear(), _stack([rows[i] for i in members]), entries)
        else:
            loose += [rows[i] for i in members]
    planes: dict[tuple[int, ...], list[list[Positions]]] = defaultdict(list)
    rest: list[_Row] = []
    for row in loose:
        turned = _split_planes(row, entries) if unit else None
        if turned is None:
            rest.append(row)
        else:
            planes[tuple(p.shape[1] for p in turned)].append(turned)
    for alike in planes.values():
        legs = [(term, np.concatenate([similar[k] for similar in alike])) for k, term in enumerate(rows[0].terms)]
        yield from _symmetries(ComplexScaling(), legs, entries)
    for some in [rest] if rest and _regular(rest, entries) else [[row] for row in rest]:
        yield from _symmetries(Scaling(), _stack(some), entries)


def _products(positions: Positions, entries: Entries) -> tuple[Tensor, Tensor]:
    """Return ⟨θ_i, G_j⟩ between rows of positions for a few samples, and the size of its terms."""
    where = torch.as_tensor(positions, device=entries.points.device)
    w, g = entries.points[:WHOLE, where], entries.fields[:WHOLE, where]
    return w @ g.mT, w.abs() @ g.abs().mT


def _mixing(legs: list[tuple[LegTerm, Positions]], entries: Entries) -> Bool[Tensor, "rows rows"]:
    """Return between which rows all of μ(θ, G) cancels, and not only its diagonal."""
    totals, sizes = [], []
    for (_, coefficient), positions in legs:
        products, size = _products(positions, entries)
        totals.append(products if coefficient > 0 else -products.mT)
        sizes.append(size if coefficient > 0 else size.mT)
    size = sum(sizes[1:], sizes[0])
    zero: Tensor = (sum(totals[1:], totals[0]).abs() <= EXACT * (size + 1e-6 * size.amax(0))).all(0).cpu()
    return zero & zero.mT


def cliques(related: Bool[Tensor, "n n"]) -> list[list[int]]:
    """Return groups of rows that are all related to each other."""
    table = related.numpy()
    remaining = list(range(len(table)))
    groups = []
    while remaining:
        group = [remaining[0]]
        allowed = table[remaining[0]].copy()
        for other in remaining[1:]:
            if allowed[other]:
                group.append(other)
                allowed &= table[other]
        groups.append(group)
        taken = set(group)
        remaining = [i for i in remaining if i not in taken]
    return groups


def _split_planes(row: _Row, entries: Entries) -> list[Positions] | None:
    """Return each leg cut into the real and imaginary row of a plane that can be turned without effect, if there is
    one.
    """
    options = [_halves(term, indices, entries) for term, indices in zip(row.terms, row.indices, strict=True)]
    if not all(options) or int(np.prod([len(choice) for choice in options])) > _MOST_CUTS:
        return None
    for cut in itertools.product(*options):
        total: Tensor | None = None
        size: Tensor | None = None
        for positions in cut:
            products, bound = _products(positions, entries)
            # A leg of degree −1 moves by the same phase as one of degree +1.
            part = products[:, 0, 1] - products[:, 1, 0]
            total = part if total is None else total + part
            size = bound.sum((1, 2)) if size is None else size + bound.sum((1, 2))
        assert total is not None
        assert size is not None
        if cancels(total, size):
            return list(cut)
    return None


_MOST_CUTS = 256


def _halves(term: LegTerm, indices: Positions, entries: Entries) -> list[Positions]:
    """Return ways to cut entries into two rows that are shifts of one another, either of them first."""
    start = entries.starts()[term[0]]
    result = []
    for shift in sorted({int(p - indices[0]) for p in indices[1:]}):
        first: list[int] = []
        second: set[int] = set()
        for index in indices.tolist():
            if index not in second:
                first.append(index)
                second.add(index + shift)
        pair = np.array([first, [index + shift for index in first]])
        if (
            np.array_equal(np.sort(pair.ravel()), indices)
            and view_of(*_stored(term, entries), pair - start) is not None
        ):
            result += [pair, pair[::-1].copy()]
    return result


def _stored(term: LegTerm, entries: Entries) -> tuple[str, tuple[int, ...]]:
    return term[0], entries.shapes[term[0]]


def _symmetries(kind: Kind, legs: list[tuple[LegTerm, Positions]], entries: Entries) -> Iterator[Symmetry]:
    starts = entries.starts()
    made = []
    for (name, coefficient), positions in legs:
        degree = int(coefficient) if coefficient == int(coefficient) else coefficient
        made += [Leg(view, degree) for view in views_of(name, entries.shapes[name], positions - starts[name])]
    yield Symmetry(block="", family=kind.code, kind=kind, legs=tuple(sorted(made, key=lambda leg: -leg.degree)))


def _regular(rows: list[_Row], entries: Entries) -> bool:
    """Return whether rows are seen by as many views together as one of them is."""
    starts = entries.starts()

    def pieces(some: list[_Row]) -> int:
        return sum(len(views_of(*_stored(term, entries), p - starts[term[0]])) for term, p in _stack(some))

    return pieces(rows) == pieces(rows[:1])


def _translations(rows: list[_Row], entries: Entries) -> Iterator[Symmetry]:
    """Yield sums over entries; rows that step through their entries together are columns of one symmetry."""
    starts = entries.starts()

    def legs(some: list[_Row]) -> tuple[Leg, ...] | None:
        views = [
            (view_of(name, entries.shapes[name], positions.T - starts[name]), coefficient)
            for (name, coefficient), positions in _stack(some)
        ]
        if any(view is None for view, _ in views):
            return None
        return tuple(Leg(view, c) for view, c in views if view is not None)

    together = legs(rows)
    for made in [together] if together is not None else [legs([row]) for row in rows]:
        assert made is not None
        yield Symmetry(block="", family="translation", kind=Translation(), legs=made)
