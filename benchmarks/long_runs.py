"""The paper's runs to their last step: full batches and mini-batches of Appendix D, with the exact ledger.

Along the way the energy fields of all heads are described, on four inputs at several context lengths, by a process of
its own (`NAME.fields.json`): what Lee's paper says of delocalisation, incoherence and rank, while a model learns.

    python benchmarks/long_runs.py profile --images FASHION_MNIST_FOLDER --text king_james.txt
    python benchmarks/long_runs.py run --images … --text … --plan penn:1e-5 cifar:4e-4 --seconds 500 --store STATES

`run` goes through the plan in order for so many seconds, keeps the state of what is unfinished in the store, and goes
on from there when called again. Results are written as NAME.json.gz after every piece. `profile` times one step of each
set-up in every arithmetic and compares the first-order leak of rounding with the second-order drift. `small` trains
small set-ups at three step sizes in float64, and `table` makes one record of everything in a folder of runs.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn

from conserved.attention import probe
from conserved_papers.claims.full_size import ARITHMETIC, runs_that_count, summary_of
from conserved_papers.lab.data import Examples
from conserved_papers.lab.long import DTYPES, Arithmetic, LongRun, recorded_steps, train_on
from conserved_papers.lab.recipes import Recipe, build, examples_of, named
from conserved_papers.lab.schedule import Schedule
from conserved_papers.lab.train import Limits
from conserved_papers.lab.windows import comparison, in_step_size_at, windows
from measure import commit, machine, save

MICRO = {"cifar": 5_000, "imagenet": 512, "penn": 192, "wikitext": 48}
"""Examples at a time: the paper's own, where they are accumulated."""

IMAGES = 20_000
"""Different images that stand in for ImageNet's 1.28 million, at 224 × 224 pixels."""

SMALL: dict[str, dict[str, Any]] = {
    "vision": {"image": 16, "patch": 8, "dim": 32, "depth": 2, "hidden": 32},
    "decoder": {"vocab": 500, "dim": 24, "depth": 2, "hidden": 16, "max_length": 16},
}


def setup(name: str, options: argparse.Namespace) -> Recipe:
    """The paper's recipe; tiny if asked for."""
    recipe = named(name)
    if recipe.name == "imagenet":
        recipe = replace(recipe, examples=IMAGES)
    if options.small:
        recipe = replace(
            recipe,
            scale="small",
            sizes={**recipe.sizes, **SMALL[recipe.architecture]},
            length=16 if recipe.length else 0,
            examples=64,
            batch=None if recipe.batch is None else 8,
            steps=min(recipe.steps, 40),
        )
    return recipe


def arithmetic(recipe: Recipe, options: argparse.Namespace) -> Arithmetic:
    """What the set-up is computed with unless the command line says otherwise."""
    stem = recipe.name.split("-")[0]
    return Arithmetic(products=options.products, micro=8 if options.small else MICRO[stem])


LENGTHS = (64, 128, 256)
"""Of contexts whose energy fields are described."""

DESCRIBED = "participation gaussian_participation coherence gaussian_coherence effective_rank bound evenness"
"""Of every head; the median over heads is kept, and the largest logit."""


class Fields:
    """Energy fields of a model at a few of the recorded steps, described beside its training."""

    def __init__(self, recipe: Recipe, examples: Examples, path: Path) -> None:
        self.recipe, self.path = recipe, path
        self.inputs = torch.cat([examples.inputs[:2], examples.inputs[-2:]]).cpu()
        marks = recorded_steps(recipe.steps)
        self.steps = {min(marks, key=lambda mark: abs(mark - recipe.steps * part)) for part in SEEN_AT}
        self.found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.waiting: list[Future[list[dict[str, Any]]]] = []

    def __call__(self, step: int, model: nn.Module) -> None:
        """Hand a copy of the weights over."""
        if step in self.steps and all(row["step"] != step for row in self.found):
            weights = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
            self.waiting.append(self.pool.submit(described, self.recipe, weights, self.inputs, step))

    def close(self) -> None:
        """Wait for what is under way, and write."""
        for one in self.waiting:
            self.found += one.result()
        self.pool.shutdown()
        self.path.write_text(json.dumps(shortened(self.found)) + "\n")


SEEN_AT = (0.0, 0.01, 0.03, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of a run after which fields are described."""


def described(recipe: Recipe, weights: dict[str, Tensor], inputs: Tensor, step: int) -> list[dict[str, Any]]:
    """A row for every context length: medians over heads, and whether rows sum to zero and ranks obey their bound."""
    torch.set_num_threads(1)
    model = build(recipe, 0).float().eval()
    model.load_state_dict(weights)
    text = not inputs.is_floating_point()
    lengths = [length for length in LENGTHS if length <= inputs.shape[1]] or [inputs.shape[1]]
    rows = []
    for length in lengths if text else (0,):
        result = probe(model, inputs[:, :length] if text else inputs.float())
        row: dict[str, Any] = {"recipe": recipe.name, "step": step, "length": result.rows[0].length}
        row |= {name: median(getattr(head, name) for head in result.rows) for name in DESCRIBED.split()}
        row |= {"largest_logit": max(head.largest_logit for head in result.rows), "heads": len(result.rows)}
        rows.append(row | {"verdict": result.verdict.status.value})
    return rows


class Data:
    """Examples of the last set-up, kept until another one is asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.key: tuple[Any, ...] = ()
        self.examples: Examples | None = None

    def of(self, recipe: Recipe) -> Examples:
        """The recipe's data."""
        key = (recipe.wants, recipe.examples, recipe.length, recipe.sizes.get("image"))
        if self.key != key or self.examples is None:
            self.examples = None
            release()
            start = time.perf_counter()
            source = self.options.images if recipe.wants == "images" else self.options.text
            self.examples = examples_of(recipe, source, device=self.options.device)
            self.key = key
            print(f"{recipe.name}: {len(self.examples):,} examples in {time.perf_counter() - start:.1f} s", flush=True)
        return self.examples


FLOAT64 = {"digits": 300, "bytes": 300, "bytes-sigmoid": 300, "digits-sgd": 1_500, "bytes-sgd": 1_500}
"""Small set-ups that two cores train in float64, with so many steps."""

FLOAT64_RATES = (0.005, 0.01, 0.02)


def small_runs(options: argparse.Namespace) -> None:
    """Full length at small size: three step sizes in float64, where nothing leaks."""
    for name in options.only or FLOAT64:
        recipe = replace(named(name), steps=FLOAT64[name], schedule=Schedule(kind="linear"))
        examples = examples_of(recipe)
        micro = len(examples) if recipe.batch is None else recipe.batch
        for rate in FLOAT64_RATES:
            how = Arithmetic(products="double", micro=micro)
            result = train_on(
                recipe, examples, rate=rate, seed=0, arithmetic=how, say=lambda line: print(line, flush=True)
            )
            told(result)
            written(result, options.output)


def tables(options: argparse.Namespace) -> None:
    """One record and one file of trajectories for each kind of device among the runs of a folder."""
    result = [LongRun.of(json.loads(gzip.decompress(p.read_bytes()))) for p in sorted(options.store.glob("*.json.gz"))]
    today = datetime.now(UTC).date().isoformat()
    for device in sorted({run.trajectory.device for run in result}):
        runs_there = [run for run in result if run.trajectory.device == device]
        names = {id(run): name for name, run in runs_that_count(runs_there).items()}
        fields = [json.loads(path.read_text()) for path in sorted(options.store.glob("*.fields.json"))]
        record: dict[str, Any] = {
            "date": today,
            "commit": commit(),
            "device": device if device != "cpu" else machine()["device"],
            "threads": machine()["threads"],
            "torch": runs_there[0].pieces[0]["torch"],
            "peak": PEAKS.get(device),
            "runs": [row_of(run) for run in runs_there],
            "laws": [row for run in runs_there for row in laws_of(run, names.get(id(run)))],
            "step_sizes": step_sizes(runs_there),
            "fields": [row for rows in fields for row in rows],
        }
        if options.extra is not None and device != "cpu":
            record |= json.loads(options.extra.read_text())
        path = options.output / f"long_runs_{'h200' if 'H200' in device else device}_{today}.json"
        path.write_text(json.dumps(shortened(record), indent=1) + "\n")
        packed = json.dumps([shortened(run.record()) for run in runs_there]).encode()
        path.with_suffix(".trajectories.json.gz").write_bytes(gzip.compress(packed, mtime=0))
        print(path)
        if "H200" in device:
            told_of = json.dumps(shortened(summary_of(runs_there, record["fields"])), indent=1)
            (options.output / "long_runs.json").write_text(told_of + "\n")
            print("for the claims: long_runs.json")


PEAKS = {"NVIDIA H200": 989e12}
"""Operations per second of dense half-precision products, by the vendor."""


def row_of(run: LongRun) -> dict[str, Any]:
    """How far a run went, how fast, and in which pieces."""
    t = run.trajectory
    return {
        "recipe": t.recipe,
        "title": t.title,
        "step": t.step,
        "seed": t.seed,
        "steps": t.steps,
        "planned": t.planned,
        "seconds": t.seconds,
        "operations_per_step": run.operations,
        "operations_per_second": run.rate,
        "gradients": ARITHMETIC[run.arithmetic.products],
        "micro": run.arithmetic.micro,
        "parameters": t.parameters,
        "data": t.data,
        "batch": t.batch,
        "examples": t.examples,
        "loss": [t.loss[0], t.loss[-1]],
        "recorded_to": t.at[-1],
        "pieces": [dict(piece) for piece in run.pieces],
    }


def laws_of(run: LongRun, told: str | None) -> list[dict[str, Any]]:
    """For every family of laws: its drift, equation (10) and (9), what the ledger says, and exponents by window.

    Args:
        run: A long run.
        told: What it is called where one run of a recipe is told of, or None.
    """
    rows: list[dict[str, Any]] = []
    t = run.trajectory
    for q in t.quantities:
        row: dict[str, Any] = {
            "recipe": t.recipe,
            "gradients": ARITHMETIC[run.arithmetic.products],
            "told": told,
            "step": t.step,
            "family": q.family,
            "role": q.role,
            "linear": q.linear,
        }
        row |= {"laws": q.laws, "numbers": q.numbers, "drift": q.drift[-1], "error": q.mean[-1]}
        if q.ledger is not None:
            row |= {"bound": None if q.bound is None else q.bound[-1]}
            row |= {part: values[-1] for part, values in q.ledger.items()}
            if not q.linear:
                row["comparison"] = asdict(comparison(t, q.family))
        row["windows"] = [window.record() for window in windows(t, q.family)]
        rows.append(row)
    return rows


def step_sizes(result: list[LongRun]) -> list[dict[str, Any]]:
    """Exponents in τ at fixed k early, in the middle and at the end, where a set-up ran at several step sizes."""
    rows: list[dict[str, Any]] = []
    for recipe in dict.fromkeys(run.trajectory.recipe for run in result):
        group = [run.trajectory for run in result if run.trajectory.recipe == recipe]
        if len({run.step for run in group}) < 2:
            continue
        for q in group[0].quantities:
            fits = {}
            for name, share in (("early", 0.1), ("middle", 0.5), ("late", 1.0)):
                fit = in_step_size_at(group, q.family, share)
                fits[name] = [fit.value, fit.low, fit.high]
            rows.append({"recipe": recipe, "family": q.family, "role": q.role, "linear": q.linear, "in_step": fits})
    return rows


def release() -> None:
    """Give memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def written(run: LongRun, folder: Path) -> Path:
    """A run as one small file, numbers to six digits."""
    trajectory = run.trajectory
    path = folder / f"{trajectory.recipe}_{trajectory.step:g}_{trajectory.seed}_{run.arithmetic.products}.json.gz"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(shortened(run.record())).encode(), mtime=0))
    return path


def shortened(value: Any) -> Any:
    """Numbers to six digits; what is not finite as JSON's null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    return [shortened(inner) for inner in value] if isinstance(value, list | tuple) else value


def told(run: LongRun) -> None:
    """One line per family of laws."""
    t = run.trajectory
    print(
        f"{t.recipe} τ = {t.step:g}: {t.steps:,} of {t.planned:,} steps in {t.seconds:.0f} s, "
        f"{run.rate / 1e12:.1f} Tflop/s, loss {t.loss[0]:.4f} → {t.loss[-1]:.4f}",
        flush=True,
    )
    for q in t.quantities:
        if q.ledger is not None:
            parts = " ".join(f"{part} {values[-1]:.2e}" for part, values in q.ledger.items())
            print(f"    {q.family:16} drift {q.drift[-1]:.2e} {parts}", flush=True)


def runs(options: argparse.Namespace) -> None:
    """Everything in the plan, in order, until the time is over."""
    start = time.perf_counter()
    data = Data(options)
    for entry in options.plan:
        name, rate, *seed = entry.split(":")
        recipe = setup(name, options)
        how = arithmetic(recipe, options)
        if time.perf_counter() - start > options.seconds:
            print(f"{entry}: no time left", flush=True)
            continue
        number = int(seed[0]) if seed else 0
        checkpoint = options.store / f"{name}_{rate}_{number}_{how.products}.pt"
        done = checkpoint.with_suffix(".done")
        if done.exists():
            print(f"{entry}: finished before", flush=True)
            continue
        examples = data.of(recipe)
        fields = Fields(recipe, examples, options.output / f"{name}_{rate}_{number}_{how.products}.fields.json")
        result = train_on(
            recipe,
            examples,
            rate=float(rate),
            seed=number,
            arithmetic=how,
            device=options.device,
            limits=Limits(
                seconds=options.seconds - (time.perf_counter() - start),
                steps=options.steps,
                checkpoint=checkpoint,
                every=options.every,
            ),
            say=lambda line: print(line, flush=True),
            seen=fields,
        )
        told(result)
        print(result.pieces[-1], flush=True)
        path = written(result, options.output)
        fields.close()
        if result.finished:
            done.write_text(path.name)
        del result
        release()


def profile(options: argparse.Namespace) -> None:
    """Seconds and operations per second of a step, leak and drift after three, for every set-up and arithmetic."""
    rows: list[dict[str, Any]] = []
    data = Data(options)
    for name in options.only or MICRO:
        recipe = setup(name, options)
        how = arithmetic(recipe, options)
        few = replace(recipe, examples=how.micro, batch=None, steps=3)
        for products in options.modes:
            micro = max(1, how.micro // 2) if products == "double" else how.micro
            start = time.perf_counter()
            try:
                run = _timed(few, data.of(few), replace(how, products=products, micro=micro), options)
            except Exception as problem:
                print(f"{name} {products}: {type(problem).__name__}: {problem}", flush=True)
                continue
            rows.append({"configuration": name, "products": products, **run})
            print(
                f"{name} {products}: {run['seconds']:.4f} s per {how.micro}, {run['rate'] / 1e12:.1f} Tflop/s, "
                f"{'same' if run['same_twice'] else 'NOT THE SAME'} twice, ledger "
                f"{run['ledger_seconds'] * 1e3:.2f} ms, note {run['note_seconds']:.2f} s, {run['gib']:.0f} GiB, "
                f"{time.perf_counter() - start:.1f} s in all",
                flush=True,
            )
            for family, each in run["families"].items():
                print(f"    {family:16} " + " ".join(f"{part} {value:.2e}" for part, value in each.items()), flush=True)
            release()
    print(save("long_runs_profile", {"table": shortened(rows)}, folder=options.output))


def _timed(recipe: Recipe, examples: Examples, how: Arithmetic, options: argparse.Namespace) -> dict[str, Any]:
    from conserved_papers.lab.long import _deterministic, _Long

    cuda = options.device.startswith("cuda")
    with _deterministic():
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        run = _Long(recipe, examples, recipe.rates[1], 0, how, torch.device(options.device))

        def seconds(work: Any, rounds: int) -> float:
            work()
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                work()
            if cuda:
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / rounds

        each = seconds(run.gradient, 3)
        former = {name: gradient.clone() for name, gradient in run.gradients.items()}
        loss = run.gradient()
        same = all(torch.equal(former[name], gradient) for name, gradient in run.gradients.items())
        noting = seconds(lambda: run.note(loss), 1)
        for _ in range(recipe.steps):
            run.gradient()
            run.step()
        families = run.ledger.measured()
        result: dict[str, Any] = {
            "seconds": each,
            "same_twice": same,
            "rate": run.operations / each,
            "note_seconds": noting,
            "families": families,
            "gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        }
        result["ledger_seconds"] = seconds(lambda: run.ledger.add(0.0), 10)
        if options.kernels and cuda:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                run.gradient()
                torch.cuda.synchronize()
            averages = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[: options.kernels]
            for event in averages:
                print(
                    f"        {event.self_device_time_total / 1e3:9.2f} ms {event.count:5} {event.key[:100]}",
                    flush=True,
                )
        return result


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("profile", "run", "small", "table"))
    parser.add_argument("--images", help="a folder with images, such as Fashion-MNIST's .gz files")
    parser.add_argument("--text", help="a text file, such as the King James Bible")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--products", choices=tuple(DTYPES), default="single", help="for all set-ups")
    parser.add_argument("--plan", nargs="*", default=["penn:1e-5", "cifar:4e-4", "wikitext:5e-6", "imagenet:2e-3"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="for the whole plan, this time")
    parser.add_argument("--steps", type=int, help="of each run, this time")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between saved states")
    parser.add_argument("--store", type=Path, default=Path("unfinished"), help="a folder for the state of runs")
    parser.add_argument("--only", nargs="*", default=[], help="set-ups, for profile and small")
    parser.add_argument("--modes", nargs="*", default=["single", "double"])
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels that took longest")
    parser.add_argument("--extra", type=Path, help="for table: a JSON file with more to record")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--output", type=Path, default=Path("."), help="a folder for results")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    options.store.mkdir(parents=True, exist_ok=True)
    {"profile": profile, "run": runs, "small": small_runs, "table": tables}[options.work](options)


if __name__ == "__main__":
    main()
