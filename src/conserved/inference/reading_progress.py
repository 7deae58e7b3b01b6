"""Progress of inferring a program's laws, for a status line on another thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReadingProgress:
    """The stage that reading is in, and how many of its operations are done."""

    stage: str = ""
    done: int = 0
    total: int = 0

    def enter(self, stage: str, total: int = 0) -> None:
        """Begin a stage.

        Args:
            stage: what is done now.
            total: how many operations it goes through; 0 if it does not count them.
        """
        self.stage, self.done, self.total = stage, 0, total

    def __str__(self) -> str:
        return f"{self.stage}, {self.done:,} of {self.total:,}" if self.total else self.stage


PROGRESS = ReadingProgress()
"""The reading under way in this process; the last one to begin a stage owns it."""
