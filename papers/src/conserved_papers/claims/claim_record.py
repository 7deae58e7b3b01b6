"""A claim: what a source states, in our words, with a check that finds out; and the outcome of a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from conserved.plain_data import record_of
from conserved.verdict import Evidence, Status, Verdict, Witness
from conserved_papers.claims.judging import ALL_SIZES, ARGUED
from conserved_papers.claims.passages import Passage, format_lines, passage

ClaimCheck = Callable[..., Verdict]
"""Called without arguments. Its keyword arguments are what the claim is about: a model, a formula, a bound."""


class Severity(StrEnum):
    """How much a refutation weighs."""

    FALSE = "false"
    """The statement fails, and something rests on it."""
    OVERCLAIM = "overclaim"
    """It is true with a condition that the source states neither there nor in its definitions."""
    GAP = "gap"
    """A step of a proof fails or is missing, what it proves stands, and the repair is given."""
    SLIP = "slip"
    """A typo, a transposition or a wrong word; the repair is given and nothing rests on it."""


class Standing(StrEnum):
    """How a claim came out, in the classes that errata sheets and tallies count."""

    PROVED = "proved, all sizes"
    PROVED_HERE = "proved, one size"
    ARGUED = "argued"
    """A proof for all sizes with a step in words that no machine checks."""
    MEASURED = "measured"
    PROXY = "proxy"
    """The statement is about models that are not at hand; a stand-in was measured."""
    GAP = "gap, repaired"
    OVERCLAIM = "overclaim"
    FALSE = "false"
    SLIP = "slip"
    CONJECTURE = "conjecture"
    """The source says that it is one; the verdict is given and not counted as an error."""
    ANSWERED = "answered"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement. `code` is stable: the source, then the place, such as paper.T4.3 or note.L10."""

    code: str
    title: str
    statement: str
    """Our reading, in our words. The verdict is about this reading."""
    source: str
    place: str
    check: ClaimCheck
    lines: str = ""
    """The lines of the source, such as "308-310, 338"; for a statement of ours those it corrects or answers."""
    whose: Literal["source", "ours"] = "source"
    """Who states it. Corrections, sharpenings, remarks and answers are ours."""
    conditions: tuple[str, ...] = ()
    """Every condition that the source states there or in its definitions; the check keeps to them."""
    hypotheses: str = ""
    """Further assumptions and choices of the check."""
    latex: tuple[str, ...] = ()
    """The formulas as printed."""
    own_latex: tuple[str, ...] = ()
    """Formulas of ours, where the source has words; all formulas of a statement of ours are such."""
    severity: Severity | None = None
    """How much a refutation of it weighs; none for a statement that holds."""
    under: str = ""
    """The code of the claim with which this one falls. The two are one error and are counted once."""
    corrected_by: str = ""
    """The code of the statement that holds instead."""
    corrects: str = ""
    """The code of the statement that this one replaces."""
    slow: bool = False
    conjecture: bool = False
    """Whether the source offers it as a conjecture."""
    proxy: bool = False
    """Whether the check measures a stand-in for what the statement is about."""

    def __post_init__(self) -> None:
        document, _, statement = self.code.partition(".")
        if not document or not statement or any(letter.isspace() for letter in self.code):
            raise ValueError(f"A code names a source and a place in it, such as note.L10; got {self.code!r}.")

    @property
    def document(self) -> str:
        """The part of the code that names the source."""
        return self.code.partition(".")[0]

    @property
    def passage(self) -> Passage:
        """Where the source says it, with a fingerprint of those lines."""
        return passage(self.document, self.place, self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a claim's check: the verdict, how long it took, the status recorded before, and an error if it
    failed.
    """

    claim: Claim
    verdict: Verdict
    seconds: float
    recorded: str = ""
    """The status of the last recorded run; empty for a claim that is new."""
    failure: str = ""
    """Why the check did not come to an end, if it did not."""

    def __repr__(self) -> str:
        return f"<Outcome of {self.claim.code}: {self.failure or self.verdict.status.value}>"

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The figures that were computed."""
        return self.verdict.evidence

    @property
    def witness(self) -> Witness | None:
        """The example that refutes the claim; a claim that falls with another one may have that one's."""
        return self.verdict.witness

    @property
    def severity(self) -> Severity | None:
        """How much a refutation weighs; none if the claim was not refuted."""
        return self.claim.severity if self.verdict.status is Status.REFUTED else None

    @property
    def standing(self) -> Standing:
        """The class in which the claim is counted."""
        verdict = self.verdict
        if self.claim.conjecture:
            return Standing.CONJECTURE
        if self.severity is not None:
            return Standing.GAP if self.severity is Severity.GAP else Standing(self.severity.value)
        if verdict.status is Status.PROVED:
            return Standing.PROVED if verdict.scope == ALL_SIZES else Standing.PROVED_HERE
        if verdict.status is Status.VERIFIED:
            if verdict.scope.startswith(ARGUED):
                return Standing.ARGUED
            return Standing.PROXY if self.claim.proxy else Standing.MEASURED
        if verdict.status is Status.REFUTED:
            return Standing.FALSE
        return Standing(verdict.status.value)

    @property
    def proof(self) -> str:
        """The evidence that proves the claim; empty if it is not proved."""
        if self.verdict != Verdict.PROVED:
            return ""
        return "; ".join(str(item) for item in self.evidence if item.proof)

    @property
    def changed(self) -> bool:
        """Whether the status is not the recorded one."""
        return bool(self.failure) or self.recorded != self.verdict.status.value

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        claim, verdict, where = self.claim, self.verdict, self.claim.passage
        return {
            **record_of(claim, "code title statement"),
            "latex": [*claim.latex, *claim.own_latex],
            **record_of(claim, "conditions hypotheses source whose place"),
            "lines": format_lines(where.lines) if where.lines else "",
            "fingerprint": where.fingerprint,
            **record_of(verdict, "status scope"),
            "standing": self.standing.value,
            "severity": self.severity.value if self.severity else "",
            "under": claim.under,
            "message": verdict.message,
            **record_of(self, "proof evidence"),
            "witness": None if verdict.witness is None else _witness(verdict.witness),
            **record_of(claim, "corrected_by corrects"),
            **record_of(self, "recorded failure"),
            "seconds": round(self.seconds, 3),
        }


def _witness(witness: Witness) -> Mapping[str, Any]:
    return {
        "what": f"claimed {witness.claimed}; found {witness.found}",
        "values": {name: str(value) for name, value in witness.data.items()},
        "numpy": witness.numpy,
    }
