"""The laws inferred for every model of the catalogue: how many, how many there are, how well they hold, at what cost.

One row for each model, saved as soon as it is there; restarting continues where the file ends.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from catalogue import Entry, entries
from conserved import LawSet, recognize
from law_checks import check, drifts
from law_counts import FILE as COUNTS
from law_misses import KINKS, REASONS, UNCLEAR
from measure import RESULTS, commit, machine
from reference.quadratic_laws import quadratic_laws

LARGEST_JACOBIAN = 4_000_000
"""Entries of the largest matrix whose rank is taken; the independent laws of larger models are not counted."""


MOST_MOVES = 400
"""Laws of one model that are moved along; identities are checked for all."""


def inferred(entry: Entry) -> tuple[LawSet, float]:
    """The laws of a model as a user would ask for them, and the seconds that took."""
    model, args, kwargs = entry.build()
    start = time.perf_counter()
    laws = recognize(model, *args, loss=entry.loss, **kwargs)
    return laws, time.perf_counter() - start


def row(entry: Entry, counts: dict[str, Any]) -> dict[str, Any]:
    """Everything measured about one model."""
    record: dict[str, Any] = {"source": entry.source, "loss": entry.loss}
    subject = entry.subject()
    record["parameters"] = sum(tensor.numel() for tensor in subject.theta.values())
    counted = counts.get(entry.name, {})
    record["counted"] = counted.get("count")
    record["count_settled"] = bool(counted.get("settled"))
    if record["counted"] is None:
        record["not_counted_because"] = counted.get("why", "not yet")
    torch.manual_seed(0)
    laws, record["seconds"] = inferred(entry)
    record["laws"] = len(laws)
    record["numbers"] = laws.numbers
    record["exact_numbers"] = sum(s.numbers for s in laws if s.exact)
    theta = {name: p.detach() for name, p in subject.model.named_parameters(remove_duplicate=False)}
    if laws.numbers * record["parameters"] <= LARGEST_JACOBIAN:
        record["independent"] = laws.independent(theta) if len(laws) else 0
        record["independent_exact"] = laws.independent(theta, exact=True) if len(laws) else 0
    else:
        record["independent"] = record["independent_exact"] = None
    if record["counted"] not in (None, record["independent"]):
        # The count is of one point: laws of degree one and two are counted over many, which see both sides of kinks.
        again = quadratic_laws(entry.subject(), laws)
        record["degree_two"], record["degree_two_missing"] = again.count, again.missing
        record["reason"] = reason(entry.name, record)
    record["coverage"] = coverage(laws, subject.theta)
    record["unknown"] = {str(name): int(times) for name, times in dict(getattr(laws, "unknown", {}) or {}).items()}
    record["dropped"] = Counter(d.reason for d in laws.dropped).most_common(8)
    result = check(laws, subject, moves=len(laws) <= MOST_MOVES)
    record["worst"] = result.worst
    record["worst_approximate"] = max(result.approximate.values(), default=0.0)
    record["worst_move"] = max(result.moves.values(), default=0.0)
    record["wrong"] = result.wrong
    drift = drifts(laws, subject)
    record["worst_drift"] = max(drift.values(), default=0.0)
    late = {name: f"drifts at first order, {d:.1e}" for name, d in drift.items() if d > 1e-3}
    record["wrong"] = late | record["wrong"]
    record["by_kind"] = dict(Counter(f"{s.family}: {s.kind.code}{'' if s.exact else ' ~'}" for s in laws))
    return record


def reason(name: str, record: dict[str, Any]) -> str:
    """Why the number of laws is not the one counted at one point."""
    known = REASONS.get(name, "")
    if not record["degree_two_missing"] and record["degree_two"] == record["independent"]:
        return known or (KINKS if record["counted"] > record["independent"] else UNCLEAR)
    return known or "not understood"


def coverage(laws: LawSet, theta: dict[str, torch.Tensor]) -> float:
    """Share of trained entries that some law spans."""
    marks = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in theta.items()}
    for symmetry in laws:
        for leg in symmetry.legs:
            if leg.view.parameter in marks:
                mark = torch.full((leg.view.n, leg.view.m), torch.nan, dtype=torch.float64)
                marks[leg.view.parameter] = leg.view.written(marks[leg.view.parameter], mark)
    touched = sum(int(mark.isnan().sum()) for mark in marks.values())
    return touched / max(sum(mark.numel() for mark in marks.values()), 1)


def shown(rows: dict[str, Any]) -> Table:
    """The table people read."""
    table = Table(title="laws inferred")
    for heading in (
        "model",
        "source",
        "D",
        "laws",
        "numbers",
        "indep.",
        "counted",
        "residual",
        "move",
        "coverage",
        "s",
        "",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "source", "") else "right")
    for name, r in rows.items():
        if "error" in r:
            table.add_row(name, r["source"], "", "", "", "", "", "", "", "", "", r["error"][:60])
            continue
        note = f"WRONG {len(r['wrong'])}" if r["wrong"] else ", ".join(r["unknown"])[:30]
        table.add_row(
            name,
            r["source"],
            f"{r['parameters']:,}",
            str(r["laws"]),
            str(r["numbers"]),
            str(r["independent"]),
            str(r["counted"]) if r["counted"] is not None else "–",
            f"{r['worst']:.0e}",
            f"{r['worst_move']:.0e}",
            f"{r['coverage']:.0%}",
            f"{r['seconds']:.1f}",
            note,
        )
    return table


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """The figures of the whole table."""
    good = {name: r for name, r in rows.items() if "error" not in r}
    counted = {n: r for n, r in good.items() if r["counted"] is not None and r["independent"] is not None}
    apart = {n: r for n, r in counted.items() if r["independent"] != r["counted"]}
    return {
        "models": len(rows),
        "errors": [name for name, r in rows.items() if "error" in r],
        "wrong": {name: r["wrong"] for name, r in good.items() if r["wrong"]},
        "worst_residual": max((r["worst"] for r in good.values() if not r["wrong"]), default=0.0),
        "counted": len(counted),
        "equal": sum(r["independent"] == r["counted"] for r in counted.values()),
        "equal_over_many_points": [n for n, r in apart.items() if r.get("degree_two_missing") == 0],
        "short": {n: r["independent"] - r["counted"] for n, r in counted.items() if r["independent"] < r["counted"]},
        "over": {n: r["independent"] - r["counted"] for n, r in counted.items() if r["independent"] > r["counted"]},
        "reasons": {n: r.get("reason", "not understood") for n, r in apart.items()},
        "sources": dict(Counter(r["source"] for r in good.values())),
    }


def main() -> None:
    """Fill in the rows that are missing, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the name, or of the source")
    parser.add_argument("--again", action="store_true", help="measure again what is in the file")
    parser.add_argument("--file", type=Path, default=RESULTS / "inference_table_cpu_2026-11-16.json")
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is in the file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    saved = json.loads(options.file.read_text()) if options.file.exists() else {}
    rows: dict[str, Any] = saved.get("rows", {})
    for entry in [] if options.show else entries():
        if options.only not in entry.name and options.only not in entry.source:
            continue
        if entry.name in rows and "error" not in rows[entry.name] and not options.again:
            continue
        try:
            rows[entry.name] = row(entry, counts)
        except ImportError as missing:
            print(f"{entry.name}: {missing}")
            continue
        except Exception as problem:
            index = traceback.extract_tb(problem.__traceback__)[-1]
            rows[entry.name] = {
                "source": entry.source,
                "error": f"{type(problem).__name__}: {problem}"[:300],
                "at": f"{Path(index.filename).name}:{index.lineno}",
            }
        r = rows[entry.name]
        line = (
            r.get("error") or f"{r['independent']} of {r['counted']}, residual {r['worst']:.0e}, {r['seconds']:.1f} s"
        )
        print(f"{entry.name}: {line}{'  WRONG ' + str(r['wrong']) if r.get('wrong') else ''}", flush=True)
        record = {"commit": commit(), **machine(), "summary": summary(rows), "rows": rows}
        options.file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    Console(width=170).print(shown(rows))
    print(
        json.dumps(
            {key: value for key, value in summary(rows).items() if key != "sources"}, indent=1, ensure_ascii=False
        )
    )


if __name__ == "__main__":
    main()
