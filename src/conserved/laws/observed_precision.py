"""The half precision that gradients were computed in, seen from the bits of entries stored in single precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_FEWEST = 24
"""Nonzero entries below which nothing is concluded."""


_FRACTION_BITS = 23


def observed_precision(samples: Sequence[NDArray[np.floating]]) -> torch.dtype | None:
    """Estimate from samples of entries in which half precision at least half of these float32 gradients were computed.

    Under autocast a weight's gradient is computed in half precision and stored in single. Such entries end in zero
    bits: 16 of 23 for bfloat16, 13 for float16, and still many after a few have been added up. Clipping multiplies all
    entries by one number, which fills the bits but maps equal significands to equal significands: entries of bfloat16
    origin have at most 128 of them. In single precision both are rare: one entry in 64 ends in six zeros, and n entries
    of different value have about n²/2²⁴ significands in common.

    One coarse gradient among fine ones is no sign of autocast but a defect, and must not loosen what it is held to.
    """
    if not samples:
        return None
    table = np.zeros((len(samples), max(map(len, samples))), dtype=np.float32)
    for row, sample in zip(table, samples, strict=True):
        row[: len(sample)] = sample
    np.abs(table, out=table)
    table[~np.isfinite(table)] = 0
    precisions = _half_types(table)
    coarse = [precision for precision in precisions if precision is not None]
    if not coarse or 2 * len(coarse) < len(precisions):
        return None
    return torch.bfloat16 if torch.bfloat16 in coarse else torch.float16


def _half_types(table: NDArray[np.float32]) -> list[torch.dtype | None]:
    """Return bfloat16 or float16 for each row of float32 entries that were computed in it.

    An entry is None for a row that was computed in float32 or in an unknown type.

    Zeros are no entries. Rows with too few entries are left out; one with too few different ones is unknown.
    """
    entries = np.sort(table, axis=1)
    first = entries > 0
    plenty = first.sum(1) >= _FEWEST
    # Of equal entries only one counts.
    first[:, 1:] &= entries[:, 1:] != entries[:, :-1]
    entries, first = entries[plenty], first[plenty]
    significands = entries.view(np.int32) & ((1 << _FRACTION_BITS) - 1)
    counts = first.sum(1)

    def ending_in(zeros: int) -> NDArray[np.float64]:
        return ((significands & ((1 << zeros) - 1) == 0) & first).sum(1) / np.maximum(counts, 1)

    ordered = np.sort(np.where(first, significands, -1), axis=1)
    repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).sum(1)
    # In single precision expect n²/2²⁴ repetitions; ten times that and three more do not happen by chance. Which half
    # precision it was cannot be seen, because sums in single precision are mixed in: the coarser one is assumed.
    often = repeated > 3 + 10 * counts.astype(np.float64) ** 2 / 2 ** (_FRACTION_BITS + 1)
    # Sums of a few bfloat16 numbers often end in as many zeros as float16 does, but not nearly all of them do.
    mostly = ending_in(16) > 0.5
    half = ~mostly & (ending_in(13) > 0.98)
    brain = ~half & (mostly | (ending_in(6) > 0.25) | often)
    return [
        None if count < _FEWEST else torch.float16 if is_half else torch.bfloat16 if is_brain else None
        for count, is_half, is_brain in zip(counts.tolist(), half.tolist(), brain.tolist(), strict=True)
    ]
