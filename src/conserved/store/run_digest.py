"""A watched run in few numbers: series by family at chosen steps, computed by SQLite, so that any run fits."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conserved.alarm import Alarm
from conserved.store.run_store import ENTRIES, MEAN_ERROR, RunStore, real

NUMBERS = (
    "observed",
    "first_order",
    "second_order",
    "residual",
    "bound",
    "excess",
    "drift",
    "predicted",
    "rate",
)
"""Columns of the ledger that a digest carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyStep:
    """The row of the ledger for the law of a family that changed most in a step; its causes add up to its change."""

    step: int
    family: str
    law: str
    numbers: dict[str, float]
    causes: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyDrift:
    """The law of a family that is furthest from its reference after the last step, and what the account adds up to."""

    family: str
    laws: int
    law: str
    error: float
    drift: float
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """One run: what it was, what its laws did at the chosen steps, and the worst of all steps."""

    name: str
    started: float
    config: dict[str, Any]
    laws: int
    steps: int
    """Steps that were written."""
    skipped: int
    shown: tuple[int, ...]
    """The chosen ones."""
    errors: dict[str, tuple[float, ...]]
    """Equation (10) by family."""
    ledger: dict[str, tuple[FamilyStep, ...]]
    totals: dict[str, tuple[float, ...]]
    """By cause: the magnitudes of its first-order parts, added over all laws."""
    drifts: tuple[FamilyDrift, ...]
    readings: dict[str, tuple[float, ...]]
    alarms: tuple[Alarm, ...]
    """One for each defect, as the run's monitor counted them."""
    worst: tuple[float, str, int] | None
    """The largest residual over rounding of all steps, its law and its step."""
    not_finite: int
    """Rows of the ledger in which the observed change is not a number."""
    state: str = ""
    """What the monitor was doing last, in words; empty if it never said."""


def digest(store: RunStore, run: str, *, steps: int = 300) -> Digest:
    """Return the digest of a run at up to `steps` steps, evenly spread, the first and the last among them."""
    number, started, config = store.select("select id, started, config from run where name = ?", run)[0]
    written = [step for (step,) in store.select("select distinct step from entry where run = ? order by step", number)]
    written = written or store.steps(run)
    shown = spread(written, steps)
    at = json.dumps(shown)

    def first(query: str) -> Any:
        return store.select(query, number)[0][0]

    return Digest(
        name=run,
        started=float(started),
        config=json.loads(config),
        laws=first("select count(*) from law where run = ?"),
        steps=len(store.steps(run)),
        skipped=first("select count(*) from step where run = ? and skipped"),
        shown=tuple(shown),
        errors=_errors(store, number, shown, at),
        ledger=_ledger(store, number, at),
        totals=_totals(store, number, shown, at),
        drifts=_drifts(store, number, written[-1]) if written else (),
        readings=_readings(store, number, shown, at),
        alarms=tuple(store.defects(run)),
        worst=_worst(store, number),
        not_finite=first("select count(*) from entry where run = ? and observed is null"),
        state=store.state(run),
    )


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the steps, evenly spread, with both ends."""
    if len(steps) <= most:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(index * last / (most - 1))] for index in range(most)]


_AT = "select value from json_each(?)"


def _errors(store: RunStore, run: int, shown: list[int], at: str) -> dict[str, tuple[float, ...]]:
    query = f"select step, family, {MEAN_ERROR} from {ENTRIES} and step in ({_AT}) group by step, family"
    return _series(store.select(query, run, at), shown)


def _totals(store: RunStore, run: int, shown: list[int], at: str) -> dict[str, tuple[float, ...]]:
    query = f"select step, cause, sum(abs(amount)) from cause where run = ? and step in ({_AT}) group by step, cause"
    return _series(store.select(query, run, at), shown)


def _readings(store: RunStore, run: int, shown: list[int], at: str) -> dict[str, tuple[float, ...]]:
    # Audits are not made in every step; the last one up to a step is what was known there.
    rows = store.select(
        f"select step, name, value from reading where run = ? and name not like 'total/%' and (step in ({_AT}) or "
        "name like 'audit/%')",
        run,
        at,
    )
    audits = [row for row in rows if row[1].startswith("audit/")]
    return _series([row for row in rows if not row[1].startswith("audit/")], shown) | _hold_values(audits, shown)


def _hold_values(rows: list[tuple[Any, ...]], shown: list[int]) -> dict[str, tuple[float, ...]]:
    """Return series of numbers that stay known until the next one comes; after the last nothing is known."""
    series: dict[str, list[tuple[int, float]]] = {}
    for step, name, value in sorted(rows):
        series.setdefault(name, []).append((step, real(value)))
    return {name: tuple(_latest(values, shown)) for name, values in sorted(series.items())}


def _latest(values: list[tuple[int, float]], shown: list[int]) -> Iterator[float]:
    end = bisect_left(shown, values[-1][0])
    for at, step in enumerate(shown):
        index = bisect_right(values, (step, float("inf"))) - 1
        yield values[index][1] if index >= 0 and at <= end else float("nan")


def _series(rows: list[tuple[Any, ...]], shown: list[int]) -> dict[str, tuple[float, ...]]:
    """Return rows of (step, name, value) as one series for every name; what was not written is not a number."""
    series: dict[str, dict[int, float]] = {}
    for step, name, value in rows:
        series.setdefault(name, {})[step] = real(value)
    return {name: tuple(values.get(step, float("nan")) for step in shown) for name, values in sorted(series.items())}


def _ledger(store: RunStore, run: int, at: str) -> dict[str, tuple[FamilyStep, ...]]:
    # With one max() in the list SQLite takes the other columns from the row where the maximum is, so the parts add up.
    # Values that are not finite count as the largest: they are what a reader has to see.
    rows = store.select(
        f"select step, family, entry.law, law.name, {', '.join(NUMBERS)}, "
        f"max(case when observed is null then 9e999 else abs(observed) end) from {ENTRIES} and step in ({_AT}) "
        "group by step, family order by step",
        run,
        at,
    )
    causes: dict[tuple[int, int], dict[str, float]] = {}
    chosen = json.dumps([[step, law] for step, _, law, *_ in rows])
    # A cross join is done in the order it is written: each wanted row is looked up, and the table is not gone through
    # once for every one of them.
    for step, law, cause, amount in store.select(
        "select step, law, cause, amount from json_each(?) as wanted cross join cause on cause.run = ? and "
        "cause.step = json_extract(wanted.value, '$[0]') and cause.law = json_extract(wanted.value, '$[1]')",
        chosen,
        run,
    ):
        causes.setdefault((step, law), {})[cause] = real(amount)
    ledger: dict[str, list[FamilyStep]] = {}
    for step, family, law, name, *numbers, _ in rows:
        values = dict(zip(NUMBERS, map(real, numbers), strict=True))
        entry = FamilyStep(step=step, family=family, law=name, numbers=values, causes=causes.get((step, law), {}))
        ledger.setdefault(family, []).append(entry)
    return {family: tuple(steps) for family, steps in sorted(ledger.items())}


def _drifts(store: RunStore, run: int, last: int) -> tuple[FamilyDrift, ...]:
    rows = store.select(
        f"select family, count(*), law.name, {MEAN_ERROR}, drift, predicted, max(case when drift is null then 9e999 "
        f"else abs(drift) end) from {ENTRIES} and step = ? group by family order by family",
        run,
        last,
    )
    return tuple(
        FamilyDrift(family=family, laws=laws, law=law, **dict(zip(_DRIFT, map(real, numbers), strict=True)))
        for family, laws, law, *numbers, _ in rows
    )


_DRIFT = ("error", "drift", "predicted")


def _worst(store: RunStore, run: int) -> tuple[float, str, int] | None:
    excess, law, step = store.select(f"select max(excess), law.name, step from {ENTRIES}", run)[0]
    total, when = store.select(
        "select max(value), step from reading where run = ? and name = 'total/of_rounding'", run
    )[0]
    if total is not None and (excess is None or total > excess):
        return float(total), "a law", int(when)
    return None if excess is None else (float(excess), law, step)
