"""Numbers on their way from the device to the host, without making the device wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conserved.moment import HostCopy
from conserved.store.step_record import LawName, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Underway:
    step: int
    causes: tuple[str, ...]
    skipped: bool
    numbers: HostCopy
    readings: dict[str, HostCopy | float]

    @property
    def arrived(self) -> bool:
        copies = [self.numbers, *(reading for reading in self.readings.values() if isinstance(reading, HostCopy))]
        return all(copy.arrived for copy in copies)


class Transfer:
    """Steps in order; each becomes a record once its numbers have arrived."""

    def __init__(self, laws: tuple[LawName, ...], order: list[int]) -> None:
        self._laws = laws
        self._places = np.argsort(order)
        """Where the row of every law is."""
        self._underway: deque[_Underway] = deque()

    def send(
        self, step: int, causes: tuple[str, ...], numbers: Tensor, readings: dict[str, Tensor | float], skipped: bool
    ) -> None:
        """Start copying."""
        read = {
            name: HostCopy.of(reading) if isinstance(reading, Tensor) else reading for name, reading in readings.items()
        }
        self._underway.append(
            _Underway(step=step, causes=causes, skipped=skipped, numbers=HostCopy.of(numbers), readings=read)
        )

    def receive(self, *, wait: bool = False) -> list[StepRecord]:
        """Return the steps that have arrived; with `wait`, all of them."""
        result = []
        while self._underway:
            first = self._underway[0]
            if not wait and not first.arrived:
                break
            self._underway.popleft()
            numbers = torch.from_numpy(first.numbers.read().numpy()[self._places].astype(np.float64))
            result.append(
                StepRecord(
                    step=first.step,
                    laws=self._laws,
                    causes=first.causes,
                    numbers=numbers,
                    readings={
                        name: float(reading.read() if isinstance(reading, HostCopy) else reading)
                        for name, reading in first.readings.items()
                    },
                    skipped=first.skipped,
                )
            )
        return result
