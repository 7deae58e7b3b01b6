"""Silent errors of training and their correct twins, each with a default monitor: what is seen, when, and as what.

    python benchmarks/silent_errors.py --rows rows.jsonl --out benchmarks/results

With `--rows` every row is written when it is there, and rows of the file are not run again. An error that raises no
alarm counts as shown by a line where the lines that a monitor says at the start and at the end of the wrong run and of
its twin differ in words, numbers left out. One that no alarm shows is run again with `check_scale` called in its first
step; without a line, it counts as seen by a call where that refutes the wrong gradient and not the twin's.
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
    details,
    faults,
    flows,
    forum,
    forum_pairs,
    frameworks,
    gradients,
    habits,
    kernels,
    loops,
    losses,
    mixtures,
    pairs,
    patches,
    peers,
    processes,
    ranks,
    replicas,
    reports,
    restarts,
    runs,
    settings,
    states,
    structures,
    surroundings,
    tasks,
    trainers,
    training,
    updates,
)
from error_programs.case import CASES, Case
from error_programs.reasons import reason_for

PROGRAMS = (
    loops, updates, flows, settings, states, frameworks, replicas, processes,
    losses, gradients, structures, runs, ranks, reports,
    habits, kernels, restarts, peers, details, trainers, tasks, pairs,
    mixtures, patches, faults, forum, forum_pairs, surroundings,
)  # fmt: skip
"""The modules that fill the table."""


def alarms_of(monitor: Monitor) -> list[dict[str, Any]]:
    """Return the alarms of a run as plain data, and its statements after them."""
    return [
        {
            "kind": a.kind,
            "code": a.code,
            "step": a.step,
            "tensor": a.tensor or a.law,
            "rank": a.rank,
            "message": a.message,
            "certain": a.certain,
        }
        for a in sorted((*monitor.alarms, *monitor.statements), key=lambda a: (a.step, not a.certain))
    ]


class Lines(logging.Handler):
    """Keeps the lines that monitors say."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("conserved")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        taken, self.lines = self.lines, []
        return taken


def told_apart(wrong: list[str], right: list[str]) -> list[str]:
    """Return parts of the lines of the wrong run that the right one has not, numbers and alarms left out."""

    def parts(lines: list[str]) -> dict[str, str]:
        text = [line.removeprefix("conserved: ") for line in lines if line.startswith("conserved: ")]
        pieces = [part.strip() for line in text for part in line.split(";")]
        return {re.sub(r"\d[\d.,e+-]*", "0", part): part for part in pieces}

    known = parts(right)
    usual = re.compile("laws|alarm|audit|ms a step|visible|see little|so far|took")
    return [part for key, part in parts(wrong).items() if key not in known and not usual.search(part)]


def judge(
    one: Case, wrong: list[dict[str, Any]], right: list[dict[str, Any]], lines: tuple[list[str], list[str]]
) -> dict[str, Any]:
    """Return what a monitor made of an error and of its twin."""
    # What is stated of the right program too says nothing about the error.
    also = {a["code"] for a in right if not a["certain"]}
    wrong = [a for a in wrong if a["certain"] or a["code"] not in also]
    named = [a for a in wrong if a["kind"] in one.kinds and re.search(one.words, a["message"], re.S)]
    return {
        "error": one.name,
        "source": one.source,
        "module": one.program.__module__.removeprefix("error_programs."),
        "how": one.how,
        "processes": one.processes,
        "why": one.why or reason_for(one.name),
        "line": told_apart(*lines),
        "as": "alarm" if any(a["certain"] for a in named) else "statement" if named else "",
        "seen": bool(wrong),
        "named": bool(named),
        "first alarm is the cause": bool(wrong) and bool(named) and wrong[0] in named,
        "late": min((a["step"] for a in named), default=0) - one.at if named else None,
        "alarms": wrong,
        "twin": [a for a in right if a["certain"]],
        "stated of the twin": [a for a in right if not a["certain"]],
    }


def run_alone(one: Case, seed: int = 0) -> dict[str, Any]:
    """Run an error and its twin in this process."""
    listener = Lines()
    results, lines = [], []
    for wrong in (True, False):
        torch.manual_seed(seed)
        results.append(alarms_of(one.program(wrong)))
        lines.append(listener.take())
    logging.getLogger("conserved").removeHandler(listener)
    row = judge(one, results[0], results[1], (lines[0], lines[1]))
    if not row["seen"] and one.how in ("default", "call"):
        row["call"] = refuted_by_call(one, seed)
    return row


def refuted_by_call(one: Case, seed: int) -> bool:
    """Return whether `check_scale` in the first step refutes the gradient of an error and not that of its twin."""
    answers = []
    for wrong in (True, False):
        torch.manual_seed(seed)
        training.CHECKED = []
        try:
            one.program(wrong)
        except Exception as problem:  # a loss that cannot be computed a second time
            print(f"check_scale was not called for {one.name}: {problem}")
            return False
        finally:
            answers.append(training.CHECKED == [True])
            training.CHECKED = None
    return answers == [True, False]


def _play(rank: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    listener = Lines()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for one in CASES:
        if one.processes == 2 and one.name in names:
            for wrong in (True, False):
                result = alarms_of(one.program(wrong, rank))
                path = Path(folder) / f"{names.index(one.name)}.{wrong}.{rank}"
                path.write_text(json.dumps([result, listener.take()]))
                dist.barrier()
    dist.destroy_process_group()


def run_together(cases: list[Case]) -> list[dict[str, Any]]:
    """Run errors between processes and their twins; what the first process says counts."""
    names = [one.name for one in cases]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_play, args=(folder, names), nprocs=2, start_method="spawn")
        rows = []
        for index, one in enumerate(cases):
            (wrong, text), (right, also) = (
                json.loads((Path(folder) / f"{index}.{w}.0").read_text()) for w in (True, False)
            )
            rows.append(judge(one, wrong, right, (text, also)))
    return rows


def outcome(row: dict[str, Any]) -> str:
    """Return what is counted of a row."""
    if row["twin"]:
        return "twin alarmed"
    if row["how"] != "default":
        return row["how"]
    if not row["seen"]:
        return "shown by a line" if row["line"] else "call" if row.get("call") else "not seen"
    if not row["named"]:
        return "misnamed"
    return "late" if row["late"] > 1 else "named within one step"


def main() -> None:
    """Run the table, print what is not as it should be, save all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a part of the names of errors")
    parser.add_argument("--modules", nargs="*", default=[], help="the modules of tests/error_programs to run")
    parser.add_argument("--rows", type=Path, default=None, help="a file of rows that are there, to which others go")
    parser.add_argument("--name", default="silent_errors")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = {f"error_programs.{name}" for name in given.modules}
    chosen = [one for one in CASES if given.only in one.name and (not wanted or one.program.__module__ in wanted)]
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    if given.rows is not None and given.rows.exists():
        rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    done = {row["error"] for row in rows}

    def keep(fresh: list[dict[str, Any]]) -> None:
        rows.extend(fresh)
        for row in fresh:
            if outcome(row) != "named within one step" or not row["first alarm is the cause"]:
                alarms = [(a["step"], a["kind"], a["message"]) for a in row["alarms"]]
                print(f"{outcome(row)}: {row['error']}", alarms, row["line"], "TWIN", row["twin"], flush=True)
        if given.rows is not None:
            with given.rows.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in fresh)

    for one in chosen:
        if one.processes == 1 and one.name not in done:
            keep([run_alone(one)])
    together = [one for one in chosen if one.processes == 2 and one.name not in done]
    keep(run_together(together) if together else [])
    counts = Counter(map(outcome, rows))
    theirs = [row for row in rows if row["source"].startswith("TrainCheck:")]
    seen = sum(row["named"] for row in theirs)
    ways = Counter(row.get("as", "alarm") for row in rows if row["named"])
    took = f"{time.perf_counter() - began:.0f} s"
    print(dict(counts), dict(ways), f"of TrainCheck's {len(theirs)}: {seen} by default", took)
    if given.out is not None:
        record = {"counts": counts, "named as": ways, "traincheck": [len(theirs), seen], "load": os.getloadavg()}
        record |= {"rows": rows}
        print(save(given.name, {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
