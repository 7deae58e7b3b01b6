"""Verdicts carry evidence, and PROVED cannot be had without a proof."""

from __future__ import annotations

import pytest

from conserved import Evidence, Verdict, Witness

MEASURED = Evidence(what="largest residual", value=3e-16, limit=1e-12, samples=40)
PROOF = Evidence(what="determinant enclosure excludes zero", proof=True)


def test_floating_point_evidence_cannot_prove() -> None:
    with pytest.raises(ValueError, match="evidence that is a proof for PROVED"):
        Verdict(status=Verdict.PROVED, message="all laws found", evidence=(MEASURED,))


def test_a_proof_among_the_evidence_proves() -> None:
    assert Verdict(status=Verdict.PROVED, message="all laws found", evidence=(MEASURED, PROOF)).holds


@pytest.mark.parametrize("status", [Verdict.VERIFIED, Verdict.REFUTED])
def test_a_verdict_needs_evidence(status: object) -> None:
    with pytest.raises(ValueError, match="Expected evidence for a verdict"):
        Verdict(status=status, message="because")  # type: ignore[arg-type]


def test_a_verdict_is_compared_with_a_status_and_is_never_a_bare_bool() -> None:
    verdict = Verdict(status=Verdict.REFUTED, message="no", evidence=(MEASURED,))
    assert verdict == Verdict.REFUTED
    assert verdict != Verdict.VERIFIED
    assert not verdict.holds
    with pytest.raises(TypeError, match="five outcomes"):
        bool(verdict)


def test_verdicts_of_one_status_are_equal_and_their_evidence_tells_them_apart() -> None:
    first = Verdict(status=Verdict.VERIFIED, message="yes", evidence=(MEASURED,))
    second = Verdict(status=Verdict.VERIFIED, message="yes", evidence=(PROOF,))
    assert first == second == Verdict.VERIFIED, "as each of them equals its status"
    assert first.evidence != second.evidence


def test_a_verdict_prints_its_evidence_and_witness() -> None:
    witness = Witness(data={"A": [[1, 1], [1, 1]]}, claimed="rank 2", found="rank 1")
    text = str(Verdict(status=Verdict.REFUTED, message="not so", evidence=(MEASURED,), witness=witness))
    assert text.splitlines() == [
        "REFUTED: not so",
        "  largest residual: 3e-16 (limit 1e-12), 40 cases",
        "  witness: A = [[1, 1], [1, 1]]: claimed rank 2, found rank 1",
    ]
