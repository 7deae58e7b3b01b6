"""The examples that the documentation points to run and say what they should."""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from conserved import discover, recognize

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_recogniser_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "custom_recognizer.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "‖up.weight[i,:]‖² − 2·‖down.weight[:,i]‖²" in shown
    assert "2 laws hold 32 conserved numbers" in shown
    assert "VERIFIED" in shown


def test_the_recogniser_in_the_documentation_runs_and_is_twenty_lines() -> None:
    text = (EXAMPLES.parent / "docs" / "recognition.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "register(" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    shown = io.StringIO()
    names: dict[str, Any] = {"__name__": "documentation"}
    with redirect_stdout(shown):
        exec(code, names)
    assert "VERIFIED: All 1 gradient identities hold" in shown.getvalue()
    model = names["model"]
    assert recognize(model).independent() == 3
    assert discover(model, torch.zeros(5, 6), forms=False).count == 3


def test_an_architecture_nobody_knows_is_listed_and_the_way_out_is_named() -> None:
    import transformers

    config = transformers.FalconConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.FalconForCausalLM(config)
    laws = recognize(model, loss="cross_entropy")
    assert len(laws) == 0
    assert set(laws.unclaimed) == {name for name, _ in model.named_parameters()}
    assert "CONTRIBUTING.md shows how to write a recogniser in 20 lines" in " ".join(laws.summary().split())
