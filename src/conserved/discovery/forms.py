"""Relations turned into symmetries: which rows belong to one group, and which group it is.

Two rows that have a law each belong to one general linear group if the mixed entries ⟨W_i, G_j⟩ cancel in the same way;
two rows that only have a law together are a plane that can be turned if the antisymmetric parts cancel. So heads,
rotary planes and neurons are found, not given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from conserved.discovery.entries import cliques
from conserved.discovery.features import Rates
from conserved.discovery.relations import EXACT, Relation
from conserved.symmetry import ComplexScaling, GeneralLinear, Kind, Leg, Scaling, Symmetry, Translation, View

LegType = tuple[str, int, float]
"""Parameter, axis and coefficient shared by the legs of one relation, which differ in their index along the axis."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that one relation takes along each leg type, in increasing order."""

    types: tuple[LegType, ...]
    rows: tuple[tuple[int, ...], ...]
    violation: float


def symmetries(relations: Sequence[Relation], rates: Rates, shapes: dict[str, tuple[int, ...]]) -> list[Symmetry]:
    """Return symmetries for all relations that have the shape of one."""
    made: list[Symmetry] = []
    lengths: dict[tuple[object, ...], list[_Rows]] = defaultdict(list)
    sums: list[Relation] = []
    for relation in relations:
        if all(feature.sort == "length" for feature in relation.terms):
            rows = _rows(relation)
            widths = tuple(len(r) for r in rows.rows)
            lengths[rows.types, widths, relation.exact].append(rows)
        elif all(feature.sort == "sum" for feature in relation.terms):
            sums.append(relation)
    for alike in lengths.values():
        made += _scalings(alike, rates, shapes)
    made += _translations(sums, shapes)
    return [*_inert(rates, shapes), *made]


def _inert(rates: Rates, shapes: dict[str, tuple[int, ...]]) -> Iterator[Symmetry]:
    """Yield parameters, or rows of them, that no field moves: every entry is conserved."""
    sizes = rates.sizes.amax(0)
    still = sizes <= 1e-12 * sizes.max()
    rows: dict[str, list[int]] = defaultdict(list)
    for feature, quiet in zip(rates.features, still.tolist(), strict=True):
        if quiet and feature.sort == "length" and feature.axis == 0:
            rows[feature.parameter].append(feature.index)
    for name, relation in rows.items():
        shape = shapes[name] or (1,)
        size = torch.Size(shape).numel()
        if len(relation) == shape[0]:
            views = [View.of(name, shape, grid=(1, size))]
        else:
            views = [View.of(name, shape, grid=(1, *shape), pick={1: (row, row + 1)}) for row in relation]
        for view in views:
            yield Symmetry(block="", family="translation", kind=Translation(), legs=(Leg(view),))


def _rows(relation: Relation) -> _Rows:
    grouped: dict[LegType, list[int]] = defaultdict(list)
    for feature, coefficient in relation.terms.items():
        grouped[feature.parameter, feature.axis, coefficient].append(feature.index)
    ordered = sorted(grouped.items())
    return _Rows(tuple(t for t, _ in ordered), tuple(tuple(sorted(r)) for _, r in ordered), relation.violation)


def _scalings(alike: list[_Rows], rates: Rates, shapes: dict[str, tuple[int, ...]]) -> Iterator[Symmetry]:
    """Yield relations with the same leg types.

    They are general linear where rows mix, complex where planes turn, and scalings otherwise.
    """
    alike = sorted(alike, key=lambda rows: rows.rows)
    types = alike[0].types
    violation = max(rows.violation for rows in alike)
    columns = [
        (t, [rows.rows[k][w] for rows in alike]) for k, t in enumerate(types) for w in range(len(alike[0].rows[k]))
    ]
    if violation >= EXACT:
        yield _symmetry(Scaling(), columns, shapes, violation)
        return
    unit = all(abs(coefficient) == 1 for _, _, coefficient in types)
    mixing = _mixing(columns, rates) if unit and len(alike) > 1 else torch.eye(len(alike), dtype=torch.bool)
    loose: list[int] = []
    for members in cliques(mixing):
        if len(members) > 1:
            yield _symmetry(GeneralLinear(), [(t, [rows[i] for i in members]) for t, rows in columns], shapes)
        else:
            loose += members
    turning = [i for i in loose if unit and _turns([(t, rows[i]) for t, rows in columns], rates)]
    if turning:
        pairs = [
            (columns[k][0], [row for i in turning for row in (columns[k][1][i], columns[k + 1][1][i])])
            for k in range(0, len(columns), 2)
        ]
        yield _symmetry(ComplexScaling(), pairs, shapes)
    rest = [i for i in loose if i not in turning]
    if rest:
        yield _symmetry(Scaling(), [(t, [rows[i] for i in rest]) for t, rows in columns], shapes)


def _entries(rates: Rates, leg: LegType, rows: list[int], columns: list[int]) -> tuple[Tensor, Tensor]:
    """Return ⟨W_i, G_j⟩ for the whole samples, and the size of its terms."""
    name, axis, _ = leg
    w, g = (t.unsqueeze(-1) if t.ndim == 1 else t for t in (rates.points[name], rates.fields[name]))
    w = w.movedim(axis + 1, 1).flatten(2) if w.ndim > 2 else w.unsqueeze(-1)
    g = g.movedim(axis + 1, 1).flatten(2) if g.ndim > 2 else g.unsqueeze(-1)
    w, g = w[:, rows], g[:, columns]
    return w @ g.mT, w.abs() @ g.abs().mT


def _mixing(columns: list[tuple[LegType, list[int]]], rates: Rates) -> Bool[Tensor, "rows rows"]:
    """Return between which rows all of μ(W, G) cancels, and not only its diagonal."""
    total: Tensor | None = None
    size: Tensor | None = None
    for leg, rows in columns:
        entries, bound = _entries(rates, leg, rows, rows)
        term = entries if leg[2] > 0 else -entries.mT
        bound = bound if leg[2] > 0 else bound.mT
        total = term if total is None else total + term
        size = bound if size is None else size + bound
    assert total is not None
    assert size is not None
    cancels: Tensor = (total.abs() <= EXACT * size).all(0)
    return cancels & cancels.mT


def _turns(legs: list[tuple[LegType, int]], rates: Rates) -> bool:
    """Return whether consecutive rows of each leg type are planes whose common rotation changes nothing."""
    if len(legs) % 2 or any(legs[k][0] != legs[k + 1][0] for k in range(0, len(legs), 2)):
        return False
    total: Tensor | None = None
    size: Tensor | None = None
    for k in range(0, len(legs), 2):
        leg, first, second = legs[k][0], legs[k][1], legs[k + 1][1]
        entries, bound = _entries(rates, leg, [first, second], [first, second])
        part = entries[:, 0, 1] - entries[:, 1, 0]
        total = part if total is None else total + part
        size = bound.sum((1, 2)) if size is None else size + bound.sum((1, 2))
    assert total is not None
    assert size is not None
    return bool((total.abs() <= EXACT * size).all())


def _symmetry(
    kind: Kind, columns: list[tuple[LegType, list[int]]], shapes: dict[str, tuple[int, ...]], violation: float = 0.0
) -> Symmetry:
    legs = tuple(
        Leg(_view(name, shapes[name], axis, rows), int(c) if c == int(c) else c) for (name, axis, c), rows in columns
    )
    legs = tuple(sorted(legs, key=lambda leg: -leg.degree))
    return Symmetry(block="", family=kind.code, kind=kind, legs=legs, epsilon=violation if violation >= EXACT else 0.0)


def _view(name: str, shape: tuple[int, ...], axis: int, rows: list[int]) -> View:
    """Return rows along an axis, as a range where they are one."""
    shape = shape or (1,)
    if rows == list(range(rows[0], rows[-1] + 1)):
        complete = len(rows) == shape[axis]
        return View.of(name, shape, axes=axis, pick=None if complete else {axis: (rows[0], rows[-1] + 1)})
    return View.of(name, shape, axes=axis, rows=tuple(rows))


def _translations(relations: list[Relation], shapes: dict[str, tuple[int, ...]]) -> Iterator[Symmetry]:
    """Yield sums along axes that do not change.

    Relations that step through the same entries together are one symmetry.
    """
    families: dict[tuple[LegType, ...], list[tuple[int, ...]]] = defaultdict(list)
    for relation in relations:
        for types, indices in _sum_legs(relation, shapes):
            families[types].append(indices)
    for types, entries in families.items():
        widths = {_rest(shapes[name], axis) for name, axis, _ in types}
        together = [(k,) * len(types) for k in range(max(widths))]
        if len(widths) == 1 and sorted(entries) == together:
            legs = [Leg(_sum_view(name, shapes[name], axis), c) for name, axis, c in types]
            yield Symmetry(block="", family="translation", kind=Translation(), legs=tuple(legs))
            continue
        for entry in sorted(entries):
            legs = [
                Leg(_sum_view(name, shapes[name], axis, k), c) for (name, axis, c), k in zip(types, entry, strict=True)
            ]
            yield Symmetry(block="", family="translation", kind=Translation(), legs=tuple(legs))


def _sum_legs(
    relation: Relation, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[tuple[LegType, ...], tuple[int, ...]]]:
    """Yield a relation as legs with one index each; all entries of a parameter with one coefficient are one leg."""
    grouped: dict[LegType, list[int]] = defaultdict(list)
    for feature, coefficient in relation.terms.items():
        grouped[feature.parameter, feature.axis, coefficient].append(feature.index)
    types: list[LegType] = []
    indices: list[int] = []
    for (name, axis, coefficient), rows in sorted(grouped.items()):
        if len(rows) == 1:
            types.append((name, axis, coefficient))
            indices.append(rows[0])
        elif len(rows) == _rest(shapes[name], axis):
            types.append((name, _TOTAL, coefficient))
            indices.append(0)
        else:
            return
    yield tuple(types), tuple(indices)


_TOTAL = -2
"""In place of an axis: all entries of the parameter are summed."""


def _rest(shape: tuple[int, ...], axis: int) -> int:
    """Return how many sums along an axis a parameter has."""
    size = torch.Size(shape or (1,)).numel()
    return 1 if axis == _TOTAL else size if axis == -1 else size // shape[axis]


def _sum_view(name: str, shape: tuple[int, ...], axis: int, index: int | None = None) -> View:
    """Return a leg whose rows are summed: along an axis, none (every entry for itself) or all.

    The leg keeps one column if `index` names it.
    """
    shape = shape or (1,)
    size = torch.Size(shape).numel()
    if axis == _TOTAL:
        return View.of(name, shape, axes=tuple(range(len(shape))))
    if axis == -1:
        return View.of(name, shape, grid=(1, size), axes=0, pick=None if index is None else {1: (index, index + 1)})
    if index is None:
        return View.of(name, shape, axes=axis)
    before, after = shape[:axis], shape[axis + 1 :]
    picks = torch.unravel_index(torch.tensor(index), before + after)
    chosen = [int(p) for p in picks]
    indices = [a for a in range(len(shape)) if a != axis]
    return View.of(name, shape, axes=axis, pick=dict(zip(indices, chosen, strict=True)))


def name_laws(made: list[Symmetry]) -> list[Symmetry]:
    """Number laws within their kind, under the module that their parameters share."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    named = []
    for symmetry in made:
        block = _common_module(symmetry.parameters)
        number = counts[block, symmetry.family]
        counts[block, symmetry.family] += 1
        named.append(replace(symmetry, block=block, part=str(number)))
    return named


def _common_module(names: tuple[str, ...]) -> str:
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return ".".join(shared)
