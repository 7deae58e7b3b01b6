"""Every refutation that a campaign has stored is settled by exactly one entry, which has a script or says why not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def settling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("settling", BENCHMARKS / "campaign" / "settling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "settling", module)
    spec.loader.exec_module(module)
    return module


def test_every_stored_refutation_is_settled_by_one_entry(settling: ModuleType) -> None:
    assert settling.unsettled(BENCHMARKS / "results") == []


def test_every_entry_settles_something_and_asserts_what_it_says(settling: ModuleType) -> None:
    rows = [row for _, row in settling.refutations(BENCHMARKS / "results")]
    for entry in settling.settlements():
        assert entry.verdict in settling.VERDICTS, entry.cause
        assert any(entry.settles(row) for row in rows), entry.cause
        assert "assert" in entry.script or "stored script" in entry.cause, entry.cause
        assert "conserved" not in entry.script, entry.cause
        assert bool(entry.report) == (entry.verdict == "known"), entry.cause


def test_a_script_whose_claim_is_wrong_is_not_shown(settling: ModuleType) -> None:
    (entry, *_) = settling.settlements()
    wrong = type(entry)(cause="none", targets=(), verdict="new", script="print(1)\nassert 1 == 2")
    assert settling.run_script(wrong) == (False, "1\n")
