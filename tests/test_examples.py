"""The examples that the documentation points to run and say what they should."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conserved import recognize

EXAMPLES = Path(__file__).parent.parent / "examples"


SAYS = {
    "custom_operator": (
        r"0 laws; operators without a rule: \{'example::squared_relu",
        r"‖up\.weight\[i,:\]‖² − 2·‖down\.weight\[:,i\]‖²",
        r"2 laws hold 32 conserved numbers",
        r"VERIFIED",
    ),
    "custom_kind": (
        r"\(H\*\)\^2 on q \(\+\), k \(−\); 2 conserved",
        r"‖q⁽ʲ⁾‖² − ‖k⁽ʲ⁾‖²\nVERIFIED",
        r"all of it accounted for",
    ),
    "moving_along_my_kind": (r"balanced: 8\.\de-02 → \d\.\de(-1[5-9]|\+00), with the same scores and fingerprint",),
    "custom_optimizer": (r"sign: \d+% of", r"decay: \d+% of", r"copies kept: 0 bytes", r"unaccounted for: rounding"),
    "custom_sink": (r"run,step,law,observed", r"\nexample,1,gated_neurons,", r"\nexample,2,gated_neurons,"),
    "custom_claim": (r"lectures.linear: VERIFIED: 6 laws, as stated",),
    "custom_figure": (r"laws per hidden neuron: 1, expected 1", r"in the report: True"),
    "attention_kernel": (
        r"VERIFIED: \d+ tests on 3 gradients hold[^\n]*would not have been seen",
        r"REFUTED: The backward of attention_with_a_slip is wrong: dq, dk fail",
        r"dq: wrong at 48–63 \(the last tile of 16\) of axis 2 of dq",
    ),
    "audit_custom_attention": (
        r"REFUTED: 1 of 3 gradient identities do not hold",
        r"gradient of k\.weight and k\.bias times 4,",
        r"query heads of a group not summed into dK",
        r"summed over the heads that share it:\nVERIFIED",
    ),
    "sigmoid_gate_refuted": (
        r"softmax: 9 laws of 63 parameters;.*step 0\.04: \d\.\de-1[56]  .*step 0\.01: \d\.\de-1[56]\n",
        r"sigmoid: 6 laws of 63 parameters;.*step 0\.04: 4\.4e-02  step 0\.02: 4\.4e-02  step 0\.01: 4\.4e-02\n",
    ),
    "lora_balance": (
        r"SGD: .* \d\.\de-0[34]\n  100\.0%  size of the steps\n  unaccounted for: 0 alarms",
        r"AdamW: .*\n   9\d\.\d%  preconditioner\n(.*\n)*  unaccounted for: 0 alarms",
    ),
    "trainer_callback": (r"17 laws watched over 30 steps", r"gated_neurons  changed by", r"\n0 alarms"),
    "discover_new_block": (
        r"VERIFIED: 7 independent laws of 52 parameters, all found",
        r"rank by depth of brackets, first point: 44, 45, 45",
        r"u        forgotten_scale",
    ),
    "certify_new_block": (r"(?s)PROVED: Exactly 7 independent laws.*again from it alone:\nPROVED: Exactly 7",),
    "probe_attention": (
        r"rank 64 of at most 64",
        r"one key eight times as long: coherence 6\d\.\d",
        r"VERIFIED: Rows sum to zero and ranks obey their bound in all 8 heads",
    ),
}
"""What each example must print."""


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_says_what_it_should(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "custom_kind", raising=False)  # another test may have moved its weights
    began = time.process_time()
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    for pattern in SAYS[name]:
        assert re.search(pattern, shown), shown
    assert time.process_time() - began < 60


def test_a_model_that_nothing_was_said_about_has_all_its_laws() -> None:
    import transformers

    config = transformers.FalconConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.FalconForCausalLM(config).double()
    laws = recognize(model, loss="cross_entropy")
    ids = torch.randint(1, 7, (2, 6))
    assert len(laws) > 3
    exact = laws.select(lambda symmetry: symmetry.exact)
    assert exact.verify(lambda: model(ids, labels=ids).loss).holds


RECIPES = {
    "balance_adapters": ("peft", (), r"balanced: 2 symmetries moved 4 tensors; .*\nchange of logits: \d\.\de-0[5-9]"),
    "quantise_with_torchao": ("torchao", ("a",), r"w8a8: .*\n(.*\n)*relative change of logits: 0\.0"),
    "quantise_with_llm_compressor": ("llmcompressor", ("a", "out"), r"int8-channel: .*\n(.*\n)*written to out"),
}
"""By script what it needs, its arguments, and what it prints."""


def checkpoint(folder: Path, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_every_recipe_is_listed() -> None:
    assert {path.stem for path in (EXAMPLES / "recipes").iterdir()} == {*RECIPES, "align_and_merge"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_from_end_to_end(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, arguments, printed = RECIPES[name]
    pytest.importorskip(package)
    checkpoint(tmp_path / "a", 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / "recipes" / f"{name}.py"), run_name="__main__")
    assert re.search(printed, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("mergekit-yaml") and shutil.which("conserved")), reason="needs mergekit")
def test_checkpoints_are_aligned_and_merged(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        checkpoint(tmp_path / name, seed)
    command = ["sh", str(EXAMPLES / "recipes" / "align_and_merge.sh"), "a", "b", "merged"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    before, after = map(float, re.search(r"distance (\S+) → (\S+)", ran.stdout).groups())  # type: ignore[union-attr]
    assert after < before
    assert (tmp_path / "merged" / "config.json").exists()
