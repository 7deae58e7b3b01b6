"""The paper's four configurations at full size (Appendix D), for as many steps as the time allows, on real data.

    python benchmarks/paper_runs.py --images FASHION_MNIST_FOLDER --text king_james.txt --seconds 300 --device cuda

Images are resized to what the configuration asks for, texts are cut into words. The paper accumulates 50,000 images and
3,456 sequences to one full-batch step; here one of its accumulated batches (5,000 images, 192 sequences) is the whole
data set unless --whole is given, so that a step takes seconds. Everything else is as in Appendix D.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conserved_papers.lab.data import Examples
from conserved_papers.lab.exponents import by_rate, growth, in_step_size
from conserved_papers.lab.figures import all_figures
from conserved_papers.lab.recipes import Recipe, cifar, examples_of, imagenet, penn, wikitext
from conserved_papers.lab.sweep import stored
from conserved_papers.lab.train import Limits, train
from conserved_papers.lab.trajectory import Trajectory
from measure import RESULTS, save

CONFIGURATIONS = {"cifar": cifar, "imagenet": imagenet, "penn": penn, "wikitext": wikitext}
ONE_BATCH = {"cifar": 5_000, "penn": 192}
SMALL = {
    "vision": {"image": 16, "patch": 8, "dim": 16, "depth": 2, "hidden": 24},
    "decoder": {"vocab": 500, "dim": 12, "depth": 2, "hidden": 16, "max_length": 16},
}


def chosen(name: str, options: argparse.Namespace) -> Recipe:
    """The paper's recipe with what the command line changes."""
    recipe = CONFIGURATIONS[name]()
    if name in ONE_BATCH and not options.whole:
        recipe = replace(recipe, examples=ONE_BATCH[name])
    precision = options.precision or recipe.precision
    recipe = replace(recipe, seeds=tuple(range(options.seeds)), precision=precision)
    if options.small:
        sizes = {**recipe.sizes, **SMALL[recipe.architecture]}
        recipe = replace(
            recipe,
            scale="small",
            sizes=sizes,
            length=16 if recipe.length else 0,
            examples=64,
            batch=None if recipe.batch is None else 8,
            steps=min(recipe.steps, 40),
        )
    return recipe


def runs_of(recipe: Recipe, examples: Examples, options: argparse.Namespace) -> list[Trajectory]:
    """All step sizes, each with an equal part of the time."""
    result: list[Trajectory] = []
    share = options.seconds / len(recipe.rates)
    for rate in recipe.rates:
        start = time.perf_counter()
        group = train(recipe, examples, rate=rate, device=options.device, limits=Limits(seconds=share))
        result += group
        for trajectory in group:
            stored(options.store, trajectory)
        taken = time.perf_counter() - start
        print(
            f"{recipe.name} τ = {rate:g}: {group[0].steps} steps of {len(group)} seeds in {taken:.0f} s, "
            f"{group[0].examples_per_second:,.0f} examples/s, loss {group[0].loss[0]:.3f} → {group[0].loss[-1]:.3f}",
            flush=True,
        )
    return result


def rows_of(recipe: Recipe, result: list[Trajectory]) -> list[dict[str, Any]]:
    """One row per family: final errors by step size, and the fitted exponents in k and τ."""
    runs = by_rate(result)
    largest = runs[max(runs)]
    rows: list[dict[str, Any]] = []
    for quantity in result[0].quantities:
        final = {
            f"{rate:g}": mean([run.quantity(quantity.family).mean[-1] for run in group]) for rate, group in runs.items()
        }
        in_k, in_tau = growth(largest, quantity.family), in_step_size(runs, quantity.family)
        rows.append(
            {
                "configuration": recipe.name,
                "family": quantity.family,
                "role": quantity.role,
                "laws": quantity.laws,
                "numbers": quantity.numbers,
                "final_error": final,
                "bound": None
                if quantity.bound is None
                else mean([r.quantity(quantity.family).bound[-1] for r in largest]),  # type: ignore[index]
                "exponent_in_k": [in_k.value, in_k.low, in_k.high],
                "exponent_in_step": [in_tau.value, in_tau.low, in_tau.high],
            }
        )
    return rows


def mean(values: list[float]) -> float:
    """The mean over seeds."""
    return sum(values) / len(values)


def shortened(value: Any) -> Any:
    """Numbers to six digits, so that hundreds of curves stay small files; what is not finite as JSON's null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    return [shortened(inner) for inner in value] if isinstance(value, list | tuple) else value


def show(rows: list[dict[str, Any]]) -> None:
    """The table as text."""
    print(f"{'configuration':14} {'quantity':22} {'role':9} {'final error at the largest step':>32} {'k':>7} {'τ':>7}")
    for row in rows:
        last = list(row["final_error"].values())[-1]
        print(
            f"{row['configuration']:14} {row['family']:22} {row['role']:9} {last:32.2e} "
            f"{row['exponent_in_k'][0]:7.2f} {row['exponent_in_step'][0]:7.2f}"
        )


def main() -> None:
    """Train what was asked for and save trajectories and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, help="a folder with images, such as Fashion-MNIST's four .gz files")
    parser.add_argument("--text", required=True, help="a text file, such as the King James Bible")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training per configuration")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--precision", choices=("float64", "float32", "bfloat16"), help="of gradients")
    parser.add_argument("--only", nargs="*", choices=tuple(CONFIGURATIONS), default=tuple(CONFIGURATIONS))
    parser.add_argument("--whole", action="store_true", help="the paper's number of examples in full-batch steps")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--output", type=Path, default=RESULTS, help="a folder for the results")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    name = "paper_runs_small" if options.small else "paper_runs"
    options.store = options.output / f"{name}.db"
    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    everything: list[Trajectory] = []
    for which in options.only:
        recipe = chosen(which, options)
        start = time.perf_counter()
        examples = examples_of(recipe, options.images if recipe.wants == "images" else options.text)
        print(
            f"{recipe.name}: {len(examples):,} examples of {examples.name} read in {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        result = runs_of(recipe, examples, options)
        everything += result
        rows += rows_of(recipe, result)
        summary.append(summary_of(recipe, result))
        record = {"seconds_per_configuration": options.seconds, "configurations": summary, "table": rows}
        # After each configuration, so that what is done is kept whatever happens to the next.
        saved = save(name, shortened(record), folder=options.output)
        packed = saved.with_suffix(".trajectories.json.gz")
        packed.write_bytes(gzip.compress(json.dumps([shortened(t.record()) for t in everything]).encode(), mtime=0))
        print(f"saved {saved} and {packed.name}", flush=True)
    figures = [figure.record() for figure in all_figures(options.store)]
    drawn = saved.with_suffix(".figures.json")
    drawn.write_text(json.dumps(shortened(figures)) + "\n")
    show(rows)
    print(f"{len(figures)} figures in {drawn}")


def summary_of(recipe: Recipe, result: list[Trajectory]) -> dict[str, Any]:
    """What was trained, how far, how fast."""
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return {
        "configuration": recipe.name,
        "title": recipe.title,
        "sizes": dict(recipe.sizes),
        "parameters": result[0].parameters,
        "data": result[0].data,
        "examples": result[0].examples,
        "batch": result[0].batch,
        "seeds": len(recipe.seeds),
        "precision": recipe.precision,
        "weights": recipe.weights,
        "planned_steps": recipe.steps,
        "steps": {f"{rate:g}": group[0].steps for rate, group in by_rate(result).items()},
        "examples_per_second": max(run.examples_per_second for run in result),
        "peak_gib": peak,
    }


if __name__ == "__main__":
    main()
