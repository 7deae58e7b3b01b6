"""Checks of functions whose gradients are right, over random shapes and precisions: there must be no alarm.

    python benchmarks/check_clean.py --checks 2000

Parts can run one after another, and the record is made of them:

    python benchmarks/check_clean.py --checks 1000 --out first
    python benchmarks/check_clean.py --checks 1000 --first 1000 --out second
    python benchmarks/check_clean.py --merge first/check_clean_cpu_*.json second/check_clean_cpu_*.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
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
    parser.add_argument("--merge", type=Path, nargs="+", help="records of parts to put together; nothing is run")
    chosen = parser.parse_args()
    if chosen.merge:
        merge([json.loads(file.read_text()) for file in chosen.merge], chosen.out)
        return
    start = time.perf_counter()
    share = -(-chosen.checks // (chosen.workers * 4))
    firsts = list(range(chosen.first, chosen.first + chosen.checks, share))
    sizes = [min(share, chosen.first + chosen.checks - first) for first in firsts]
    end = time.time() + 60 * chosen.minutes
    work = [(first, size, chosen.device, end) for first, size in zip(firsts, sizes, strict=True)]
    with get_context("spawn").Pool(chosen.workers) as pool:
        parts = pool.starmap(run, work, 1)
    record = combined(parts) | {
        "seeds": [chosen.first, chosen.first + chosen.checks - 1],
        "where": chosen.device,
        "seconds": time.perf_counter() - start,
        "workers": chosen.workers,
    }
    print({key: value for key, value in record.items() if key != "alarms"}, len(record["alarms"]), "alarms")
    if record["checks"] >= 500 or chosen.out != RESULTS:
        print(f"saved {save('check_clean', record, chosen.out)}")


LINES = ("identity", "relation", "derivative")


def combined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts, alarms and closest ratios of several parts together."""
    statuses: Counter[str] = Counter()
    for part in parts:
        statuses.update(part["statuses"])
    return {
        "checks": sum(part["checks"] for part in parts),
        "tests": sum(part["tests"] for part in parts),
        "alarms": [alarm for part in parts for alarm in part["alarms"]],
        "statuses": dict(statuses),
        "closest to the limit": {line: max(part["closest to the limit"][line] for part in parts) for line in LINES},
    }


def merge(records: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Save one record of several, with the seeds and the commit of each."""
    record = combined(records) | {
        "where": records[0]["where"],
        "seconds": sum(record["seconds"] for record in records),
        "workers": records[0]["workers"],
        "parts": [{key: record.get(key) for key in ("date", "commit", "seeds", "checks")} for record in records],
    }
    print({key: value for key, value in record.items() if key != "alarms"}, len(record["alarms"]), "alarms")
    print(f"saved {save('check_clean', record, out)}")


if __name__ == "__main__":
    main()
