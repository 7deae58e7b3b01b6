"""What every sink does: begin a run, take records, end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from conserved.store.step_record import LawName, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What is known when a run begins, or goes on at a step."""

    name: str
    laws: Sequence[LawName] = ()
    formulas: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    reference: Mapping[str, Tensor] = field(default_factory=dict)


class Sink(ABC):
    """A place for records."""

    @abstractmethod
    def begin(self, run: Run) -> None:
        """A run starts, or goes on after `run.step`; later records of an earlier attempt are void."""

    @abstractmethod
    def write(self, record: StepRecord) -> None:
        """Take one step."""

    def close(self) -> None:
        """No more records will come."""
        return None
