"""Write outcomes down, as the record that pages are made of and that later runs are held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from conserved.verdict import Evidence, Witness
from conserved_papers.claims.claim_record import Outcome


def record_of_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as recorded.json keeps it: no times, evidence as text with two digits."""
    verdict = outcome.verdict
    return {
        "status": verdict.status.value,
        "standing": outcome.standing.value,
        "scope": verdict.scope,
        "message": verdict.message,
        "evidence": [evidence_text(item) for item in verdict.evidence],
        "witness": None if verdict.witness is None else _witness(verdict.witness),
    }


def record_of_outcomes(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Outcomes by code."""
    return {outcome.claim.code: record_of_outcome(outcome) for outcome in outcomes}


def evidence_text(item: Evidence) -> str:
    """Return one piece of evidence, with two digits and the limit."""
    return str(replace(item, value=_rounded(item.value), limit=_rounded(item.limit)))


def _rounded(value: float | int | str | None) -> int | str | None:
    return f"{value:.2g}" if isinstance(value, float) else value


def _witness(witness: Witness) -> dict[str, str]:
    values = "; ".join(f"{name} = {value}" for name, value in witness.data.items())
    return {"data": values, "claimed": witness.claimed, "found": witness.found, "numpy": witness.numpy}
