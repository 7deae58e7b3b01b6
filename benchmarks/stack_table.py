"""A default monitor on parallel stacks: does every correct run stay silent, with the laws of one process?

    python benchmarks/stack_table.py [PATTERN …] [--torchtitan]

Every configuration runs with two or four processes of gloo, each pair forked anew. Runs of torchtitan need it on the
path (`pip install --no-deps --target FOLDER torchtitan==0.2.2`, and tyro, torchdata, datasets beside it).
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
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
from measure import commit, machine, save
from stack_configurations import CONFIGURATIONS

STEPS = 6
LONGEST = 120.0
"""Seconds after which a run counts as hanging."""


def work(rank: int, world: int, name: str, folder: str, modules: list[str]) -> None:
    """Train with a default monitor as one of several processes, and write what it said to a file."""
    log = open(f"{folder}/{rank}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(LONGEST - 5, exit=True)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rank": rank}
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
        for module in modules:
            importlib.import_module(module)
        result |= watch(name, rank, world)
    except BaseException as problem:
        # A benchmark reports whatever a run raises.
        result["error"] = repr(problem)[:300]
        traceback.print_exc()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))
    log.flush()
    os._exit(0)


def watch(name: str, rank: int, world: int) -> dict[str, Any]:
    """Train a configuration with the two lines of a default monitor."""
    training = CONFIGURATIONS[name][1](rank, world)
    monitor = conserved.Monitor(training.model, training.optimizer)
    seconds = []
    for number in range(STEPS):
        began = time.perf_counter()
        training.step(number)
        middle = time.perf_counter()
        monitor.step()
        seconds.append((middle - began, time.perf_counter() - middle))
    last = monitor.last_audit
    found = {
        "laws": len(monitor.laws),
        "coverage": float(last.coverage.share) if last is not None and hasattr(last.coverage, "share") else None,
        "tested": "" if last is None else str(last.coverage).splitlines()[0],
        "verdicts": [entry.status for entry in monitor.audits],
        "alarms": [
            {"step": one.step, "code": one.code, "law": one.law, "message": one.message} for one in monitor.alarms
        ],
        "state": monitor.state,
        "last step, seconds": seconds[-1],
    }
    monitor.close()
    return found


def run(name: str, world: int, modules: list[str]) -> dict[str, Any]:
    """Run a configuration and return what its processes said; the first speaks for laws and verdict."""
    folder = tempfile.mkdtemp(prefix="stack-")
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=work, args=(rank, world, name, folder, modules)) for rank in range(world)]
    for process in processes:
        process.start()
    end = time.time() + LONGEST
    for process in processes:
        process.join(max(0.1, end - time.time()))
    hangs = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    files = [Path(f"{folder}/{rank}.json") for rank in range(world)]
    said: list[dict[str, Any]] = [
        json.loads(one.read_text()) if one.exists() else {"error": "no result"} for one in files
    ]
    errors = [one["error"] for one in said if "error" in one]
    alarms = [alarm | {"rank": rank} for rank, one in enumerate(said) for alarm in one.get("alarms", [])]
    return {"processes": world, "hangs": hangs, "errors": errors, **said[0], "alarms": alarms}


def main() -> None:
    """Run all configurations, or those whose names match a pattern, and save the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--torchtitan", action="store_true")
    parser.add_argument("--name", default="stack_table")
    given = parser.parse_args()
    modules = ["stack_torchtitan"] if given.torchtitan else []
    modules += ["stack_by_hand", *(["stack_defects"] if "defects" in given.name else [])]
    for module in modules:
        importlib.import_module(module)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stack_configurations", "conserved.tracking", "conserved.auditing", *modules])
    rows: dict[str, Any] = {}
    for name, (world, _) in CONFIGURATIONS.items():
        if given.patterns and not any(fnmatch(name, pattern) for pattern in given.patterns):
            continue
        row = rows[name] = run(name, world, modules)
        status = "hangs" if row["hangs"] else "error" if row["errors"] else f"{len(row['alarms'])} alarms"
        print(f"{name} [{world}]: {status}, {row.get('laws')} laws, {row.get('verdicts')}, {row.get('tested')}")
        for alarm in row["alarms"][:2]:
            print(f"    rank {alarm['rank']} step {alarm['step']} {alarm['code']}: {alarm['message'][:200]}")
    record = {"commit": commit(), "machine": machine(), "steps": STEPS, "configurations": rows}
    print(save(given.name, record))


if __name__ == "__main__":
    main()
