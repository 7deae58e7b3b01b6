"""Checks of functions whose gradients are right, over random shapes and precisions: there must be no alarm.

python benchmarks/check_clean.py --checks 2000
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from conserved.checking import check
from kernel_zoo import drawn
from measure import RESULTS, save


def run(first: int, checks: int, device: str, end: float = float("inf")) -> dict[str, Any]:
    """Some of the checks, one after another, until a time of the clock."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    statuses: Counter[str] = Counter()
    alarms: list[dict[str, Any]] = []
    tests, closest = 0, {"identity": 0.0, "relation": 0.0, "derivative": 0.0}
    done = 0
    for seed in range(first, first + checks):
        if time.time() > end:
            break
        done += 1
        name, dtype, fn, inputs = drawn(seed)
        result = check(
            fn, *(value.to(device) if isinstance(value, torch.Tensor) else value for value in inputs), seed=seed
        )
        statuses[result.verdict.status.value] += 1
        tests += len(result.tests)
        for test in result.tests:
            if test.method.value in closest:
                closest[test.method.value] = max(closest[test.method.value], test.worst)
        near = [test for test in result.tests if 0.5 < test.worst <= 1]
        if near:
            print(
                f"  near: {seed} {name} {dtype} {near[0].worst:.2f} {near[0].method.value} {near[0].what}", flush=True
            )
        if result.failures:
            alarms.append({"seed": seed, "function": name, "dtype": str(dtype)[6:], "text": str(result)})
            print(f"{seed} {name} {dtype}\n{result}", flush=True)
        if (seed + 1) % 50 == 0:
            print(f"from {first}: {done} checks, {len(alarms)} alarms, {time.perf_counter() - start:.0f} s", flush=True)
    return {
        "checks": done,
        "tests": tests,
        "alarms": alarms,
        "statuses": dict(statuses),
        "closest to the limit": closest,
    }


def main() -> None:
    """Run the checks, print every alarm, save the count and the ratios that came closest to one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further check after that")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    start = time.perf_counter()
    share = -(-chosen.checks // (chosen.workers * 4))
    firsts = list(range(chosen.first, chosen.first + chosen.checks, share))
    sizes = [min(share, chosen.first + chosen.checks - first) for first in firsts]
    end = time.time() + 60 * chosen.minutes
    work = [(first, size, chosen.device, end) for first, size in zip(firsts, sizes, strict=True)]
    with get_context("spawn").Pool(chosen.workers) as pool:
        parts = pool.starmap(run, work, 1)
    statuses: Counter[str] = Counter()
    for part in parts:
        statuses.update(part["statuses"])
    alarms = [alarm for part in parts for alarm in part["alarms"]]
    lines = ("identity", "relation", "derivative")
    record = {
        "checks": sum(part["checks"] for part in parts),
        "where": chosen.device,
        "tests": sum(part["tests"] for part in parts),
        "alarms": alarms,
        "statuses": dict(statuses),
        "closest to the limit": {line: max(part["closest to the limit"][line] for part in parts) for line in lines},
        "seconds": time.perf_counter() - start,
        "workers": chosen.workers,
    }
    print({key: value for key, value in record.items() if key != "alarms"}, len(alarms), "alarms")
    if record["checks"] >= 500:
        print(f"saved {save('check_clean', record, chosen.out)}")


if __name__ == "__main__":
    main()
