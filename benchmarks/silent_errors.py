"""Silent errors of training and their correct twins, each with a default monitor: what is seen, when, and as what.

python benchmarks/silent_errors.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from measure import commit, machine, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conserved import Monitor
from error_programs import (
    flows,
    frameworks,
    gradients,
    loops,
    losses,
    processes,
    ranks,
    replicas,
    reports,
    runs,
    settings,
    states,
    structures,
    updates,
)
from error_programs.case import CASES, Case

PROGRAMS = (
    loops, updates, flows, settings, states, frameworks, replicas, processes,
    losses, gradients, structures, runs, ranks, reports,
)  # fmt: skip
"""The modules that fill the table."""


def alarms_of(monitor: Monitor) -> list[dict[str, Any]]:
    """Return the alarms of a run as plain data."""
    return [
        {
            "kind": a.kind,
            "code": a.code,
            "step": a.step,
            "tensor": a.tensor or a.law,
            "rank": a.rank,
            "message": a.message,
        }
        for a in monitor.alarms
    ]


def judge(one: Case, wrong: list[dict[str, Any]], right: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a monitor made of an error and of its twin."""
    named = [a for a in wrong if a["kind"] in one.kinds and re.search(one.words, a["message"], re.S)]
    return {
        "error": one.name,
        "source": one.source,
        "how": one.how,
        "why": one.why,
        "seen": bool(wrong),
        "named": bool(named),
        "first alarm is the cause": bool(wrong) and bool(named) and wrong[0] in named,
        "late": min((a["step"] for a in named), default=0) - one.at if named else None,
        "alarms": wrong,
        "twin": right,
    }


def run_alone(one: Case, seed: int = 0) -> dict[str, Any]:
    """Run an error and its twin in this process."""
    results = []
    for wrong in (True, False):
        torch.manual_seed(seed)
        results.append(alarms_of(one.program(wrong)))
    return judge(one, *results)


def _play(rank: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("conserved").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for one in CASES:
        if one.processes == 2 and one.name in names:
            for wrong in (True, False):
                found = alarms_of(one.program(wrong, rank))
                path = Path(folder) / f"{names.index(one.name)}.{wrong}.{rank}"
                path.write_text(json.dumps(found))
                dist.barrier()
    dist.destroy_process_group()


def run_together(cases: list[Case]) -> list[dict[str, Any]]:
    """Run errors between processes and their twins; what the first process says counts."""
    names = [one.name for one in cases]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_play, args=(folder, names), nprocs=2, start_method="spawn")
        rows = []
        for index, one in enumerate(cases):
            wrong, right = (json.loads((Path(folder) / f"{index}.{w}.0").read_text()) for w in (True, False))
            rows.append(judge(one, wrong, right))
    return rows


def main() -> None:
    """Run the table, print what is not as it should be, save all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a part of the names of errors")
    parser.add_argument("--modules", nargs="*", default=[], help="the modules of tests/error_programs to run")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("conserved").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    wanted = {f"error_programs.{name}" for name in given.modules}
    chosen = [one for one in CASES if given.only in one.name and (not wanted or one.program.__module__ in wanted)]
    began = time.perf_counter()
    rows = [run_alone(one) for one in chosen if one.processes == 1]
    together = [one for one in chosen if one.processes == 2]
    rows += run_together(together) if together else []
    for row in rows:
        good = row["how"] != "default" or (row["named"] and row["late"] is not None and row["late"] <= 1)
        if not good or row["twin"] or (row["how"] == "default" and not row["first alarm is the cause"]):
            print(
                row["error"],
                row["late"],
                [(a["step"], a["kind"], a["message"]) for a in row["alarms"]],
                "TWIN",
                row["twin"],
            )
    default = [row for row in rows if row["how"] == "default"]
    counts = Counter(
        "twin alarmed" if row["twin"] else "not seen" if not row["seen"] else "misnamed" if not row["named"]
        else "late" if row["late"] > 1 else "named within one step"
        for row in default
    )  # fmt: skip
    theirs = [row for row in rows if row["source"].startswith("TrainCheck:")]
    seen = sum(row["named"] for row in theirs)
    print(dict(counts), f"of TrainCheck's {len(theirs)}: {seen} by default", f"{time.perf_counter() - began:.0f} s")
    if given.out is not None:
        record = {"counts": counts, "traincheck": [len(theirs), seen], "load": os.getloadavg(), "rows": rows}
        print(save("silent_errors", {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
