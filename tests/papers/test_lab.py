"""Fitted exponents and their intervals, and text by the stretch."""

from __future__ import annotations

import math

import pytest
import torch

from conserved_papers.lab.data.embedded import sequences, standard_library_text
from conserved_papers.lab.fits import exponent, interval
from conserved_papers.lab.order import Descent, drift_orders


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, -0.5], ids=str)
def test_exponents_recover_powers(power: float) -> None:
    sizes = [0.4, 0.2, 0.1]
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power, abs=1e-12)


def test_a_drift_of_zero_has_no_exponent() -> None:
    assert math.isnan(exponent([0.2, 0.1], [0.0, 0.0]))


def test_points_that_are_not_positive_are_left_out_of_a_fit() -> None:
    assert exponent([0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 4.0, 16.0]) == pytest.approx(2)


def test_an_interval_is_students() -> None:
    # 1, 2, 3: mean 2, standard error 1/√3, t(2) = 4.3027.
    result = interval([1.0, 2.0, 3.0])
    assert result.value == pytest.approx(2)
    assert result.low == pytest.approx(2 - 4.3026527 / math.sqrt(3))
    assert result.high == pytest.approx(2 + 4.3026527 / math.sqrt(3))


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    assert interval([1.5]).low is None
    assert math.isnan(interval([math.nan]).value)


def test_slopes_of_runs_recover_powers() -> None:
    runs = [Descent(step=step, drift={"linear": 3 * step, "still": 2.0}) for step in (0.4, 0.2, 0.1)]
    assert drift_orders(runs) == {"linear": pytest.approx(1), "still": pytest.approx(0)}


def test_sequences_are_reproducible_stretches_of_the_standard_library() -> None:
    first, second, other = sequences(3, 16, seed=1), sequences(3, 16, seed=1), sequences(3, 16, seed=2)
    assert first.shape == (3, 16)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    text = standard_library_text(1 << 20)
    assert all(bytes(row.tolist()) in text for row in first)
