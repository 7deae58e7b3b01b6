"""Numbers that are equal or opposite to one another, kept as sets while such equations come in.

Every number belongs to a set and is plus or minus the number that stands for it. Sets are merged many at a time:
the roots of all left and right sides are looked up at once, the larger of each two is hung below the smaller, and
what two equations of one batch claimed differently is merged again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from conserved.inference.types.tensor_type import Atoms


@dataclass(slots=True)
class SignedSets:
    """Disjoint sets of numbers with signs; the smallest number of a set stands for it."""

    count: int = 0
    _parent: Atoms = field(default_factory=lambda: np.arange(1024))
    _sign: np.ndarray = field(default_factory=lambda: np.ones(1024, dtype=np.int8))

    def grow(self, count: int) -> None:
        """Make room for the numbers below `count`; new ones are alone."""
        size = self._parent.size
        if count > size:
            wider = max(count, 2 * size)
            self._parent = np.concatenate([self._parent, np.arange(size, wider)])
            self._sign = np.concatenate([self._sign, np.ones(wider - size, dtype=np.int8)])
        self.count = max(self.count, count)

    def find(self, numbers: Atoms) -> tuple[Atoms, np.ndarray]:
        """Return for each number the one that stands for its set, and whether it is that (1) or its negative (−1)."""
        root, sign = self._parent[numbers], self._sign[numbers]
        while True:
            above = self._parent[root]
            deeper = np.flatnonzero(above != root)
            if not deeper.size:
                break
            sign[deeper] *= self._sign[root[deeper]]
            root = above
        self._parent[numbers] = root
        self._sign[numbers] = sign
        return root, sign

    def join(self, left: Atoms, right: Atoms, sign: int) -> Atoms:
        """Merge sets so that left = sign · right, entry by entry; the roots of sets that became their own negative."""
        a, b = left, right
        relative = np.full(a.size, sign, dtype=np.int8)
        torn: list[Atoms] = []
        while a.size:
            root_a, sign_a = self.find(a)
            root_b, sign_b = self.find(b)
            relative = relative * sign_a * sign_b
            equal = root_a == root_b
            if equal.any():
                torn.append(root_a[equal & (relative < 0)])
                apart = ~equal
                root_a, root_b, relative = root_a[apart], root_b[apart], relative[apart]
            high, low = np.maximum(root_a, root_b), np.minimum(root_a, root_b)
            if a.size < left.size:
                # Of several below which one is to hang, the smallest is written last: a star is merged in few rounds.
                order = np.argsort(-low, kind="stable")
                high, low, relative = high[order], low[order], relative[order]
            self._parent[high] = low
            self._sign[high] = relative
            again = (self._parent[high] != low) | (self._sign[high] != relative)
            a, b, relative = high[again], low[again], relative[again]
        return np.unique(np.concatenate(torn)) if torn else left[:0]

    def roots(self) -> tuple[Atoms, np.ndarray]:
        """Return `find` of every number."""
        return self.find(np.arange(self.count))
