r"""Laws that are sums over single entries, whatever the storage order: every entry's charge under every scaling.

Let e run over all entries of all parameters and G over gradient fields. A vector c with

    Σ_e c_e θ_e G_e = 0  at every θ        (a scaling: entry e has charge c_e and moves by s^{c_e}), or
    Σ_e c_e G_e = 0      at every θ        (a translation: entry e moves by c_e)

is a law, and all of them are the null space of the rates θ_e G_e, or G_e, over random samples. Nothing is assumed about
which entries belong together: entries of one row of one head have the same charges, and that is how rows are found in
parameters that are stacked, fused, transposed, split or flattened.

A null space has no preferred basis. Here it has: charges that many entries share are taken as coordinates, so that
most entries have a charge of one under a single scaling, and the rest follow with small whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

EXACT = 1e-9
"""Singular values and violations below this, relative to their terms, are rounding."""

_ZERO = 1e-6
"""Charges below this are zero, and closer than this they are equal."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class EntryRelation:
    """Σ c_e rate_e = 0: positions of entries in the flat parameter vector, increasing, and their coefficients."""

    indices: NDArray[np.int64]
    coefficients: Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Charges:
    """The null space of the rates of entries, before it is made sparse."""

    rates: Float[Tensor, "samples entries"]
    alive: NDArray[np.int64]
    """Entries that move."""
    null: Matrix
    """One row for each law, over the entries that move."""

    @property
    def still(self) -> NDArray[np.int64]:
        """Entries that never move."""
        return np.setdiff1d(np.arange(self.rates.shape[1]), self.alive)

    def relations(self) -> list[EntryRelation]:
        """Return a sparse basis of all relations; each holds on every sample."""
        result = []
        for row in sparse_basis(self.null) if len(self.null) else ():
            inside = np.flatnonzero(row)
            columns = self.rates[:, torch.as_tensor(self.alive[inside], device=self.rates.device)]
            weights = torch.as_tensor(row[inside], device=self.rates.device)
            if cancels(columns @ weights, columns.abs() @ weights.abs()):
                result.append(EntryRelation(self.alive[inside], row[inside]))
        return result


def cancels(totals: Float[Tensor, " samples"], sizes: Float[Tensor, " samples"]) -> bool:
    """Return whether sums are zero up to rounding, against the sizes of their terms.

    Where terms are tiny on one sample (a saturated softmax) they are themselves rounding of larger numbers.
    """
    return bool((totals.abs() <= EXACT * (sizes + 1e-6 * sizes.max())).all())


def charges_of(rates: Float[Tensor, "samples entries"]) -> Charges:
    """Return all linear relations between the rates of entries."""
    scale = rates.square().mean(0).sqrt()
    alive = (scale > 1e-12 * scale.max()).nonzero().flatten()
    null = null_space(rates[:, alive] / scale[alive]) / scale[alive] if len(alive) else rates.new_zeros(0, 0)
    return Charges(rates, alive.cpu().numpy(), null.cpu().numpy())


def null_space(matrix: Float[Tensor, "samples n"]) -> Float[Tensor, "k n"]:
    """Return orthonormal rows that span the null space of a matrix with more rows than columns.

    Inverse iteration on R of one QR factorisation: only the null space is computed, not all singular vectors. A
    spectrum that fades out without a drop of ten has no null space.
    """
    r = torch.linalg.qr(matrix, mode="r").R
    n = r.shape[1]
    size = float(torch.linalg.matrix_norm(r)) / n**0.5
    if size == 0:
        return torch.eye(n, dtype=r.dtype, device=r.device)
    diagonal = r.diagonal()
    diagonal[diagonal.abs() < 1e-15 * size] = 1e-15 * size
    generator = torch.Generator().manual_seed(0)
    block = min(n, 32)
    while True:
        x = torch.randn(n, block, generator=generator, dtype=r.dtype).to(r.device)
        for _ in range(3):
            x = torch.linalg.solve_triangular(r.mT, torch.linalg.qr(x).Q, upper=False)
            x = torch.linalg.solve_triangular(r, torch.linalg.qr(x).Q, upper=True)
        q = torch.linalg.qr(x).Q
        _, values, right = torch.linalg.svd(r @ q, full_matrices=False)
        small = int((values < EXACT * size).sum())
        if small < block or block == n:
            break
        block = min(n, 4 * block)
    rising = values.flip(0)
    while small and small < block and rising[small] < 10 * rising[small - 1]:
        small -= 1
    return (q @ right[len(values) - small :].mT).mT


def sparse_basis(null: Matrix) -> Matrix:
    """Return the same row space with few, simple coefficients: coordinates are the charges that most entries share."""
    k = len(null)
    charges, members = _distinct(null)
    counts = np.bincount(members[members >= 0], minlength=len(charges))
    chosen = _independent(charges, np.argsort(-counts, kind="stable"), k)
    if len(chosen) < k:
        return np.zeros((0, null.shape[1]))
    table = _tidy(np.asarray(np.linalg.solve(charges[chosen].T, charges.T), dtype=np.float64))
    table = _shorten(table, counts)
    wide = np.hstack([table, np.zeros((k, 1))])[:, members]
    # The first entry has a positive coefficient, so that relations of one symmetry have equal signs.
    return wide * np.array([np.sign(row[np.flatnonzero(row)[0]]) for row in wide])[:, None]


def _distinct(null: Matrix) -> tuple[Matrix, NDArray[np.int64]]:
    """Return the different charges, and for each entry which charge it has; −1 for entries without any.

    Two entries have equal charges if equal random combinations of their coordinates are equal.
    """
    lengths = np.linalg.norm(null, axis=0)
    # Coordinates relative to a typical charge, so that one tolerance fits all.
    unit = null / np.median(lengths[lengths > _ZERO * lengths.max()])
    some = np.flatnonzero(lengths > _ZERO * lengths.max())
    keys = np.random.default_rng(0).standard_normal((3, len(null))) @ unit[:, some]
    members = np.full(null.shape[1], -1, dtype=np.int64)
    labels = np.zeros(len(some), dtype=np.int64)
    for key in keys:
        order = np.lexsort((key, labels))
        new = (np.diff(key[order]) > _ZERO) | (np.diff(labels[order]) != 0)
        fresh = np.concatenate(([0], np.cumsum(new)))
        labels[order] = fresh
    members[some] = labels
    count = int(labels.max()) + 1
    sums = np.zeros((count, len(null)))
    np.add.at(sums, labels, unit[:, some].T)
    return sums / np.bincount(labels)[:, None], members


def _independent(charges: Matrix, order: NDArray[np.int64], most: int) -> list[int]:
    """Return charges in this order, each if it is independent of those before it."""
    chosen: list[int] = []
    basis = np.zeros((0, charges.shape[1]))
    residual = charges / np.linalg.norm(charges, axis=1, keepdims=True)
    for index in order.tolist():
        rest = residual[index] - (residual[index] @ basis.T) @ basis
        rest -= (rest @ basis.T) @ basis
        size = float(np.linalg.norm(rest))
        if size > 1e-3:
            basis = np.vstack([basis, rest / size])
            chosen.append(index)
            if len(chosen) == most:
                break
    return chosen


def _tidy(table: Matrix) -> Matrix:
    """Return small fractions where coefficients are close to them."""
    values, inverse = np.unique(table.round(9), return_inverse=True)
    near = np.array([float(Fraction(v).limit_denominator(12)) for v in values.tolist()])
    tidy = np.where(np.abs(near - values) < _ZERO * np.maximum(1, np.abs(values)), near, values)
    return tidy[inverse].reshape(table.shape)


def _shorten(table: Matrix, counts: NDArray[np.int64]) -> Matrix:
    """Subtract multiples of rows from one another while that leaves fewer entries, shortest rows first."""
    table = table.copy()
    improved = True
    while improved:
        improved = False
        for index in np.argsort([_weight(row, counts) for row in table], kind="stable").tolist():
            weights = (table != 0) @ counts
            overlap = ((table != 0) & (table[index] != 0)) @ counts
            for other in np.flatnonzero(2 * overlap > weights).tolist():
                if other == index:
                    continue
                both = (table[index] != 0) & (table[other] != 0)
                ratios, which = np.unique((table[index, both] / table[other, both]).round(6), return_inverse=True)
                factor = ratios[np.bincount(which, weights=counts[both]).argmax()]
                shorter = table[index] - factor * table[other]
                shorter[np.abs(shorter) < _ZERO] = 0
                if _weight(shorter, counts) < _weight(table[index], counts):
                    table[index] = shorter
                    improved = True
    sizes = np.array([np.abs(row[row != 0]).min() for row in table])
    return _tidy(table / sizes[:, None])


def _weight(row: Matrix, counts: NDArray[np.int64]) -> int:
    return int(counts[row != 0].sum())
