"""Alarms of other processes on the first one, which alone writes to the log."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from conserved._torch_compat import default_store
from conserved.alarm import Alarm

_SERIAL = itertools.count()


class RelayedAlarms:
    """Alarms that processes leave in the key-value store they met by, and that the first process reads.

    Nothing waits. In a step without an alarm the first process reads one counter, and the others do nothing.
    """

    def __init__(self) -> None:
        self._store: Any = default_store()
        # Processes make their monitors in the same order, or show each other nothing.
        self._prefix = f"conserved/alarms/{next(_SERIAL)}"
        self.rank = dist.get_rank()
        self._read = 0

    def show(self, alarms: Iterable[Alarm]) -> None:
        """Leave alarms of this process for the first one, which has its own."""
        for alarm in alarms if self.rank else ():
            own = alarm if alarm.rank is not None else replace(alarm, rank=self.rank)
            number = self._store.add(f"{self._prefix}/count", 1)
            self._store.set(f"{self._prefix}/{number}", json.dumps(asdict(own)))

    def arrivals(self) -> Iterator[Alarm]:
        """Yield what other processes have left since the last call, on the first process."""
        total = 0 if self.rank else self._store.add(f"{self._prefix}/count", 0)
        while self._read < total and self._store.check([f"{self._prefix}/{self._read + 1}"]):
            self._read += 1
            fields = json.loads(self._store.get(f"{self._prefix}/{self._read}"))
            yield Alarm(**fields | {"laws": tuple(fields["laws"])})
