"""Folders of checkpoints on the command line: mappings, fingerprints, alignment, and schemes that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from conserved.cli import main  # noqa: F401 - registers the commands
from conserved.cli.app import app

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("models") / "llama"
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        # One channel that a step for the whole tensor would have to serve.
        model.model.layers[0].mlp.up_proj.weight[3] *= 30
    model.save_pretrained(path)
    return path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_mappings_name_what_a_format_cannot_say(folder: Path) -> None:
    result = json.loads(run("mappings", str(folder), "--format", "llmcompressor", "--json").stdout)
    assert len(result["mappings"]) == 4
    (first, *_) = result["left out"]
    assert first["smooth"] == ["model.layers.0.self_attn.v_proj"]
    assert "read 2 times" in first["reason"]


def test_a_scheme_shows_every_layer_and_moves_to_the_same_model(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "moved"
    output = run("equalize", str(folder), "--scheme", "int4-tensor", "-o", str(out)).stdout
    line = next(text for text in output.splitlines() if "layers.0.mlp.up_proj" in text)
    before, after = (float(word) for word in line.split()[1::2])
    assert after < before / 2
    same = run("fingerprint", str(folder), str(out), "--json")
    assert same.exit_code == 0
    assert json.loads(same.stdout)["agree"]
    aligned = json.loads(run("align", str(folder), str(out), "--json").stdout)
    assert aligned["after"] < 1e-5 * aligned["before"]


def test_other_weights_are_another_model(folder: Path, tmp_path: Path) -> None:
    other = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.neg_()
    other.save_pretrained(tmp_path / "other")
    assert run("fingerprint", str(folder), str(tmp_path / "other")).exit_code == 1


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_one_weight_that_changed_is_more_than_rounding(folder: Path, tmp_path: Path, precision: torch.dtype) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).to(precision)
    model.save_pretrained(tmp_path / "one")
    run("move", str(tmp_path / "one"), "--random", "3", "-o", str(tmp_path / "moved"))
    assert run("fingerprint", str(tmp_path / "one"), str(tmp_path / "moved")).exit_code == 0
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.05
    model.save_pretrained(tmp_path / "other")
    result = run("fingerprint", str(tmp_path / "one"), str(tmp_path / "other"))
    assert result.exit_code == 1
    assert "rounding explains" in result.stdout


def test_equal_models_in_other_gauges_become_equal_files(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    run("move", str(folder), "--random", "3", "-o", str(moved))
    states = []
    for name, source in (("a", folder), ("b", moved)):
        run("canonical", str(source), "-o", str(tmp_path / name))
        states.append(transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0]) < 1e-4


def test_what_cannot_be_used_is_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    from conserved.errors import InvalidInputError

    for words in (
        ("fingerprint", str(tmp_path)),
        ("mappings", str(folder), "--format", "llmcompresor"),
        ("equalize", str(folder), "--scheme", "int4-chanel", "--dry-run"),
        ("align", str(folder), str(folder), "-o", str(folder)),
    ):
        with pytest.raises(InvalidInputError):
            run(*words)
