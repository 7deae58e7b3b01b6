"""Where records go: one file per sink."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from conserved.track.sinks.jsonl import JsonLines
from conserved.track.sinks.live import LiveTable
from conserved.track.sinks.sink import Run, Sink
from conserved.track.sinks.sqlite import RunStore, SQLite, store_document
from conserved.track.sinks.store_file import BrokenStore, RunTaken
from conserved.track.sinks.tensorboard import TensorBoard
from conserved.track.sinks.trackio import Trackio
from conserved.track.sinks.wandb import WeightsAndBiases

__all__ = [
    "BrokenStore",
    "JsonLines",
    "LiveTable",
    "Run",
    "RunStore",
    "RunTaken",
    "SQLite",
    "Sink",
    "TensorBoard",
    "Trackio",
    "WeightsAndBiases",
    "opened",
    "store_document",
]


def opened(sinks: Iterable[Sink | str | Path] | Sink | str | Path) -> tuple[Sink, ...]:
    """Sinks, or files that say by their ending what they are: .jsonl is JSON lines, .db and .sqlite a run store."""
    given = [sinks] if isinstance(sinks, Sink | str | Path) else list(sinks)
    return tuple(sink if isinstance(sink, Sink) else _file(Path(sink)) for sink in given)


def _file(path: Path) -> Sink:
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix in (".db", ".sqlite", ".sqlite3"):
        return SQLite(path)
    raise ValueError(f"{path} does not say what it is; name it .db for a run store or .jsonl for JSON lines.")
