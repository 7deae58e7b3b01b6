"""What the README's loop costs: an audit after every backward pass, its result read at once.

python benchmarks/watch_cost.py    # on a GPU 0.6 billion parameters at 4 × 2,048 tokens; small on a processor

Loops of several passes with and without audits are timed in turns, as whole loops: the host of an ordinary loop runs
ahead of the device, and an audit that is read makes it wait. `alone` is an audit with the device waited for before and
after, which no loop does. What a monitor costs, with its audits, is in step_overhead.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import nn

import conserved
from audit_cost import SIZES, build, seconds
from measure import RESULTS, save

PASSES, ROUNDS = 8, 9


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def loops(model: nn.Module, backward: Callable[[], None], device: str, rounds: int) -> dict[str, Any]:
    """Seconds of a pass, of one with an audit, and the share the audit adds, from loops in turns."""
    backward()
    first = seconds(lambda: conserved.audit(model).ok, device)

    def loop(audited: bool) -> None:
        for _ in range(PASSES):
            model.zero_grad()
            backward()
            if audited:
                assert conserved.audit(model).failures == ()

    loop(audited=True)
    plain, audited, shares, alone = [], [], [], []
    for _ in range(rounds):
        plain.append(seconds(lambda: loop(audited=False), device) / PASSES)
        audited.append(seconds(lambda: loop(audited=True), device) / PASSES)
        shares.append(audited[-1] / plain[-1] - 1)
        alone.append(seconds(lambda: conserved.audit(model).ok, device))
    model.zero_grad()
    forward = seconds(backward, device)
    return {
        "pass_seconds": spread(plain),
        "audited_pass_seconds": spread(audited),
        "added_share_of_pass": spread(shares),
        "alone_seconds": spread(alone),
        "first_call_seconds": first,
        "pass_with_device_waited_for_seconds": forward,
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {}
    for precision in ("bfloat16", "autocast", "float32") if device == "cuda" else ("float32",):
        began = time.perf_counter()
        model, backward, count = build(SIZES[device], device, precision)
        found = record[precision] = {"parameters": count, **loops(model, backward, device, options.rounds)}
        added, alone = found["added_share_of_pass"], found["alone_seconds"]["median"]
        print(
            f"{precision}: a pass {1e3 * found['pass_seconds']['median']:.1f} ms, an audit adds "
            f"{100 * added['median']:.2f} % [{100 * added['low']:.2f}, {100 * added['high']:.2f}], alone "
            f"{1e3 * alone:.2f} ms, the first {found['first_call_seconds']:.2f} s; {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        del model, backward
    print(save("watch_cost", {"loops": record, "passes_per_loop": PASSES}, options.out))


if __name__ == "__main__":
    main()
