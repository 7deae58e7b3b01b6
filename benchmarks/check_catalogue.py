"""The share of planted defects that conserved.check sees, by line of defence, in float32 and bfloat16.

python benchmarks/check_catalogue.py [--seeds 1]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from broken_kernels import CATALOGUE, FAMILIES, Planted, inputs_for, kernel
from conserved.auditing import Method, check
from measure import save

LINES = {Method.PRESENCE: "1", Method.IDENTITY: "2", Method.RELATION: "3", Method.SLOPE: "4"}


def seen_by(planted: Planted, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Which lines of defence see a defect, and what the check says."""
    found = check(
        kernel(planted.family, planted.defect),
        *inputs_for(planted.family, dtype, seed),
        names=FAMILIES[planted.family].names,
    )
    lines = {LINES[test.method] for test in found.failures}
    told = next((test.meaning for test in found.failures if test.meaning), "")
    where = next((test.where for test in found.failures if test.where), "")
    return {
        "lines": sorted(lines),
        "meaning": told,
        "where": where,
        "seconds": found.seconds,
        "suspects": found.suspects,
    }


def main() -> None:
    """Measure, print the shares and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for planted in CATALOGUE:
        if chosen.only not in planted.name:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for seed in range(chosen.seeds):
                row = {"name": planted.name, "dtype": str(dtype)[6:], "seed": seed, **seen_by(planted, dtype, seed)}
                rows.append(row)
                print(
                    f"{row['dtype']:<9} {planted.name:<60} {','.join(row['lines']) or 'none':<8} {row['meaning'][:70]}",
                    flush=True,
                )
    shares: dict[str, dict[str, float]] = {}
    for kind in ("float32", "bfloat16"):
        mine = [row for row in rows if row["dtype"] == kind]
        shares[kind] = {line: sum(line in row["lines"] for row in mine) / max(len(mine), 1) for line in "1234"}
        shares[kind]["all"] = sum(bool(row["lines"]) for row in mine) / max(len(mine), 1)
        print(kind, {line: f"{share:.1%}" for line, share in shares[kind].items()})
    record = {
        "defects": len(CATALOGUE),
        "families": len(FAMILIES),
        "shares": shares,
        "seconds": time.perf_counter() - start,
    }
    if not chosen.only:
        print(f"saved {save('check_catalogue', record | {'rows': rows})}")


if __name__ == "__main__":
    main()
