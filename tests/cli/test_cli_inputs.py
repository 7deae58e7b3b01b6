"""One grammar of --inputs for every command, one -o for every result, and help that a person can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conserved.cli.app import ORDER, UsageError, did_you_mean
from conserved.cli.inputs import InputSpec, is_input, parse_input, parse_inputs, sampler_of
from test_cli import run

BLOCK = ("conserved.blocks:Attention", "dim=4", "heads=2")

MODEL = """
import torch
from torch import nn

class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, weight):
        return weight * self.outer(torch.relu(self.inner(x)))
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5,4", InputSpec(shape=(5, 4))),
        ("bf16:5,4", InputSpec(precision="bfloat16", shape=(5, 4))),
        ("q:5,4", InputSpec(name="q", shape=(5, 4))),
        ("q:fp16:2,8,512,64", InputSpec(name="q", precision="float16", shape=(2, 8, 512, 64))),
        ("tokens:50:2,8", InputSpec(bound=50, shape=(2, 8))),
        ("int:50:2,8", InputSpec(bound=50, shape=(2, 8))),
        ("labels:int:1000:64", InputSpec(name="labels", bound=1000, shape=(64,))),
        ("scale:fp64:", InputSpec(name="scale", precision="float64")),
        ("draw", InputSpec(sampler="draw")),
    ],
)
def test_an_input_is_a_shape_with_what_is_known_of_it_before(text: str, expected: InputSpec) -> None:
    assert parse_input(text) == expected


@pytest.mark.parametrize(
    "text", ["", "2,x", "2,0", "q:bf17:2,3", "a:b:c:2", "tokens:x:2", "int:2,3", "tokens:0:2", "-1,2", "2;3", "5,4,"]
)
def test_what_is_no_input_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(UsageError, match="Expected"):
        parse_input(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "Say what f takes"), (["draw", "2"], "all inputs at once"), (["q:2", "3"], "all inputs or none")],
)
def test_inputs_must_fit_together(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_inputs(words, "f")


def test_the_same_name_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="same name"):
        parse_inputs(["q:2", "q:3"], "f")


def test_drawn_inputs_have_their_shapes_types_and_bounds() -> None:
    draw = sampler_of(parse_inputs(["x:bf16:3,2", "t:int:5:100"], "f"))
    drawn = draw(torch.Generator().manual_seed(0))
    assert drawn["x"].shape == (3, 2)
    assert drawn["x"].dtype == torch.bfloat16
    assert set(drawn["t"].tolist()) == set(range(5))
    assert torch.equal(drawn["t"], draw(torch.Generator().manual_seed(0))["t"]), "the same seed, the same inputs"


def test_words_of_models_are_told_from_inputs() -> None:
    assert all(map(is_input, ("5,4", "7", "q:bf16:2,3", "tokens:5:2")))
    assert not any(map(is_input, ("dim=4", "path=a:b", "name=5,4")))


@pytest.mark.parametrize("command", ["laws", "discover", "audit", "certify"])
@pytest.mark.parametrize("inputs", [("3,4",), ("x:3,4",), ("fp32:3,4",)], ids=" ".join)
@pytest.mark.usefixtures("as_users_run_it")
def test_every_command_on_models_takes_the_same_words(
    command: str, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, *BLOCK, "--inputs", *inputs) == 0
    assert "12" in capsys.readouterr().out or command == "audit"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("conserved.blocks:Attention", "dim=4"), "Add heads=VALUE after the model."),
        ((*BLOCK, "kvheads=1"), "Did you mean 'kv_heads'"),
        (("torch.nn:Embedding", "num_embeddings=5", "embedding_dim=3", "--inputs", "2,4"), "tokens:BOUND:SHAPE"),
    ],
)
def test_a_wrong_argument_or_input_is_answered_with_what_to_write(
    words: tuple[str, ...], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "laws", *words) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["attention", "laws", "audit"])
@pytest.mark.usefixtures("as_users_run_it")
def test_inputs_that_a_model_cannot_take_are_bad_usage_in_every_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, *BLOCK, "--inputs", "6,5") == 2
    assert "conserved.blocks:Attention cannot be run on 6,5: RuntimeError" in capsys.readouterr().err


@pytest.mark.usefixtures("as_users_run_it")
def test_attention_takes_the_same_words_and_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "attention", *BLOCK, "--inputs", "x:6,4", "--no-baselines") == 0
    assert "VERIFIED" in capsys.readouterr().out


@pytest.mark.usefixtures("as_users_run_it")
def test_a_shape_alone_is_enough_for_check_and_names_are_those_of_the_function(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "check", "torch.nn.functional:silu", "--inputs", "2,2,32,8") == 0
    assert "dinput" in capsys.readouterr().out
    target = "torch.nn.functional:scaled_dot_product_attention"
    assert run(monkeypatch, "check", target, "--inputs", "2,2,32,8") == 2
    assert "missing 2 required" in capsys.readouterr().err


@pytest.mark.parametrize("inputs", [("2,3", "2,1"), ("x:2,3", "weight:2,1"), ("weight:2,1", "x:2,3")], ids=" ".join)
@pytest.mark.usefixtures("as_users_run_it")
def test_several_inputs_go_by_place_or_by_name(
    inputs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weighted.py").write_text(MODEL)
    assert run(monkeypatch, "laws", f"{tmp_path / 'weighted.py'}:Weighted", "--inputs", *inputs) == 0
    assert "4 conserved numbers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("check", "torch.nn.functional:silu", "--inputs", "4"),
        ("audit", *BLOCK, "--inputs", "3,4"),
        ("laws", *BLOCK),
        ("discover", *BLOCK, "--inputs", "3,4"),
        ("attention", *BLOCK, "--inputs", "6,4", "--no-baselines"),
        ("claims", "note.L10.corrected"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_every_result_goes_to_a_file_too(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    assert run(monkeypatch, *words, "-o", str(output)) == 0
    assert not capsys.readouterr().out.startswith("{"), "what is printed stays for people"
    assert json.loads(output.read_text(encoding="utf-8"))
    assert run(monkeypatch, *words, "-o", str(tmp_path)) == 2
    assert "Expected a file to write" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", *ORDER])
def test_help_shows_no_type_for_a_switch(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(monkeypatch, *([command] if command else []), "--help") == 0
    shown = capsys.readouterr().out
    assert "<bool>" not in shown
    assert "--help" in shown
    assert not command or "--output" in shown


def test_commands_are_grouped_by_need(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    headings = ("Start here", "Is a backward pass right?", "What does training conserve?", "Recorded runs", "papers")
    indices = [shown.index(heading) for heading in headings]
    assert indices == sorted(indices)
    assert "─ Commands" not in shown, "none is left without a heading"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("lawz",), "'laws'"),
        (("laws", "conserved.blocks:Atention"), "'Attention'"),
        (("laws", *BLOCK, "--loss", "crossentropy"), "'cross_entropy'"),
        (("laws", *BLOCK, "--latx"), "--latex"),
    ],
    ids=["command", "model", "loss", "option"],
)
def test_a_slip_of_the_finger_is_told_what_was_meant(
    words: tuple[str, ...], meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 2
    assert meant in capsys.readouterr().err


def test_nothing_is_meant_by_a_word_that_is_like_none() -> None:
    assert did_you_mean("xyz", ["laws", "check"]) == ""


@pytest.mark.parametrize("command", ["runs", "report"])
def test_an_empty_store_is_an_error(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.db").touch()
    assert run(monkeypatch, command, "empty.db") == 2
    assert "Nothing has been recorded in empty.db yet" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("words", [("equalize",), ("move", "--random", "0")], ids=lambda words: words[0])
def test_an_empty_folder_is_an_error(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert run(monkeypatch, words[0], str(tmp_path / "empty"), *words[1:], "-o", str(tmp_path / "out")) == 2
    assert "safetensors files, got" in capsys.readouterr().err
