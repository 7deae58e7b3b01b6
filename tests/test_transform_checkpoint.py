"""Checkpoints moved file by file: the same function, tensors in their places, and a dry run that writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from conserved.transform import Checkpoint, Unmovable, equalize, symmetries_of
from test_cli import run

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.arange(1, 9)[None]


def saved(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A small Llama in several files."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small | heads | changes)).to(dtype)
    model.save_pretrained(folder, max_shard_size="8KB")
    return model


def loaded(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("objective", ["balanced", "range", "incoherent"])
def test_a_folder_is_equalised_as_the_model_in_memory_is(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path / "in")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    laws = symmetries_of(model, IDS)
    before = model(IDS).logits
    words = ["equalize", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--objective", objective]
    assert run(monkeypatch, *words) == 0
    assert "Written to" in capsys.readouterr().out
    moved = loaded(tmp_path / "out")
    torch.testing.assert_close(moved(IDS).logits, before, rtol=1e-4, atol=1e-5)
    equalize(model, laws=laws, objective=objective)
    for (name, ours), theirs in zip(moved.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_dry_run_says_what_would_change_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "in")
    held = {file: file.read_bytes() for file in (tmp_path / "in").iterdir()}
    assert run(monkeypatch, "equalize", str(tmp_path / "in"), "--dry-run", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["written"] is None
    assert "model.layers.0.mlp.up_proj.weight" in record["tensors"]
    assert record["largest objective after"] < 1e-6 < record["largest objective before"]
    assert any("ε" in why for why in record["left alone"].values())
    assert held == {file: file.read_bytes() for file in (tmp_path / "in").iterdir()}


def test_a_move_by_two_and_back_restores_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "in", torch.bfloat16)
    name = "model.layers.*.mlp.gated_neurons"
    assert run(monkeypatch, "move", str(tmp_path / "in"), "--by", f"{name}=2", "-o", str(tmp_path / "there")) == 0
    assert run(monkeypatch, "move", str(tmp_path / "there"), "--by", f"{name}=0.5", "-o", str(tmp_path / "back")) == 0
    for file in (tmp_path / "in").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    assert any((tmp_path / "there" / f.name).read_bytes() != f.read_bytes() for f in (tmp_path / "in").iterdir())


def test_random_elements_and_elements_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path / "in")
    assert run(monkeypatch, "move", str(tmp_path / "in"), "--random", "3", "-o", str(tmp_path / "a")) == 0
    torch.testing.assert_close(loaded(tmp_path / "a")(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    save_file({"model.norm.gain": torch.full((16,), 4.0)}, tmp_path / "elements.safetensors")
    words = ["--elements", str(tmp_path / "elements.safetensors"), "-o", str(tmp_path / "b")]
    assert run(monkeypatch, "move", str(tmp_path / "in"), *words) == 0
    assert torch.equal(loaded(tmp_path / "b").model.norm.weight, 4 * model.model.norm.weight)


def test_tied_copies_in_the_files_move_along(tmp_path: Path) -> None:
    model = saved(tmp_path / "in", tie_word_embeddings=True)
    weights = {n: t for f in (tmp_path / "in").glob("*.safetensors") for n, t in load_file(f).items()}
    for file in (tmp_path / "in").glob("*.safetensors*"):
        file.unlink()
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tmp_path / "in/m.safetensors")
    laws = symmetries_of(model, IDS)
    stream = laws["model.stream_scale"]
    checkpoint = Checkpoint(tmp_path / "in", tmp_path / "out", laws.parameters)
    from conserved.transform import move

    move(checkpoint, {stream: torch.tensor(2.0)})
    found = load_file(tmp_path / "out/m.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], 2 * weights["model.embed_tokens.weight"])


class TestRefused:
    """Bad usage ends with one sentence and exit code 2."""

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["equalize", "{in}"], "-o"),
            (["equalize", "{in}", "-o", "{in}"], "itself"),
            (["equalize", "{in}", "--dry-run", "--objective", "small"], "balanced, range"),
            (["equalize", "{in}", "--dry-run", "--objective", "activation"], "--texts"),
            (["move", "{in}", "--dry-run"], "--by"),
            (["move", "{in}", "--dry-run", "--by", "heads=2"], "No symmetry is called 'heads'"),
            (["move", "{in}", "--dry-run", "--by", "model.norm.gain=-1"], "positive"),
            (["equalize", "{in}/nowhere", "--dry-run"], "no folder"),
        ],
        ids=["nowhere to write", "itself", "objective", "texts", "nothing to do", "name", "negative", "folder"],
    )
    def test_with_a_sentence(
        self,
        words: list[str],
        said: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        saved(tmp_path / "in")
        assert run(monkeypatch, *[word.replace("{in}", str(tmp_path / "in")) for word in words]) == 2
        assert said in capsys.readouterr().err

    def test_files_that_are_damaged(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
        with pytest.raises(Unmovable, match="not a safetensors file"):
            Checkpoint(tmp_path)
        header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        with pytest.raises(Unmovable, match="a does not lie within the file"):
            Checkpoint(tmp_path)
