"""Findings, one sentence for each chapter, computed from the records in the store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from conserved.demo.chapters import CLEAN, MODEL, PLANTED, THEOREM, WATCHED
from conserved.laws import LawSet
from conserved.report.numerals import numeral
from conserved.store.run_digest import digest
from conserved.tracking import RunStore


def finding_lines(store: RunStore) -> list[str]:
    """Return one sentence on each chapter that is in the store, in the order of the story."""
    made = (_laws, _defect, _drift, _theorem, _figure)
    return [line for make in made if (line := make(store))]


def _laws(store: RunStore) -> str:
    record = store.documents("laws").get(MODEL)
    if record is None:
        return ""
    laws = LawSet.from_dict(record)
    return (
        f"{MODEL}, a file the package has never seen ({record['parameters']:,} parameters), has {len(laws):,} laws "
        f"that keep {laws.numbers:,} numbers; they span {record['coverage']:.1%} of its parameters "
        f"and see {record['directions']:.1%} of their gradients' directions."
    )


def _defect(store: RunStore) -> str:
    audits = store.documents("audit")
    if PLANTED not in audits:
        return ""
    planted, clean, losses = audits[PLANTED], audits[CLEAN], store.documents("demo")["losses"]
    broken = [row for row in planted["rows"] if not row["ok"]]
    if not broken:
        return f"The planted defect ({planted['planted']}) was missed."
    worst = broken[0]
    state = "hold" if clean["ok"] else "do not all hold"
    return (
        f"With a fused layer norm that has a wrong backward it trains to a loss of {losses['planted']:.2f} in "
        f"{losses['steps']} steps, against {losses['clean']:.2f} with PyTorch's. The first backward pass gives it "
        f"away: {worst['name']} is off by {numeral(worst['residual'])} where rounding explains "
        f"{numeral(worst['tolerance'])}; "
        f"without the defect all {len(clean['rows'])} identities {state}."
    )


def _drift(store: RunStore) -> str:
    if WATCHED not in store.runs():
        return ""
    run = digest(store, WATCHED)
    if not run.drifts:
        return ""
    moved = {cause: sum(abs(value) for value in values) for cause, values in run.totals.items()}
    size = sum(moved.values()) or math.nan
    shares = sorted(((value / size, cause) for cause, value in moved.items()), reverse=True)
    listing = ", ".join(f"{share:.0%} {cause}" for share, cause in shares if share >= 0.005)
    numbers: Counter[str] = Counter()
    for symmetry in LawSet.from_dict(store.documents("laws")[MODEL]):
        numbers[symmetry.family] += symmetry.numbers
    shown = max(run.drifts, key=lambda drift: numbers[drift.family])
    worst = run.worst[0] if run.worst else math.nan
    closes = "closes" if worst <= 1 else "does not close"
    return (
        f"AdamW moves {shown.family}, the law with most numbers, by {shown.error:.0%} of itself in {run.steps} steps. "
        f"The account of every step says why ({listing} at first order) and {closes}: what is left over is "
        f"{numeral(worst)} of what rounding explains."
    )


def _theorem(store: RunStore) -> str:
    record = store.documents("claim").get(THEOREM)
    if record is None:
        return ""
    conclusion = {"refuted": "is false", "proved": "holds", "verified": "holds"}.get(record["status"], record["status"])
    title, message = str(record["title"]), str(record["message"])
    return f"Theorem 4.7 of the paper, {title[:1].lower()}{title[1:]}, {conclusion}: {message[:1].lower()}{message[1:]}"


def _figure(store: RunStore) -> str:
    figure = store.documents("figure").get("figure4")
    if figure is None:
        return ""
    values = {item["what"]: item for item in figure["findings"]}
    wrong = _one(values, "sigmoid Σ Wᵢ, full batch: exponent")
    right = _one(values, "rotary attention: exponent")
    still = _one(values, "softmax Σ Wᵢ, full batch")
    if wrong is None or right is None or still is None:
        return ""
    return (
        "Its Figure 4, measured again: with the step halved and the flow time kept, the drift of what is conserved "
        f"halves (the step to the power {_power(right)}) or is rounding ({numeral(still['value'])}); that of the "
        f"theorem's quantity stays (power {_power(wrong)})."
    )


def _one(values: Mapping[str, Any], beginning: str) -> Any:
    return next((item for key, item in values.items() if key.startswith(beginning)), None)


def _power(item: Mapping[str, Any]) -> str:
    """Return two digits, and no sign on what rounds to zero."""
    return f"{round(item['value'], 2) + 0.0:.2f}".replace("-", "−")
