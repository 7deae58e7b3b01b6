"""Every derivation of every law of the catalogue, followed by the checker: how many are proved, and why others are not.

A law that the checker refuses is held against one backward pass in float64: it is wrong, or the checker is.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from typing import Any

import torch

from catalogue import entries
from conserved import recognize
from conserved.inference.derivation import Derivation
from conserved.inference.derivation_record import Unwritten
from law_checks import residuals
from measure import save


def examined(entry: Any) -> dict[str, Any]:
    """The laws of one model, by what the checker says of them."""
    torch.manual_seed(0)
    model, args, kwargs = entry.build()
    laws = recognize(model, *args, loss=entry.loss, **kwargs)
    found: dict[str, Any] = {
        "laws": len(laws),
        "proved": 0,
        "steps": 0,
        "unchecked": {},
        "refused": {},
        "unwritten": {},
    }
    assert isinstance(laws.derivation, Derivation)
    found["translations"] = sum(symmetry.kind.linear for symmetry in laws)
    start = time.process_time()
    for symmetry in laws:
        try:
            report = laws.derivation.checked(symmetry)
        except Unwritten as problem:
            found["unwritten"][symmetry.name] = str(problem)
            continue
        found["steps"] += report.steps
        found["proved"] += report.ok
        if report.wrong:
            found["refused"][symmetry.name] = report.wrong[0]
        elif report.unchecked:
            found["unchecked"][symmetry.name] = report.unchecked[0]
    found["seconds"] = time.process_time() - start
    if found["refused"]:
        prepared = entry.subject()
        exact = residuals(laws, prepared)
        found["residuals_of_refused"] = {name: exact[name] for name in found["refused"] if name in exact}
    return found


def reason(text: str) -> str:
    """What was said, without where."""
    operation = text.partition(" in ")[0]
    return f"{operation}: {text.rpartition(': ')[2]}" if ": " in text else text


def main() -> None:
    """The whole catalogue, or the models whose names are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    for entry in entries():
        if options.names and not any(name in entry.name for name in options.names):
            continue
        try:
            rows[entry.name] = examined(entry)
        except Exception as problem:
            rows[entry.name] = {"error": f"{type(problem).__name__}: {problem}"[:200]}
            if options.names:
                traceback.print_exc()
        row = rows[entry.name]
        said = row.get("error") or f"{row['proved']}/{row['laws']} in {row['seconds']:.1f} s"
        print(entry.name, said, file=sys.stderr, flush=True)
        if options.names:
            print(row)
    good = [row for row in rows.values() if "error" not in row]
    totals = {key: sum(row[key] for row in good) for key in ("laws", "translations", "proved", "steps", "seconds")}
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for row in good:
        for kind in ("unchecked", "refused", "unwritten"):
            kinds[kind].update(reason(text) for text in row[kind].values())
    counts = {kind: sum(found.values()) for kind, found in kinds.items()}
    reasons = {kind: dict(found.most_common(40)) for kind, found in kinds.items()}
    summary = {"models": len(good), **totals, **counts, "reasons": reasons}
    summary["errors"] = {name: row["error"] for name, row in rows.items() if "error" in row}
    print(summary)
    if not options.names and not options.dry:
        print("saved", save("derivations", {"summary": summary, "models": rows}))


if __name__ == "__main__":
    main()
