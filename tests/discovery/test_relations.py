"""Relations are made shorter: the multiple that is subtracted is the one that cancels most."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from conserved.discovery.relations import _COARSE, _FINE, _each_less, _Resolution


def naive(row: np.ndarray, other: np.ndarray, resolution: _Resolution) -> np.ndarray:
    """One entry at a time."""
    ratios = [round(a / b, resolution.decimals) for a, b in zip(row, other, strict=True) if a != 0 and b != 0]
    if not ratios:
        return row
    counts = Counter(sorted(ratios))
    (multiple, _), *_ = counts.most_common()
    left = [a - multiple * b for a, b in zip(row, other, strict=True)]
    return np.array([0.0 if abs(entry) < resolution.zero else entry for entry in left])


@pytest.mark.parametrize("resolution", [_FINE, _COARSE], ids=["fine", "coarse"])
@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_less_the_multiple_that_cancels_most_of_its_entries(seed: int, resolution: _Resolution) -> None:
    chance = np.random.default_rng(seed)
    row, *others = chance.integers(-2, 3, size=(9, 12)) * chance.choice([0.0, 0.5, 1.0], size=(9, 12))
    if seed == 0:
        row = np.zeros(12)
    result = _each_less(row, np.stack(others), resolution)
    assert np.array_equal(result, np.stack([naive(row, other, resolution) for other in others]))
