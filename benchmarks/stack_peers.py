"""Who sees the planted defects: a trusted second run, replicas compared with each other, or identities.

    python benchmarks/stack_peers.py --stack stack_megatron --table benchmarks/results/stack_megatron_….json

A comparison with a trusted run is what TTrace does: here the correct twin on the same stack, from the same weights and
data, gradient by gradient at the first step. Replicas alone and identities alone are told apart by the codes of the
alarms that a default monitor raised in a saved table. spmd_types needs annotations that only torchtitan 0.3 has.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from conserved.layout.gradients import gradient_of
from conserved.symmetry.view import local
from measure import RESULTS, commit, machine, save
from stack_configurations import CONFIGURATIONS

STEPS = 3
"""Steps whose gradients are compared: some defects show after the first."""

LIMIT = 1e-3
"""Relative difference of a gradient that rounding in float32 does not explain."""

LONGEST = 90.0


def work(rank: int, world: int, name: str, folder: str, modules: list[str]) -> None:
    """Train a few steps without a monitor and write the gradients that the optimizer used to a file."""
    log = open(f"{folder}/{rank}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    for module in modules:
        importlib.import_module(module)
    training = CONFIGURATIONS[name][1](rank, world)
    steps: list[dict[str, torch.Tensor]] = []

    def keep(*_: Any) -> None:
        gradients = {n: gradient_of(p) for n, p in training.model.named_parameters()}
        steps.append({n: local(g).detach().clone() for n, g in gradients.items() if g is not None})

    register_optimizer_step_pre_hook(keep)
    for number in range(STEPS):
        training.step(number)
    torch.save(steps, f"{folder}/{rank}.pt")
    os._exit(0)


def gradients_of(name: str, modules: list[str]) -> list[list[dict[str, torch.Tensor]]] | None:
    """Return the gradients of a run, by process and step; None if it did not end."""
    world = CONFIGURATIONS[name][0]
    folder = tempfile.mkdtemp(prefix="stack-peers-")
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=work, args=(rank, world, name, folder, modules)) for rank in range(world)]
    for process in processes:
        process.start()
    end = time.time() + LONGEST
    for process in processes:
        process.join(max(0.1, end - time.time()))
    for process in processes:
        process.kill()
    files = [Path(f"{folder}/{rank}.pt") for rank in range(world)]
    return [torch.load(file) for file in files] if all(file.exists() for file in files) else None


def compare(right: Any, wrong: Any) -> dict[str, Any]:
    """Return the first step in which gradients of two runs differ, and where most."""
    for number in range(min(len(right[0]), len(wrong[0]))):
        worst, where = 0.0, ""
        for rank, (one, other) in enumerate(zip(right, wrong, strict=True)):
            for name, gradient in one[number].items():
                size = float(gradient.norm())
                apart = float((other[number][name] - gradient).norm()) / size if size and name in other[number] else 0.0
                worst, where = max((worst, where), (apart, f"{name} on rank {rank}"))
        if worst > LIMIT:
            return {"seen": True, "step": number + 1, "where": where, "difference": worst}
    return {"seen": False}


def seen_by_monitor(row: dict[str, Any] | None) -> dict[str, bool]:
    """Return which alarms a default monitor raised on a run."""
    codes = {alarm["code"] for alarm in (row or {}).get("alarms", [])}
    replicas = {"replicas"} & codes
    return {"monitor": bool(codes), "replicas": bool(replicas), "identities": bool(codes - replicas)}


def main() -> None:
    """Compare every defect with its twin, and save after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--stack", action="append", default=[])
    parser.add_argument("--table", type=Path, action="append", default=[])
    parser.add_argument("--name", default="stack_peers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    modules = [importlib.import_module(name) for name in given.stack]
    defects: dict[str, str] = {}
    for module in modules:
        defects |= getattr(module, "DEFECTS", {})
    tables: dict[str, Any] = {}
    for path in given.table:
        tables |= json.loads(path.read_text())["configurations"] if path.exists() else {}
    multiprocessing.get_context("forkserver").set_forkserver_preload(given.stack)
    twins: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for name, twin in defects.items():
        if given.patterns and not any(fnmatch(name, pattern) for pattern in given.patterns):
            continue
        if twin not in twins:
            twins = {twin: gradients_of(twin, given.stack)}
        wrong = gradients_of(name, given.stack)
        trusted = {"seen": None} if wrong is None or twins[twin] is None else compare(twins[twin], wrong)
        rows[name] = {"trusted_run": trusted, **seen_by_monitor(tables.get(name))}
        print(name, rows[name], flush=True)
        save(given.name, {"commit": commit(), "machine": machine(), "defects": rows}, given.out)


if __name__ == "__main__":
    main()
