"""`conserved reproduce`: what it prints and stores, and what it says when something is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from conserved import cli
from conserved.tracking import BrokenStoreError, RunStore
from conserved_papers.lab import sweep as sweeping
from conserved_papers.lab.places import Here
from conserved_papers.lab.recipes import named
from conserved_papers.lab.reproduction import plan, sources_among

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["conserved", "reproduce", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_figure_is_made_stored_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store.db"
    assert run(monkeypatch, "figure1", "--workers", "1", "--store", str(store), "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"]
    assert [figure["code"] for figure in record["figures"]] == ["figure1"]
    with RunStore(store) as opened:
        assert opened.documents("figure")["figure1"]["findings"][0]["holds"]
    assert run(monkeypatch, "figure1", "--workers", "1", "--store", str(store)) == 0
    shown = capsys.readouterr()
    assert "4 results are in" in shown.err
    assert "exponent of the drift" in shown.out


def test_findings_that_do_not_hold_are_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store.db"
    document = {"rate": 0.1, "time": 1.0, "paths": [{"points": [[1, 2], [1, 3]], "law": [1.0, 2.0]}]}
    for rate in (0.2, 0.1, 0.05, 0.025):
        sweeping.keep(store, "levels", f"{rate:g}", document | {"rate": rate})
    assert run(monkeypatch, "figure1", "--workers", "1", "--store", str(store)) == 1
    assert "does not hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("figure9",), "There is no figure 'figure9'. There are: figure1, figure2"),
        (("figure3", "--full"), "cifar is trained on CIFAR-10: give where it is with --data PATH"),
        (("figure3", "--data", "/no/such/place"), "There is nothing at /no/such/place"),
        (("figure1", "--device", "cuda:7"), "The device 'cuda:7' cannot be used here"),
        (("figure1", "--device", "teapot"), "The device 'teapot' cannot be used here"),
    ],
    ids=["unknown figure", "no data", "wrong path", "no such device", "no device"],
)
def test_bad_usage_is_said_before_anything_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    store = tmp_path / "store.db"
    assert run(monkeypatch, *arguments, "--store", str(store)) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")
    assert not store.exists()


def test_a_truncated_file_is_found_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(bytes((0, 0, 8, 3, 0, 0, 0, 9)) + bytes(20))
    store = tmp_path / "store.db"
    assert run(monkeypatch, "figure3", "--data", str(tmp_path), "--store", str(store)) == 2
    assert "truncated" in capsys.readouterr().err
    assert not store.exists()


def test_a_store_that_is_none_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "notes.txt"
    store.write_text("my notes, not a database, and long enough to be looked at " * 20)
    before = store.read_bytes()
    assert run(monkeypatch, "figure1", "--workers", "1", "--store", str(store)) == 2
    assert "not a run store" in capsys.readouterr().err
    assert store.read_bytes() == before


def test_a_full_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise BrokenStoreError("store.db: database or disk is full.")

    monkeypatch.setattr(sweeping, "store_document", full)
    assert run(monkeypatch, "figure1", "--workers", "1", "--store", str(tmp_path / "store.db")) == 2
    assert "make room" in capsys.readouterr().err.replace("\n", " ")


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Here, "run", stopped)
    assert run(monkeypatch, "figure1", "--workers", "1", "--store", str(tmp_path / "store.db")) == 130
    assert "run the same command again" in capsys.readouterr().err.replace("\n", " ")


def test_work_that_two_figures_share_is_planned_once() -> None:
    both, one = plan(["figure2", "figure5"]), plan(["figure2"])
    assert [task.name for task in both] == [task.name for task in one]
    assert {task.name for task in plan(["ledger", "optimizers"])} == {task.name for task in plan(["ledger"])}


def test_each_recipe_takes_the_data_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("in the beginning")
    sources = sources_among([str(tmp_path / "book.txt")])
    assert sources(named("bytes")) == str(tmp_path / "book.txt")
    assert sources(named("digits")) is None
