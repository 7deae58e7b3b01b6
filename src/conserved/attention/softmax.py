r"""Attention entropy and the largest logit, by one pass over blocks of the logits.

With m the largest logit of a row so far, Z = Σ e^{z−m} and W = Σ e^{z−m}(z − m), the row's entropy is log Z − W/Z. A
new block that raises m by δ turns (Z, W) into e^{−δ}(Z, W − δ Z): the running softmax of Milakov and Gimelshein (2018)
with one more sum. Nothing of size L × L is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from conserved.attention.band import Band
from conserved.output.lines import columns, join_lines
from conserved.output.result import PrintableResult

TILE = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoftmaxStatistics(PrintableResult):
    """Per head and query: entropy of the attention weights in nats, largest logit, and how many keys are seen.

    A query that sees nothing has entropy zero and a largest logit of −inf.
    """

    entropy: Float[Tensor, "*heads queries"]
    largest: Float[Tensor, "*heads queries"]
    seen: Float[Tensor, "*heads queries"]

    def __repr__(self) -> str:
        heads, queries = self.entropy.shape[:-1].numel(), self.entropy.shape[-1]
        return f"<SoftmaxStatistics: {heads} heads, {queries:,} queries>"

    def summary(self) -> str:
        """Return entropy, evenness and largest logit of every head as text."""
        columns_of = (self.mean_entropy, self.evenness, self.largest_logit)
        numbers = zip(*(tensor.flatten().tolist() for tensor in columns_of), strict=True)
        rows = [(str(head), *(f"{number:.3g}" for number in row)) for head, row in enumerate(numbers)]
        return join_lines(columns(("head", "entropy", "H/log n", "max z"), rows, right=range(4)))

    @property
    def mean_entropy(self) -> Float[Tensor, "*heads"]:
        """The mean over queries that see something."""
        asks = self.seen > 0
        return torch.where(asks, self.entropy, 0.0).sum(-1) / asks.sum(-1)

    @property
    def evenness(self) -> Float[Tensor, "*heads"]:
        """Σ entropy / Σ log(keys seen): 1 is uniform attention, 0 a single key; NaN where no query has a choice."""
        room = self.seen.clamp(min=1).log()
        return self.entropy.sum(-1) / room.sum(-1)

    @property
    def largest_logit(self) -> Float[Tensor, "*heads"]:
        """The largest logit of a head."""
        return self.largest.amax(-1)


def softmax_statistics(
    q: Float[Tensor, "*heads queries d"],
    k: Float[Tensor, "*kv_heads keys d"],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask: Bool[Tensor, "*#heads keys"] | None = None,
) -> SoftmaxStatistics:
    """Return entropy and largest logit of every query, in float32 (float64 for double-precision inputs).

    Args:
        q: queries, (…, heads, queries, d).
        k: keys, (…, key heads, keys, d); several query heads may share a key head.
        causal: whether queries see no later keys, with the last query at the last key.
        window: the largest number of keys that a query sees; by default all.
        scale: factor of the logits; 1/√d if None.
        softcap: c of logits that are capped as c · tanh(logits / c); by default none.
        key_mask: (…, keys), False hides a key.

    Returns:
        Entropy in nats, largest logit and number of keys seen, by head and query.
    """
    q, k = q.detach(), k.detach()
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        if key_mask is not None and key_mask.ndim > 1 and key_mask.shape[-2] not in (1, q.shape[-3]):
            key_mask = key_mask.repeat_interleave(q.shape[-3] // key_mask.shape[-2], -2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    band = Band.of(q.shape[-2], k.shape[-2], causal=causal, window=window)
    work = torch.promote_types(q.dtype, torch.float32)
    parts = [
        _rows(q[..., i : i + TILE, :].to(work) * scale, k, band, i, softcap, key_mask, work)
        for i in range(0, q.shape[-2], TILE)
    ]
    entropy, largest, seen = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return SoftmaxStatistics(entropy=entropy, largest=largest, seen=seen)


def _rows(
    q: Tensor, k: Tensor, band: Band, first: int, softcap: float | None, mask: Tensor | None, work: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block of queries against all keys it may see."""
    rows, keys = q.shape[-2], k.shape[-2]
    top = q.new_full(q.shape[:-1], -torch.inf)
    z, w, seen = (q.new_zeros(q.shape[:-1]) for _ in range(3))
    start = 0 if band.lower is None else max(0, first + band.lower)
    stop = keys if band.upper is None else min(keys, first + rows - 1 + band.upper)
    for j in range(start, stop, TILE):
        end = min(j + TILE, stop)
        logits = q @ k[..., j:end, :].to(work).mT
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        lower, upper = (None if limit is None else limit + first - j for limit in (band.lower, band.upper))
        visible = Band(lower=lower, upper=upper).visible(rows, end - j, q.device)
        visible = visible if mask is None else visible & mask[..., None, j:end]
        logits = logits.masked_fill(~visible, -torch.inf)
        seen = seen + visible.sum(-1)
        fresh = torch.maximum(top, logits.amax(-1))
        base = torch.where(fresh == -torch.inf, 0.0, fresh)
        rise = torch.where(top == -torch.inf, 0.0, base - top)
        fade = torch.where(top == -torch.inf, 0.0, torch.exp(-rise))
        shifted = logits - base[..., None]
        weight = shifted.exp()
        moment = torch.where(weight > 0, weight * shifted, 0.0)
        z, w = fade * z + weight.sum(-1), fade * (w - rise * z) + moment.sum(-1)
        top = fresh
    entropy = torch.where(z > 0, z.clamp(min=1e-38).log() - w / z.clamp(min=1e-38), 0.0)
    return entropy.clamp(min=0).double(), top.double(), seen.double()
