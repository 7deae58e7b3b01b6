"""A claim: what a source states, in our words, with a check that finds out; and the outcome of a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conserved.verdict import Evidence, Verdict, Witness

Check = Callable[..., Verdict]
"""Called without arguments. Its keyword arguments are what the claim is about: a model, a formula, a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement of a source. `code` is stable: the source, then the place, such as paper.T4.3 or note.L10."""

    code: str
    title: str
    statement: str
    source: str
    place: str
    check: Check
    hypotheses: str = ""
    latex: tuple[str, ...] = ()
    corrected_by: str = ""
    """The code of the statement that holds instead."""
    corrects: str = ""
    """The code of the statement that this one replaces."""
    slow: bool = False

    def __post_init__(self) -> None:
        document, _, place = self.code.partition(".")
        if not document or not place or any(letter.isspace() for letter in self.code):
            raise ValueError(f"A code names a source and a place in it, such as note.L10; got {self.code!r}.")

    @property
    def document(self) -> str:
        """The part of the code that names the source."""
        return self.code.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a claim's check: the verdict, how long it took, what was recorded before, and what went wrong."""

    claim: Claim
    verdict: Verdict
    seconds: float
    recorded: str = ""
    """The status of the last recorded run; empty for a claim that is new."""
    failure: str = ""
    """Why the check did not come to an end, if it did not."""

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What was computed."""
        return self.verdict.evidence

    @property
    def witness(self) -> Witness | None:
        """The example that refutes the claim."""
        return self.verdict.witness

    @property
    def proof(self) -> str:
        """What proves the claim, or nothing."""
        if self.verdict != Verdict.PROVED:
            return ""
        return "; ".join(str(item) for item in self.evidence if item.proof)

    @property
    def changed(self) -> bool:
        """Whether the status is not the recorded one."""
        return bool(self.failure) or self.recorded != self.verdict.status.value

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        claim, verdict = self.claim, self.verdict
        return {
            "code": claim.code,
            "title": claim.title,
            "statement": claim.statement,
            "latex": list(claim.latex),
            "hypotheses": claim.hypotheses,
            "source": claim.source,
            "place": claim.place,
            "status": verdict.status.value,
            "message": verdict.message,
            "proof": self.proof,
            "evidence": [
                {
                    "what": item.what,
                    "value": item.value,
                    "limit": item.limit,
                    "samples": item.samples,
                    "proof": item.proof,
                }
                for item in verdict.evidence
            ],
            "witness": None if verdict.witness is None else _witness(verdict.witness),
            "corrected_by": claim.corrected_by,
            "corrects": claim.corrects,
            "recorded": self.recorded,
            "failure": self.failure,
            "seconds": round(self.seconds, 3),
        }


def _witness(witness: Witness) -> Mapping[str, Any]:
    return {
        "what": f"claimed {witness.claimed}; found {witness.found}",
        "values": {name: str(value) for name, value in witness.data.items()},
        "numpy": witness.numpy,
    }
