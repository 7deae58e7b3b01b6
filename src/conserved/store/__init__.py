"""Where runs are kept: sinks, one file each, the run store, and what a step leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from conserved.store.json_lines import JsonLines
from conserved.store.live_table import LiveTable
from conserved.store.run_store import RunStore
from conserved.store.sink import Run, Sink
from conserved.store.sqlite_sink import SQLite, store_document
from conserved.store.step_record import Entry, StepRecord
from conserved.store.store_file import BrokenStoreError, RunTakenError
from conserved.store.tensorboard import TensorBoard
from conserved.store.trackio import Trackio
from conserved.store.wandb import WeightsAndBiases

__all__ = [
    "BrokenStoreError",
    "Entry",
    "JsonLines",
    "LiveTable",
    "Run",
    "RunStore",
    "RunTakenError",
    "SQLite",
    "Sink",
    "StepRecord",
    "TensorBoard",
    "Trackio",
    "WeightsAndBiases",
    "open_sink",
    "store_document",
]


def open_sink(sinks: Iterable[Sink | str | Path] | Sink | str | Path) -> tuple[Sink, ...]:
    """Open the sinks of the argument `sinks` of a monitor.

    Args:
        sinks: one sink or several; a path stands for the sink its ending names: .jsonl is JSON lines, .db, .sqlite and
            .sqlite3 a run store.

    Returns:
        The sinks, before `begin` of any of them.

    Raises:
        ValueError: a path has another ending.
    """
    given = [sinks] if isinstance(sinks, Sink | str | Path) else list(sinks)
    return tuple(sink if isinstance(sink, Sink) else _file(Path(sink)) for sink in given)


def _file(path: Path) -> Sink:
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix in (".db", ".sqlite", ".sqlite3"):
        return SQLite(path)
    raise ValueError(f"Expected a path that ends in .db (run store) or .jsonl (JSON lines), got {path}. Rename it.")
