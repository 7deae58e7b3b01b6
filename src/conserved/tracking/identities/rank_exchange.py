"""Numbers that processes show each other without a collective: through the key-value store they met by.

A collective waits for every process. A monitor on one rank only, or a rank whose checks are off, would let the others
wait for ever. Here every process leaves its numbers under its own key and reads what the others have left, if it is
there. Nothing waits, and nothing depends on who takes part.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch.distributed as dist

from conserved._torch_compat import default_store

_KEPT = 64
"""Steps whose own numbers are kept, until the others have shown theirs."""

MOST = 16
"""Processes whose numbers every process reads; of more, only the first process reads all."""


_SERIAL = itertools.count()


class RankExchange:
    """The exchange of records of each step between the processes of a run, each under its own key."""

    def __init__(self, purpose: str) -> None:
        self._store: Any = default_store()
        # Processes make their monitors in the same order, or show each other nothing.
        self._purpose = f"conserved/{purpose}/{next(_SERIAL)}"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._own: dict[int, dict[str, Any]] = {}
        self._read: dict[int, int] = {}
        """By process, the last step that was read."""

    def show(self, step: int, record: dict[str, Any]) -> None:
        """Leave what this process has to say about a step."""
        self._own[step] = record
        for old in [number for number in self._own if 0 < number <= step - _KEPT]:
            del self._own[old]
        # The start stays: who is late reads it as well.
        recent = {
            number: self._own[number] for number in dict.fromkeys((0, *list(self._own)[-2:])) if number in self._own
        }
        self._store.set(self._key(self.rank), json.dumps(recent))

    def arrivals(self) -> list[tuple[int, int, dict[str, Any], dict[str, Any]]]:
        """Return rank, step, its record and the own record, for every step that both have and was not read before."""
        pairs = []
        for rank in self._others():
            key = self._key(rank)
            if not self._store.check([key]):
                continue
            for step, record in json.loads(self._store.get(key)).items():
                number = int(step)
                if number > self._read.get(rank, -1) and number in self._own:
                    self._read[rank] = number
                    pairs.append((rank, number, record, self._own[number]))
        return pairs

    def behind(self, step: int) -> bool:
        """Return whether records of some process up to a step are still missing."""
        return any(self._read.get(rank, -1) < step for rank in self._others())

    @property
    def compared(self) -> int:
        """The number of other processes whose records this one reads."""
        return len(self._others())

    def _others(self) -> list[int]:
        if self.world <= MOST or self.rank == 0:
            return [rank for rank in range(self.world) if rank != self.rank]
        return [0]

    def _key(self, rank: int) -> str:
        return f"{self._purpose}/{rank}"
