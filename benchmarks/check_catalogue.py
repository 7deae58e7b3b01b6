"""The share of planted defects that conserved.check sees, by line of defence, in float32 and bfloat16.

Defects of `broken_kernels`, and those of `hidden_defects`, which sit in tails, last blocks, single rows and rare
inputs. The latter are also planted into functions that run in bfloat16 alone, as many kernels do: these have no more
precise form.

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
from conserved.auditing import Check, Method, check
from hidden_defects import HIDDEN, Hidden, hidden_function, hidden_inputs, names_of
from measure import save

LINES = {Method.PRESENCE: "1", Method.IDENTITY: "2", Method.RELATION: "3", Method.SLOPE: "4"}


def seen_by(planted: Planted, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Which lines of defence see a defect, and what the check says."""
    found = check(
        kernel(planted.family, planted.defect),
        *inputs_for(planted.family, dtype, seed),
        names=FAMILIES[planted.family].names,
    )
    return _row(found)


def _row(found: Check) -> dict[str, Any]:
    lines = {LINES[test.method] for test in found.failures}
    return {
        "lines": sorted(lines),
        "meaning": next((test.meaning for test in found.failures if test.meaning), ""),
        "where": next((test.where for test in found.failures if test.where), ""),
        "unseen": "" if lines else found.unseen,
        "seconds": found.seconds,
        "suspects": found.suspects,
    }


def hidden_seen_by(hidden: Hidden, dtype: torch.dtype, seed: int, *, alone: bool) -> dict[str, Any]:
    """The same for a defect that hides; `alone` for a function that runs in this precision only."""
    function = hidden_function(hidden, only=dtype if alone else None)
    found = check(function, *hidden_inputs(hidden.function, dtype, seed), names=names_of(hidden.function))
    return {"kind": hidden.kind, **_row(found)}


def _share(rows: list[dict[str, Any]]) -> float:
    return sum(bool(row["lines"]) for row in rows) / max(len(rows), 1)


def _hiding(only: str, seeds: int, end: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    forms = ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    for hidden in HIDDEN:
        if only not in hidden.name:
            continue
        for dtype, alone in forms:
            for seed in range(seeds):
                if time.time() > end:
                    return rows
                form = f"{str(dtype)[6:]}{' alone' if alone else ''}"
                row = {"name": hidden.name, "form": form, **hidden_seen_by(hidden, dtype, seed, alone=alone)}
                rows.append(row)
                print(f"{form:<15} {hidden.name:<60} {','.join(row['lines']) or 'none':<8} {row['unseen']}", flush=True)
    return rows


def main() -> None:
    """Measure, print the shares and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further check after that")
    parser.add_argument("--hidden", action="store_true", help="only the defects that hide")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    end = time.time() + 60 * chosen.minutes
    for planted in () if chosen.hidden else CATALOGUE:
        if chosen.only not in planted.name or time.time() > end:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for seed in range(chosen.seeds):
                row = {"name": planted.name, "dtype": str(dtype)[6:], "seed": seed, **seen_by(planted, dtype, seed)}
                rows.append(row)
                print(
                    f"{row['dtype']:<9} {planted.name:<60} {','.join(row['lines']) or 'none':<8} {row['meaning'][:70]}",
                    flush=True,
                )
    hiding = _hiding(chosen.only, chosen.seeds, end)
    shares: dict[str, dict[str, float]] = {}
    for kind in ("float32", "bfloat16"):
        mine = [row for row in rows if row["dtype"] == kind]
        shares[kind] = {line: sum(line in row["lines"] for row in mine) / max(len(mine), 1) for line in "1234"}
        shares[kind]["all"] = sum(bool(row["lines"]) for row in mine) / max(len(mine), 1)
        print(kind, {line: f"{share:.1%}" for line, share in shares[kind].items()})
    for how in ("float32", "bfloat16", "bfloat16 alone"):
        mine = [row for row in hiding if row["form"] == how]
        kinds = sorted({row["kind"] for row in mine})
        shares[f"hidden, {how}"] = {"all": sum(bool(row["lines"]) for row in mine) / max(len(mine), 1)} | {
            kind: _share([row for row in mine if row["kind"] == kind]) for kind in kinds
        }
        print("hidden", how, {kind: f"{share:.1%}" for kind, share in shares[f"hidden, {how}"].items()})
    record = {
        "hidden defects": len(HIDDEN),
        "checks": len(rows) + len(hiding),
        "defects": len(CATALOGUE),
        "families": len(FAMILIES),
        "shares": shares,
        "seconds": time.perf_counter() - start,
    }
    if not chosen.only:
        title = "check_hidden" if chosen.hidden else "check_catalogue"
        print(f"saved {save(title, record | {'rows': rows, 'hidden': hiding})}")


if __name__ == "__main__":
    main()
