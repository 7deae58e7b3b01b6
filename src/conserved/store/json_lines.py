"""JSON lines: one object per step, readable by anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord
from conserved.store.store_file import BrokenStoreError, FileMark, RunTakenError, report_damage


class JsonLines(Sink):
    """Appends to a file, one line per step, each written out before the next step.

    A line that a killed process left half-written is cut off when the run goes on, and so are steps after the
    checkpoint it goes on from. Runs of several names may share a file; a second writer of the same name is noticed.

    Args:
        path: the file; folders are made.
    """

    slow = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None

    def begin(self, run: Run) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._run = run.name
        # A device or a pipe may be read without end.
        if self.path.is_file():
            self._cut(run.step)
        self._file = self.path.open("ab")
        self._mark, self._end = FileMark.of(self.path), self.path.stat().st_size

    def _cut(self, step: int) -> None:
        """Leave out this run's steps after `step` and a line that was not finished. Whole files are left as they are:
        others may be writing to them."""
        text = self.path.read_bytes()
        with report_damage(self.path):
            lines = [
                json.dumps(line)
                for line in _parse(self.path, text)
                if not (line.get("run") == self._run and line["step"] > step)
            ]
        if len(lines) == text.count(b"\n") and (not text or text.endswith(b"\n")):
            return
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        fresh.replace(self.path)

    def write(self, record: StepRecord) -> None:
        assert self._file is not None
        line = json.dumps({"run": self._run} | _finite(record.record()), allow_nan=False)
        self._mark.check()
        self._check_own()
        try:
            self._file.write(f"{line}\n".encode())
            self._file.flush()
        except OSError as problem:
            raise BrokenStoreError(f"{self.path} cannot be written: {problem.strerror or problem}.") from problem
        self._end = self._file.tell()

    def _check_own(self) -> None:
        """Check that lines between two steps of this run belong to other runs."""
        if self.path.stat().st_size == self._end:
            return
        with self.path.open("rb") as file:
            file.seek(self._end)
            added = file.read()
        if any(line.get("run") == self._run for line in _parse(self.path, added)):
            raise RunTakenError(
                f"Another writer is adding steps to the run {self._run!r} in {self.path}; this step is not written, so "
                "that the two are not mixed. Give every run a name of its own with run=."
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def lines(path: str | Path) -> list[dict[str, Any]]:
    """Return what a file holds; a last line that was not finished is left out."""
    return _parse(Path(path), Path(path).read_bytes())


def _parse(path: Path, text: bytes) -> list[dict[str, Any]]:
    with report_damage(path):
        records = [json.loads(line) for line in text.split(b"\n")[:-1]]
    if not all(isinstance(line, dict) for line in records):
        raise BrokenStoreError(f"{path} is damaged: not every line is an object.")
    return records


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
