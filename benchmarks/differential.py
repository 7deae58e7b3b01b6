"""Random programs and functions by PyTorch with autograd, floats, balls and the second checker: do all four agree?"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from conserved.discovery import UnsuitableError
from measure import save
from random_functions import compared, random_function
from random_programs import Compared, compare, random_case

CAMPAIGNS = {
    "programs: value and gradient": (0, "programs"),
    "programs: brackets of two fields": (100_000, "brackets"),
    "programs: brackets of three fields": (200_000, "triples"),
    "functions in PyTorch: value and gradient": (300_000, "functions"),
}
"""What is compared, the first seed, and the option that says how many."""

CHUNK = 100


def one(what: str, seed: int, used: Counter[str]) -> Compared:
    """One random program or function, run four ways."""
    if what.startswith("functions"):
        written = random_function(seed)
        result = compared(written)
        used.update(written.used)
        return result
    case = random_case(seed, steps=12)
    used.update(node.op for node in case.program.nodes)
    return compare(case, brackets=1 if "two" in what else 2 if "three" in what else 0)


def chunk(job: tuple[str, range]) -> dict[str, Any]:
    """Several comparisons: how many were made, left open or refused by all, and which disagreed."""
    what, seeds = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    used: Counter[str] = Counter()
    outcome: dict[str, Any] = {
        "compared": 0,
        "open": 0,
        "refused": 0,
        "undefined": 0,
        "no_program": 0,
        "disagreements": [],
    }
    start = time.perf_counter()
    for seed in seeds:
        try:
            result = one(what, seed, used)
        except UnsuitableError:
            outcome["no_program"] += 1
            continue
        outcome["open"] += result.open
        outcome["refused"] += result.refused
        outcome["undefined"] += result.undefined
        outcome["compared"] += not (result.open or result.refused or result.undefined)
        if result.disagreements:
            outcome["disagreements"].append({"seed": seed, "first": result.disagreements[0]})
    return outcome | {"what": what, "seconds": time.perf_counter() - start, "operators": used}


def main() -> None:
    """Run the campaigns and store what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_500)
    parser.add_argument("--brackets", type=int, default=1_200)
    parser.add_argument("--triples", type=int, default=100)
    parser.add_argument("--functions", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    chosen = vars(parser.parse_args())
    jobs = [
        (what, range(at, min(at + CHUNK, first + chosen[option])))
        for what, (first, option) in CAMPAIGNS.items()
        for at in range(first, first + chosen[option], CHUNK)
    ]
    jobs.sort(key=lambda job: not job[0].startswith("functions"))
    rows: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(chosen["workers"], mp_context=get_context("spawn")) as pool:
        for done, part in enumerate(pool.map(chunk, jobs), 1):
            row = rows.setdefault(part["what"], {"what": part["what"], "operators": Counter(), "disagreements": []})
            for key in ("compared", "open", "refused", "undefined", "no_program", "seconds"):
                row[key] = row.get(key, 0) + part[key]
            row["operators"] += part["operators"]
            row["disagreements"] += part["disagreements"]
            print(f"{done} of {len(jobs)}: {part['what']}, {len(part['disagreements'])} disagreements", flush=True)
    ordered = [
        rows[what] | {"operators": dict(sorted(rows[what]["operators"].items()))} for what in CAMPAIGNS if what in rows
    ]
    print(save("differential", {"rows": ordered}))


if __name__ == "__main__":
    main()
