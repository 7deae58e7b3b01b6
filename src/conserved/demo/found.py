"""Five lines of what was found, each computed from the records in the store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from conserved.demo.parts import CLEAN, MODEL, PLANTED, WATCHED
from conserved.laws import LawSet
from conserved.report.numerals import numeral
from conserved.track import RunStore
from conserved.track.sinks.digest import digest


def found_lines(store: RunStore) -> list[str]:
    """One sentence each on laws, drifts, claims, gradients and the watched run."""
    return [
        _laws(store.documents("laws")[MODEL]),
        _drifts(store.documents("figure")),
        _claims(store.documents("claim"), store.documents("demo")["claims"]),
        _audits(store.documents("audit")),
        _watched(store),
    ]


def _laws(record: Mapping[str, Any]) -> str:
    laws = LawSet.from_dict(record)
    return (
        f"A decoder of {record['parameters']:,} parameters has {len(laws):,} laws that hold {laws.numbers:,} conserved "
        f"numbers, {record['independent']:,} of them independent."
    )


def _drifts(figures: Mapping[str, Mapping[str, Any]]) -> str:
    findings = [item for figure in figures.values() for item in figure["findings"]]
    judged = [item for item in findings if item["holds"] is not None]
    failed = [item["what"] for item in judged if not item["holds"]]
    orders = figures["order"]["findings"]
    laws = [item["value"] for item in orders if item["expected"] == "1"]
    spoiled = [item["value"] for item in orders if item["expected"] == "0"]
    text = (
        f"At fixed flow time laws drift as the step to the power {_range(laws)}, spoiled ones to {_range(spoiled)}; "
        f"{len(judged) - len(failed)} of {len(judged)} statements about {len(figures)} figures hold"
    )
    return f"{text}; not so: {failed[0]}." if failed else f"{text}."


def _range(values: list[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "unknown"
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return (low if low == high else f"{low} to {high}").replace("-", "−")


def _claims(records: Mapping[str, Mapping[str, Any]], asked: Mapping[str, Any]) -> str:
    count = Counter(record["status"] for record in records.values())
    listing = ", ".join(f"{number} {status}" for status, number in sorted(count.items()))
    changed = [code for code, record in records.items() if record["recorded"] != record["status"]]
    refuted = [code for code, record in records.items() if record["status"] == "refuted"]
    text = f"{len(records)} of {asked['known']} claims of the sources were run: {listing}"
    text += f"; among those that do not hold is {_first(refuted)}" if refuted else ""
    return f"{text}. Not as recorded: {', '.join(changed)}." if changed else f"{text}."


def _first(codes: list[str]) -> str:
    """Theorem 4.7 of the paper where it is among them: it is the one with consequences."""
    return next((code for code in codes if code == "paper.T4.7"), codes[0])


def _audits(records: Mapping[str, Mapping[str, Any]]) -> str:
    clean, planted = records[CLEAN], records[PLANTED]
    broken = [row for row in planted["rows"] if not row["ok"]]
    caught = "is missed"
    if broken:
        caught = f"shows in {broken[0]['name']} with a residual of {numeral(broken[0]['residual'])}"
    exact = [row for row in clean["rows"] if row["ok"] and row["tolerance"] < 1e-6]
    worst = max((row["residual"] for row in exact), default=math.nan)
    state = "hold" if clean["ok"] else "do not all hold"
    return (
        f"The {len(clean['rows'])} gradient identities of a right backward pass {state}, the exact ones to "
        f"{numeral(worst)}; a planted defect ({planted['planted']}) {caught}."
    )


def _watched(store: RunStore) -> str:
    run = digest(store, WATCHED)
    ranked = sorted(run.drifts, key=lambda drift: drift.error)
    size = sum(run.totals[cause][-1] for cause in run.totals)
    cause = max(run.totals, key=lambda name: run.totals[name][-1])
    worst = run.worst[0] if run.worst else math.nan
    return (
        f"AdamW moves the laws by {ranked[0].error:.2g} ({ranked[0].family}) to {ranked[-1].error:.2g} "
        f"({ranked[-1].family}) of themselves in {run.steps} steps; "
        f"{run.totals[cause][-1] / size:.0%} of the first-order change in the last step is its {cause}. The account of "
        f"every step closes to {numeral(worst)} of what rounding explains."
    )
