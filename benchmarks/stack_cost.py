"""What a default monitor costs under FSDP2 and tensor parallelism: step ratios in turns, one audit, bytes it sends.

    python benchmarks/stack_cost.py [--sizes 3.5M 125M] [--stacks FSDP2 TP DDP] [--rounds N] [--threads N]

Two processes of gloo train two copies of a model, one with a monitor and one without, step by step in turns, so that a
noisy moment hits both. The first steps, in which laws are read, are reported apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import conserved
from measure import RESULTS, commit, machine, save
from stack_configurations import adamw, shard, tensor_parallel
from stack_models import DecoderConfig, make_decoder, make_tokens, token_loss

SIZES = {
    "3.5M": DecoderConfig(vocabulary=4096, width=192, heads=6, key_heads=2, hidden=512, layers=5, length=128),
    "125M": DecoderConfig(vocabulary=32000, width=768, heads=12, key_heads=6, hidden=2048, layers=11, length=128),
}
BATCH = 4
WARM = 3
"""First steps, in which laws are read and the first audits made."""


class Run:
    """A model in training on one stack, with a default monitor or without."""

    def __init__(self, size: str, stack: str, *, watched: bool) -> None:
        self.config = SIZES[size]
        self.model: Any = make_decoder(self.config)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if stack == "FSDP2":
            shard(self.model, mesh)
        elif stack == "TP":
            tensor_parallel(self.model, mesh, sequence=False)
        else:
            self.model = DistributedDataParallel(self.model)
        self.rank = 0 if stack == "TP" else dist.get_rank()
        self.optimizer = adamw(self.model)
        self.monitor = conserved.Monitor(self.model, self.optimizer) if watched else None
        self.number = 0

    def step(self) -> float:
        """Train one step; return its seconds."""
        tokens = make_tokens(self.config, step=self.number, rank=self.rank, batch=BATCH)
        self.number += 1
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        token_loss(self.model(tokens[:, :-1]), tokens).backward()
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.step()
        return time.perf_counter() - began


def measure(size: str, stack: str, rounds: int) -> dict[str, Any]:
    """Return times of steps with and without a monitor, and the cost of one audit."""
    plain, watched = Run(size, stack, watched=False), Run(size, stack, watched=True)
    monitor = watched.monitor
    assert monitor is not None
    first = [(plain.step(), watched.step()) for _ in range(WARM)]
    times = [(plain.step(), watched.step()) for _ in range(rounds)]
    audits = [entry.seconds for entry in monitor.audits]
    last = monitor.last_audit
    record = {
        "parameters": sum(p.numel() for p in plain.model.parameters()),
        "tokens_per_step": BATCH * SIZES[size].length,
        "rounds": rounds,
        "first_steps_s": [(round(a, 4), round(b, 4)) for a, b in first],
        "plain_step_s": median(a for a, _ in times),
        "ratio_of_medians": median(b for _, b in times) / median(a for a, _ in times),
        "ratio_of_means": mean(b for _, b in times) / mean(a for a, _ in times),
        "laws": len(monitor.laws),
        "identities_tested": 0 if last is None else last.tested,
        "coverage": None if last is None else last.coverage.parameters,
        "verdicts": [entry.status for entry in monitor.audits],
        "audited_steps": [entry.step for entry in monitor.audits],
        "audit_s": [round(seconds, 4) for seconds in audits],
        "bytes_sent_per_audit": None if last is None else last.moved_bytes,
        "alarms": [alarm.message for alarm in monitor.alarms],
        "every": monitor.every,
        "load": os.getloadavg(),
    }
    monitor.close()
    return record


def work(rank: int, world: int, folder: str, call: Callable[..., Any], args: tuple[Any, ...], threads: int) -> None:
    """Run one measurement as one of several processes; the first writes it to a file."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    record = call(*args)
    if rank == 0:
        Path(f"{folder}/result.json").write_text(json.dumps(record))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Measure every size on every stack, and save after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=[*SIZES])
    parser.add_argument("--stacks", nargs="+", default=["FSDP2", "TP", "DDP"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240.0, help="longest time of one measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for size in given.sizes:
        for stack in given.stacks:
            folder = tempfile.mkdtemp(prefix="stack-cost-")
            args = (size, stack, given.rounds)
            processes = [
                context.Process(target=work, args=(rank, 2, folder, measure, args, given.threads)) for rank in (0, 1)
            ]
            for process in processes:
                process.start()
            end = time.time() + given.seconds
            for process in processes:
                process.join(max(0.1, end - time.time()))
            for process in processes:
                process.kill()
            result = Path(f"{folder}/result.json")
            row = rows[f"{stack}, {size}"] = json.loads(result.read_text()) if result.exists() else {"error": "no end"}
            print(f"{stack}, {size}: {row}", flush=True)
            record = {"commit": commit(), "machine": machine(), "threads": given.threads, "rows": rows}
            print(save("stack_cost", record, given.out), flush=True)


if __name__ == "__main__":
    main()
