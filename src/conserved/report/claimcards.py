"""Outcomes of claims as cards: statement, typeset mathematics, evidence, witness and the lines that recompute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from conserved.report.mathematics import typeset
from conserved.report.numerals import shown
from conserved.report.table import Table
from conserved.verdict import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCard:
    """One claim as it was judged when it was last run."""

    code: str
    title: str
    statement: str
    formulas: tuple[Markup, ...]
    hypotheses: tuple[str, ...]
    source: str
    place: str
    status: Status
    message: str
    proof: str
    evidence: Table | None
    witness: str
    witness_values: Table | None
    numpy: str
    corrects: str
    corrected_by: str
    recorded: str
    seconds: float | None

    @property
    def as_recorded(self) -> bool:
        """Whether the run came out as the ledger says it does."""
        return not self.recorded or self.recorded == self.status.value


def claim_card(name: str, content: Mapping[str, Any]) -> ClaimCard:
    """A card from an outcome's record."""
    evidence = [(item.get("what", ""), item.get("value"), item.get("limit")) for item in content.get("evidence") or ()]
    witness = content.get("witness") or {}
    values = witness.get("values") or {}
    latex = content.get("latex") or ()
    seconds = content.get("seconds")
    return ClaimCard(
        code=str(content.get("code") or name),
        title=str(content.get("title") or name),
        statement=str(content.get("statement") or ""),
        formulas=tuple(typeset(str(text)) for text in ([latex] if isinstance(latex, str) else latex)),
        hypotheses=_lines(content.get("hypotheses")),
        source=str(content.get("source") or ""),
        place=str(content.get("place") or ""),
        status=Status(str(content["status"]).lower()),
        message=str(content.get("message") or ""),
        proof=str(content.get("proof") or ""),
        evidence=Table.of(("what was computed", "value", "held against"), evidence, 40) if evidence else None,
        witness=str(witness.get("what") or ""),
        witness_values=Table.of(("in the witness", "value"), [(str(k), shown(v)) for k, v in values.items()], 40)
        if values
        else None,
        numpy=str(witness.get("numpy") or ""),
        corrects=str(content.get("corrects") or ""),
        corrected_by=str(content.get("corrected_by") or ""),
        recorded=str(content.get("recorded") or "").lower(),
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
    )


def _lines(value: Any) -> tuple[str, ...]:
    if not value:
        return ()
    return (str(value),) if isinstance(value, str) else tuple(str(item) for item in value)
