"""The demonstration: small versions of everything, in one store and one report."""

from __future__ import annotations

from conserved.demo.running import Demo, Occupied, Settings, run

__all__ = ["Demo", "Occupied", "Settings", "run"]
"""`run(folder)` fills `folder/store.db` and writes `folder/report.html`."""
