"""Checkpoints moved file by file: the same function, tensors in their places, and a dry run that writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import float64
from conserved.transform import Checkpoint, UnmovableError, equalize, symmetries_of
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
    result = load_file(tmp_path / "out/m.safetensors")
    assert torch.equal(result["lm_head.weight"], result["model.embed_tokens.weight"])
    assert torch.equal(result["lm_head.weight"], 2 * weights["model.embed_tokens.weight"])


WORDS = ["the cat sat on the mat", "a dog ran", "the mat ran on a cat sat dog"]


def with_tokenizer(folder: Path) -> None:
    """A tokenizer that knows a few words, beside the weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for line in WORDS for word in line.split()})
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_are_measured_on_lines_of_text(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path / "in", dtype)
    with_tokenizer(tmp_path / "in")
    (tmp_path / "lines.txt").write_text("\n".join([*WORDS, ""]))
    words = ["equalize", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--objective", "activation"]
    assert run(monkeypatch, *words, "--texts", str(tmp_path / "lines.txt"), "--alpha", "0.7", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert "model.layers.0.input_layernorm.weight" in record["tensors"]
    moved = loaded(tmp_path / "out")
    assert next(moved.parameters()).dtype == dtype
    ends = (2e-2, 2e-2) if dtype == torch.bfloat16 else (1e-4, 1e-5)
    torch.testing.assert_close(moved(IDS).logits, model(IDS).logits, rtol=ends[0], atol=ends[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    batches = [dict(tokenizer(line, return_tensors="pt")) for line in WORDS]
    equalize(model, laws=symmetries_of(model, IDS), objective="activation", batches=batches, alpha=0.7)
    for (name, ours), theirs in zip(moved.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def experts(name: str, how: str) -> Any:
    """A small mixture whose experts are one stacked parameter in memory, and one tensor each in files."""
    sizes: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_experts_per_tok": 2}
    own: dict[str, Any] = {
        "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
        "Mixtral": {"num_local_experts": 4},
    }
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **own[name])
    config._experts_implementation = how
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_stacked_experts_in_grouped_products_are_moved_and_the_function_stays(name: str) -> None:
    laws = symmetries_of(experts(name, "grouped_mm"), IDS)
    model = experts(name, "eager").double()
    with float64.kept(), torch.no_grad():
        before = model(IDS).logits
        for objective in ("range", "balanced"):
            done = equalize(model, laws=laws, objective=objective)
            assert "model.layers.0.mlp.experts.down_proj" in done.moved.parameters
            assert float((model(IDS).logits - before).norm() / before.norm()) < 1e-10


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_files_with_other_tensors_than_the_model_are_left_alone_by_name_or_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = experts(name, "eager")
    model.save_pretrained(tmp_path / "in")
    assert run(monkeypatch, "equalize", str(tmp_path / "in"), "--dry-run", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert any("layers.0.mlp" in why and "--load" in why for why in record["left alone"].values())
    assert not any("experts" in tensor for tensor in record["tensors"])
    words = ["equalize", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--load", "--json"]
    assert run(monkeypatch, *words) == 0
    assert any("experts" in tensor for tensor in json.loads(capsys.readouterr().out)["tensors"])
    result = type(model).from_pretrained(tmp_path / "out", local_files_only=True)
    torch.testing.assert_close(result(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    changed = dict(result.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    assert not torch.equal(changed, model.model.layers[0].mlp.experts.down_proj)


def test_quantised_tensors_are_left_alone_by_name_and_the_rest_is_moved(tmp_path: Path) -> None:
    model = saved(tmp_path / "in")
    laws = symmetries_of(model, IDS)
    for file in (tmp_path / "in").glob("*.safetensors"):
        tensors = load_file(file)
        coded = {n: t.to(torch.float8_e4m3fn) if "layers.0.mlp.down" in n else t for n, t in tensors.items()}
        save_file(coded, file)
    done = equalize(Checkpoint(tmp_path / "in", tmp_path / "out", laws.parameters), laws=laws)
    assert "down_proj.weight is stored as F8_E4M3" in done.skipped["model.layers.0.mlp.gated_neurons"]
    assert "model.layers.1.mlp.gated_neurons" in done.moved.moved


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    saved(tmp_path / "in")
    (index,) = (tmp_path / "in").glob("*.index.json")
    some = next((tmp_path / "in").glob("*.safetensors"))
    stray = tmp_path / "in" / "consolidated.safetensors"
    stray.write_bytes(some.read_bytes())
    result = Checkpoint(tmp_path / "in", tmp_path / "out")
    with result.complete():
        pass
    assert (tmp_path / "out" / stray.name).is_file()
    assert len(result) == len(json.loads(index.read_text())["weight_map"])
    (tmp_path / "in" / "model.safetensors").write_bytes(some.read_bytes())
    with pytest.raises(UnmovableError, match="does not list it"):
        Checkpoint(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").unlink()
    held = index.read_text()
    index.write_text("[]")
    with pytest.raises(UnmovableError, match="not an index"):
        Checkpoint(tmp_path / "in")
    index.unlink()
    with pytest.raises(UnmovableError, match=f"is in {stray.name} and {some.name}"):
        Checkpoint(tmp_path / "in")
    index.write_text(held)
    some.unlink()
    with pytest.raises(UnmovableError, match=f"lists {some.name}, which is not in"):
        Checkpoint(tmp_path / "in")


def test_a_fused_map_is_moved_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "in")
    assert run(monkeypatch, "equalize", str(tmp_path / "in"), "-o", str(tmp_path / "out")) == 0
    moved: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", local_files_only=True)
    torch.testing.assert_close(moved(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    assert not torch.equal(moved.transformer.h[0].attn.c_attn.weight, model.transformer.h[0].attn.c_attn.weight)
    assert moved.lm_head.weight is moved.transformer.wte.weight


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
            (["equalize", "{in}/nowhere", "--dry-run"], "which does not exist"),
            (["equalize", "{in}", "-o", "{in}/config.json"], "is a file"),
            (["equalize", "{in}", "-o", "{in}/config.json/out"], "cannot be written to"),
            (["equalize", "{in}", "--dry-run", "--objective", "activation", "--texts", "{in}/no"], "cannot be read"),
        ],
        ids=[
            "nowhere to write",
            "itself",
            "objective",
            "texts",
            "nothing to do",
            "name",
            "negative",
            "folder",
            "file",
            "unwritable",
            "no texts",
        ],
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
        with pytest.raises(UnmovableError, match="not a safetensors file"):
            Checkpoint(tmp_path)
        header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        with pytest.raises(UnmovableError, match="a does not lie within the file"):
            Checkpoint(tmp_path)
