"""What watching costs: the README's audit in a loop, read at once or later, and a monitor with its audits.

python benchmarks/watch_cost.py               # on a GPU 0.6 billion parameters in bfloat16; small on a processor
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

import conserved
from audit_cost import SIZES, build
from measure import save

ROUNDS = 20


def timed(step: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each call, with the device waited for at both ends."""
    found = []
    for _ in range(rounds):
        _wait()
        began = time.perf_counter()
        step()
        _wait()
        found.append(time.perf_counter() - began)
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles in milliseconds."""
    low, middle, high = quantiles(seconds, n=4)
    return {"median_ms": 1e3 * middle, "low_ms": 1e3 * low, "high_ms": 1e3 * high}


def audits(model: nn.Module, backward: Callable[[], None], rounds: int) -> dict[str, Any]:
    """The loop of the README: an audit after every backward pass, its result read."""
    model.zero_grad()
    backward()
    first = timed(lambda: conserved.audit(model).ok, 1)[0]
    plain, alone = [], []
    for _ in range(rounds):
        model.zero_grad()
        plain += timed(backward, 1)
        alone += timed(lambda: conserved.audit(model).ok, 1)
    ratio = [a / p for a, p in zip(alone, plain, strict=True)]
    return {
        "forward_and_backward": spread(plain),
        "audit": spread(alone),
        "first_call_ms": 1e3 * first,
        "share_of_pass": median(ratio),
        "shares": ratio,
    }


def monitored(
    model: nn.Module, backward: Callable[[], None], make: Callable[[], torch.optim.Optimizer], rounds: int
) -> dict[str, Any]:
    """Whole steps with and without a monitor, in turns."""
    optimizer = make()

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    for _ in range(3):
        step()
    without, with_ = [], []
    shares = []
    for _ in range(3):
        before = timed(step, rounds)
        monitor = conserved.Monitor(model, optimizer)

        def watched(monitor: conserved.Monitor = monitor) -> None:
            step()
            monitor.step()

        for _ in range(5):
            watched()
        after = timed(watched, rounds)
        every = [entry.step for entry in monitor.audits]
        monitor.close()
        shares.append(sum(after) / sum(before) - 1)
        without += before
        with_ += after
    return {
        "plain": spread(without),
        "watched": spread(with_),
        "shares": shares,
        "share": median(shares),
        "audited_steps": every,
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = "bfloat16" if device == "cuda" else "float32"
    model, backward, count = build(SIZES[device], device, precision)
    record: dict[str, Any] = {
        "parameters": count,
        "precision": precision,
        "audit": audits(model, backward, options.rounds),
    }
    for name, make in {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=1e-4),
        "AdamW": lambda: torch.optim.AdamW(model.parameters(), lr=1e-5),
    }.items():
        record[name] = monitored(model, backward, make, options.rounds)
    for name in ("audit", "SGD", "AdamW"):
        share = record[name]["share_of_pass" if name == "audit" else "share"]
        print(f"{name}: {100 * share:.2f} %, {[round(100 * one, 2) for one in record[name]['shares'][:5]]}")
    if options.out:
        save("watch_cost", record, options.out)


if __name__ == "__main__":
    main()
