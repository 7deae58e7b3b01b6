"""What the README's loop costs: an audit after every backward pass, its result read at once, or a pass later.

python benchmarks/watch_cost.py    # on a GPU 0.6 billion parameters at 4 × 2,048 tokens; small on a processor

Loops of several passes with and without audits are timed in turns, as whole loops: the host of an ordinary loop runs
ahead of the device, and an audit that is read makes it wait. `alone` is an audit with the device waited for before and
after, which no loop does, and `queued` the time until `audit(model, wait=False)` returns. What a monitor costs, with
its audits, is in step_overhead.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn

import conserved
from audit_cost import SIZES, build, seconds
from measure import RESULTS, save

PASSES, ROUNDS = 8, 9


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


WAYS = ("without", "at once", "later")
"""Whether passes are audited, and when the result is read: at once, or when that of the next pass is queued."""


def loops(model: nn.Module, forward: Callable[[], Tensor], device: str, rounds: int) -> dict[str, Any]:
    """Seconds of a pass, of one with an audit, and the shares the audit adds, from loops in turns."""
    forward().backward()
    first = seconds(lambda: conserved.audit(model).ok, device)

    def loop(way: str) -> None:
        before: conserved.Audit | None = None
        for _ in range(PASSES):
            model.zero_grad()
            forward().backward()
            if way == "without":
                continue
            result = conserved.audit(model, wait=way == "at once")
            read, before = (result, None) if way == "at once" else (before, result)
            assert read is None or read.failures == ()
        assert before is None or before.ok

    def forward_only() -> None:
        for _ in range(PASSES):
            forward()

    times: dict[str, list[float]] = {way: [] for way in (*WAYS, "forward", "alone", "queued")}
    for number in range(rounds + 1):
        taken = {way: seconds(lambda way=way: loop(way), device) / PASSES for way in WAYS}  # type: ignore[misc]
        taken["forward"] = seconds(forward_only, device) / PASSES
        taken["alone"] = seconds(lambda: conserved.audit(model).ok, device)
        began = time.perf_counter()
        later = conserved.audit(model, wait=False)
        taken["queued"] = time.perf_counter() - began
        assert later.ok
        for way, one in taken.items():
            times[way] += [one] if number else []
    added = {way: [b - a for a, b in zip(times["without"], times[way], strict=True)] for way in WAYS[1:]}
    backward = [whole - part for whole, part in zip(times["without"], times["forward"], strict=True)]

    def shares(of: list[float]) -> dict[str, dict[str, float]]:
        return {way: spread([a / b for a, b in zip(added[way], of, strict=True)]) for way in added}

    return {
        "pass_seconds": spread(times["without"]),
        "forward_seconds": spread(times["forward"]),
        "backward_seconds": spread(backward),
        "audited_pass_seconds": {way: spread(times[way]) for way in added},
        "added_seconds": {way: spread(added[way]) for way in added},
        "added_share_of_pass": shares(times["without"])["at once"],
        "added_share_of_pass_read_later": shares(times["without"])["later"],
        "added_share_of_backward": shares(backward),
        "alone_seconds": spread(times["alone"]),
        "host_seconds_until_queued": spread(times["queued"]),
        "first_call_seconds": first,
    }


def said(precision: str, result: dict[str, Any]) -> str:
    """One line for the terminal."""
    parts = [f"{precision}: a pass {1e3 * result['pass_seconds']['median']:.1f} ms"]
    parts.append(f"{1e3 * result['backward_seconds']['median']:.1f} of it backward")
    for way in WAYS[1:]:
        share, added = result["added_share_of_backward"][way], result["added_seconds"][way]["median"]
        parts.append(
            f"an audit read {way} adds {1e3 * added:.2f} ms, {100 * share['median']:.2f} % "
            f"[{100 * share['low']:.2f}, {100 * share['high']:.2f}] of the backward"
        )
    parts.append(f"alone {1e3 * result['alone_seconds']['median']:.2f} ms")
    parts.append(f"queued by the host in {1e3 * result['host_seconds_until_queued']['median']:.2f} ms")
    return "; ".join(parts)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--precision", action="append", choices=["bfloat16", "autocast", "float32"], help="only these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {}
    every = ["bfloat16", "autocast", "float32"] if device == "cuda" else ["float32"]
    for precision in options.precision or every:
        model, forward, count = build(SIZES[device], device, precision)
        result = record[precision] = {"parameters": count, **loops(model, forward, device, options.rounds)}
        print(said(precision, result), flush=True)
        del model, forward
    print(save("watch_cost", {"loops": record, "passes_per_loop": PASSES}, options.out))


if __name__ == "__main__":
    main()
