"""Outcomes of claims as cards: statement, typeset mathematics, evidence, witness and the lines that recompute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from conserved.report.mathematics import typeset
from conserved.report.numerals import format_number
from conserved.report.table import ReportTable
from conserved.verdict import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCard:
    """One claim as it was judged when it was last run."""

    code: str
    title: str
    statement: str
    formulas: tuple[Markup, ...]
    hypotheses: tuple[str, ...]
    conditions: tuple[str, ...]
    source: str
    whose: str
    place: str
    status: Status
    scope: str
    severity: str
    under: str
    message: str
    proof: str
    evidence: ReportTable | None
    witness: str
    witness_values: ReportTable | None
    numpy: str
    corrects: str
    corrected_by: str
    recorded: str
    seconds: float | None

    @property
    def as_recorded(self) -> bool:
        """Whether the run came out as the ledger says it does."""
        return not self.recorded or self.recorded == self.status.value


COLUMNS = ("proved", "verified", "answered", "false", "gap", "overclaim", "slip", "refuted", "inconclusive")


def tally(cards: Sequence[ClaimCard]) -> ReportTable | None:
    """Count the sources' statements and ours apart, by verdict.

    Errors that fall with another one are counted with it.
    """
    counted = [card for card in cards if not (card.under and card.status is Status.REFUTED)]
    used = [name for name in COLUMNS if any(_column(card) == name for card in counted)]
    rows = []
    for source, whose in dict.fromkeys((card.source, card.whose) for card in counted):
        own = [_column(card) for card in counted if (card.source, card.whose) == (source, whose)]
        rows.append((source, "ours" if whose == "ours" else "the source", *(own.count(name) for name in used)))
    rows.sort(key=lambda row: row[1] == "ours")
    return ReportTable.of(("source", "whose statement", *used), rows, 40) if rows else None


def _column(card: ClaimCard) -> str:
    return card.severity or card.status.value


_TEXTS = ("statement", "source", "scope", "severity", "under", "message", "proof", "corrects", "corrected_by")


def claim_card(name: str, content: Mapping[str, Any]) -> ClaimCard:
    """Return a card from an outcome's record."""
    evidence = [(item.get("what", ""), item.get("value"), item.get("limit")) for item in content.get("evidence") or ()]
    witness = content.get("witness") or {}
    values = [(str(name), format_number(value)) for name, value in (witness.get("values") or {}).items()]
    seconds = content.get("seconds")
    texts: dict[str, Any] = {name: str(content.get(name) or "") for name in _TEXTS}
    return ClaimCard(
        **texts,
        code=str(content.get("code") or name),
        title=str(content.get("title") or name),
        formulas=tuple(typeset(text) for text in _lines(content.get("latex"))),
        hypotheses=_lines(content.get("hypotheses")),
        conditions=_lines(content.get("conditions")),
        whose=str(content.get("whose") or "source"),
        place=", ".join(str(content[name]) for name in ("place", "lines") if content.get(name)),
        status=Status(str(content["status"]).lower()),
        evidence=ReportTable.of(("what was computed", "value", "held against"), evidence, 40) if evidence else None,
        witness=str(witness.get("what") or ""),
        witness_values=ReportTable.of(("in the witness", "value"), values, 40) if values else None,
        numpy=str(witness.get("numpy") or ""),
        recorded=str(content.get("recorded") or "").lower(),
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
    )


def _lines(value: Any) -> tuple[str, ...]:
    if not value:
        return ()
    return (str(value),) if isinstance(value, str) else tuple(str(item) for item in value)
