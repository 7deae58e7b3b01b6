"""The command conserved claims: tables, one claim in full, JSON, the store, strictness, mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import conserved
from conserved import Evidence, Verdict
from conserved.claims import Claim, claims
from conserved.store.run_store import RunStore
from conserved_papers.claims import registry
from test_cli import run

Printed = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_a_group_is_a_table_by_source_with_verdicts_and_what_holds_instead(monkeypatch: Patch, capsys: Printed) -> None:
    assert run(monkeypatch, "claims", "note.L1") == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("Natural Attention: Theoretical Foundations")
    assert "note.L10 refuted Positive definiteness of AAᵀ · false → note.L10.corrected" in " ".join(shown.out.split())
    assert any(line.split()[:2] == ["note.L10.corrected", "proved"] for line in lines)
    assert any(re.search(r"\b\d+ claims in", line) for line in lines)
    assert re.match(r"1/\d+ note\.", shown.err), "progress goes to standard error"


def test_one_claim_is_shown_in_full_with_its_numpy_lines(monkeypatch: Patch, capsys: Printed) -> None:
    assert run(monkeypatch, "claims", "note.L10") == 1, "the verdict of one claim is the exit code"
    shown = capsys.readouterr().out
    for part in ("Lemma 10", "REFUTED", "λ_min ≥ 1/2", "λ_min = 0", "import numpy as np", "note.L10.corrected"):
        assert part in shown
    code = shown.partition("In NumPy\n")[2].partition("\n\nWhat holds instead")[0]
    exec("\n".join(line.rstrip() for line in code.splitlines()), {})


def test_a_witness_is_not_cut_at_the_width_of_the_terminal(monkeypatch: Patch, capsys: Printed) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run(monkeypatch, "claims", "note.T14") == 1
    shown = capsys.readouterr().out
    [outcome] = conserved.claims.run("note.T14")
    assert outcome.witness is not None
    assert all(line in shown.splitlines() for line in outcome.witness.numpy.splitlines())
    assert f"found:   {outcome.witness.found}" in shown


def test_what_is_finished_is_shown_when_the_run_is_interrupted(
    monkeypatch: Patch, tmp_path: Path, capsys: Printed
) -> None:
    whole = registry.outcome

    def stops(claim: Claim) -> Any:
        if claim.code == "note.L11":
            raise KeyboardInterrupt
        return whole(claim)

    monkeypatch.setattr(registry, "outcome", stops)
    store = tmp_path / "store.db"
    assert run(monkeypatch, "claims", "note.L1", "--store", str(store)) == 130
    shown = capsys.readouterr().out
    assert "note.L10.corrected" in shown
    assert "Interrupted: " in shown
    with RunStore(store) as store_:
        assert "note.L10" in store_.documents("claim")
    assert run(monkeypatch, "claims", "note.L1", "--json") == 130
    result = json.loads(capsys.readouterr().out)
    assert [record["code"] for record in result["claims"]][:1] == ["note.L10"]
    assert result["left"] > 0


def test_hypotheses_and_proofs_are_shown(monkeypatch: Patch, capsys: Printed) -> None:
    assert run(monkeypatch, "claims", "note.L10.corrected") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Given: Rows of A sum to one." in shown
    assert "PROVED (all sizes)" in shown
    assert "proof: L Σa² − (Σa)²" in shown
    assert "lines" in shown or "line 130" in shown
    assert "Ours" in shown
    assert "Replaces note.L10" in shown


def test_json_is_the_records(monkeypatch: Patch, capsys: Printed) -> None:
    assert run(monkeypatch, "claims", "note.T4", "--json") == 1
    [record] = json.loads(capsys.readouterr().out)["claims"]
    assert (record["code"], record["status"], record["recorded"]) == ("note.T4", "refuted", "refuted")
    assert record["witness"]["numpy"].startswith("import numpy")
    assert run(monkeypatch, "claims", "*.L10*", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["counts"] == {"proved": 1, "verified": 0, "refuted": 2, "inconclusive": 0, "answered": 0}
    assert result["severities"] == {"false": 1, "slip": 1}
    assert result["changed"] == []


def test_the_list_runs_nothing(monkeypatch: Patch, capsys: Printed) -> None:
    def never(claim: Claim) -> Any:
        raise AssertionError("a claim was run")

    monkeypatch.setattr(registry, "outcome", never)
    assert run(monkeypatch, "claims", "--list") == 0
    shown = capsys.readouterr().out
    assert all(claim.code in shown for claim in claims())
    assert run(monkeypatch, "claims", "paper", "--list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["claims"]
    assert {entry["code"] for entry in listed} == {claim.code for claim in claims("paper")}


def test_outcomes_are_kept_in_a_store(monkeypatch: Patch, tmp_path: Path, capsys: Printed) -> None:
    store = tmp_path / "store.db"
    assert run(monkeypatch, "claims", "*.L10*", "--store", str(store)) == 0
    capsys.readouterr()
    with RunStore(store) as store_:
        documents = store_.documents("claim")
    assert set(documents) == {"note.L10", "note.L10.corrected", "note.L10.index"}
    assert (documents["note.L10"]["severity"], documents["note.L10"]["whose"]) == ("false", "source")
    assert documents["note.L10"]["witness"]["numpy"]
    assert documents["note.L10"]["corrected_by"] == "note.L10.corrected"


def test_strict_fails_when_a_verdict_is_not_the_recorded_one(monkeypatch: Patch, capsys: Printed) -> None:
    assert run(monkeypatch, "claims", "note.L10", "--strict") == 0
    monkeypatch.setattr(registry, "recorded", lambda: {"note.L10": "proved"})
    assert run(monkeypatch, "claims", "note.L10") == 1, "without --strict the recorded verdict does not matter"
    capsys.readouterr()
    assert run(monkeypatch, "claims", "note.L10", "--strict") == 1
    assert "note.L10 is refuted; it was proved" in capsys.readouterr().out


def test_a_check_that_crashes_is_reported_and_the_rest_runs(monkeypatch: Patch, capsys: Printed) -> None:
    def bad() -> Verdict:
        raise RuntimeError("out of luck")

    good = Verdict(status=Verdict.VERIFIED, message="Fine.", evidence=(Evidence(what="looked"),))
    claims()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for code, check in (("luck.T1", bad), ("luck.T2", lambda: good)):
        conserved.claims.register(Claim(code=code, title=code, statement=code, source="me", place="p. 1", check=check))
    assert run(monkeypatch, "claims", "luck") == 1
    shown = capsys.readouterr().out
    assert "luck.T1 did not come to an end: RuntimeError: out of luck" in shown
    assert "1 verified, 1 inconclusive" in shown


def test_on_a_terminal_there_is_a_bar(monkeypatch: Patch, capsys: Printed) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run(monkeypatch, "claims", "*.L10*") == 0
    shown = capsys.readouterr().err
    assert "━" in shown
    assert "1/3 note.L10 " not in shown, "no plain lines beside it"


def test_a_pattern_that_matches_nothing_is_bad_usage_and_says_what_there_is(
    monkeypatch: Patch, capsys: Printed
) -> None:
    assert run(monkeypatch, "claims", "nothing") == 2
    shown = capsys.readouterr().err
    assert "No claim matches 'nothing'" in shown
    assert "Codes begin with paper, summary" in shown
