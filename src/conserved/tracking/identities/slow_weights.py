"""Slow weights that a loop draws its weights back to now and then, as Lookahead does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conserved.tracking.identities.entry_samples import EntrySample

_FIT = 1e-3
"""How far weights may be from the line between slow and fast ones, relative to the way between them."""


class SlowWeights:
    """Entries of the weights where the loop last drew them back to, at first those of the start.

    Lookahead sets θ to s + α (θ − s) with one 0 < α < 1 for all tensors, and s to the result.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sample = EntrySample.of(tensors, 0)
        self._slow = self._sample.read()
        self._fast = self._slow

    def knows(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the tensors."""
        return self._sample.matches(tensors)

    def remember(self) -> None:
        """Note the weights that a step has left."""
        self._fast = self._sample.read()

    def drawn_back(self) -> bool:
        """Return whether the weights are now between the slow ones and those of the last step; then they are slow."""
        now = self._sample.read()
        way, gone = self._fast - self._slow, now - self._slow
        square = float(way @ way)
        share = float(gone @ way) / square if square else 0.0
        between = _FIT < share < 1 - _FIT and float((gone - share * way).norm()) <= _FIT * square**0.5
        if between:
            self._slow = now
        return between and bool(torch.isfinite(now).all())
