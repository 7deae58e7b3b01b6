"""Natural attention against SGD and Adam on small tasks, and against the rate its note states."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from conserved.attention import NaturalAttention, NaturalDescent, value_metric
from measure import save

DIM, LENGTH, BATCH, STEPS = 8, 12, 24, 150
TUNING, SEEDS = tuple(range(100, 106)), tuple(range(10))
STUDENT_T = 2.262
"""97.5 % quantile of Student's t with nine degrees of freedom."""

Make = Callable[[NaturalAttention, float], torch.optim.Optimizer]
METHODS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "SGD": (
        lambda layer, lr: torch.optim.SGD(layer.parameters(), lr=lr),
        (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    ),
    "SGD, momentum": (
        lambda layer, lr: torch.optim.SGD(layer.parameters(), lr=lr, momentum=0.9),
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    ),
    "Adam": (lambda layer, lr: torch.optim.Adam(layer.parameters(), lr=lr), (0.003, 0.01, 0.03, 0.1, 0.3)),
    "natural": (lambda layer, lr: NaturalDescent(layer, lr, damping=1e-2), (0.03, 0.1, 0.3, 0.6, 1.0)),
    "natural, A Aᵀ": (
        lambda layer, lr: NaturalDescent(layer, lr, damping=1e-2, metric="tokens"),
        (1e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1),
    ),
}


def even(generator: torch.Generator) -> Tensor:
    """Tokens with independent entries of equal size."""
    return torch.randn(BATCH, LENGTH, DIM, generator=generator, dtype=torch.float64)


def uneven(generator: torch.Generator) -> Tensor:
    """Tokens whose entries fall off in size from 1 to 1/64."""
    return even(generator) * torch.arange(1, DIM + 1, dtype=torch.float64) ** -2


def distinct(generator: torch.Generator) -> Tensor:
    """Tokens dominated by one direction that all share, as activations often are."""
    return even(generator) + 3 * torch.ones(DIM, dtype=torch.float64)


TASKS = {"even inputs": even, "uneven inputs": uneven, "shared direction": distinct}


def half_squares(y: Tensor, target: Tensor) -> Tensor:
    """‖Y − T‖² / (2 · tokens)."""
    return (y - target).square().sum() / (2 * y.shape[:-1].numel())


def run(task: str, method: str, rate: float, seed: int) -> tuple[float, float]:
    """A student learns a teacher of the same form; final loss over the first, and seconds a step."""
    generator = torch.Generator().manual_seed(seed)
    x = TASKS[task](generator)
    torch.manual_seed(seed)
    teacher, student = NaturalAttention(DIM).double(), NaturalAttention(DIM).double()
    with torch.no_grad():
        target = teacher(x)
        first = float(half_squares(student(x), target))
    optimizer = METHODS[method][0](student, rate)
    start = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = half_squares(student(x), target)
        loss.backward()
        optimizer.step()
        if not math.isfinite(loss.item()):
            return math.inf, 0.0
    seconds = (time.perf_counter() - start) / STEPS
    with torch.no_grad():
        return float(half_squares(student(x), target)) / first, seconds


def compared(task: str) -> dict[str, Any]:
    """Every method at the rate that did best on the worst tuning seed, over fresh seeds."""
    result = {}
    for method, (_, rates) in METHODS.items():
        # The rate whose worst seed does best: one that is best on average may diverge on the next seed.
        tuned = {rate: max(math.log10(min(run(task, method, rate, s)[0], 1e9)) for s in TUNING) for rate in rates}
        rate = min(tuned, key=lambda r: tuned[r])
        outcomes = [run(task, method, rate, seed) for seed in SEEDS]
        logs = [math.log10(min(loss, 1e9)) for loss, _ in outcomes]
        result[method] = {
            "rate": rate,
            "rate_at_edge_of_grid": rate in (rates[0], rates[-1]),
            "log10_loss": mean(logs),
            "half_interval": STUDENT_T * stdev(logs) / math.sqrt(len(logs)),
            "losses": [loss for loss, _ in outcomes],
            "seconds_per_step": mean(seconds for _, seconds in outcomes),
        }
    return result


def contraction(kind: str, damping: float, seed: int, rate: float = 0.5, steps: int = 20) -> dict[str, float]:
    """Values alone, attention held fixed: how much the squared error shrinks a step, at worst, in metric and length.

    The note states (1 − η/L) for the squared error in the metric.
    """
    torch.manual_seed(seed)
    layer = NaturalAttention(DIM).double()
    x = torch.randn(1 if kind == "uniform attention" else 4, LENGTH, DIM, dtype=torch.float64)
    if kind == "uniform attention":
        layer.q.data.zero_()
    goal = torch.randn(DIM, DIM, dtype=torch.float64)
    layer.q.requires_grad_(False)
    layer.k.requires_grad_(False)
    with torch.no_grad():
        mixed = layer.weights(x) @ x
        metric = value_metric(x, layer.weights(x))
    optimizer = NaturalDescent(layer, rate, damping=damping)
    sizes = []
    for _ in range(steps):
        error = layer.v.detach() - goal
        sizes.append((float((error * (metric @ error)).sum()), float(error.square().sum())))
        optimizer.zero_grad()
        half_squares(layer(x), mixed @ goal).backward()
        optimizer.step()
    ratios = [[after[i] / before[i] for before, after in pairwise(sizes)] for i in (0, 1)]
    return {"in_metric": max(ratios[0]), "in_length": max(ratios[1]), "stated": 1 - rate / LENGTH}


def main() -> None:
    """Run all, print both tables, save."""
    torch.set_num_threads(1)
    console = Console(width=110)
    rates = Table(title=f"values alone: worst factor of the squared error in one step (rate 0.5, L = {LENGTH})")
    for heading in ("attention", "damping", "in the metric", "in length", "note: 1 − η/L", "holds in the metric"):
        rates.add_column(heading, justify="right" if heading != "attention" else "left")
    stated = []
    for kind in ("random attention", "uniform attention"):
        for damping in (1e-6, 1e-2, 1.0, 30.0):
            runs = [contraction(kind, damping, seed) for seed in SEEDS]
            worst = {name: max(one[name] for one in runs) for name in runs[0]}
            holds = worst["in_metric"] <= worst["stated"]
            stated.append({"attention": kind, "damping": damping, **worst, "holds": holds})
            cells = [f"{worst[name]:.4f}" for name in ("in_metric", "in_length", "stated")]
            rates.add_row(kind, f"{damping:g}", *cells, "yes" if holds else "no")
    console.print(rates)
    table = Table(
        title=f"log10 of final over first loss after {STEPS} steps, mean ± 95 % interval over {len(SEEDS)} seeds"
    )
    table.add_column("method")
    results = {task: compared(task) for task in TASKS}
    for task in TASKS:
        table.add_column(task, justify="right")
    table.add_column("time / SGD", justify="right")
    for method in METHODS:
        cells = [
            f"{results[task][method]['log10_loss']:.2f} ± {results[task][method]['half_interval']:.2f}"
            for task in TASKS
        ]
        slower = mean(
            results[task][method]["seconds_per_step"] / results[task]["SGD"]["seconds_per_step"] for task in TASKS
        )
        table.add_row(method, *cells, f"{slower:.1f}")
    console.print(table)
    record = {
        "dim": DIM,
        "length": LENGTH,
        "batch": BATCH,
        "steps": STEPS,
        "rate_of_the_note": stated,
        "tasks": results,
    }
    print(f"saved {save('natural_attention', record)}")


if __name__ == "__main__":
    main()
