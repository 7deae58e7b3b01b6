"""Counts the laws of every model of the catalogue that is small enough by the Lie closure, for the tests.

A rank at one point is a lower bound of the generic rank, and a kinked network has regions where a neuron never
switches; so several seeds are tried, and the largest rank with a clear gap is what counts. Norms have ε = 0: the
count includes the laws that hold up to ε. Restarting continues where the file ends.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

from catalogue import Entry, entries
from conserved.discovery.inputs import UnsuitableError
from conserved.discovery.rank import LEAST_GAP
from law_checks import Subject, count

FILE = Path(__file__).parent.parent / "tests" / "data" / "law_counts.json"


def counted(entry: Entry, *, largest: int, seeds: int, seconds: float) -> dict[str, Any]:
    """The best count over several seeds, with everything needed to repeat it; or why there is none."""
    if not entry.countable:
        return {"why": entry.reason}
    subject = entry.subject()
    size = sum(tensor.numel() for tensor in subject.theta.values())
    if size > largest:
        return {"parameters": size, "why": f"{size} parameters"}
    return _best(subject, seeds, seconds)


def _best(subject: Subject, seeds: int, seconds: float) -> dict[str, Any]:
    start = time.perf_counter()
    best: dict[str, Any] | None = None
    tried: list[int] = []
    for seed in range(seeds):
        try:
            result = count(subject, seed=seed)
        except (UnsuitableError, RuntimeError, NotImplementedError) as problem:
            return {"why": str(problem).splitlines()[0][:200]}
        tried.append(result.count)
        clear = result.gap >= LEAST_GAP
        decided = result.verdict.holds
        better = best is None or (clear, result.rank, decided) > (best["clear"], best["rank"], best["settled"])
        if better:
            best = {
                "parameters": result.parameters,
                "count": result.count,
                "rank": result.rank,
                "ranks": list(result.ranks),
                "depth": result.depth,
                "gap": result.gap,
                "seed": seed,
                "clear": clear,
                "settled": decided,
                "message": "" if decided else result.verdict.message,
            }
        agreeing = len(tried) >= 2 and decided and tried.count(result.count) >= 2 and result.count == min(tried)
        if agreeing or time.perf_counter() - start > seconds:
            break
    assert best is not None
    return best | {"counts": tried, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    """Count what has not been counted yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the name, or of the source")
    parser.add_argument("--largest", type=int, default=320, help="parameters beyond which nothing is counted")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60, help="after which no further seed is begun")
    parser.add_argument("--again", action="store_true", help="count again what is in the file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for entry in entries():
        if options.only not in entry.name and options.only not in entry.source:
            continue
        if "count" in known.get(entry.name, {}) and not options.again:
            continue
        try:
            result = counted(entry, largest=options.largest, seeds=options.seeds, seconds=options.seconds)
        except ImportError as missing:
            print(f"{entry.name}: {missing}")
            continue
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        known[entry.name] = result
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(known, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
        shown = (
            f"{result['count']} laws of {result['parameters']}, seed {result['seed']}"
            if "count" in result
            else result["why"]
        )
        print(f"{entry.name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
