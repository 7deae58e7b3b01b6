"""The demonstration: everything in one store and one report, five lines from the store, and a second run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conftest import unchecked
from conserved.claims import claims
from conserved.cli import main
from conserved.demo import Demo, Occupied, Settings, parts
from conserved.demo import run as run_demo
from conserved.demo.decoder import DEFECT, decoder, next_byte_loss, plant_defect, text
from conserved.demo.found import found_lines
from conserved.lab.demo import Demonstration
from conserved.report.contents import read
from conserved.track import RunStore, store_document
from report_store import claim

CHEAP = Settings(steps=2, watched=2, figures=("figure1",), seeds=1, workers=1, claims="note.L10")


@pytest.mark.slow
class TestDemonstration:
    """What a run leaves behind."""

    def test_every_kind_of_record_is_in_the_report(self, demo: Demo) -> None:
        contents = read(demo.store)
        known = claims("note.L1")
        assert len(known) > 2
        assert contents.counts() == {
            "laws": 1,
            "figures": 3,
            "runs": 1,
            "claims": len(known),
            "audits": 2,
            "attention": 1,
            "trajectories": 6,
        }
        assert contents.left_out == ()
        assert demo.report.read_text(encoding="utf-8").startswith("<!doctype html>")

    def test_laws_are_told_from_impostors(self, demo: Demo) -> None:
        record = demo.record()
        assert record["verdict"] == "verified"
        assert record["numbers"] == record["independent"] == 801
        assert record["orders"]["query_key"] == pytest.approx(1, abs=0.1)
        assert record["orders"]["not_query_key"] == pytest.approx(0, abs=0.1)
        assert record["runs"][-1]["drift"]["class_shift"] < 1e-14
        assert record["runs"][-1]["loss_after"] < record["runs"][-1]["loss_before"]

    def test_the_five_lines_follow_the_store(self, demo: Demo, tmp_path: Path) -> None:
        assert len(demo.found) == 5
        assert "801 conserved numbers, 801 of them independent" in demo.found[0]
        known = len(claims("note.L1"))
        assert f"{known} of {known} claims of the sources were run" in demo.found[2]
        assert f"shows in {DEFECT}.gain" in demo.found[3]
        copied = tmp_path / "store.db"
        copied.write_bytes(demo.store.read_bytes())
        with RunStore(copied) as store:
            assert tuple(found_lines(store)) == demo.found
            laws = store.documents("laws")[parts.MODEL]
            planted = store.documents("audit")[parts.PLANTED]
        store_document(copied, "laws", parts.MODEL, laws | {"independent": 7})
        rows = [row | {"ok": True} for row in planted["rows"]]
        store_document(copied, "audit", parts.PLANTED, planted | {"rows": rows})
        store_document(copied, "claim", "x", claim("x", status="refuted"))
        with RunStore(copied) as store:
            changed = found_lines(store)
        assert "7 of them independent" in changed[0]
        assert "Not as recorded: x." in changed[2]
        assert changed[3].endswith("is missed.")

    def test_a_finished_demonstration_is_begun_anew_and_an_interrupted_one_goes_on(
        self, demo: Demo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        def already_compared(store: Path, *_: object) -> Demonstration:
            with RunStore(demo.store) as finished:
                for kind, name in (("laws", parts.MODEL), ("figure", "order")):
                    store_document(store, kind, name, finished.documents(kind)[name])
            return demo.order

        monkeypatch.setattr(parts, "compare_steps", already_compared)
        with unchecked(), monkeypatch.context() as patched:
            patched.setattr(parts, "watch_training", stop)
            with pytest.raises(KeyboardInterrupt):
                run_demo(tmp_path, CHEAP)
        assert not (tmp_path / "report.html").exists()
        with RunStore(tmp_path / "store.db") as store:
            kept = store.select("select name, written from document where kind = 'levels'")
        assert kept, "what was finished is kept"
        with unchecked():
            run_demo(tmp_path, CHEAP)
        with RunStore(tmp_path / "store.db") as store:
            assert store.select("select name, written from document where kind = 'levels'") == kept
            store_document(tmp_path / "store.db", "claim", "stale", claim("stale"))
        with unchecked():
            run_demo(tmp_path, CHEAP)
        with RunStore(tmp_path / "store.db") as store:
            assert "stale" not in store.documents("claim"), "a finished demonstration is not added to"


def test_the_planted_defect_changes_gradients_and_nothing_else() -> None:
    right, wrong, examples = decoder(0), decoder(0), text(0)
    plant_defect(wrong)
    losses = [next_byte_loss(model, examples) for model in (right, wrong)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for loss in losses:
        loss.backward()
    different = [
        name
        for (name, a), (_, b) in zip(right.named_parameters(), wrong.named_parameters(), strict=True)
        if a.grad is not None and b.grad is not None and not torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-12)
    ]
    assert different == [f"{DEFECT}.weight"]


@pytest.mark.parametrize("content", ["store", "text"])
def test_what_is_not_a_demonstration_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    if content == "store":
        store_document(path, "claim", "mine", claim("mine"))
    else:
        path.write_text("my own words " * 50)
    before = path.read_bytes()
    with pytest.raises((Occupied, ValueError), match="something else" if content == "store" else "is not a run store"):
        run_demo(tmp_path, CHEAP)
    assert path.read_bytes() == before


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["conserved", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


class TestCommand:
    """`conserved demo`."""

    @pytest.mark.slow
    @pytest.mark.parametrize("as_json", [False, True], ids=["words", "json"])
    def test_says_where_the_report_is_and_what_was_found(
        self,
        as_json: bool,
        demo: Demo,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        asked: list[tuple[Path, Settings]] = []

        def recorded(folder: Path, settings: Settings, **_: object) -> Demo:
            asked.append((folder, settings))
            return demo

        monkeypatch.setattr("conserved.demo.run", recorded)
        options = ("--folder", str(tmp_path), "--steps", "20", "--seed", "3", *(["--json"] if as_json else []))
        assert run(monkeypatch, "demo", *options) == 0
        assert asked == [(tmp_path, Settings(steps=20, seed=3))]
        shown = capsys.readouterr().out
        if as_json:
            record = json.loads(shown)
            assert record["report"] == str(demo.report)
            assert record["found"] == list(demo.found)
        else:
            assert " a law" in shown
            assert "an exact law" in shown
            assert "not a law" in shown
            assert f"report: {demo.report}" in shown
            for number in range(1, 6):
                assert f"\n{number}. " in shown

    def test_a_folder_that_cannot_be_written_is_bad_usage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("x")
        assert run(monkeypatch, "demo", "--folder", str(tmp_path / "file" / "demo")) == 2
        assert "cannot write to" in capsys.readouterr().err
