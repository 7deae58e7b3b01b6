"""Correct programs with a default monitor: none may end, raise an alarm, or have another loss than without it.

python benchmarks/harmless_clean.py --programs 176 --steps 50 --out benchmarks/results
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from measure import commit, machine, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conserved import Monitor
from harmless_programs import AfterStep, Combination, drawn, run


def watched(program: Combination, steps: int) -> dict[str, Any]:
    """Run one program with a monitor and without, and compare."""
    plain_times: list[float] = []
    began = time.perf_counter()
    plain = run(program, lambda model, optimizer: lambda loss: plain_times.append(time.perf_counter()), steps=steps)
    monitors: list[Monitor] = []
    times: list[float] = []

    def watch(model: Any, optimizer: Any) -> AfterStep:
        monitors.append(Monitor(model, optimizer))

        def after(loss: Any) -> None:
            monitors[0].step(loss=loss)
            times.append(time.perf_counter())

        return after

    try:
        result = run(program, watch, steps=steps)
    except Exception as problem:
        return {"program": str(program), "ended": f"{type(problem).__name__}: {problem}"[:300]}
    (monitor,) = monitors
    monitor.close()
    same = all(torch.equal(a, b) or (a != a).any() for a, b in zip(plain, result, strict=True))
    return {
        "program": str(program),
        "same": same,
        "state": monitor.state,
        "laws": len(monitor.laws),
        "alarms": [f"{alarm.code}: {alarm.message}"[:300] for alarm in monitor.alarms],
        "every": monitor.every,
        "step, ms": 1e3 * _median(plain_times),
        "watched step, ms": 1e3 * _median(times),
        "seconds": time.perf_counter() - began,
    }


def _median(times: list[float]) -> float:
    return median(after - before for before, after in pairwise(times[2:]))


def main() -> None:
    """Run the table, print what went wrong, save all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=176)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("conserved").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for program in drawn(given.programs, given.seed):
        if given.only in str(program):
            row = watched(program, given.steps)
            rows.append(row)
            if row.get("ended") or row.get("alarms") or not row.get("same"):
                print(
                    row["program"],
                    row.get("ended", ""),
                    row.get("same"),
                    row.get("state"),
                    row.get("alarms"),
                    flush=True,
                )
    counts = Counter(
        "ended" if "ended" in row else "alarmed" if row["alarms"] else "changed" if not row["same"] else "clean"
        for row in rows
    )
    states = Counter(row.get("state", "").partition(":")[0] for row in rows)
    print(dict(counts), dict(states))
    if given.out is not None:
        record = {"steps": given.steps, "counts": counts, "states": states, "load": os.getloadavg(), "rows": rows}
        print(save("harmless_clean", {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
