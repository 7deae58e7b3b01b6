r"""Which keys a query sees, and sums over exactly those in time linear in the length.

Query i sees the keys j with i + lower ≤ j < i + upper (where they exist). Every such set of keys is a difference of
two beginnings of the sequence, so a sum over it is a difference of prefix sums. For Σ_j (x_i·y_j)² over j < t the
prefix sum is of the matrices y_j y_jᵀ: with S_c = Σ_{j < cB} y_j y_jᵀ at every B-th place and t = cB + s,

    Σ_{j<t} (x·y_j)² = xᵀ S_c x + Σ_{cB ≤ j < t} (x·y_j)².

With B = d both terms cost d² per row and the S_c take no more memory than the vectors: O(L d²) time, O(L d) memory.
A difference of prefix sums over L keys carries, for a window of w, L/w times the rounding of the sum itself (with a
bias that is linear in the distance, (L/w)³ times): nothing to speak of in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.attention.moments import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Query i sees keys from i + lower up to, not including, i + upper; None has no limit on that side."""

    lower: int | None = None
    upper: int | None = None

    @property
    def whole(self) -> bool:
        """Whether every query sees every key."""
        return self.lower is None and self.upper is None

    @staticmethod
    def of(queries: int, keys: int, *, causal: bool, window: int | None) -> Band:
        """Causal attention and windows; the last query stands at the last key, as in decoding with a cache.

        A causal window of w sees a query's own key and the w − 1 before it; one that is not causal sees the keys
        at distances less than w on both sides.
        """
        if window is not None and window < 1:
            raise ValueError(f"A window holds at least one key; got {window}.")
        last = keys - queries
        return Band(
            lower=None if window is None else last - window + 1,
            upper=last + 1 if causal else None if window is None else last + window,
        )

    def mirrored(self) -> Band:
        """Which queries see a key: the same statement with the roles exchanged."""
        return Band(
            lower=None if self.upper is None else 1 - self.upper,
            upper=None if self.lower is None else 1 - self.lower,
        )

    def sums(self, values: Float[Tensor, "*heads n d"], rows: int) -> Float[Tensor, "*heads rows d"]:
        """For every row the sum of the values it sees."""
        ahead = torch.nn.functional.pad(values.cumsum(-2), (0, 0, 1, 0))
        return ahead[..., self._ends(self.upper, rows, values), :] - ahead[..., self._starts(rows, values), :]

    def squares(self, x: Float[Tensor, "heads rows d"], y: Float[Tensor, "heads n d"]) -> Float[Tensor, "heads rows"]:
        """For every row i of x the sum of (x_i·y_j)² over the y_j it sees."""
        total = prefix_squares(x, y, self.upper)
        return total if self.lower is None else total - prefix_squares(x, y, self.lower)

    def visible(self, queries: int, keys: int, device: torch.device | None = None) -> Tensor:
        """The whole matrix of who sees what; for small sizes."""
        gap = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
        seen = torch.ones_like(gap, dtype=torch.bool)
        if self.lower is not None:
            seen &= gap >= self.lower
        if self.upper is not None:
            seen &= gap < self.upper
        return seen

    def _starts(self, rows: int, values: Tensor) -> Tensor:
        if self.lower is None:
            return torch.zeros(rows, dtype=torch.long, device=values.device)
        starts = self._ends(self.lower, rows, values)
        return torch.minimum(starts, self._ends(self.upper, rows, values))

    def _ends(self, offset: int | None, rows: int, values: Tensor) -> Tensor:
        n = values.shape[-2]
        if offset is None:
            return torch.full((rows,), n, dtype=torch.long, device=values.device)
        return (torch.arange(rows, device=values.device) + offset).clamp(0, n)


def prefix_squares(
    x: Float[Tensor, "heads rows d"], y: Float[Tensor, "heads n d"], offset: int | None
) -> Float[Tensor, "heads rows"]:
    """For every row i of x the sum of (x_i·y_j)² over j < i + offset; over all j if there is no offset."""
    heads, rows = x.shape[:2]
    n = y.shape[-2]
    if offset is None or offset >= n:
        return _quadratic(x, y.mT @ y)
    found = x.new_zeros(heads, rows)
    first, past = max(0, 1 - offset), min(rows, n - offset)
    if past > first:
        found[:, first:past] = _aligned(x[:, first:past], y, first + offset)
    if rows > max(past, 0):
        rest = slice(max(past, 0), rows)
        found[:, rest] = _quadratic(x[:, rest], y.mT @ y)
    return found


def _aligned(x: Tensor, y: Tensor, start: int) -> Tensor:
    """Σ_{j < start + i} (x_i·y_j)² for rows that all end inside y."""
    heads, rows, d = x.shape
    chunk = max(d, 16)
    head = start % chunk
    begin = start - head
    scatter = y[:, :begin].mT @ y[:, :begin]
    x = torch.nn.functional.pad(x, (0, 0, head, (-(rows + head)) % chunk))
    many = max(1, BLOCK // (heads * chunk * max(d, chunk)))
    within = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril(-1)
    parts = []
    for place in range(0, x.shape[1], many * chunk):
        left = x[:, place : place + many * chunk].unflatten(1, (-1, chunk))
        right = y[:, begin + place : begin + place + left.shape[1] * chunk]
        right = torch.nn.functional.pad(right, (0, 0, 0, left.shape[1] * chunk - right.shape[1]))
        right = right.unflatten(1, (-1, chunk))
        own = right.mT @ right
        upto = own.cumsum(1)
        before = scatter[:, None] + upto - own
        near = (left @ right.mT).masked_fill(~within, 0.0).square().sum(-1)
        parts.append((_quadratic(left, before) + near).flatten(1))
        scatter = scatter + upto[:, -1]
    return torch.cat(parts, 1)[:, head : head + rows]


def _quadratic(x: Tensor, form: Tensor) -> Tensor:
    """xᵀ S x for every row."""
    return ((x @ form) * x).sum(-1)
