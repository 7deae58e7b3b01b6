"""What a default monitor costs: import, first step, step ratios side by side, the stride it settles at, memory.

    python benchmarks/harmless_cost.py --steps 5000 --out benchmarks/results

Ratios are of one run in turns, so that a noisy moment hits both; the load of the machine is recorded beside them.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from measure import commit, machine, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conserved import Monitor
from harmless_programs import ARCHITECTURES


class Run:
    """One model in training, with a monitor or without."""

    def __init__(self, architecture: str, *, watched: bool) -> None:
        torch.manual_seed(0)
        build, self.inputs = ARCHITECTURES[architecture]
        self.model: nn.Module = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.monitor = Monitor(self.model, self.optimizer) if watched else None

    def step(self) -> float:
        """Train one step; return its seconds."""
        began = time.perf_counter()
        out = self.model(self.inputs())
        loss = F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.step(loss=loss)
        return time.perf_counter() - began


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measured(architecture: str, steps: int) -> dict[str, Any]:
    """Run a model with a monitor and without, in turns."""
    plain, watched = Run(architecture, watched=False), Run(architecture, watched=True)
    first = {"first step, s": plain.step(), "first watched step, s": watched.step()}
    times: list[tuple[float, float]] = []
    held = {}
    for number in range(2, steps + 1):
        times.append((plain.step(), watched.step()))
        if number in (steps // 5, steps):
            held[f"resident bytes after {number} steps"] = memory()
    assert watched.monitor is not None
    half = times[len(times) // 2 :]
    row = {
        "model": architecture,
        "steps": steps,
        **first,
        "step, ms": 1e3 * median(a for a, _ in half),
        "added, ms (mean)": 1e3 * sum(b - a for a, b in half) / len(half),
        "ratio of medians": median(b for _, b in half) / median(a for a, _ in half),
        "every": watched.monitor.every,
        "alarms": len(watched.monitor.alarms),
        "state": watched.monitor.state,
        **held,
    }
    watched.monitor.close()
    return row


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    logging.getLogger("conserved").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    script = "import time, torch; a = time.perf_counter(); import conserved; print(time.perf_counter() - a)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    record: dict[str, Any] = {"import after torch, s": float(done.stdout), "load": os.getloadavg()}
    record["rows"] = [measured("mlp", given.steps)]
    record["rows"] += [measured(name, given.others) for name in ("convolutional", "gpt", "llama", "lstm")]
    for row in record["rows"]:
        print(row, flush=True)
    print({key: value for key, value in record.items() if key != "rows"})
    if given.out is not None:
        print(save("harmless_cost", {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
