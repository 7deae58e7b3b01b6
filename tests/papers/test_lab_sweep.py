"""Sweeps: stored at once, resumed after being killed, the same everywhere, and not sunk by one failure."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sweep_runner
from conserved.store.run_store import RunStore
from conserved.store.sqlite_sink import store_document
from conserved_papers.lab.places import Here, Place, Ray
from conserved_papers.lab.sweep import KIND, NoRoomError, Training, checkpoints, sweep, trainings, trajectories
from conserved_papers.lab.task import Task
from sweep_runner import RESULTS, Dies, tasks

pytestmark = pytest.mark.usefixtures("as_users_run_it")

UNTIMED = ("seconds", "examples_per_second")


def stored(store: Path) -> dict[str, dict[str, Any]]:
    """All trajectories of a store without the clock's readings."""
    with RunStore(store) as opened:
        result = opened.documents(KIND)
    return {name: {k: v for k, v in record.items() if k not in UNTIMED} for name, record in result.items()}


def count(store: Path) -> int:
    """How many trajectories a store holds; none while another process is only beginning to make it."""
    if not store.exists():
        return 0
    with closing(sqlite3.connect(store, timeout=60)) as db:
        if not db.execute("select 1 from sqlite_master where name = 'document'").fetchone():
            return 0
        result: int = db.execute("select count(*) from document where kind = ?", (KIND,)).fetchone()[0]
        return result


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    store = tmp_path_factory.mktemp("whole") / "store.db"
    assert sweep(tasks(), store, Here()).stored == RESULTS
    return stored(store)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_sweep_killed_three_times_at_random_ends_with_exactly_its_thirty_results(
    tmp_path: Path, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    store = tmp_path / "store.db"
    command = [sys.executable, str(Path(__file__).parents[1] / "sweep_runner.py"), str(store)]
    chance = random.Random(0)
    seen = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        for _ in range(3):
            enough = seen + chance.randint(1, 6)
            driver.stdin.write("begin\n")
            driver.stdin.flush()
            running = int(driver.stdout.readline())
            while count(store) < enough:
                os.kill(running, 0)  # Raises if it has ended by itself.
                time.sleep(chance.uniform(0.0, 0.05))
            os.kill(running, signal.SIGKILL)
            assert driver.stdout.readline() == "ended\n"
            seen = count(store)
            assert enough <= seen < RESULTS
        driver.stdin.close()
    assert not sweep(tasks(), store, Here()).failures
    assert RunStore(store).check()
    assert stored(store) == uninterrupted
    assert len(stored(store)) == RESULTS


def test_what_is_stored_is_not_run_again(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    text: list[str] = []
    few = tasks()[:2]
    first = sweep(few, store, Here(), say=text.append)
    again = sweep(few, store, Here(), say=text.append)
    assert (first.stored, first.present) == (6, 0)
    assert (again.stored, again.present) == (0, 6)
    assert "6 results" in text[-1]


def test_a_task_with_one_result_missing_is_done_again_whole(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    sweep(tasks()[:1], store, Here())
    before = stored(store)
    with sqlite3.connect(store) as db:
        db.execute("delete from document where name = ?", (tasks()[0].results[1],))
    db.close()
    assert sweep(tasks()[:1], store, Here()).stored == 3
    assert stored(store) == before


def test_a_run_that_fails_is_reported_and_the_others_are_stored(tmp_path: Path) -> None:
    good = tasks()[:1]
    bad = replace(good[0], rate=10.0)
    result = sweep([bad, *good], tmp_path / "store.db", Here())
    assert result.stored == 3
    assert [failure.task for failure in result.failures] == ["relu-attention/10"]
    assert "no longer finite" in result.failures[0].reason


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_workers_of_ray_give_the_same_numbers_and_survive_one_that_dies(
    tmp_path: Path, uninterrupted: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'conserved_papers[ray]'")
    # Workers import the module of the task that dies.
    monkeypatch.setenv("PYTHONPATH", f"{Path(sweep_runner.__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}")
    few: Sequence[Task] = [tasks()[0], Dies(), tasks()[1], replace(tasks()[0], rate=10.0)]
    result = sweep(few, tmp_path / "store.db", Ray(workers=2))
    reasons = {failure.task: failure.reason for failure in result.failures}
    assert set(reasons) == {"dies", "relu-attention/10"}
    assert "abruptly" in reasons["dies"]
    assert "no longer finite" in reasons["relu-attention/10"]
    expected = {name: uninterrupted[name] for task in tasks()[:2] for name in task.results}
    assert stored(tmp_path / "store.db") == expected
    assert not checkpoints(tmp_path / "store.db").exists()


class Interrupted(Place):
    """Ctrl-C after two tasks."""

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Any:
        yield from list(Here().run(tasks[:2], folder=folder))
        raise KeyboardInterrupt


def test_an_interrupted_sweep_keeps_what_was_finished(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    with pytest.raises(KeyboardInterrupt):
        sweep(tasks()[:4], store, Interrupted())
    assert count(store) == 6
    assert sweep(tasks()[:4], store, Here()).stored == 6


def test_a_full_disk_is_said_and_nothing_stored_is_lost(tmp_path: Path) -> None:
    """SQLite's own limit on the size of a file stands in for the disk's: the same error, from the same place."""
    store = tmp_path / "store.db"
    sweep(tasks()[:1], store, Here())
    full = sqlite3.connect

    def small(*arguments: Any, **options: Any) -> sqlite3.Connection:
        db = full(*arguments, **options)
        (pages,) = db.execute("pragma page_count").fetchone()
        db.execute(f"pragma max_page_count = {pages}")
        return db

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", small)
        with pytest.raises(NoRoomError, match=r"disk is full.*is safe.*run the same command again"):
            sweep(tasks(), store, Here())
    left = count(store)
    assert left >= 3
    assert RunStore(store).check()
    sweep(tasks(), store, Here())
    assert count(store) == RESULTS


def test_tasks_must_be_named_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="listed twice"):
        sweep([tasks()[0], tasks()[0]], tmp_path / "store.db", Here())


def test_a_grid_is_every_recipe_at_every_step_size() -> None:
    recipe = replace(tasks()[0].recipe, rates=(0.1, 0.2))
    result = trainings([recipe], seeds=2)
    assert [task.name for task in result] == ["relu-attention/0.1", "relu-attention/0.2"]
    assert result[1].results == ("relu-attention/0.2/0", "relu-attention/0.2/1")


def test_trajectories_come_out_as_they_went_in(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    (task, *_) = tasks()
    sweep([task], store, Here())
    result = list(trajectories(store))
    assert [run.name for run in result] == list(task.results)
    store_document(store, KIND, "odd", {"recipe": "x"})
    with pytest.raises(ValueError, match="is missing"):
        list(trajectories(store))


def test_a_training_is_plain_data() -> None:
    (task, *_) = tasks()
    assert isinstance(task, Training)
    assert task == replace(task)
