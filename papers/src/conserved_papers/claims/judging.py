"""From what a check computed to its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from conserved.verdict import Evidence, Verdict, Witness

ALL_SIZES = "all sizes"
ARGUED = "argued"
"""Begins the scope of a proof with a step in words."""


def confirm(message: str, *evidence: Evidence, scope: str = "", beside: Sequence[Evidence] = ()) -> Verdict:
    """Return the verdict on a claim that holds: proved if every piece of evidence it needs is a proof, verified
    otherwise.

    Args:
        message: the sentence of the verdict.
        *evidence: the evidence that the claim needs.
        scope: the sizes for which a proof is one, such as "all sizes" or "at d = 3".
        beside: evidence that was looked at as well and is not needed.

    Returns:
        The verdict.

    Raises:
        ValueError: all evidence is a proof and there is no scope.
    """
    proved = all(item.proof for item in evidence)
    if proved and not scope:
        raise ValueError(f"A proof needs a scope, such as 'all sizes' or 'at d = 3': {message}")
    status = Verdict.PROVED if proved else Verdict.VERIFIED
    return Verdict(status=status, message=message, evidence=(*evidence, *beside), scope=scope)


def refute(message: str, *evidence: Evidence, witness: Witness | None = None) -> Verdict:
    """Return the verdict on a claim that does not hold.

    Args:
        message: the sentence of the verdict.
        *evidence: the figures that show it.
        witness: an example that a person can recompute.

    Returns:
        The verdict.
    """
    return Verdict(status=Verdict.REFUTED, message=message, evidence=evidence, witness=witness)


def decide(
    good: bool,
    says: str,
    otherwise: str,
    *evidence: Evidence,
    witness: Witness | None = None,
    scope: str = "",
    beside: Sequence[Evidence] = (),
) -> Verdict:
    """Return `confirm` or `refute`, by the result of a check.

    Args:
        good: whether the claim stood the check.
        says: the sentence if it did.
        otherwise: the sentence if it did not.
        *evidence: the evidence that the claim needs; if it fails, evidence that was to prove it proves nothing.
        witness: an example that refutes it.
        scope: the sizes for which a proof is one.
        beside: evidence that was looked at as well and is not needed.

    Returns:
        The verdict.
    """
    if good:
        return confirm(says, *evidence, scope=scope, beside=beside)
    return refute(otherwise, *evidence, *beside, witness=witness)


@dataclass(frozen=True, slots=True)
class InWords:
    """A step of a proof that is written out and that no machine checks."""

    text: str


JudgedStep = tuple[str, bool] | InWords
"""A sentence and the result of its check, or a sentence that is argued in words."""


def by_steps(
    says: str,
    otherwise: str,
    *steps: JudgedStep,
    scope: str = ALL_SIZES,
    witness: Witness | None = None,
    beside: Sequence[Evidence] = (),
) -> Verdict:
    """Judge a proof in steps; one step that fails breaks it.

    Args:
        says: the sentence if all steps hold.
        otherwise: the sentence if one fails.
        *steps: each a sentence with the result of its check, or a sentence in words.
        scope: the sizes for which it is a proof.
        witness: an example that refutes the claim.
        beside: evidence that was looked at as well and is not needed.

    Returns:
        PROVED if the machine checked every step. VERIFIED with the scope "argued, …" if some step is in words alone.
        REFUTED if a step fails.
    """
    evidence = [_step(step) for step in steps]
    good = all(isinstance(step, InWords) or step[1] for step in steps)
    if not good:
        return refute(otherwise, *evidence, *beside, witness=witness)
    if all(item.proof for item in evidence):
        return confirm(says, *evidence, scope=scope, beside=beside)
    return confirm(says, *evidence, scope=f"{ARGUED}, {scope}", beside=beside)


def _step(step: JudgedStep) -> Evidence:
    if isinstance(step, InWords):
        return Evidence(what=step.text, value="in words")
    text, good = step
    return Evidence(what=text, value=None if good else "fails", proof=good)


def answer(says: str, verdict: Verdict) -> Verdict:
    """Return the verdict on a question.

    Args:
        says: the answer in a sentence.
        verdict: the verdict on the statement that supports it.

    Returns:
        ANSWERED with the evidence and its strength; if the support does not hold, its own verdict with a note.
    """
    if not verdict.holds:
        return replace(verdict, message=f"The answer is not supported. {verdict.message}")
    strength = "Proved" if verdict == Verdict.PROVED else "Argued" if verdict.scope.startswith(ARGUED) else "Measured"
    # The scope keeps its case: "at L = 2, 4, 8" is a formula.
    scope = f" ({verdict.scope})" if verdict.scope else ""
    support = f": {verdict.message}" if verdict.message else "."
    return Verdict(status=Verdict.ANSWERED, message=f"{says} {strength}{scope}{support}", evidence=verdict.evidence)


def together(*verdicts: Verdict, says: str = "", otherwise: str = "") -> Verdict:
    """Return a verdict on several parts that are all needed: as strong as the weakest.

    Args:
        *verdicts: the verdicts on the parts.
        says: the sentence if all hold; by default theirs.
        otherwise: the sentence if one does not; by default that of the first that does not.

    Returns:
        One verdict with the evidence of all parts, or of the parts that do not hold.
    """
    bad = [verdict for verdict in verdicts if not verdict.holds]
    evidence = tuple(item for verdict in (bad or verdicts) for item in verdict.evidence)
    if bad:
        status = Verdict.REFUTED if any(v == Verdict.REFUTED for v in bad) else Verdict.INCONCLUSIVE
        witness = next((verdict.witness for verdict in bad if verdict.witness), None)
        return Verdict(status=status, message=otherwise or bad[0].message, evidence=evidence, witness=witness)
    proved = all(verdict == Verdict.PROVED for verdict in verdicts)
    scopes = sorted(dict.fromkeys(verdict.scope for verdict in verdicts if verdict.scope), key=_argued_first)
    scope = "; ".join(scopes)
    message = says or " ".join(dict.fromkeys(verdict.message for verdict in verdicts))
    return Verdict(
        status=Verdict.PROVED if proved else Verdict.VERIFIED, message=message, evidence=evidence, scope=scope
    )


def _argued_first(scope: str) -> bool:
    """Return the evidence with arguments in words first, because they are the weaker part."""
    return not scope.startswith(ARGUED)
