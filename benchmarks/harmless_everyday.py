"""Everyday programs of many kinds with a default monitor: none may end, raise an alarm, or have another loss.

    python benchmarks/harmless_everyday.py --steps 40 --out benchmarks/results

Every program runs twice from one seed, without a monitor and with one, in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import commit, machine, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conserved import Monitor
from everyday_programs import PROGRAMS

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trained(name: str, dtype: torch.dtype, steps: int, *, watched: bool) -> tuple[list[Tensor], Monitor | None]:
    """Run a program; return its losses and, last, its weights, and the monitor."""
    torch.manual_seed(0)
    run = PROGRAMS[name](dtype)
    monitor = Monitor(run.model, run.optimizers) if watched else None
    losses = []
    for _ in range(steps):
        losses.append(run.step().clone())
        if monitor is not None:
            monitor.step(loss=losses[-1])
    if monitor is not None:
        monitor.close()
    return [*losses, *(p.detach().clone() for p in run.model.parameters())], monitor


def compared(name: str, precision: str, steps: int) -> dict[str, Any]:
    """Run one program without a monitor and with one."""
    row: dict[str, Any] = {"program": name, "precision": precision}
    began = time.perf_counter()
    try:
        plain, _ = trained(name, PRECISIONS[precision], steps, watched=False)
    except Exception as problem:
        return row | {"unwatched": f"{type(problem).__name__}: {problem}"[:300]}
    try:
        result, monitor = trained(name, PRECISIONS[precision], steps, watched=True)
    except Exception as problem:
        return row | {"ended": f"{type(problem).__name__}: {problem}"[:300], "trace": traceback.format_exc()[-1500:]}
    assert monitor is not None
    return row | {
        "same": all(torch.equal(a, b) or bool((a != a).any()) for a, b in zip(plain, result, strict=True)),
        "state": monitor.state,
        "laws": len(monitor.laws) if "not watched" not in monitor.state else 0,
        "alarms": [f"{alarm.code}, step {alarm.step}: {alarm.message}"[:300] for alarm in monitor.alarms],
        "seconds": time.perf_counter() - began,
    }


def outcome(row: dict[str, Any]) -> str:
    """Return what became of a program."""
    for key in ("unwatched", "ended"):
        if key in row:
            return key
    return "alarmed" if row["alarms"] else "clean" if row["same"] else "changed"


def main() -> None:
    """Run the table, print what went wrong, save all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="")
    parser.add_argument("--precision", default="float32,bfloat16")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("conserved").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for name in [one for one in PROGRAMS if given.only in one]:
        for precision in given.precision.split(","):
            row = compared(name, precision, given.steps)
            rows.append(row)
            if outcome(row) != "clean":
                print(
                    name, precision, outcome(row), {k: v for k, v in row.items() if k not in ("program", "precision")}
                )
                sys.stdout.flush()
    counts = Counter(map(outcome, rows))
    print(dict(counts), len(PROGRAMS))
    if given.out is not None:
        record = {"steps": given.steps, "programs": len(PROGRAMS), "counts": counts, "rows": rows}
        print(save("harmless_everyday", {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
