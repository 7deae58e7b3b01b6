r"""Low-rank approximation of the energy field: how few directions are enough, and from what length on.

The best approximation of E by a matrix of rank r leaves out σ_{r+1}, …: its relative error is
(Σ_{i>r} σ_i² / Σ σ_i²)^½ in the Frobenius norm, and no entry is off by more than σ_{r+1}.
If every logit of a row is off by at most δ, its attention weights change by factors between e^{−2δ} and e^{2δ}.
The best approximation keeps queries and keys of r entries each: E_r = (Q P)(K_c P')ᵀ for d × r maps P and P', so a head
whose field has a small rank is a head that would do with narrower keys in its cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from conserved.attention.energy import energy_field
from conserved.attention.moments import TokenMoments
from conserved.attention.probing import AttentionInputs, described
from conserved.attention.queries_and_keys import Capture
from conserved.output.lines import WIDTH, TextLine, columns, counted, join_lines
from conserved.output.result import PrintableResult

TOLERANCE = 0.1
"""Relative error in the Frobenius norm at which a field counts as being of a rank: 99 % of its energy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """One head: the relative error of keeping r directions, the directions needed, and how both grow with the length.

    `reaches` gives for a number of directions the shortest of the `lengths` at which that many are needed.
    """

    layer: str
    head: int
    width: int
    length: int
    errors: dict[int, float]
    needed: int
    growth: dict[int, int]
    reaches: dict[int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankTable(PrintableResult):
    """Every head of a model."""

    rows: tuple[LowRank, ...]
    tolerance: float
    skipped: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return f"<LowRankTable: {counted(len(self.rows), 'head')} at a relative error of {self.tolerance:g}>"

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"tolerance": self.tolerance, "heads": [asdict(row) for row in self.rows]}

    def lines(self) -> list[TextLine]:
        """Return a table for every layer, and a legend."""
        lines: list[TextLine] = []
        for layer in dict.fromkeys(row.layer for row in self.rows):
            rows = [row for row in self.rows if row.layer == layer]
            ranks, lengths = list(rows[0].errors), list(rows[0].growth)
            heads = ["head", "need", *(f"err@{rank}" for rank in ranks), *(f"L={length}" for length in lengths)]
            cells = [
                [
                    str(row.head),
                    f"{row.needed}/{row.width}",
                    *(f"{row.errors[rank]:.3f}" for rank in ranks),
                    *(str(row.growth[length]) for length in lengths),
                ]
                for row in rows
            ]
            lines.append(TextLine(f"{layer or '(model)'}, {rows[0].length} keys", style="bold"))
            lines += columns(heads, cells, right=range(len(heads)))
        note = (
            f"need: directions for a relative error of {self.tolerance:g}; err@r: relative error of keeping r; "
            "L=n: directions needed for the first n keys"
        )
        return [*lines, TextLine(note), *(TextLine(f"{layer}: not described, {why}") for layer, why in self.skipped)]

    def summary(self, width: int = WIDTH) -> str:
        """Return the table as text."""
        return join_lines(self.lines(), width)


def truncation_errors(values: Float[Tensor, "*heads n"]) -> Float[Tensor, "*heads n1"]:
    """Return the relative Frobenius errors of keeping 0, 1, …, n directions."""
    squares = values.square()
    tails = squares.flip(-1).cumsum(-1).flip(-1)
    tails = torch.nn.functional.pad(tails, (0, 1))
    return (tails / tails[..., :1].clamp(min=1e-300)).sqrt()


def directions_needed(values: Float[Tensor, "*heads n"], tolerance: float = TOLERANCE) -> Tensor:
    """Return how many directions bring the relative error down to `tolerance`; none for a field of zeros."""
    enough = truncation_errors(values) <= tolerance
    return enough.double().argmax(-1)


def low_rank(
    q: Float[Tensor, "*heads queries d"],
    k: Float[Tensor, "*kv_heads keys d"],
    *,
    tolerance: float = TOLERANCE,
    scale: float | None = None,
    layer: str = "",
    lengths: Sequence[int] | None = None,
) -> list[LowRank]:
    """Return how few directions the energy field of each head needs, for the field over all keys.

    Args:
        q: queries, (heads, queries, d), or (queries, d) of one head.
        k: keys, (key heads, keys, d); several query heads may share a key head.
        tolerance: the relative error in the Frobenius norm that is allowed, between 0 and 1.
        scale: factor of the logits; by default 1/√d.
        layer: the name of the layer, for the rows.
        lengths: lengths of the beginnings of the sequence that are measured as well; by default 8, 16, 32, … They take
            one pass together, since their sums add up.

    Returns:
        One row per head.

    Raises:
        ValueError: `tolerance` is not between 0 and 1.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"Expected a tolerance between 0 and 1, got {tolerance}. Pass a relative error.")
    if q.ndim == 2:
        q, k = q[None], k[None]
    length, width = k.shape[-2:]
    chosen = sorted({n for n in lengths if 0 < n < length} | {length}) if lengths else _doubling(length)
    retained = sorted({1, max(1, width // 8), max(1, width // 4), max(1, width // 2)})
    groups = q.shape[-3] // k.shape[-3]
    spectra = _growing(q, k, chosen, scale, groups)
    full = energy_field(q, k, scale=scale).singular_values
    errors, needed = truncation_errors(full), directions_needed(full, tolerance)
    ranks = torch.stack([directions_needed(values, tolerance) for values in spectra], -1)
    rows = []
    for head in range(q.shape[-3]):
        growth = dict(zip(chosen, map(int, ranks[head].tolist()), strict=True))
        rows.append(
            LowRank(
                layer=layer,
                head=head,
                width=width,
                length=length,
                errors={rank: float(errors[head, min(rank, errors.shape[-1] - 1)]) for rank in retained},
                needed=int(needed[head]),
                growth=growth,
                reaches={rank: next((n for n, has in growth.items() if has >= rank), None) for rank in retained},
            )
        )
    return rows


def _doubling(length: int) -> list[int]:
    powers = [8 << i for i in range(max(0, math.ceil(math.log2(max(length, 9) / 8)))) if 8 << i < length]
    return [*powers, length]


def _growing(q: Tensor, k: Tensor, lengths: Sequence[int], scale: float | None, groups: int) -> list[Tensor]:
    """Return singular values of the field of ever longer beginnings; each segment of the sequence is read once."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gap = k.shape[-2] - q.shape[-2]
    queries: TokenMoments | None = None
    keys: TokenMoments | None = None
    spectra, past = [], 0
    for length in lengths:
        fresh = TokenMoments.of(k[..., past:length, :])
        keys = fresh if keys is None else keys.merge(fresh)
        asked = q[..., max(0, past - gap) : max(0, length - gap), :]
        if asked.shape[-2]:
            new = TokenMoments.of(asked)
            queries = new if queries is None else queries.merge(new)
        if queries is None:
            spectra.append(k.new_zeros(q.shape[-3], 1, dtype=torch.float64))
        else:
            factor = keys.factor.repeat_interleave(groups, -3)
            spectra.append(torch.linalg.svdvals(abs(scale) * queries.about_zero() @ factor.mT))
        past = length
    return spectra


def low_rank_table(model: nn.Module, *args: Any, tolerance: float = TOLERANCE, **model_inputs: Any) -> LowRankTable:
    """Run a model once; for every head, how few directions its energy field needs on the layer's longest sequence.

    Args:
        model: a model whose attention can be observed, as for `probe`.
        *args: inputs, as the model is called.
        tolerance: the relative error in the Frobenius norm that is allowed, between 0 and 1.
        **model_inputs: more inputs, by name.

    Returns:
        One row per head, and the layers that could not be described.

    Raises:
        NoAttentionError: no call of attention was observed.
    """
    by_layer: dict[str, list[LowRank]] = {}

    def describe(capture: Capture, calls: Iterable[AttentionInputs]) -> None:
        longest = max(calls, key=lambda call: call[1].shape[-2], default=None)
        if longest is not None:
            q, k, _ = longest
            by_layer[capture.path] = low_rank(q, k, tolerance=tolerance, scale=capture.scale, layer=capture.path)

    skipped = described(model, args, model_inputs, describe)
    rows = tuple(row for rows in by_layer.values() for row in rows)
    return LowRankTable(rows=rows, tolerance=tolerance, skipped=tuple(skipped.items()))
