"""The interface of sinks: begin a run, take records, end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from conserved.store.step_record import LawName, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run as it begins, or as it goes on after a step: its name, its laws and the settings to store with it."""

    name: str
    laws: Sequence[LawName] = ()
    formulas: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    reference: Mapping[str, Tensor] = field(default_factory=dict)


class Sink(ABC):
    """A place for the records of a run: a file, a dashboard, a table in the terminal."""

    slow: ClassVar[bool] = False
    """Whether a monitor writes to it on a thread of its own, as to files that may be locked or on a slow disk."""

    @abstractmethod
    def begin(self, run: Run) -> None:
        """Begin a run, or go on with one after `run.step`; later records of an earlier attempt are void.

        Args:
            run: its name, laws, formulas, settings and reference values.
        """

    @abstractmethod
    def write(self, record: StepRecord) -> None:
        """Take the record of one step.

        Args:
            record: a row of numbers for every law, readings and alarms; on the host, in the order of steps.
        """

    def note_state(self, state: str) -> None:
        """Keep in words what the monitor of the run is doing, such as a part of it that is off; most sinks do not.

        Args:
            state: the text of `Monitor.state`; it replaces an earlier one.
        """
        return None

    def close(self) -> None:
        """End the run: no more records will come."""
        return None
