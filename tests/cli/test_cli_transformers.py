"""`conserved laws` for models of the transformers library that exist as a config only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from conserved.optional import MissingPackageError, require
from hf_zoo import named
from test_cli import run

TINY = ["hidden_size=8", "num_attention_heads=2", "num_hidden_layers=3", "intermediate_size=5", "vocab_size=11"]


def test_a_config_class_with_options_is_listed_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(monkeypatch, "laws", "transformers:LlamaConfig", *TINY, "--loss", "cross_entropy") == 0
    shown = capsys.readouterr().out
    assert "model.layers.{0–2}.self_attn                 query_key      (C*)^2    6       12" in shown
    assert "‖down_proj.weight[:,i]‖² − ‖up_proj.weight[i,:]‖²" in shown
    assert "class_shift" in shown
    assert "Independence was not counted" in shown


def test_a_narrow_terminal_gets_the_paths_on_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run(monkeypatch, "laws", "transformers:LlamaConfig", *TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    index = lines.index("model.layers.{0–2}.mlp")
    assert lines[index + 1].split() == ["gated_neurons", "(R₊)^5", "3", "15"]
    assert max(map(len, lines)) <= 60


def test_billions_of_parameters_are_listed_without_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four layers of the seven-billion model; all 32 of another one are read where inference is tested."""
    assert run(monkeypatch, "laws", "transformers:MistralForCausalLM", "num_hidden_layers=4", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["unclaimed"] == []
    assert record["independent"] is None
    assert len(record["laws"]) == 4 * (8 + 8 + 1 + 2) + 2


@pytest.mark.parametrize("family", ["Llama", "GPT-2, tied", "BERT, masked", "ViT classifier", "Mixtral"])
@pytest.mark.parametrize("given", ["file", "folder"])
def test_a_local_config_is_read(
    family: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = named(family)
    config = one.configured()
    config.architectures = [one.model]
    config.save_pretrained(tmp_path)
    target = tmp_path / "config.json" if given == "file" else tmp_path
    assert run(monkeypatch, "laws", str(target), "--json", "--loss", one.loss) == 0
    record = json.loads(capsys.readouterr().out)
    assert {law["name"] for law in record["laws"]} == {law.name for law in one.laws(one.build()).laws}


def test_attention_of_weights_in_a_folder_is_described_on_drawn_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = named("Llama")
    one.build().save_pretrained(tmp_path)  # type: ignore[operator]
    inputs = f"tokens:{one.configured().vocab_size}:1,6"
    assert run(monkeypatch, "attention", str(tmp_path), "--inputs", inputs, "--no-baselines", "--json") == 0
    assert {head["length"] for head in json.loads(capsys.readouterr().out)["heads"]} == {6}


def test_entries_of_a_config_file_can_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named("Llama").configured().save_pretrained(tmp_path)
    assert run(monkeypatch, "laws", str(tmp_path), "hidden_act=relu", "num_hidden_layers=2") == 0
    shown = capsys.readouterr().out
    assert "gates" in shown
    assert "model.layers.{0–1}.mlp" in shown


MISTAKES = {
    "no such file": (["nowhere/config.json"], "There is no file nowhere/config.json"),
    "unknown option": (["transformers:LlamaConfig", "heads=3"], "LlamaConfig has no option 'heads'"),
    "impossible sizes": (["transformers:LlamaConfig", "hidden_size=63"], "not a multiple of the number of attention"),
    "no such class": (["transformers:LamaConfig"], "has no 'LamaConfig'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_with_a_sentence(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = MISTAKES[mistake]
    assert run(monkeypatch, "laws", *arguments) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_config_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "of-my-own"}')
    assert run(monkeypatch, "laws", str(path)) == 2
    assert f"not a config that transformers {transformers.__version__} knows" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingPackageError, match=r"Reading adapters needs peft.*pip install 'conserved\[hf\]'"):
        require("peft", "Reading adapters")
    assert require("json", "Nothing") is json


def test_importing_the_package_imports_no_optional_one() -> None:
    import subprocess
    import sys

    code = (
        "import conserved, sys; print([m for m in ('transformers', 'peft', 'accelerate', 'timm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
