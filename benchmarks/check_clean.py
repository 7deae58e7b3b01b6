"""Checks of functions whose gradients are right, over random shapes and precisions: there must be no alarm.

python benchmarks/check_clean.py --checks 2000
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from conserved.auditing import check
from kernel_zoo import drawn
from measure import save


def main() -> None:
    """Run the checks, print every alarm, save the count and the ratios that came closest to one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    statuses: Counter[str] = Counter()
    alarms: list[dict[str, Any]] = []
    tests, closest = 0, {"identity": 0.0, "relation": 0.0, "slope": 0.0}
    for seed in range(chosen.first, chosen.first + chosen.checks):
        name, dtype, fn, inputs = drawn(seed)
        found = check(fn, *inputs, seed=seed)
        statuses[found.verdict.status.value] += 1
        tests += len(found.tests)
        for test in found.tests:
            if test.method.value in closest:
                closest[test.method.value] = max(closest[test.method.value], test.worst)
        near = [test for test in found.tests if 0.5 < test.worst <= 1]
        if near:
            print(
                f"  near: {seed} {name} {dtype} {near[0].worst:.2f} {near[0].method.value} {near[0].what}", flush=True
            )
        if found.failures:
            alarms.append({"seed": seed, "function": name, "dtype": str(dtype)[6:], "text": str(found)})
            print(f"{seed} {name} {dtype}\n{found}", flush=True)
        if (seed + 1) % 100 == 0:
            print(
                f"{seed + 1} checks, {len(alarms)} alarms, {time.perf_counter() - start:.0f} s, closest {closest}",
                flush=True,
            )
    record = {
        "checks": chosen.checks,
        "tests": tests,
        "alarms": alarms,
        "statuses": dict(statuses),
        "closest to the limit": closest,
        "seconds": time.perf_counter() - start,
    }
    print({key: value for key, value in record.items() if key != "alarms"}, len(alarms), "alarms")
    if chosen.checks >= 2000:
        print(f"saved {save('check_clean', record)}")


if __name__ == "__main__":
    main()
