"""Sums of key gradients are held against rounding that was predicted in the same pass, where none is replayed."""

from __future__ import annotations

import pytest
import torch

from conserved.attention.precision import AttentionPrecision
from conserved.attention.rounding import AttentionRounding
from conserved.auditing.kernel_precision import explained_by_predictions
from conserved.auditing.softmax_gauge import GaugeRow


def _predicted(error: float) -> AttentionPrecision:
    precision = AttentionPrecision()
    numbers = torch.tensor([error, error / 4])
    precision.add(
        "layer",
        "flash",
        AttentionRounding(query=numbers, key=numbers, query_norm=torch.ones(2), key_norm=torch.ones(2)),
    )
    return precision


@pytest.mark.parametrize(("residual", "explained"), [(0.3, True), (0.6, False)])
def test_a_sum_is_explained_up_to_the_predicted_error_of_all_keys(residual: float, explained: bool) -> None:
    """An error of 2 % of dK, in one direction for all of 64 keys, leaves at most 0.16 beside a tolerance of 0.2."""
    row = GaugeRow(name="layer", head=1, call=0, sequence=0, residual=residual, tolerance=0.2, length=64)
    assert explained_by_predictions([row], _predicted(0.02)) == [explained]


def test_layers_without_a_prediction_are_not_explained() -> None:
    row = GaugeRow(name="other", head=0, call=0, sequence=0, residual=0.21, tolerance=0.2, length=64)
    assert explained_by_predictions([row], _predicted(0.5)) == [False]
