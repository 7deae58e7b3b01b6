"""The examples that the documentation points to run and say what they should."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_recogniser_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "custom_recognizer.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "‖up.weight[i,:]‖² − 2·‖down.weight[:,i]‖²" in shown
    assert "2 laws hold 32 conserved numbers" in shown
    assert "VERIFIED" in shown
