"""Numbers on their way from the device to the host, without making the device wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conserved.store.step_record import LawName, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Underway:
    step: int
    causes: tuple[str, ...]
    skipped: bool
    host: Tensor
    readings: dict[str, Tensor | float]
    arrived: torch.cuda.Event | None


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
        """Start copying; on a GPU the copy is queued behind the work that makes the numbers."""
        arrived: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            kept: dict[str, Tensor | float] = {}
            for name, value in readings.items():
                if isinstance(value, Tensor) and value.device.type == "cuda":
                    target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                    kept[name] = target.copy_(value.detach(), non_blocking=True)
                else:
                    kept[name] = value
            readings = kept
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            host = numbers
        self._underway.append(
            _Underway(step=step, causes=causes, skipped=skipped, host=host, readings=dict(readings), arrived=arrived)
        )

    def receive(self, *, wait: bool = False) -> list[StepRecord]:
        """The steps that have arrived; with `wait`, all of them."""
        found = []
        while self._underway:
            first = self._underway[0]
            if first.arrived is not None and not first.arrived.query():
                if not wait:
                    break
                first.arrived.synchronize()
            self._underway.popleft()
            numbers = torch.from_numpy(first.host.numpy()[self._places].astype(np.float64))
            found.append(
                StepRecord(
                    step=first.step,
                    laws=self._laws,
                    causes=first.causes,
                    numbers=numbers,
                    readings={name: float(value) for name, value in first.readings.items()},
                    skipped=first.skipped,
                )
            )
        return found
