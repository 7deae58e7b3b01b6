"""Embedded data and the order test's own parts."""

from __future__ import annotations

import math

import pytest
import torch

from conserved.lab.data import sequences, standard_library_text
from conserved.lab.order import Descent, slopes


def run(step: float, **drift: float) -> Descent:
    return Descent(step=step, steps=1, loss_before=1.0, loss_after=0.0, drift=drift)


def test_slopes_recover_powers() -> None:
    fitted = slopes([run(step, linear=3 * step, constant=2.0, square=step**2) for step in (0.4, 0.2, 0.1)])
    assert fitted == {"linear": pytest.approx(1), "constant": pytest.approx(0), "square": pytest.approx(2)}


def test_a_drift_of_zero_has_no_slope() -> None:
    assert math.isnan(slopes([run(0.2, still=0.0), run(0.1, still=0.0)])["still"])


def test_the_corpus_is_the_interpreters_own_text() -> None:
    text = standard_library_text(4096)
    assert len(text) == 4096
    assert b"import" in text


def test_more_text_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="were asked for"):
        standard_library_text(1 << 40)


def test_sequences_are_reproducible_bytes() -> None:
    first, second, other = sequences(3, 16, seed=1), sequences(3, 16, seed=1), sequences(3, 16, seed=2)
    assert first.shape == (3, 16)
    assert int(first.max()) < 256
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
