"""From what a check computed to its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conserved.verdict import Evidence, Verdict, Witness

ALL_SIZES = "all sizes"


def held(message: str, *evidence: Evidence, scope: str = "", beside: Sequence[Evidence] = ()) -> Verdict:
    """The claim holds: proved if every piece of evidence it needs is a proof, verified otherwise.

    `beside` is what was looked at as well and is not needed. A proof says for which sizes it is one.
    """
    proved = all(item.proof for item in evidence)
    if proved and not scope:
        raise ValueError(f"A proof needs a scope, such as 'all sizes' or 'at d = 3': {message}")
    status = Verdict.PROVED if proved else Verdict.VERIFIED
    return Verdict(status=status, message=message, evidence=(*evidence, *beside), scope=scope)


def refuted(message: str, *evidence: Evidence, witness: Witness | None = None) -> Verdict:
    """The claim does not hold."""
    return Verdict(status=Verdict.REFUTED, message=message, evidence=evidence, witness=witness)


def judged(
    good: bool,
    says: str,
    otherwise: str,
    *evidence: Evidence,
    witness: Witness | None = None,
    scope: str = "",
    beside: Sequence[Evidence] = (),
) -> Verdict:
    """One of the two, by what was found; evidence that was to prove the claim proves nothing if it fails."""
    if good:
        return held(says, *evidence, scope=scope, beside=beside)
    return refuted(otherwise, *evidence, *beside, witness=witness)


def argued(
    says: str,
    otherwise: str,
    *steps: tuple[str, bool],
    scope: str = ALL_SIZES,
    witness: Witness | None = None,
    beside: Sequence[Evidence] = (),
) -> Verdict:
    """A proof in steps, each a sentence with what the machine found when it checked it; one that fails breaks it."""
    good = all(found for _, found in steps)
    evidence = [Evidence(what=text, value=None if found else "fails", proof=found) for text, found in steps]
    return judged(good, says, otherwise, *evidence, scope=scope, witness=None if good else witness, beside=beside)


def answered(answer: str, found: Verdict) -> Verdict:
    """A question's verdict: the answer, with the evidence for it and its strength. One without support is none."""
    if not found.holds:
        return replace(found, message=f"The answer is not supported. {found.message}")
    strength = f"{found.heading.lower()}: {found.message}" if found.message else found.heading.lower()
    return Verdict(status=Verdict.ANSWERED, message=f"{answer} ({strength})", evidence=found.evidence)


def together(*verdicts: Verdict, says: str = "", otherwise: str = "") -> Verdict:
    """A verdict on several parts that are all needed: as strong as the weakest."""
    bad = [verdict for verdict in verdicts if not verdict.holds]
    evidence = tuple(item for verdict in (bad or verdicts) for item in verdict.evidence)
    if bad:
        status = Verdict.REFUTED if any(v == Verdict.REFUTED for v in bad) else Verdict.INCONCLUSIVE
        witness = next((verdict.witness for verdict in bad if verdict.witness), None)
        return Verdict(status=status, message=otherwise or bad[0].message, evidence=evidence, witness=witness)
    proved = all(verdict == Verdict.PROVED for verdict in verdicts)
    scope = "; ".join(dict.fromkeys(verdict.scope for verdict in verdicts if verdict.scope))
    message = says or " ".join(dict.fromkeys(verdict.message for verdict in verdicts))
    return Verdict(
        status=Verdict.PROVED if proved else Verdict.VERIFIED, message=message, evidence=evidence, scope=scope
    )
