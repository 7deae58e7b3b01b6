r"""Which keys a query sees, and sums over exactly those in time linear in the length.

Query i sees the keys j with i + lower ≤ j < i + upper (where they exist). Such a set of keys is a beginning of the
sequence, an end of it, or a difference of two beginnings; `prefix_sums` takes sums over those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from conserved.attention.prefix_sums import Rows, prefix_dots, prefix_squares


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
        """Return causal attention and windows; the last query stands at the last key, as in decoding with a cache.

        A causal window of w sees a query's own key and the w − 1 before it; one that is not causal sees the keys
        at distances less than w on both sides.
        """
        if window is not None and window < 1:
            raise ValueError(f"Expected a window of at least one key, got {window}. Pass window=1 or more.")
        last = keys - queries
        return Band(
            lower=None if window is None else last - window + 1,
            upper=last + 1 if causal else None if window is None else last + window,
        )

    def mirrored(self) -> Band:
        """Return which queries see a key: the same statement with the roles exchanged."""
        return Band(
            lower=None if self.upper is None else 1 - self.upper,
            upper=None if self.lower is None else 1 - self.lower,
        )

    def counts(
        self, rows: int, n: int, seen: Bool[Tensor, "*heads n"] | None, device: torch.device
    ) -> Float[Tensor, "*heads rows"]:
        """Return how many of the n keys every row sees, of those marked as seen."""
        indices = torch.arange(rows, device=device)
        starts = torch.zeros_like(indices) if self.lower is None else (indices + self.lower).clamp(0, n)
        ends = torch.full_like(indices, n) if self.upper is None else (indices + self.upper).clamp(0, n)
        if seen is None:
            return (ends - starts).double()
        ahead = torch.nn.functional.pad(seen.double().cumsum(-1), (1, 0))
        return ahead[..., ends] - ahead[..., starts]

    def dots(self, x: Rows | Tensor, y: Rows | Tensor) -> Float[Tensor, "heads rows"]:
        """Return for every row i of x the sum of x_i·y_j over the y_j it sees."""
        if self.upper is None and self.lower is not None:
            return prefix_dots(x, y, self.lower, after=True)
        total = prefix_dots(x, y, self.upper)
        return total if self.lower is None else total - prefix_dots(x, y, self.lower)

    def squares(self, x: Rows | Tensor, y: Rows | Tensor) -> Float[Tensor, "heads rows"]:
        """Return for every row i of x the sum of (x_i·y_j)² over the y_j it sees."""
        if self.upper is None and self.lower is not None:
            return prefix_squares(x, y, self.lower, after=True)
        total = prefix_squares(x, y, self.upper)
        return total if self.lower is None else total - prefix_squares(x, y, self.lower)

    def visible(self, queries: int, keys: int, device: torch.device | None = None) -> Tensor:
        """Return the whole matrix of who sees what; for small sizes."""
        gap = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
        seen = torch.ones_like(gap, dtype=torch.bool)
        if self.lower is not None:
            seen &= gap >= self.lower
        if self.upper is not None:
            seen &= gap < self.upper
        return seen
