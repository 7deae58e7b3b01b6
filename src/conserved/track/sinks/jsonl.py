"""JSON lines: one object per step, readable by anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from conserved.track.record import StepRecord
from conserved.track.sinks.sink import Run, Sink


class JsonLines(Sink):
    """Appends to a file, one line per step, each written out before the next step.

    A line that a killed process left half-written is cut off when the run goes on, and so are steps after the
    checkpoint it goes on from.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None

    def begin(self, run: Run) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        if self.path.exists():
            earlier = lines(self.path)
            kept = [json.dumps(line) for line in earlier if not (line["run"] == run.name and line["step"] > run.step)]
            fresh = self.path.with_suffix(".tmp")
            fresh.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            fresh.replace(self.path)
        self._run = run.name
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        assert self._file is not None
        line = json.dumps({"run": self._run} | _finite(record.to_dict()), allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def lines(path: str | Path) -> list[dict[str, Any]]:
    """What a file holds; a last line that was not finished is left out."""
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
