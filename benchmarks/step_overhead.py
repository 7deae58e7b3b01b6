"""What watching every law at every step costs a training step: time and memory, against other ways of watching."""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from conserved import Monitor, MonitorConfig, blocks, recognize
from conserved.tracking import GENERIC, Rule, SQLite
from measure import in_turns, save

SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"vocab": 8192, "dim": 512, "depth": 4, "heads": 8, "hidden": 1536, "kv_heads": 4},
    "cuda": {"vocab": 65536, "dim": 1024, "depth": 40, "heads": 16, "hidden": 3072, "kv_heads": 8},
}
"""21 million parameters on a processor; 0.6 billion, in the proportions of Qwen-3 0.6B, on a GPU."""

BATCH: dict[str, dict[str, int]] = {
    "cpu": {"micro": 4, "length": 512, "accumulate": 2},
    "cuda": {"micro": 8, "length": 1024, "accumulate": 8},
}
"""Sequences, tokens in each, and how many such batches make a step: 4,096 tokens and 65,536 tokens."""

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    "SGD, momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
}


class Run:
    """A model, its optimizer, and what is done after every step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, int], vocab: int) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        shape = (batch["accumulate"], batch["micro"], batch["length"] + 1)
        self.text = torch.randint(vocab, shape, generator=generator).to(self.device)
        self.after: Callable[[], object] = lambda: None
        self.spent: list[float] = []
        """Seconds the host was busy after each step."""
        self.worked: list[float] = []
        """Seconds of processor time of every step, which other programs on the machine do not stretch."""

    def loss(self, rows: Tensor) -> Tensor:
        """Next-token cross-entropy, in bfloat16 on a GPU as everyone trains there."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / self.batch["accumulate"]

    def alone(self) -> float:
        """Seconds from the end of a step of one batch to the end of what is done after it, the device included."""
        self.loss(self.text[0]).backward()
        self.optimizer.step()
        self._wait()
        start = time.perf_counter()
        self.after()
        self._wait()
        taken = time.perf_counter() - start
        self.optimizer.zero_grad()
        return taken

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, batches: int | None = None) -> None:
        """One training step, of all batches or of the first few."""
        began = time.process_time()
        for rows in self.text[:batches]:
            self.loss(rows).backward()
        self.optimizer.step()
        start = time.perf_counter()
        self.after()
        self.spent.append(time.perf_counter() - start)
        self.optimizer.zero_grad()
        self.worked.append(time.process_time() - began)


def watched(run: Run, *, audit: int | None = None, rule: Rule | None = None) -> Monitor:
    """Every law, every step, into a run store; gradients audited at every step or never."""
    store = os.path.join(tempfile.mkdtemp(), "runs.db")
    precision = torch.bfloat16 if run.device.type == "cuda" else None
    config = MonitorConfig(precision=precision, keep=10, rule=rule)
    return Monitor(run.model, run.optimizer, loss="cross_entropy", sinks=SQLite(store), audit=audit, config=config)


def copied(run: Run) -> Callable[[], object]:
    """The obvious way: a float64 copy of every parameter, and the laws of the copy."""
    laws = recognize(run.model, loss="cross_entropy")

    def after() -> object:
        theta = {name: parameter.detach().double() for name, parameter in run.model.named_parameters()}
        return {name: value.cpu() for name, value in laws.values(theta).items()}

    return after


def wandb_watched(run: Run) -> Callable[[], object]:
    """Histograms of every parameter and gradient, as wandb.watch(log="all") makes them, at every step."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    logged = wandb.init(mode="offline", dir=tempfile.mkdtemp(), project="overhead")
    wandb.watch(run.model, log="all", log_freq=1)
    return lambda: logged.log({"step": 1})


def peak(run: Run) -> int | None:
    """The most memory a step allocates on the device."""
    if run.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run.step(batches=2)
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def waits(run: Run) -> bool | None:
    """Whether what is done after a step makes the host wait for the device, as torch itself detects it."""
    if run.device.type != "cuda":
        return None
    run.loss(run.text[0]).backward()
    run.optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.after()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.optimizer.zero_grad()
    return False


def ways_of(name: str) -> dict[str, Callable[[Run], Monitor | Callable[[], object]]]:
    """How a run of an optimizer is watched: what each way does after a step."""
    ways: dict[str, Callable[[Run], Monitor | Callable[[], object]]] = {
        "monitor": lambda run: watched(run, audit=1),
        "monitor without audits": watched,
    }
    if name == "SGD":
        ways |= {"generic rule": lambda run: watched(run, audit=1, rule=GENERIC), "float64 copy": copied}
        if find_spec("wandb") is not None:
            ways["wandb.watch"] = wandb_watched
    return ways


def shares(taken: dict[str, list[float]]) -> dict[str, list[float]]:
    """What every way adds to a step without it, round by round."""
    return {way: [a / b - 1 for a, b in zip(each, taken["none"], strict=True)] for way, each in taken.items()}


def measured(name: str, shape: dict[str, Any], batch: dict[str, int], device: str, rounds: int) -> dict[str, Any]:
    """All ways of watching one optimizer's run, in turns."""
    torch.manual_seed(0)
    options = {key: shape[key] for key in ("vocab", "dim", "depth", "heads", "hidden")}
    with torch.device(device):
        model = blocks.DecoderLM(
            **options, kv_heads=shape["kv_heads"], positions="rotary-half", max_length=batch["length"]
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    runs = {"none": Run(model, OPTIMIZERS[name](model), batch, shape["vocab"])}
    runs["none"].step()
    memory: dict[str, Any] = {"none": peak(runs["none"])}
    monitors: dict[str, Monitor] = {}
    for way, watch in ways_of(name).items():
        twin = copy.deepcopy(model)
        run = runs[way] = Run(twin, OPTIMIZERS[name](twin), batch, shape["vocab"])
        result = watch(run)
        if isinstance(result, Monitor):
            monitors[way] = result
        run.after = result.step if isinstance(result, Monitor) else result
    # What all these monitors know, which a run has once, would be gone through by every collection of garbage.
    gc.collect()
    gc.freeze()
    try:
        taken = in_turns({way: run.step for way, run in runs.items()}, rounds)
    finally:
        gc.unfreeze()
    seconds = {way: median(each) for way, each in taken.items()}
    added = shares(taken)
    worked = shares({way: run.worked[-rounds:] for way, run in runs.items()})
    alone = {way: median(run.alone() for _ in range(4)) for way, run in runs.items()}
    waiting = {way: waits(runs[way]) for way in monitors}
    held = {way: monitor.memory() for way, monitor in monitors.items()}
    if device == "cuda":
        base = torch.cuda.memory_allocated()
        memory |= {way: (peak(run) or 0) - base for way, run in runs.items()}
    return {
        "parameters": count,
        "laws": len(monitors["monitor"].laws),
        "numbers": monitors["monitor"].laws.numbers,
        "tokens": batch["micro"] * batch["length"] * batch["accumulate"],
        "seconds": seconds,
        "overhead": {way: median(each) for way, each in added.items()},
        "overhead_range": {way: [min(each), max(each)] for way, each in added.items()},
        "audited": {way: len(monitor.audits) for way, monitor in monitors.items()},
        "processor_overhead": {way: median(each) for way, each in worked.items()},
        "processor_range": {way: [min(each), max(each)] for way, each in worked.items()},
        "host_seconds": {way: median(run.spent[1:]) for way, run in runs.items()},
        "alone_seconds": alone,
        "alone_share": {way: one / seconds["none"] for way, one in alone.items()},
        "waits_for_device": waiting,
        "held_bytes": held,
        "held_share": {way: (one["laws"] + one["copies"]) / one["parameters"] for way, one in held.items()},
        "peak_bytes": memory,
        "alarms": {way: [alarm.message for alarm in monitor.alarms[:1]] for way, monitor in monitors.items()},
    }


def main() -> None:
    """Run every optimizer on this machine, print the overheads and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=6, help="timed steps of each way")
    parser.add_argument("--accumulate", type=int, default=0, help="batches that make a step")
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], action="append", help="only these")
    chosen = parser.parse_args()
    logging.getLogger("conserved").setLevel(logging.ERROR)
    kind = torch.device(chosen.device).type
    batch = BATCH[kind] | ({"accumulate": chosen.accumulate} if chosen.accumulate else {})
    table = Table(title=f"one training step with every law watched, on {chosen.device}")
    for heading in (
        "optimizer",
        "way of watching",
        "step (ms)",
        "added",
        "from … to",
        "processor",
        "alone (ms)",
        "alone",
        "held / parameters",
    ):
        table.add_column(heading, justify="left" if heading in ("optimizer", "way of watching") else "right")
    record = {}
    for name in chosen.optimizer or OPTIMIZERS:
        result = record[name] = measured(name, SHAPES[kind], batch, chosen.device, chosen.rounds)
        print(f"{name}: {result['parameters']:,} parameters, {result['laws']} laws, {result['tokens']:,} tokens a step")
        for way, taken in result["seconds"].items():
            share = f"{result['held_share'][way]:.2%}" if way in result["held_share"] else "–"
            low, high = result["overhead_range"][way]
            table.add_row(
                name,
                way,
                f"{1e3 * taken:.1f}",
                f"{result['overhead'][way]:+.2%}",
                f"{low:+.2%} … {high:+.2%}",
                f"{result['processor_overhead'][way]:+.2%}",
                f"{1e3 * result['alone_seconds'][way]:.1f}",
                f"{result['alone_share'][way]:.2%}",
                share,
            )
        path = save("step_overhead", {"optimizers": record, "batch": batch, "rounds": chosen.rounds})
    Console(width=140).print(table)
    print(f"saved {path}")


if __name__ == "__main__":
    main()
