r"""Whether key gradients that do not add up to zero are rounding of the attention kernel, and not a wrong backward.

Fused kernels take their softmax correction δ_i = dO_i·O_i from the stored output. An output rounded to half precision
leaves Σ_j dS_ij = −ε_i with ε_i the error of δ_i, and the sum over keys of dK is −a Σ_i ε_i q_i: it does not vanish,
though the backward pass is right. `attention_rounding` computes that error from what the kernel got and stored. If dK
of a head is off by a vector E over L keys, its sum is off by at most √L ‖E‖, in every sequence of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from conserved.attention.attention_calls import AttentionCall, observe_attention
from conserved.attention.precision import AttentionPrecision
from conserved.attention.precision_watch import listen_for_rounding
from conserved.attention.rounding import AttentionRounding
from conserved.auditing.replay import Replay
from conserved.auditing.softmax_gauge import GaugeRow

_ALL = 1 << 30
"""More sequences than a batch has."""


@dataclass(eq=False, repr=False)
class _KeyErrors(AttentionPrecision):
    """Predicted ‖E‖ by attention layer and key head, the largest of all calls."""

    sizes: dict[tuple[str, int], float] = field(default_factory=dict)

    def add(self, name: str, kernel: str, rounding: AttentionRounding) -> None:
        for head, size in enumerate((rounding.key * rounding.key_norm).tolist()):
            self.sizes[name, head] = max(self.sizes.get((name, head), 0.0), size)


def explained_by_predictions(rows: Sequence[GaugeRow], predicted: AttentionPrecision) -> list[bool]:
    """Compare sums of key gradients with the errors of dK that were predicted in the same pass, without a replay.

    Predictions are made for one sequence of the batch. The largest relative error of a layer stands for its heads.

    Args:
        rows: heads whose key gradients do not add up to zero.
        predicted: predictions of the pass.

    Returns:
        For every row, whether rounding of the kernel explains it.
    """
    errors: dict[str, float] = {}
    for row in predicted.rows:
        if row.key == row.key:
            errors[row.name] = max(errors.get(row.name, 0.0), row.key)
    return [row.residual <= row.tolerance + row.length**0.5 * errors.get(row.name, 0.0) for row in rows]


def explained_by_rounding(rows: Sequence[GaugeRow], replay: Replay, parameters: Mapping[str, Tensor]) -> list[bool]:
    """Replay the pass, predict the rounding of every attention call, and compare with sums of key gradients.

    Args:
        rows: heads whose key gradients do not add up to zero.
        replay: the pass.
        parameters: trained parameters, by name; the gradient of the first runs through all layers.

    Returns:
        For every row, whether rounding of the kernel explains it.
    """
    errors = _KeyErrors()

    def listen(call: AttentionCall) -> None:
        listen_for_rounding(call, errors, _ALL, half_only=True)

    first = dict([next(iter(parameters.items()))])
    with observe_attention(replay.model, listen):
        replay.gradients(first)
    return [
        row.size <= row.tolerance * row.scale + row.length**0.5 * errors.sizes.get((row.name, row.head), 0.0)
        for row in rows
    ]
