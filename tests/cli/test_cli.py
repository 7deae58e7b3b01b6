"""The command: tables for people, JSON for programs, one sentence for mistakes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import conserved
from conserved import Verdict
from conserved.cli import main

MODEL = """
import torch
from conserved.blocks import Attention, SwiGLU

def small():
    return Attention(4, 2)

ready = SwiGLU(3, 4)
number = 7

def wrong():
    return 3

def failing(size=2):
    raise RuntimeError("no weights here")

def meta():
    with torch.device("meta"):
        return SwiGLU(3, 4)

def stranger():
    return torch.nn.Linear(2, 2)

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SwiGLU(3, 4)

    def forward(self, x, y):
        return self.inner(x + y)

two_inputs = Sum

def both(generator):
    return torch.randn(2, 3, generator=generator), torch.randn(2, 3, generator=generator)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["conserved", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_a_factory_in_a_file_is_listed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "laws", f"{file}:small") == 0
    shown = capsys.readouterr().out
    assert "query_key" in shown
    assert "q.weight[0:2]·q.weight[0:2]ᵀ − k.weight[0:2]·k.weight[0:2]ᵀ" in shown
    assert "4 laws hold 12 conserved numbers; 12 are independent at these weights" in shown


def test_a_class_of_a_package_takes_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("dim=4", "heads=2", "rotary=half", "bias=True")
    assert run(monkeypatch, "laws", "conserved.blocks:Attention", *options, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["numbers"] == record["independent"] == 8
    assert {law["group"] for law in record["laws"]} == {"(C*)^1", "GL(2)"}
    assert all(law["formula"] and law["latex"] and law["exact"] for law in record["laws"])


def test_a_model_that_is_already_built_is_listed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "laws", f"{file}:ready", "--latex") == 0
    assert capsys.readouterr().out.startswith(r"\lVert \mathtt{down.weight}_{:,i} \rVert^{2} - ")


def test_a_loss_adds_the_laws_of_the_head(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("vocab=5", "dim=4", "depth=1", "heads=2", "hidden=3")
    result = []
    for loss in ("regression", "cross_entropy"):
        assert run(monkeypatch, "laws", "conserved.blocks:DecoderLM", *sizes, "--loss", loss, "--json") == 0
        result.append(json.loads(capsys.readouterr().out)["numbers"])
    assert result[1] - result[0] == 4


def test_a_model_without_values_is_listed_and_says_what_was_not_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "laws", f"{file}:meta") == 0
    shown = capsys.readouterr().out
    assert "1 law holds 4 conserved numbers" in shown
    assert "Independence was not counted" in shown


def test_a_model_without_laws_is_told_why(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "laws", f"{file}:stranger") == 0
    assert "it makes the output, which a loss may see in any way" in capsys.readouterr().out


def test_inputs_can_be_given_where_they_cannot_be_guessed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "laws", f"{file}:two_inputs") == 2
    assert "--inputs" in capsys.readouterr().err
    assert run(monkeypatch, "laws", f"{file}:two_inputs", "--inputs", "both") == 0
    assert "1 law holds 4 conserved numbers" in capsys.readouterr().out


MISTAKES = [
    ("nothing", "does not name a model"),
    ("missing.py:small", "There is no file missing.py"),
    ("no.such.module:thing", "could not be imported"),
    ("FILE:absent", "has no 'absent'. It has: Attention, Sum, SwiGLU, both"),
    ("FILE:number", "Expected a model or a function that returns one"),
    ("FILE:wrong", "to return a torch.nn.Module, got int"),
    ("FILE:failing", "failed: RuntimeError: no weights here"),
    ("FILE:failing sized=1", "unexpected keyword argument 'sized'"),
    ("FILE:small heads", "Expected an option as name=value, got 'heads'"),
    ("FILE:ready dim=3", "is a model already"),
    ("FILE:small --loss hinge", "got 'hinge'"),
    ("conserved.blocks:Attention dim=5 heads=2", "multiple of heads, got dim 5 and heads 2"),
]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_ends_with_one_sentence_and_code_2(
    words: str, message: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "laws", *words.replace("FILE", str(file)).split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_file_that_cannot_be_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert run(monkeypatch, "laws", f"{tmp_path / 'broken.py'}:f") == 2
    assert "could not be run: SyntaxError" in capsys.readouterr().err


def test_unknown_commands_are_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "lores") == 2


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"conserved {conserved.__version__}\n"


DISCOVER = """
import torch
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
    def forward(self, x):
        return self.b(self.a(x))

def points(generator):
    return torch.randn(2, 3, generator=generator)

def dropout():
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout())
"""


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    path = tmp_path / "pair_model.py"
    path.write_text(DISCOVER)
    return path


class TestDiscoverCommand:
    """Counting and finding laws from the command line."""

    @pytest.mark.parametrize("inputs", ["2,3", "points"])
    def test_counts_and_finds(
        self, inputs: str, pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "discover", f"{pair}:Pair", "--inputs", inputs, "--json") == 0
        streams = capsys.readouterr()
        record = json.loads(streams.out)
        assert (record["count"], record["complete"]) == (3, True)
        assert "brackets of depth 1: rank 9 of 12" in streams.err

    def test_prints_a_table_and_latex(
        self, pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "discover", f"{pair}:Pair", "--inputs", "2,3") == 0
        assert "3 independent laws of 12 parameters, all found." in capsys.readouterr().out
        assert run(monkeypatch, "discover", f"{pair}:Pair", "--inputs", "2,3", "--latex") == 0
        assert capsys.readouterr().out.startswith(r"\begin{tabular}{lr}")

    def test_takes_token_ids(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        sizes = ("vocab=5", "dim=4", "depth=1", "heads=2", "hidden=3")
        target = ("conserved.blocks:DecoderLM", *sizes, "--inputs", "tokens:5:2,4", "--loss", "cross_entropy")
        assert run(monkeypatch, "discover", *target, "--count-only", "--json") == 0
        assert json.loads(capsys.readouterr().out)["count"] == 27

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("FILE:Pair", "Say what the model takes"),
            ("FILE:Pair --inputs 2,x", "Expected a shape as sizes with commas"),
            ("FILE:Pair --inputs tokens:x:2", "tokens:BOUND:SHAPE"),
            ("FILE:Pair --inputs nowhere", "has no function 'nowhere'"),
            ("FILE:Pair --inputs 2,5", "failed on a random input"),
            ("FILE:dropout --inputs 2,3", "got two that differ"),
            ("FILE:Pair --inputs 2,3 --loss hinge", "got 'hinge'"),
        ],
    )
    def test_mistakes(
        self, words: str, message: str, pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "discover", *words.replace("FILE", str(pair)).split()) == 2
        assert message in capsys.readouterr().err


def test_a_file_that_exits_is_a_mistake_and_not_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quits.py").write_text("import sys\nsys.exit(0)\n")
    assert run(monkeypatch, "laws", f"{tmp_path / 'quits.py'}:model") == 2
    assert "could not be run: SystemExit" in capsys.readouterr().err


def test_a_file_can_import_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "neighbour_parts.py").write_text("from conserved.blocks import SwiGLU\n")
    (tmp_path / "with_neighbour.py").write_text("from neighbour_parts import SwiGLU\nmodel = SwiGLU(3, 4)\n")
    assert run(monkeypatch, "laws", f"{tmp_path / 'with_neighbour.py'}:model") == 0
    assert "gated_neurons" in capsys.readouterr().out


class TestAttention:
    MODEL = ("conserved.blocks:DecoderLM", "vocab=20", "dim=8", "depth=1", "heads=2", "hidden=8")

    def run(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["conserved", "attention", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    def test_a_table_for_people(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(monkeypatch, *self.MODEL, "--inputs", "tokens:20:2,30", "--low-rank") == 0
        shown = capsys.readouterr().out
        assert "layers.0.attention, causal" in shown
        assert "VERIFIED: Rows sum to zero" in shown
        assert "err@2" in shown
        assert max(map(len, shown.splitlines())) <= 80

    def test_json_for_programs(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(monkeypatch, *self.MODEL, "--inputs", "tokens:20:1,30", "--json") == 0
        record = json.loads(capsys.readouterr().out)
        assert record["verdict"] == "verified"
        assert [(head["layer"], head["head"]) for head in record["heads"]] == [
            ("layers.0.attention", i) for i in (0, 1)
        ]
        assert all(head["coherence"] >= 1 for head in record["heads"])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("conserved.blocks:SwiGLU", "dim=3", "hidden=4", "--inputs", "5,3"), "without a call of attention"),
            ((*MODEL,), "--inputs"),
            ((*MODEL, "--text", "some words"), "--text is for a folder"),
        ],
        ids=["no attention", "no inputs", "no tokenizer"],
    )
    def test_mistakes(
        self,
        arguments: tuple[str, ...],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert self.run(monkeypatch, *arguments) == 2
        assert message in capsys.readouterr().err


class TestExitCodesAndMistakes:
    """What a command answers when it cannot say yes."""

    FUNCTION = "import torch\nfrom torch import nn\ndef build(): return nn.Linear(3, 3)\n"

    def test_inconclusive_has_a_code_of_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "m.py").write_text(self.FUNCTION)
        target = f"{tmp_path / 'm.py'}:build"
        unknown = Verdict(status=Verdict.INCONCLUSIVE, message="not clear")
        result = dataclasses.replace(conserved.discover(torch.nn.Linear(3, 3), torch.zeros(2, 3)), verdict=unknown)
        monkeypatch.setattr(conserved, "discover", lambda *_, **__: result)
        assert run(monkeypatch, "discover", target, "--inputs", "2,3") == 3
        assert run(monkeypatch, "--help") == 0
        assert "3 inconclusive" in capsys.readouterr().out

    @pytest.mark.parametrize("command", ["discover", "audit", "check"])
    def test_a_device_that_is_not_there_is_one_line(
        self, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        (tmp_path / "m.py").write_text(self.FUNCTION)
        inputs = "x:fp32:2,3" if command == "check" else "2,3"
        target = f"{tmp_path / 'm.py'}:build"
        assert run(monkeypatch, command, target, "--inputs", inputs, "--device", "cuda") == 2
        error = capsys.readouterr().err
        assert "The device 'cuda' cannot be used here" in error
        assert len(error.strip().splitlines()) == 1

    @pytest.mark.parametrize(
        "words",
        [
            ("laws", "conserved.blocks:Attention", "dim=4", "heads=2", "--store", "{}/no/s.db"),
            ("certify", "conserved.blocks:Attention", "dim=4", "heads=2", "--inputs", "3,4", "-o", "{}/no/c.json"),
            ("claims", "note.L10", "--store", "{}/no/s.db"),
            ("reproduce", "figure1", "--store", "{}/no/s.db"),
        ],
        ids=lambda words: words[0],
    )
    def test_a_missing_folder_is_not_made(
        self,
        words: tuple[str, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert run(monkeypatch, *(word.format(tmp_path) for word in words)) == 2
        assert "Expected an existing folder" in capsys.readouterr().err
        assert not (tmp_path / "no").exists()

    def test_stopping_a_command_is_said_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(conserved, "discover", stop)
        words = ("discover", "conserved.blocks:Attention", "dim=4", "heads=2", "--inputs", "3,4")
        assert run(monkeypatch, *words) == 130
        assert capsys.readouterr().err.strip() == "Stopped. Nothing was written."

    def test_a_large_count_says_how_large_before_it_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from conserved.discovery import rank

        assert rank.announcement(1000, torch.device("cpu")) == ""
        text = rank.announcement(32_768, torch.device("cpu"))
        assert "32,768 parameters" in text
        assert "GB and about" in text
        heard: list[str] = []
        monkeypatch.setattr(rank, "_LARGE", 10)
        conserved.discover(torch.nn.Linear(3, 4), torch.zeros(2, 3), progress=heard.append)
        assert heard[0].startswith("counting the laws of 16 parameters")


class TestCompletion:
    """What the shell offers after a tab."""

    @pytest.mark.parametrize(
        ("words", "offered"),
        [
            ("claims paper.T4.7", ["paper.T4.7"]),
            ("reproduce rel", ["relu-attention"]),
            ("laws x:y --loss c", ["cross_entropy"]),
            ("audit x:y --device cu", ["cuda", "cuda:0"]),
            ("audit x:y --autocast b", ["bfloat16"]),
            ("ru", ["runs"]),
        ],
    )
    def test_claims_figures_and_values(self, words: str, offered: list[str]) -> None:
        asked = {
            "_CONSERVED_COMPLETE": "complete_bash",
            "COMP_WORDS": f"conserved {words}",
            "COMP_CWORD": str(len(words.split())),
        }
        program = "import sys; sys.argv = ['conserved']; from conserved.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | asked, timeout=600
        )
        assert [word for word in offered if word not in done.stdout.split()] == []
