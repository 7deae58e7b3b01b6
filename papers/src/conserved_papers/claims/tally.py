"""Count claims by source and class, as recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from conserved.verdict import Status
from conserved_papers.claims.claim_record import Claim, Standing
from conserved_papers.claims.registry import SOURCES, Record, claims, records


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many claims of a source are in which class; errors that are one are counted once."""

    source: str
    whose: str
    counts: Mapping[Standing, int]


def tallies(
    whose: str, result: Mapping[str, Record] | None = None, listed: Iterable[Claim] | None = None
) -> list[Tally]:
    """Count the statements of the sources, or ours.

    Args:
        whose: "source" or "ours".
        found: the outcomes; by default those recorded.
        listed: the claims; by default all.

    Returns:
        One tally for each source. A claim that falls with another one is left out.
    """
    result = records() if result is None else result
    chosen = [claim for claim in (claims() if listed is None else listed) if claim.whose == whose]
    rows = []
    for document, title in SOURCES.items():
        own = [claim for claim in chosen if claim.document == document and claim.code in result]
        counted = Counter(result[claim.code].standing for claim in own if not dependent(claim, result))
        if own:
            rows.append(Tally(source=title, whose=whose, counts=counted))
    return rows


def dependent(claim: Claim, result: Mapping[str, Record]) -> bool:
    """Return whether a claim falls with another one, which is counted instead."""
    return bool(claim.under) and result[claim.code].status == Status.REFUTED.value


def tally_table(whose: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of a table of the recorded outcomes, with a sum."""
    rows = tallies(whose)
    columns = [standing for standing in Standing if any(row.counts.get(standing) for row in rows)]
    body = [(row.source, *(str(row.counts.get(name, 0)) for name in columns)) for row in rows]
    total = ("together", *(str(sum(row.counts.get(name, 0) for row in rows)) for name in columns))
    return ("source", *columns), [*body, total]
