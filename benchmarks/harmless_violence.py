"""Acts of violence on a watched run: the run goes on, the losses are the same, the state says what happened.

python benchmarks/harmless_violence.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from measure import commit, machine, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import acts_of_violence_2
from acts_of_violence import ACTS, run, same


def suffered(name: str) -> dict[str, Any]:
    """Run an act without a monitor and with one, and compare."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        try:
            plain, _ = run(name, Path(first), watched=False)
        except Exception as problem:
            return {"act": name, "unwatched": f"{type(problem).__name__}: {problem}"[:200]}
        try:
            result, monitor = run(name, Path(second), watched=True)
        except Exception as problem:
            return {"act": name, "ended": f"{type(problem).__name__}: {problem}"[:300]}
    assert monitor is not None
    alarms = [f"{alarm.code}: {alarm.message}"[:200] for alarm in monitor.alarms]
    seconds = time.perf_counter() - began
    return {"act": name, "same": same(plain, result), "state": monitor.state, "alarms": alarms, "seconds": seconds}


def main() -> None:
    """Run all acts, print what became of each, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--new", action="store_true", help="only the acts of acts_of_violence_2")
    parser.add_argument("--name", default="harmless_violence")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("conserved").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for name in acts_of_violence_2.NEW if given.new else ACTS | acts_of_violence_2.NEW:
        if any(part in name for part in given.only.split(",")):
            row = suffered(name)
            outcome = (
                ("ENDED " + row["ended"] if "ended" in row else "")
                or ("unwatched " + row["unwatched"] if "unwatched" in row else "")
                or ("same" if row["same"] else "CHANGED")
            )
            print(f"{name:36} {outcome} | {row.get('state', '')[:110]} | {row.get('alarms', '')}"[:330], flush=True)
            rows.append(row)
    counts = Counter(
        "ended"
        if "ended" in row
        else "unwatched run ends"
        if "unwatched" in row
        else "same"
        if row["same"]
        else "changed"
        for row in rows
    )
    print(len(rows), dict(counts))
    if given.out is not None:
        record = {"acts": len(rows), "counts": counts, "rows": rows}
        print(save(given.name, {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
