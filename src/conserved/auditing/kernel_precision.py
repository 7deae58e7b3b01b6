r"""Whether key gradients that do not add up to zero are rounding of the attention kernel, and not a wrong backward.

Fused kernels take their softmax correction δ_i = dO_i·O_i from the stored output. An output rounded to half precision
leaves Σ_j dS_ij = −ε_i with ε_i the error of δ_i, and the sum over keys of dK is −a Σ_i ε_i q_i: it does not vanish,
though the backward pass is right. `attention_rounding` computes that error from what the kernel got and stored. With r
the predicted relative error of dK, the sum is at most √L r of the norm of dK over L keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from conserved.attention.precision import AttentionPrecision
from conserved.auditing.attention_keys import keys_seen
from conserved.auditing.replay import Replay
from conserved.auditing.softmax_gauge import GaugeRow


def explained_by_rounding(
    rows: Sequence[GaugeRow], heads: Mapping[str, int], replay: Replay, parameters: Mapping[str, Tensor]
) -> list[bool]:
    """Replay the pass, predict the rounding of every attention call, and compare with sums of key gradients.

    Args:
        rows: heads whose key gradients do not add up to zero.
        heads: by attention layer, how many key heads it has.
        replay: the pass.
        parameters: trained parameters, by name; the gradient of the first runs through all layers.

    Returns:
        For every row, whether rounding of the kernel explains it.
    """
    precision = AttentionPrecision()
    first = dict([next(iter(parameters.items()))])
    with keys_seen(replay.model, lambda name, keys, visible: keys, precision):
        replay.gradients(first)
    predicted: dict[tuple[str, int], float] = {}
    counts = Counter({row.name: 0 for row in precision.rows})
    for row in precision.rows:
        counts[row.name] = max(counts[row.name], row.head + 1)
    for row in precision.rows:
        groups = max(1, counts[row.name] // max(1, heads.get(row.name, 1)))
        key = row.name, row.head // groups
        predicted[key] = max(predicted.get(key, 0.0), row.key)
    return [row.residual <= row.tolerance + row.length**0.5 * predicted.get((row.name, row.head), 0.0) for row in rows]
