"""The run store: what goes in comes out, a killed process loses at most the step in flight, writers do not collide."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conserved import Monitor, MonitorConfig
from conserved.store import run_digest
from conserved.store.json_lines import lines
from conserved.store.step_record import By
from conserved.tracking import JsonLines, RunStore, SQLite, store_document
from training import decoder, exact_text_loss, train

HERE = Path(__file__).parents[1]


def watched(path: Path, *, run: str = "one", steps: int = 4, where: str = "layers.0.*") -> Monitor:
    torch.manual_seed(0)
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    gauges = {"constant": lambda: 1.5}
    monitor = Monitor(
        model, optimizer, sinks=path, run=run, where=where, config=MonitorConfig(gauges=gauges or {}, notes={"seed": 0})
    )

    def after(number: int) -> None:
        if number == 2:
            with torch.no_grad():
                model.get_parameter("layers.0.attention.q.weight")[0, 0] += 1.0
        monitor.step()

    train(model, optimizer, exact_text_loss, steps, after=after)
    monitor.close()
    return monitor


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    monitor = watched(tmp_path / "runs.db")
    with RunStore(tmp_path / "runs.db") as store:
        assert store.check()
        assert store.runs() == ["one"]
        assert store.config("one") == {"seed": 0, "optimizer": ["SGD"], "every": "auto"}
        assert store.steps("one") == [1, 2, 3, 4]
        assert store.entries("one") == monitor.ledger()
        law = monitor.laws.symmetries[0].name
        assert store.entries("one", law=law, step=2) == monitor.ledger(law=law, step=2)
        kinds: tuple[By, ...] = ("block", "family", "law")
        for by in kinds:
            result = store.errors("one", by=by)
            for record in monitor.records:
                assert result[record.step] == pytest.approx(record.errors(by))
        assert {step: result["constant"] for step, result in store.readings("one").items()} == dict.fromkeys(
            (1, 2, 3, 4), 1.5
        )
        assert store.readings("one")[1]["audit/refuted"] == 0
        text = {(alarm.step, alarm.code, alarm.law) for record in monitor.records for alarm in record.alarms}
        assert {(alarm.step, alarm.code, alarm.law) for alarm in store.alarms("one")} == text
        assert store.alarms("one")
        reference = store.reference("one")
        assert all(torch.equal(reference[name], value) for name, value in monitor.reference.values.items())


@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Expected a run store"):
        RunStore(tmp_path / "none.db")
    watched(tmp_path / "runs.db", steps=1)
    with RunStore(tmp_path / "runs.db") as store:
        with pytest.raises(KeyError, match="There are: one"):
            store.entries("two")
        with pytest.raises(ValueError, match='"block"'):
            store.errors("one", by="colour")


def test_values_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    for path in (tmp_path / "runs.db", tmp_path / "runs.jsonl"):
        model = decoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Monitor(model, optimizer, sinks=path, run="one", where="*query_key*") as monitor:
            with torch.no_grad():
                model.get_parameter("layers.0.attention.q.weight").fill_(math.nan)
            optimizer.step()
            monitor.step()
    with RunStore(tmp_path / "runs.db") as store:
        assert math.isnan(store.entries("one")[0].observed)
    (line,) = lines(tmp_path / "runs.jsonl")
    assert line["laws"][0]["observed"] == "nan"


def test_json_lines_hold_the_ledger(tmp_path: Path) -> None:
    monitor = watched(tmp_path / "run.jsonl")
    result = lines(tmp_path / "run.jsonl")
    assert [line["step"] for line in result] == [1, 2, 3, 4]
    assert [(line["step"], law["law"], law["residual"], law["causes"]) for line in result for law in line["laws"]] == [
        (entry.step, entry.law, entry.residual, dict(entry.causes)) for entry in monitor.ledger()
    ]
    assert result[2]["alarms"]
    assert result[0]["errors"] == pytest.approx(monitor.records[0].errors())


def test_a_line_that_was_cut_off_is_dropped_when_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    watched(path, run="other", steps=2)
    watched(path, steps=3)
    with path.open("a") as file:
        file.write('{"run": "one", "step": 4, "la')
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    monitor = Monitor(model, optimizer, sinks=JsonLines(path), run="one", where="layers.0.*")
    state = monitor.state_dict() | {"count": 2}
    monitor.load_state_dict(state)
    train(model, optimizer, exact_text_loss, 2, after=lambda _: monitor.step())
    monitor.close()
    assert [(line["run"], line["step"]) for line in lines(path)] == [
        ("other", 1), ("other", 2), ("one", 1), ("one", 2), ("one", 3), ("one", 4),
    ]  # fmt: skip


IMPORTED = """
import contextlib, io, os, sys, random, signal
sys.path.insert(0, {here!r})
import torch
import store_writer
# What the first run of a process imports and prepares takes seconds; every child would pay it again.
with contextlib.redirect_stdout(io.StringIO()):
    store_writer.main({store!r} + ".first.db", "first", {store!r} + ".pt", 1)
"""

WRITERS = (
    IMPORTED
    + """
children = []
for run, checkpoint in {runs!r}.items():
    child = os.fork()
    if child == 0:
        code = 3
        try:
            store_writer.main({store!r}, run, checkpoint, {steps})
            code = 0
        finally:
            os._exit(code)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))
"""
)
"""One process for each run, at the same time."""

FORKED = (
    IMPORTED
    + """
for attempt in range({kills}):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        try:
            store_writer.main({store!r}, "killed", {checkpoint!r}, 10**6)
        finally:
            os._exit(3)
    os.close(write)
    random.seed(attempt)
    wanted, handed, kept = random.randint(0, 4), 0, b""
    while handed < wanted or b"ready" not in kept:
        kept += os.read(read, 4096)
        whole = kept.rpartition(b"\\n")[0].split()
        handed = len([word for word in whole if word != b"ready"])
    # A kill at a random moment of the step that follows.
    import time
    time.sleep(random.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while chunk := os.read(read, 4096):
        kept += chunk
    os.close(read)
    whole = kept.rpartition(b"\\n")[0].split()
    print(max([int(word) for word in whole if word != b"ready"], default=-1), flush=True)
"""
)


def check_killed(store: Path, handed: int) -> int:
    """The store after a kill: sound, whole steps without a gap, and all of those that were handed over but one."""
    if not store.exists():
        assert handed < 0
        return 0
    with RunStore(store) as opened:
        assert opened.check()
        tables = sqlite3.connect(store)
        known = tables.execute("select count(*) from sqlite_master where name = 'run'").fetchone()[0]
        tables.close()
        steps = opened.steps("killed") if known and opened.runs() else []
        if handed >= 0:
            assert steps[-1] in (handed, handed + 1), "at most the step in flight is lost"
        assert steps == list(range(1, len(steps) + 1)), "no gap, no step twice"
        if steps:
            last = opened.entries("killed", step=steps[-1])
            assert len(last) == len(opened.reference("killed")), "a step is whole or not there"
        return len(steps)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_killing_the_process_at_random_loses_at_most_the_step_in_flight(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Processes, each killed at a random moment and followed by one that goes on from the last checkpoint.

    There are sixteen, and with `--whole` fifty.
    """
    kills = 50 if request.config.getoption("--whole") else 16
    store, checkpoint = tmp_path / "runs.db", tmp_path / "checkpoint.pt"
    script = FORKED.format(here=str(HERE), kills=kills, store=str(store), checkpoint=str(checkpoint))
    survived, furthest = 0, 0
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            survived += 1
            furthest = max(furthest, check_killed(store, int(line)))
    assert driver.returncode == 0
    assert survived == kills
    assert furthest > 10, "runs went on from their checkpoints"
    with RunStore(store) as opened:
        assert max(abs(entry.residual) for entry in opened.entries("killed")) < 1e-13
        assert not opened.alarms("killed")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
def test_two_writers_and_a_reader_share_a_store(tmp_path: Path) -> None:
    store, steps = tmp_path / "runs.db", 30
    runs = {name: str(tmp_path / f"{name}.pt") for name in ("one", "two")}
    script = WRITERS.format(here=str(HERE), runs=runs, store=str(store), steps=steps)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as writers:
        while writers.poll() is None:
            if store.exists():
                with RunStore(store) as reader:
                    assert reader.check()
            time.sleep(0.05)
    assert writers.returncode == 0
    with RunStore(store) as opened:
        assert sorted(opened.runs()) == ["one", "two"]
        first, second = (opened.entries(name) for name in ("one", "two"))
        assert {entry.step for entry in first} == set(range(1, steps + 1))
        assert first == second, "two runs of the same seed"


def test_a_store_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    path.write_text(json.dumps({"not": "a database"}) * 50)
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, sinks=SQLite(path), where="*query_key*", config=MonitorConfig(strict=True))

    def write() -> None:
        optimizer.step()
        monitor.step()
        monitor.flush()

    with pytest.raises(sqlite3.DatabaseError):
        write()


def test_documents_are_kept_by_kind_and_name_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.db"
    for name, content in (("a", {"x": 1.0}), ("b", {"x": [2.0, float("inf")]}), ("a", {"x": 3.0})):
        store_document(path, "trajectory", name, content)
    store_document(path, "claim", "a", {"<b>": "é"})
    with RunStore(path) as store:
        assert store.documents("trajectory") == {"b": {"x": [2.0, float("inf")]}, "a": {"x": 3.0}}
        assert store.documents("claim") == {"a": {"<b>": "é"}}
        assert store.documents("audit") == {}
        assert store.runs() == []


def test_a_document_that_is_not_json_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store_document(path, "audit", "a", {"x": 1})
    with pytest.raises(TypeError):
        store_document(path, "audit", "a", {"x": torch.zeros(1)})
    with RunStore(path) as store:
        assert store.documents("audit") == {"a": {"x": 1}}


def test_an_audit_is_known_until_the_next_and_nothing_after_the_last() -> None:
    rows = [(1, "audit/residual", 1.0), (5, "audit/residual", 2.0)]
    result = run_digest._hold_values(rows, [0, 1, 3, 6, 9])["audit/residual"]
    assert str(result) == "(nan, 1.0, 1.0, 2.0, nan)"
