"""A piece of work whose results are documents of a run store: what sweeps run, wherever they run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

Documents = Mapping[str, dict[str, Any]]
"""Plain data by name."""


class Task(ABC):
    """Work that depends on nothing but its own plain fields, so that it can be sent to another process or machine."""

    kind: ClassVar[str]
    """Under which its results are kept."""

    @property
    @abstractmethod
    def results(self) -> tuple[str, ...]:
        """The names its documents will have."""

    @property
    def name(self) -> str:
        """Its name, unique in a sweep."""
        return f"{self.kind}/{self.results[0]}"

    @property
    def accelerated(self) -> bool:
        """Whether it wants a graphics processor."""
        return False

    @abstractmethod
    def perform(self, checkpoint: Path | None = None) -> Documents:
        """Do it, going on from the checkpoint if there is one."""
