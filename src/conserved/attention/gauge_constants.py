r"""The constants that are subtracted from keys and values before attention: any is exact, so these are the best ones.

The rounding error of dQ is at most proportional to |k̄_i - c| for row i, where k̄_i = Σ_j P_ij k_j, and that of δ_i to
|O_i - e| (see `centered`). The sum of squares over rows is least for

    c = mean over rows of k̄_i,        e = mean over rows of O_i,

which are means over *rows of attention*, not over tokens. They differ where heads attend to few keys: with an attention
sink whose value is near zero, O_i is near zero while the mean value is not, and subtracting the mean value would make
the error larger. Rows also answer what to do when windows move: every row counts once, whatever it sees. Documents that
are packed into one sequence are different softmaxes, and each gets constants from rows of its own, up to a number.

Subtracting rounds. fl(k - c) is exact where c/2 <= k <= 2c (Sterbenz); elsewhere it is off by up to u |k - c|, which
perturbs scores that may be large. So a component of a constant is used only where it exceeds twice the standard
deviation of k̄_i (or O_i) over rows, and is zero elsewhere, where subtracting it gains little. What the gate leaves in
place is at most twice the spread, so it raises the root mean square of the bound by at most sqrt(1 + 2²).

A head is left alone unless its constant takes away three quarters of the mean square of k̄_i (or O_i), which halves the
bound. Less is not worth a rounding: where rows are far apart, such as in saturated heads, O_i is close to single values
that need no rounding, and the bound is not what limits the accuracy.

Where queries are large, rounding of k - c moves scores by a q_i·η_j, which is the relative error that it makes in P and
dS. Kernels round dS by the unit roundoff u in any case. Keys of a head are left alone if the root mean square of that
change, over sampled queries and keys, exceeds 4 u.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conserved.attention.fused_centering import kernels_apply, sampled_constants
from conserved.attention.sampled_rows import (
    SampledPositions,
    document_of_tokens,
    group_size,
    hides_nothing_but_later_keys,
    packed_documents,
    rows_of_documents,
    sampled_queries,
    sampled_rows,
    score_scale,
)

GATE = 2.0
"""Standard deviations over rows that a component must exceed to be subtracted: derived above."""

LEAST_GAIN = 0.75
"""Share of the mean square of a head that its constant must take away: derived above."""

MOST_NOISE = 2.0
"""Most that rounding may move scores, in spacings of one (twice the unit roundoff): derived above."""

ROWS = 32
"""Sampled rows for every key head. The mean of m rows misses the best constant by spread / sqrt(m): 18 % of it."""


_MOST_DOCUMENTS = 16
"""Packed documents that get constants of their own. More would need as many rows as short documents have."""


@dataclass(frozen=True, slots=True, eq=False)
class Constants:
    """One vector for all keys and one for all values of a head, (…, key heads, 1, width); None is not subtracted.

    Documents that are packed into one sequence do not see each other, so each may have vectors of its own:
    (…, key heads, documents, width). `documents` is then the number of the document of every token.
    """

    key: Tensor | None
    value: Tensor | None
    documents: Tensor | None = None

    def of_tokens(self, constant: Tensor) -> Tensor:
        """Return a constant as it is subtracted from tokens: one vector for all, or one for each."""
        return constant if self.documents is None else constant.index_select(-2, self.documents)


def row_constants(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Constants:
    """Return the gated means of k̄_i and O_i over sampled rows of one call.

    Args:
        query: (…, heads, length, width).
        key: (…, key heads, length, width).
        value: as `key`.
        options: the further arguments of the call by name, from which masks are read.

    Returns:
        The constants.
    """
    scale = score_scale(query, options)
    plain = isinstance(scale, float | int) and hides_nothing_but_later_keys(query, key, options)
    if plain and kernels_apply(query, key, value):
        positions = SampledPositions.of(query.shape[-2], ROWS, group_size(query, key))
        causal = bool(options.get("is_causal") or options.get("causal"))
        gates = (GATE, LEAST_GAIN, MOST_NOISE * torch.finfo(key.dtype).eps)
        return Constants(*sampled_constants(query, key, value, positions, float(scale), causal=causal, gates=gates))
    bounds = packed_documents(query, key, options)
    if bounds is not None and 1 < len(bounds) - 1 <= _MOST_DOCUMENTS:
        return _constants_by_document(query, key, value, options, bounds)
    sample = SampledPositions.of(query.shape[-2], ROWS, group_size(query, key)).slice
    c, e = _gated(*mean_tokens_of_rows(query, key, value, options, sample))
    return Constants(_without_noise(Constants(c, e), sampled_queries(query, key, options, sample), key), e)


def mean_tokens_of_rows(
    query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any], sample: slice | Tensor
) -> tuple[Tensor, list[int], Tensor | None]:
    """Return k̄_i and O_i of sampled rows side by side, their widths, and which rows see a key (None if all do)."""
    weights, sees = sampled_rows(query, key, options, sample)
    rows = torch.cat([weights @ tokens.to(weights.dtype) for tokens in (key, value)], -1)
    return rows, [key.shape[-1], value.shape[-1]], sees


def _constants_by_document(
    query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any], bounds: Tensor
) -> Constants:
    groups = group_size(query, key)
    number = max(1, ROWS // groups)
    sample = rows_of_documents(bounds, number, query.shape[-2])
    rows, widths, _ = mean_tokens_of_rows(query, key, value, options, sample)
    # Rows are ordered by query head of the group, document and position.
    rows = rows.unflatten(-2, (groups, len(bounds) - 1, number)).movedim(-4, -3).flatten(-3, -2)
    c, e = (part.squeeze(-2) for part in _gated(rows, widths))
    chosen = Constants(c, e, document_of_tokens(bounds, key.shape[-2]))
    return replace(chosen, key=_without_noise(chosen, sampled_queries(query, key, options, sample), key))


def with_marker(constant: Tensor, value: Tensor, stored: torch.dtype) -> Tensor:
    """Move one component of a constant of values beyond all of them, so that rows that see no key can be recognised.

    A row that sees a key is a weighted mean of values. If a component of the constant lies below all values (or above),
    that component of the centered row is positive (or negative) and not zero, whatever the mask and the weights are. A
    row that sees no key is zero in all components. The component with the least way to go is chosen for each head.

    Args:
        constant: (…, heads, 1, width); heads whose constant is zero need no marker and get none.
        value: (…, heads, length, width).
        stored: the precision in which the output is stored, where the component must not vanish.

    Returns:
        The constant with its marker.
    """
    value = value.detach().float()
    low, high = value.amin(-2, keepdim=True), value.amax(-2, keepdim=True)
    # At least 1/64 of the entries: rounding of the constant, at most 65/256 margins, then cannot reach them.
    margin = torch.maximum(high - low, torch.maximum(low.abs(), high.abs())) / 64
    margin = margin.clamp_min(torch.finfo(stored).tiny)
    below, above = low - margin, high + margin
    marker = torch.where(constant - below <= above - constant, below, above)
    way = (marker - constant).abs()
    nearest = way == way.amin(-1, keepdim=True)
    used = (constant != 0).any(-1, keepdim=True)
    return torch.where(nearest & used, marker, constant)


def _without_noise(constants: Constants, queries: Tensor, key: Tensor) -> Tensor | None:
    """Return the constant of the keys, or zero for heads whose scores its subtraction would move too much.

    Args:
        constants: the constants.
        queries: sampled queries times the scale of the scores, (…, key heads, rows, width).
        key: the keys.
    """
    if constants.key is None or key.dtype not in (torch.bfloat16, torch.float16):
        return constants.key
    constant = constants.key.to(key.dtype)
    sample = slice(None, None, max(1, key.shape[-2] // 64))
    keys, c = key[..., sample, :], constant
    if constants.documents is not None:
        c = constant.index_select(-2, constants.documents[sample])
    rounding = (keys - c).float() - (keys.float() - c.float())
    noise = (queries.float() @ rounding.mT).square().mean((-2, -1), keepdim=True)
    limit = MOST_NOISE * torch.finfo(key.dtype).eps
    return torch.where(noise <= limit**2, constant, 0.0)


def _gated(rows: Tensor, widths: list[int], sees: Tensor | None = None) -> list[Tensor]:
    """Return the gated means over rows of tensors that are concatenated along the last axis."""
    rows = rows.float()
    if sees is None:
        variance, mean = torch.var_mean(rows, -2, keepdim=True, correction=0)
    else:
        number = sees.float().sum(-2, keepdim=True).clamp_min(1.0)
        mean = (rows * sees).sum(-2, keepdim=True) / number
        variance = ((rows - mean).square() * sees).sum(-2, keepdim=True) / number
    if len(set(widths)) == 1:  # all parts at once, in a third of the operations
        parts = _open(*(moment.unflatten(-1, (-1, widths[0])) for moment in (mean, variance)))
        return list(parts.unbind(-2))
    moments = zip(mean.split(widths, -1), variance.split(widths, -1), strict=True)
    return [_open(*part) for part in moments]


def _open(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the components of a mean that pass the gate, or zero if they make too small a part of the head.

    Where rows are not finite the variance is NaN, every comparison is false, and nothing passes.
    """
    square = mean.square()
    passes = square > GATE**2 * variance
    gain = torch.where(passes, square, 0.0).sum(-1, keepdim=True)
    size = (square + variance).sum(-1, keepdim=True)
    return torch.where(passes & (gain > LEAST_GAIN * size), mean, 0.0)
