"""From what a check computed to its verdict."""

from __future__ import annotations

from conserved.verdict import Evidence, Verdict, Witness


def held(message: str, *evidence: Evidence) -> Verdict:
    """The claim holds: proved if some evidence is a proof of it, verified otherwise."""
    proved = any(item.proof for item in evidence)
    return Verdict(status=Verdict.PROVED if proved else Verdict.VERIFIED, message=message, evidence=evidence)


def refuted(message: str, *evidence: Evidence, witness: Witness | None = None) -> Verdict:
    """The claim does not hold."""
    return Verdict(status=Verdict.REFUTED, message=message, evidence=evidence, witness=witness)


def judged(good: bool, says: str, otherwise: str, *evidence: Evidence, witness: Witness | None = None) -> Verdict:
    """One of the two, by what was found; evidence that was to prove the claim proves nothing if it fails."""
    if good:
        return held(says, *evidence)
    return refuted(otherwise, *evidence, witness=witness)
