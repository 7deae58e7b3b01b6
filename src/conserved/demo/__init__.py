"""The demonstration: one story about a model in one file, in one store and one report."""

from __future__ import annotations

from conserved.demo.chapters import Settings
from conserved.demo.running import Demo, OccupiedError, run

__all__ = ["Demo", "OccupiedError", "Settings", "run"]
"""`run(folder)` fills `folder/store.db` and writes `folder/report.html`."""
