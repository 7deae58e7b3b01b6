"""A default monitor on parallel stacks: does every correct run stay silent, with the laws of one process?

    python benchmarks/stack_table.py [PATTERN …] [--stack MODULE …] [--unwatched] [--keep]

Every configuration runs with two or four processes of gloo, each pair forked anew. A stack is a module of this folder
that registers configurations; those of a package need it on the path (`pip install --no-deps --target FOLDER
torchtitan==0.2.2`, and what it imports beside it). Without a monitor, runs show what the package does by itself.
Long tables are made in parts: with `--keep`, configurations that today's file has are not run again. Every row says
which commit it was measured on.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import conserved
from measure import RESULTS, commit, machine, save, save_path
from stack_configurations import CONFIGURATIONS

STEPS = 6
LONGEST = float(os.environ.get("STACK_SECONDS", "120"))
"""Seconds after which a run counts as hanging."""


def work(rank: int, world: int, name: str, folder: str, modules: list[str], watched: bool) -> None:
    """Train with a default monitor as one of several processes, and write what it said to a file."""
    log = open(f"{folder}/{rank}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(LONGEST - 5, exit=True)
    torch.set_num_threads(1)
    if os.environ.get("STACK_LOGS"):
        # Conditions of the monitor come with the traceback of what failed inside.
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("conserved").setLevel(logging.DEBUG)
    result: dict[str, Any] = {"rank": rank}
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
        for module in modules:
            importlib.import_module(module)
        result |= train(name, rank, world, watched=watched)
    except BaseException as problem:
        # A benchmark reports whatever a run raises.
        result["error"] = repr(problem)[:300]
        traceback.print_exc()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))
    log.flush()
    os._exit(0)


def train(name: str, rank: int, world: int, *, watched: bool) -> dict[str, Any]:
    """Train a configuration with the two lines of a default monitor, or without them."""
    training = CONFIGURATIONS[name][1](rank, world)
    monitor = conserved.Monitor(training.model, training.optimizer) if watched else None
    seconds = []
    for number in range(STEPS):
        began = time.perf_counter()
        training.step(number)
        if monitor is not None:
            monitor.step()
        seconds.append(time.perf_counter() - began)
    median = sorted(seconds[1:])[len(seconds) // 2 - 1]
    if monitor is None:
        return {"step_seconds": median}
    last = monitor.last_audit
    record = {
        "laws": len(monitor.laws),
        "tested": 0 if last is None else last.tested,
        "coverage": None if last is None else last.coverage.parameters,
        "summary": "" if last is None else str(last.coverage).splitlines()[0],
        "verdict": "" if last is None else last.verdict.message,
        "bytes_sent": None if last is None else last.moved_bytes,
        "verdicts": [entry.status for entry in monitor.audits],
        "alarms": [
            {
                "step": alarm.step,
                "code": alarm.code,
                "law": alarm.law,
                "tensor": alarm.tensor,
                "rank": alarm.rank,
                "message": alarm.message,
            }
            for alarm in monitor.alarms
        ],
        "state": monitor.state,
        "step_seconds": median,
    }
    monitor.close()
    return record


def run(name: str, world: int, modules: list[str], *, watched: bool = True) -> dict[str, Any]:
    """Run a configuration and return what its processes said; the first speaks for laws and verdict."""
    folder = tempfile.mkdtemp(prefix="stack-")
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=work, args=(rank, world, name, folder, modules, watched)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    end = time.time() + LONGEST
    for process in processes:
        process.join(max(0.1, end - time.time()))
    hangs = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    logs = {rank: Path(f"{folder}/{rank}.log") for rank in range(world)}
    if hangs or os.environ.get("STACK_LOGS"):
        for rank, log in logs.items():
            print(f"--- rank {rank}\n{log.read_text()[-4000:] if log.exists() else ''}")
    files = [Path(f"{folder}/{rank}.json") for rank in range(world)]
    text: list[dict[str, Any]] = [
        json.loads(one.read_text()) if one.exists() else {"error": "no result"} for one in files
    ]
    errors = [one["error"] for one in text if "error" in one]
    alarms = [alarm | {"reported_by": rank} for rank, one in enumerate(text) for alarm in one.get("alarms", [])]
    return {"processes": world, "hangs": hangs, "errors": errors, **text[0], "alarms": alarms}


def saved_rows(name: str, folder: Path) -> dict[str, Any]:
    """Return the configurations of today's file, or none."""
    path = save_path(name, folder)
    rows: dict[str, Any] = json.loads(path.read_text())["configurations"] if path.exists() else {}
    return rows


def main() -> None:
    """Run all configurations, or those whose names match a pattern, and save the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--stack", action="append", default=[], help="modules that register configurations")
    parser.add_argument("--unwatched", action="store_true", help="train without a monitor")
    parser.add_argument("--ratio", action="store_true", help="train without a monitor as well, for the ratio of steps")
    parser.add_argument("--keep", action="store_true", help="add to today's file what it does not have")
    parser.add_argument("--name", default="stack_table")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    modules = given.stack or ["stack_configurations", "stack_by_hand"]
    for module in modules:
        importlib.import_module(module)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conserved.tracking", "conserved.auditing", *modules])
    rows: dict[str, Any] = saved_rows(given.name, given.out) if given.keep else {}
    path = save_path(given.name, given.out)
    for name, (world, _) in CONFIGURATIONS.items():
        if name in rows or (given.patterns and not any(fnmatch(name, pattern) for pattern in given.patterns)):
            continue
        row = rows[name] = {"commit": commit()} | run(name, world, modules, watched=not given.unwatched)
        if given.ratio:
            row["plain_step_seconds"] = run(name, world, modules, watched=False).get("step_seconds")
        status = "hangs" if row["hangs"] else "error" if row["errors"] else f"{len(row['alarms'])} alarms"
        print(f"{name} [{world}]: {status}, {row.get('laws')} laws, {row.get('verdicts')}, {row.get('summary')}")
        if row.get("verdicts") and row["verdicts"][-1] != "verified":
            print(f"    {row['verdict'][:600]}", flush=True)
        if row.get("state") not in (None, "watching"):
            print(f"    {row['state'][:300]}", flush=True)
        for error in row["errors"][:1]:
            print(f"    {error}", flush=True)
        for alarm in row["alarms"][:3]:
            print(
                f"    rank {alarm['rank']} step {alarm['step']} {alarm['code']}: {alarm['message'][:200]}", flush=True
            )
        # After every configuration: a table that is stopped keeps what it has.
        record = {"commit": commit(), "machine": machine(), "steps": STEPS, "configurations": rows}
        save(given.name, record, given.out)
    print(path)


if __name__ == "__main__":
    main()
