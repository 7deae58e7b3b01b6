"""A background sink closes the store of a program that ends without closing its monitor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conserved.store import background_sink
from conserved.store.background_sink import BackgroundSink
from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord

PROGRAM = """
import sys
from conserved.store.background_sink import BackgroundSink
from conserved.store.sink import Sink

class File(Sink):
    def begin(self, run):
        pass
    def write(self, record):
        pass
    def note_state(self, state):
        pass
    def close(self):
        open(sys.argv[1], "w").write("closed")

BackgroundSink(File()).note_state("watching")
"""


class _Closings(Sink):
    def __init__(self) -> None:
        self.closed = 0

    def begin(self, run: Run) -> None: ...

    def write(self, record: StepRecord) -> None: ...

    def note_state(self, state: str) -> None: ...

    def close(self) -> None:
        self.closed += 1


def test_what_a_program_leaves_open_is_closed_when_it_ends(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "store")], check=True, timeout=300)
    assert (tmp_path / "store").read_text() == "closed"


def test_a_sink_is_closed_once() -> None:
    closings = _Closings()
    sink = BackgroundSink(closings)
    sink.note_state("watching")
    sink.close()
    background_sink._close_open_sinks()
    assert closings.closed == 1


def test_a_fork_leaves_the_sink_of_its_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    closings = _Closings()
    sink = BackgroundSink(closings)
    sink.note_state("watching")
    monkeypatch.setattr(sink, "process", -1)
    background_sink._close_open_sinks()
    assert closings.closed == 0
    sink.close()
