"""Run stores deleted, full, damaged, hostile or wanted by two writers: said in one line that names the file."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conserved import Monitor, cli
from conserved.report import NotAStoreError, write_report
from conserved.store.json_lines import lines
from conserved.tracking import BrokenStoreError, MonitorConfig, RunStore, RunTakenError, SQLite, store_document
from report_store import claim, watch
from training import decoder, exact_text_loss

pytestmark = pytest.mark.usefixtures("as_users_run_it")


class Watched:
    """A small training run that writes to a file, and raises what goes wrong with that unless it is lenient."""

    def __init__(self, path: Path, run: str = "one", *, strict: bool = True) -> None:
        torch.manual_seed(0)
        self.model = decoder().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.sink = SQLite(path) if path.suffix == ".db" else None
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            sinks=self.sink or path,
            run=run,
            where="*query_key*",
            every=1,
            config=MonitorConfig(strict=strict),
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        exact_text_loss(self.model, 0).backward()
        self.optimizer.step()
        self.monitor.step()
        self.monitor.flush()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


@pytest.mark.parametrize("name", ["runs.db", "runs.jsonl"])
@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_file_that_goes_missing_while_it_is_written_is_noticed_in_the_next_step(
    name: str, what: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    run = Watched(path)
    run.step()
    if what == "replaced":
        shutil.copy(path, tmp_path / "copy")
        os.replace(tmp_path / "copy", path)
    else:
        path.unlink()
    with pytest.raises(BrokenStoreError, match=rf"{name} was {what}"):
        run.step()
    run.monitor.close()


def test_a_full_disk_names_the_store_and_keeps_the_steps_before(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    run = Watched(path)
    run.step()
    assert run.sink is not None
    assert run.sink._db is not None
    (pages,) = run.sink._db.execute("pragma page_count").fetchone()
    run.sink._db.execute(f"pragma max_page_count = {pages}")
    with pytest.raises(BrokenStoreError, match=r"runs\.db.*disk is full.*Make room"):
        run.steps(500)
    run.monitor.close()
    with RunStore(path) as store:
        assert store.check()
        assert store.steps("one")[0] == 1


def test_a_corrupt_database_names_itself_to_its_writer_and_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    run = Watched(path)
    for _ in range(3):
        run.step()
    run.monitor.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(BrokenStoreError, match=r"runs\.db: .*malformed"):
        Watched(path).step()
    with RunStore(path) as store, pytest.raises(BrokenStoreError, match=r"runs\.db: .*malformed"):
        store.entries("one")
    with pytest.raises((BrokenStoreError, NotAStoreError), match=r"runs\.db"):
        write_report(path, tmp_path / "page.html")


@pytest.mark.parametrize("name", ["runs.db", "runs.jsonl"])
def test_two_monitors_of_one_run_name_are_told_and_not_mixed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    first, second = Watched(path), Watched(path)
    first.step()
    first.step()
    second.step()
    with pytest.raises((RunTakenError, BrokenStoreError), match=name):
        first.step()
    second.step()
    second.monitor.close()
    first.monitor.close()
    result = RunStore(path).steps("one") if name == "runs.db" else [line["step"] for line in lines(path)]
    assert result == [1, 2]


@pytest.mark.parametrize("name", ["runs.db", "runs.jsonl"])
def test_runs_of_two_names_share_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    first, second = Watched(path, "one"), Watched(path, "two")
    for run in (first, second, first, second):
        run.step()
    first.monitor.close()
    second.monitor.close()
    if name == "runs.db":
        with RunStore(path) as store:
            assert [store.steps(run) for run in ("one", "two")] == [[1, 2], [1, 2]]
    else:
        assert sorted((line["run"], line["step"]) for line in lines(path)) == [
            (run, step) for run in ("one", "two") for step in (1, 2)
        ]


HOLDS = """
import sys
import test_store_hostile as t
from pathlib import Path
run = t.Watched(Path(sys.argv[1]))
run.step()
print("holds", flush=True)
sys.stdin.readline()
run.step()
print("went on", flush=True)
"""


@pytest.mark.slow
def test_a_second_process_is_refused_while_the_first_runs_and_may_go_on_when_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    }
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "holds\n"
        with pytest.raises(RunTakenError, match=rf"'one' in .*runs\.db is being written by process {other.pid}"):
            Watched(path).step()
        other.stdin.write("go on\n")
        other.stdin.flush()
        assert other.stdout.readline() == "went on\n", "the first writer is not disturbed"
    with RunStore(path) as store:
        assert store.steps("one") == [1, 2]
    after = Watched(path)
    after.step()
    after.monitor.close()
    with RunStore(path) as store:
        assert store.steps("one") == [1]


def change(query: str, *given: Any) -> Callable[[sqlite3.Connection], object]:
    return lambda db: db.execute(query, given)


DAMAGE: dict[str, Callable[[sqlite3.Connection], object]] = {
    "a blob for a run's name": change("update run set name = x'00ff'"),
    "a blob for a law's name": change("update law set name = x'80'"),
    "a blob for a family": change("update law set family = x'ff00'"),
    "text that is not UTF-8": change("update law set name = cast(x'c328' as text)"),
    "text for numbers": change("update entry set observed = 'much', excess = 'more'"),
    "text for steps": change("update step set step = 'first' where step = 1"),
    "a config that is no JSON": change("update run set config = '{'"),
    "a config that is a list": change("update run set config = '[1, 2]'"),
    "a config nested deeply": change("update run set config = ?", "[" * 100_000),
    "a number of 5,000 digits": change("update run set config = ?", '{"a": ' + "9" * 5000 + "}"),
    "half a character": change("update run set config = ?", '{"a\\ud800": "\\udfff"}'),
    "no ledger": change("drop table entry"),
    "no column": change("alter table law drop column family"),
    "a start beyond all time": change("update run set started = 1e300"),
    "laws without units": change("update law set units = 0"),
    "a blob for an alarm": change(
        "insert into alarm values (1, 1, x'00', x'ff', 'a', 'b', x'00', x'00', x'ff', 'c', 1, 0)"
    ),
    "a document that is no JSON": change("update document set content = '{'"),
    "a document that is a list": change("update document set content = '[]'"),
    "a document nested deeply": change("update document set content = ?", '{"a":' * 50_000),
    "a document with a name in bytes": change("update document set name = x'fe'"),
    "a document that is a blob": change("update document set content = x'fffefd'"),
    "a moment that is text": change("update document set written = 'now'"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.db"
    watch(path, "run", steps=3)
    store_document(path, "claim", "c", claim("c"))
    store_document(path, "demo", "summary", {"headline": ["found"]})
    return path


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_hostile_store_is_reported_as_far_as_it_can_be_or_refused_in_one_line(
    damage: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostile.db"
    with RunStore(sound) as store:
        store.select("vacuum into ?", str(path))
    db = sqlite3.connect(path)
    DAMAGE[damage](db)
    db.commit()
    db.close()
    monkeypatch.setattr(sys, "argv", ["conserved", "report", str(path), "-o", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    text = capfd.readouterr()
    assert ended.value.code in (0, 2), text.err
    assert "Traceback" not in text.err + text.out
    if ended.value.code == 2:
        assert "hostile.db" in text.err
        assert text.err.count("\n") == 1
    else:
        assert (tmp_path / "page.html").stat().st_size > 1000


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\n", b"{\n", b"[1]\n", b'{"run": "one", "step": "x"}\n', b'{"run": "one"}\n', b"[" * 10**5 + b"\n"],
    ids=["bytes", "half", "list", "text", "no step", "nested"],
)
def test_a_hostile_file_of_lines_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content)
    with pytest.raises(BrokenStoreError, match=r"runs\.jsonl is damaged"):
        Watched(path).step()


def test_a_store_of_the_first_version_without_a_table_of_writers_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    run = Watched(path)
    run.step()
    run.monitor.close()
    with sqlite3.connect(path) as db:
        db.execute("drop table writer")
    db.close()
    again = Watched(path)
    again.monitor.load_state_dict(run.monitor.state_dict())
    again.step()
    again.monitor.close()
    with RunStore(path) as store:
        assert store.steps("one") == [1, 2]
        assert json.loads(store.select("select config from run")[0][0])["every"] == 1


def test_a_store_on_a_device_is_written_and_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    path.symlink_to("/dev/zero")

    read = Path.read_bytes

    def read_files(self: Path) -> bytes:
        assert self != path, "a device may be read without end"
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", read_files)
    run = Watched(path)
    run.step()
    run.monitor.close()
    assert run.monitor.state == "watching"
