"""The demonstration: a story in one store and one report, sentences from the store, and a second run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conftest import unchecked
from conserved.cli import main
from conserved.demo import Demo, OccupiedError, Settings, chapters
from conserved.demo import run as run_demo
from conserved.demo.chapters import CLEAN, MODEL, PLANTED, WATCHED
from conserved.demo.findings import finding_lines
from conserved.demo.running import CHAPTERS
from conserved.demo.training import BATCH, LENGTH, DemoTask, load
from conserved.report.contents import read
from conserved.tracking import RunStore, store_document
from report_store import claim

CHEAP = Settings(steps=2, claims=(), recipes=())


@pytest.mark.slow
class TestDemonstration:
    """What a run leaves behind."""

    def test_every_chapter_is_in_the_report(self, demo: Demo) -> None:
        contents = read(demo.store)
        assert contents.counts() == {
            "laws": 1,
            "figures": 3,
            "runs": 1,
            "claims": 1,
            "audits": 2,
            "attention": 0,
            "trajectories": 6,
        }
        assert contents.left_out == ()
        assert demo.status == "verified"
        assert demo.report.read_text(encoding="utf-8").startswith("<!doctype html>")
        assert {path.name for path in demo.store.parent.iterdir()} >= {"gpt.py", "fused_norm.py", "report.html"}

    def test_the_defect_trains_and_is_caught_in_the_first_backward(self, demo: Demo) -> None:
        with RunStore(demo.store) as store:
            planted, clean = store.documents("audit")[PLANTED], store.documents("audit")[CLEAN]
            losses = store.documents("demo")["losses"]
        assert {row["family"] for row in planted["rows"] if not row["ok"]} == {"gain"}
        assert clean["status"] == "verified"
        assert losses["planted"] == pytest.approx(losses["clean"], rel=0.05)

    def test_sentences_follow_the_store(self, demo: Demo, tmp_path: Path) -> None:
        assert len(demo.found) == 5
        assert "laws that keep 3,335 numbers" in demo.found[0]
        assert "is off by 0.29" in demo.found[1] or "is off by 0.3" in demo.found[1]
        assert "preconditioner" in demo.found[2]
        assert "and closes" in demo.found[2]
        assert "is false" in demo.found[3]
        assert "power 1.0" in demo.found[4]
        assert "(power 0.00)" in demo.found[4], "no sign on what rounds to zero"
        copied = tmp_path / "store.db"
        copied.write_bytes(demo.store.read_bytes())
        with RunStore(copied) as store:
            assert tuple(finding_lines(store)) == demo.found
            laws, planted = store.documents("laws")[MODEL], store.documents("audit")[PLANTED]
            theorem = store.documents("claim")[chapters.THEOREM]
        store_document(copied, "laws", MODEL, laws | {"parameters": 7})
        store_document(copied, "audit", PLANTED, planted | {"rows": [row | {"ok": True} for row in planted["rows"]]})
        store_document(copied, "claim", chapters.THEOREM, theorem | {"status": "verified"})
        with RunStore(copied) as store:
            changed = finding_lines(store)
        assert "(7 parameters)" in changed[0]
        assert changed[1].endswith("was missed.")
        assert "holds" in changed[3]

    def test_an_interrupted_demonstration_goes_on_and_a_finished_one_is_begun_anew(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        titles = [chapter.title for chapter in CHAPTERS]
        stopped = [*CHAPTERS[:2], type(CHAPTERS[0])(title="x", seconds=1, run=stop)]
        with unchecked(), monkeypatch.context() as patched:
            patched.setattr("conserved.demo.running.CHAPTERS", tuple(stopped))
            with pytest.raises(KeyboardInterrupt):
                run_demo(tmp_path, CHEAP)
        assert not (tmp_path / "report.html").exists()
        with RunStore(tmp_path / "store.db") as store:
            saved = store.select("select name, written from document where kind = 'audit'")
        assert len(saved) == 2, "what was finished is kept"
        with unchecked():
            run_demo(tmp_path, CHEAP)
        with RunStore(tmp_path / "store.db") as store:
            assert store.select("select name, written from document where kind = 'audit'") == saved
            assert len(store.documents("demo")) == len(titles) + 3, "each chapter, settings, losses and the summary"
        store_document(tmp_path / "store.db", "claim", "stale", claim("stale"))
        with unchecked():
            run_demo(tmp_path, CHEAP)
        with RunStore(tmp_path / "store.db") as store:
            assert "stale" not in store.documents("claim"), "a finished demonstration is not added to"
            assert store.runs() == [WATCHED]

    def test_says_what_comes_next_how_long_and_what_was_found(self, tmp_path: Path) -> None:
        with unchecked(), (tmp_path / "said").open("w") as file:
            run_demo(tmp_path / "d", CHEAP, console=Console(file=file, width=200))
        text = (tmp_path / "said").read_text()
        for number, chapter in enumerate(CHAPTERS, 1):
            assert f"{number}/{len(CHAPTERS)} {chapter.title} (about {chapter.seconds} s)" in text
        first = text.index("▸")
        count = len(CHAPTERS)
        assert text.index(f"1/{count} ") < first < text.index(f"2/{count} "), (
            "the first finding comes before the second chapter"
        )


def test_the_planted_defect_changes_gradients_of_norms_and_nothing_else(tmp_path: Path) -> None:
    right, wrong = DemoTask.of(tmp_path, 0, fused=False), DemoTask.of(tmp_path, 0, fused=True)
    losses = [task.objective(0) for task in (right, wrong)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    different = {
        name.rpartition(".")[0]
        for (name, a), (_, b) in zip(right.model.named_parameters(), wrong.model.named_parameters(), strict=True)
        if a.grad is not None and b.grad is not None and not torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6)
    }
    assert different == {"blocks.0.ln_1", "blocks.0.ln_2", "blocks.1.ln_1", "blocks.1.ln_2", "ln_f"}


def test_the_kernel_is_right_where_its_blocks_are_full(tmp_path: Path) -> None:
    task = DemoTask.of(tmp_path, 0, fused=True)
    kernel = load(tmp_path / "fused_norm.py")
    assert BATCH * LENGTH % kernel.BLOCK, "the demonstration's batch must not fill its blocks"
    x = torch.randn(kernel.BLOCK, 8, dtype=torch.float64, requires_grad=True)
    norm = kernel.FusedLayerNorm(8).double()
    assert torch.autograd.gradcheck(lambda *a: kernel.FusedLayerNormFunction.apply(*a, 1e-5), (
        x[:8].detach().requires_grad_(), norm.weight, norm.bias), raise_exception=False) is False  # fmt: skip
    norm(x).square().sum().backward()
    expected = torch.autograd.grad(
        torch.nn.functional.layer_norm(x, (8,), norm.weight, norm.bias, 1e-5).square().sum(), [x, *norm.parameters()]
    )
    for result, right in zip([x.grad, *(p.grad for p in norm.parameters())], expected, strict=True):
        torch.testing.assert_close(result, right)
    assert task.size == 120_576


@pytest.mark.parametrize("content", ["store", "text"])
def test_what_is_not_a_demonstration_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    if content == "store":
        store_document(path, "claim", "mine", claim("mine"))
    else:
        path.write_text("my own words " * 50)
    before = path.read_bytes()
    with pytest.raises(
        (OccupiedError, ValueError), match="something else" if content == "store" else "is not a run store"
    ):
        run_demo(tmp_path, CHEAP)
    assert path.read_bytes() == before


def test_no_optional_package_is_needed() -> None:
    """The demonstration is what people run first, after a plain `pip install .`."""
    optional = ("sklearn", "PIL", "transformers", "matplotlib", "ray", "pytest", "beartype", "hypothesis", "plotly")
    program = (
        "import sys, tempfile\n"
        f"for name in {optional!r}: sys.modules[name] = None\n"
        "from conserved.demo import Settings, run\n"
        "found = run(tempfile.mkdtemp(), Settings(steps=2, claims=('paper.T4.7',), recipes=()))\n"
        "assert len(found.found) == 4, found.found\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["conserved", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


class TestCommand:
    """`conserved demo`."""

    @pytest.mark.slow
    @pytest.mark.parametrize("as_json", [False, True], ids=["words", "json"])
    def test_says_where_the_report_is(
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
        options = ("--output", str(tmp_path), "--steps", "20", "--seed", "3", *(["--json"] if as_json else []))
        assert run(monkeypatch, "demo", *options) == 0
        assert asked == [(tmp_path, Settings(steps=20, seed=3))]
        shown = capsys.readouterr().out
        if as_json:
            record = json.loads(shown)
            assert record["report"] == str(demo.report)
            assert record["found"] == list(demo.found)
        else:
            assert f"report: {demo.report}" in shown

    @pytest.mark.slow
    def test_the_commands_it_ends_with_work(self, demo: Demo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        shutil.copy(demo.store.parent / "gpt.py", tmp_path)
        assert run(monkeypatch, "laws", f"{tmp_path / 'gpt.py'}:build", "--inputs", "tokens:256:2,64") == 0

    def test_stopping_says_what_was_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def stop(*_: object, **__: object) -> Demo:
            raise KeyboardInterrupt

        monkeypatch.setattr("conserved.demo.run", stop)
        assert run(monkeypatch, "demo", "--output", str(tmp_path)) == 130
        assert f"What was finished is in {tmp_path / 'store.db'}" in capsys.readouterr().err

    def test_a_folder_that_cannot_be_written_is_bad_usage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("x")
        assert run(monkeypatch, "demo", "--output", str(tmp_path / "file" / "demo")) == 2
        assert "cannot write to" in capsys.readouterr().err
