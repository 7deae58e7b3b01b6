"""Claims: verdicts come out of the checks, break when their subject is broken, and witnesses refute by themselves."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import conserved
from claim_mutations import MUTATIONS
from conserved import Evidence, Verdict
from conserved.claims import Claim, NoSuchClaim, Outcome, claims, ledger
from conserved.claims.page import heading, section
from conserved.verdict import Status

pytestmark = pytest.mark.usefixtures("as_users_run_it")

PAGE = Path(__file__).parent.parent / "docs" / "claims.md"

ALL = [pytest.param(claim, id=claim.code, marks=[pytest.mark.slow] if claim.slow else []) for claim in claims()]


HOLDS = ("proved", "verified")


def reproduces(code: str) -> str:
    """Run the lines of a witness as a reader would, and return what they print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "witness", "exec"), {})
    return printed.getvalue()


@pytest.mark.parametrize("claim", ALL)
def test_a_claim_comes_out_as_recorded_with_evidence_and_a_section_on_the_page(claim: Claim) -> None:
    """One run for all that is asked of an outcome: runs are what takes time here."""
    outcome = ledger.outcome(claim)
    assert not outcome.failure
    assert outcome.verdict.status.value == outcome.recorded
    assert not outcome.changed
    assert outcome.verdict.status is not Status.INCONCLUSIVE
    assert section(outcome) in PAGE.read_text(encoding="utf-8") + "\n", "run python -m conserved.claims.page"
    _is_plain_data(outcome)
    if outcome.verdict == Verdict.REFUTED:
        _refutes_by_itself(outcome)
    else:
        assert outcome.witness is None


def _is_plain_data(outcome: Outcome) -> None:
    record = outcome.record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert {"code", "title", "statement", "latex", "hypotheses", "source", "place", "status", "message"} <= set(record)
    assert {"proof", "evidence", "witness", "corrected_by", "corrects", "recorded", "seconds"} <= set(record)
    assert bool(record["proof"]) is (record["status"] == "proved")
    assert all(record[field] for field in ("title", "statement", "place", "message", "evidence"))


def _refutes_by_itself(outcome: Outcome) -> None:
    assert outcome.witness is not None
    assert outcome.witness.data
    lines = outcome.witness.numpy.strip().splitlines()
    assert 2 <= len(lines) <= 10
    assert any(line.strip().startswith("assert") for line in lines), "it must fail where the claim holds"
    assert reproduces(outcome.witness.numpy)


@pytest.mark.parametrize("claim", ALL)
def test_a_claim_comes_out_the_other_way_when_its_subject_is_broken(claim: Claim) -> None:
    assert claim.code in MUTATIONS, "every claim needs a mutation in tests/claim_mutations.py"
    broken = claim.check(**MUTATIONS[claim.code])
    assert broken.holds is not (ledger.recorded()[claim.code] in HOLDS), broken


def test_no_mutation_is_left_over() -> None:
    assert set(MUTATIONS) == {claim.code for claim in claims()}


class TestTheLedger:
    def test_it_covers_the_sources(self) -> None:
        codes = [claim.code for claim in claims()]
        assert len(codes) >= 45
        assert {claim.document for claim in claims()} >= set(ledger.SOURCES)
        for item in ("D1", "L2", "T3", "T4", "C5", "R6", "T7", "C8", "R9", "L10", "L11", "T12", "L13", "T14"):
            assert f"note.{item}" in codes

    def test_no_two_claims_say_the_same(self) -> None:
        for field in ("statement", "title"):
            said = [getattr(claim, field) for claim in claims()]
            assert len(set(said)) == len(said)

    def test_what_replaces_a_refuted_claim_is_a_claim_that_holds(self) -> None:
        recorded, codes = ledger.recorded(), {claim.code: claim for claim in claims()}
        for claim in codes.values():
            if claim.corrected_by:
                assert recorded[claim.code] == "refuted", claim.code
                assert recorded[claim.corrected_by] in ("proved", "verified"), claim.code
            if claim.corrects:
                assert codes[claim.corrects].corrected_by == claim.code

    def test_the_page_has_a_section_for_every_claim_and_no_other(self) -> None:
        text = PAGE.read_text(encoding="utf-8").splitlines()
        assert [line for line in text if line.startswith("### ")] == [heading(claim) for claim in claims()]

    def test_what_is_recorded_is_what_there_is(self) -> None:
        assert list(ledger.recorded()) == [claim.code for claim in claims()]

    @pytest.mark.parametrize(
        ("pattern", "codes"),
        [
            ("note.L10", ["note.L10"]),
            ("NOTE.l10", ["note.L10"]),
            ("note.L1", ["note.L10", "note.L10.corrected", "note.L11", "note.L11.corrected"]),
            ("*.L10*", ["note.L10", "note.L10.corrected"]),
        ],
        ids=str,
    )
    def test_patterns(self, pattern: str, codes: list[str]) -> None:
        names = [claim.code for claim in claims(pattern)]
        assert [name for name in names if not name.startswith("note.L13")] == codes

    def test_a_pattern_that_matches_nothing_says_what_there_is(self) -> None:
        with pytest.raises(NoSuchClaim, match=r"note\.L10"):
            claims("nothing")

    def test_run_is_public(self) -> None:
        [outcome] = conserved.claims.run("note.L10")
        assert (outcome.claim.code, outcome.recorded) == ("note.L10", "refuted")
        assert outcome.verdict == Verdict.REFUTED
        assert outcome.evidence == outcome.verdict.evidence
        assert outcome.witness is not None


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that forgets what a test adds."""
    claims()
    monkeypatch.setattr(ledger, "_registered", dict(ledger._registered))


def _mine(**options: Any) -> Claim:
    given: dict[str, Any] = {
        "code": "mine.T1",
        "title": "Mine",
        "statement": "All is well.",
        "source": "me",
        "place": "page 1",
        "check": lambda: Verdict(status=Verdict.VERIFIED, message="So it is.", evidence=(Evidence(what="looked"),)),
    }
    return Claim(**given | options)


@pytest.mark.usefixtures("fresh")
class TestClaimsOfOthers:
    def test_a_claim_is_registered_with_one_function(self) -> None:
        conserved.claims.register(_mine())
        [outcome] = conserved.claims.run("mine")
        assert outcome.verdict == Verdict.VERIFIED
        assert outcome.changed, "it has never been recorded"

    def test_the_decorator_leaves_the_function_as_it_is(self) -> None:
        @conserved.claims.claim("mine.T2", "Two", statement="2 = 2.", place="page 2")
        def check(*, left: int = 2) -> Verdict:
            status = Verdict.VERIFIED if left == 2 else Verdict.REFUTED
            return Verdict(status=status, message="", evidence=(Evidence(what="left", value=left),))

        assert check(left=3) == Verdict.REFUTED
        [outcome] = conserved.claims.run("mine.T2")
        assert outcome.claim.source == "mine"

    def test_a_code_is_used_once(self) -> None:
        with pytest.raises(ValueError, match=r"already.*AAᵀ"):
            conserved.claims.register(_mine(code="note.L10"))

    @pytest.mark.parametrize("code", ["", "mine", "mine.", ".T1", "mine.T 1"], ids=repr)
    def test_a_code_names_a_source_and_a_place(self, code: str) -> None:
        with pytest.raises(ValueError, match="source and a place"):
            _mine(code=code)

    def test_a_check_that_fails_does_not_sink_the_rest(self) -> None:
        def bad() -> Verdict:
            raise ZeroDivisionError("no luck")

        conserved.claims.register(_mine(check=bad))
        conserved.claims.register(_mine(code="mine.T2", title="Other", statement="Other."))
        first, second = conserved.claims.run("mine")
        assert (first.verdict.status, first.failure) == (Status.INCONCLUSIVE, "ZeroDivisionError: no luck")
        assert first.changed
        assert second.verdict == Verdict.VERIFIED

    def test_random_numbers_of_a_check_do_not_depend_on_what_ran_before(self) -> None:
        import torch

        drawn: list[float] = []

        def check() -> Verdict:
            drawn.append(float(torch.randn(())))
            return Verdict(status=Verdict.INCONCLUSIVE, message="")

        torch.manual_seed(5)
        ledger.outcome(_mine(check=check))
        after = float(torch.randn(()))
        torch.manual_seed(5)
        assert float(torch.randn(())) == after, "nor does it disturb those of the caller"
        ledger.outcome(_mine(check=check))
        assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("fresh")
def test_the_example_for_contributors_runs() -> None:
    text = (PAGE.parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "@claims.claim(" in block]
    shown = reproduces(code)
    assert "REFUTED: The mixed term is missing." in shown
    [outcome] = conserved.claims.run("mine.T1")
    _refutes_by_itself(outcome)


def test_claims_are_loaded_when_they_are_asked_for() -> None:
    code = "import sys, conserved; assert 'conserved.claims' not in sys.modules; conserved.claims.claims"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
