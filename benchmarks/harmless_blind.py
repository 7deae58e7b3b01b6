"""Programs that the monitor had not seen when they were written, in turns with a monitor and without.

    python benchmarks/harmless_blind.py --batch blind_programs_5 --steps 45 --out benchmarks/results

None may end, raise an alarm, or have other losses or weights. Each has random numbers of its own.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from measure import commit, machine, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conserved import Monitor

CASTS = {"float32": nullcontext, "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}


class Run:
    """A program in training, with a monitor or without, and the random numbers of its own."""

    def __init__(self, build: Any, cast: Any, *, watched: bool) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.training = build(cast)
        self.monitor = Monitor(self.training.model, self.training.optimizers) if watched else None
        self.losses: list[Tensor] = []
        self.times: list[float] = []
        self._keep()

    def _keep(self) -> None:
        self._states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def step(self) -> None:
        torch.set_rng_state(self._states[0])
        random.setstate(self._states[1])
        np.random.set_state(self._states[2])
        began = time.process_time()
        loss = self.training.step()
        if self.monitor is not None:
            self.monitor.step(loss=loss)
        self.times.append(time.process_time() - began)
        self.losses.append(loss.detach().clone())
        self._keep()

    def results(self) -> list[Tensor]:
        return [*self.losses, *(p.detach().clone() for p in self.training.model.parameters())]


def compared(build: Any, precision: str, steps: int) -> dict[str, Any]:
    """Run one program with a monitor and without, step by step in turns."""
    row: dict[str, Any] = {"program": build.__name__.replace("_", " "), "precision": precision}
    try:
        plain = Run(build, CASTS[precision], watched=False)
        for _ in range(3):
            plain.step()
    except Exception as problem:
        return row | {"outcome": "not run", "why": f"{type(problem).__name__}: {problem}"[:300]}
    try:
        watched = Run(build, CASTS[precision], watched=True)
        for _ in range(3):
            watched.step()
        for _ in range(steps - 3):
            plain.step()
            watched.step()
    except Exception as problem:
        trace = traceback.format_exc()[-900:]
        return row | {"outcome": "ended", "why": f"{type(problem).__name__}: {problem}"[:300], "trace": trace}
    monitor = watched.monitor
    assert monitor is not None
    monitor.close()
    pairs = zip(plain.results(), watched.results(), strict=True)
    same = all(torch.equal(a, b) or bool((a != a).any()) for a, b in pairs)
    outcome = "alarmed" if monitor.alarms else "clean" if same else "changed"
    return row | {
        "outcome": outcome,
        "same": same,
        "alarms": [f"{alarm.code}, step {alarm.step}: {alarm.message}"[:400] for alarm in monitor.alarms],
        "statements": [f"{alarm.code}, step {alarm.step}" for alarm in monitor.statements],
        "state": monitor.state,
        "step, ms": 1e3 * median(plain.times[3:]),
        "median ratio": median(watched.times[3:]) / median(plain.times[3:]),
        "added, ms (median)": 1e3 * (median(watched.times[3:]) - median(plain.times[3:])),
        "added, ms (mean)": 1e3 * (sum(watched.times[1:]) - sum(plain.times[1:])) / (steps - 1),
        "first watched step, s": watched.times[0],
    }


def main() -> None:
    """Run all programs of a batch in both precisions, print what is not clean, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", default="blind_programs_5")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--only", default="")
    parser.add_argument("--precision", default="float32,autocast")
    parser.add_argument("--name", default="harmless_blind")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("conserved").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = []
    for name, build in importlib.import_module(given.batch).PROGRAMS.items():
        if not any(part in name for part in given.only.split(",")):
            continue
        for precision in given.precision.split(","):
            row = compared(build, precision, given.steps)
            rows.append(row)
            if row["outcome"] != "clean":
                print(row, flush=True)
    counts = Counter(row["outcome"] for row in rows)
    print(dict(counts), [row["program"] for row in rows if row["outcome"] not in ("clean", "not run")])
    if given.out is not None:
        record = {"batch": given.batch, "steps": given.steps, "counts": counts, "rows": rows}
        print(save(given.name, {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
