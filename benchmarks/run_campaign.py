"""Search released software for wrong gradients: one command, every target checked, every refutation confirmed or not.

python benchmarks/run_campaign.py operators --device cpu --dtypes float32 --modes eager --samples 1
python benchmarks/run_campaign.py compositions --count 500 --modes inductor --workers 16 --device cuda
python benchmarks/run_campaign.py packages --device cpu
PYTHONPATH=.carry python benchmarks/run_campaign.py kernels --device cuda --dtypes float32 bfloat16
python benchmarks/run_campaign.py jax --device cpu
python benchmarks/run_campaign.py optimizers
python benchmarks/run_campaign.py settle

Targets are shared out over worker processes. A worker that dies or hangs is started again behind the target it was at,
and every row is written when it is known. Every refutation is run again by a script without this library
(campaign/confirming.py), programs are made smaller while the script still confirms them, and the script is kept with
the result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from campaign import compositions, jax_table, kernel_table, operators, optimizers, package_table, planting, settling
from campaign.compositions import Program, shrunk
from campaign.confirming import confirm, kinds_in, script
from campaign.described import jax_target, torch_target
from campaign.operators import NoSampleError
from campaign.target import Target
from conserved.checking import UncheckableError, check
from measure import RESULTS, commit, machine, save, save_path

HERE = Path(__file__).resolve().parent
SHRINKING = 45.0
"""Seconds after which a program is not made smaller any more: every attempt compiles it again."""

FAMILIES = ("operators", "compositions", "packages", "kernels", "jax", "planted", "optimizers", "settle")

SETTLED_PACKAGES = ("egnn-pytorch", "geoopt", "normflows", "pytorch_optimizer", "pytorch-wavelets", "torchmetrics")
"""Packages whose versions are stored beside the settlements."""

LOST_DEVICE = "CUDA error"
"""What an exception says after which a process cannot use its GPU again."""


def targets_of(chosen: argparse.Namespace) -> Iterator[Callable[[], Target]]:
    """Yield the targets of a family, in an order that every worker repeats; a worker makes its own ones alone."""
    dtypes = tuple(getattr(torch, name) for name in chosen.dtypes)
    if chosen.family == "compositions":
        for mode in chosen.modes:
            for seed in range(chosen.first, chosen.first + chosen.count):
                yield partial(compositions.target_of, seed, dtypes, mode)
        return
    if chosen.family == "planted":
        seeds = range(chosen.first, chosen.first + chosen.count)
        made: Iterable[Target] = (target for seed in seeds for target in planting.targets_of(seed, dtypes))
    elif chosen.family == "operators":
        made = list(operators.targets(dtypes, tuple(chosen.modes), chosen.device, chosen.samples, chosen.match))
        # A run that is cut short has seen operators of all names.
        random.Random(chosen.first).shuffle(made)
    elif chosen.family == "jax":
        made = (jax_target(entry, dtype) for entry in jax_table.descriptions() for dtype in dtypes)
    else:
        entries = (kernel_table if chosen.family == "kernels" else package_table).descriptions()
        made = (torch_target(entry, mode, dtype) for entry in entries for mode in chosen.modes for dtype in dtypes)
    for target in made:
        yield partial(_same, target)


def _same(target: Target) -> Target:
    return target


def check_target(target: Target, device: str, seconds: float) -> dict[str, Any]:
    """Check one target and return its verdict, tests and time; nothing is raised."""
    torch.manual_seed(0)
    row: dict[str, Any] = target.record()
    start, worked = time.perf_counter(), time.process_time()
    try:
        function, tensors = target.build(device)
        # One graph for each shape: beyond dynamo's limit a function runs eagerly, and that is not what is checked.
        torch._dynamo.config.recompile_limit = 256
        _run_once(function, tensors)
        compiled = time.perf_counter() - start
        result = check(function, *tensors, seconds=seconds)
    except NoSampleError:
        return row | {"status": "no sample"}
    except UncheckableError as problem:
        return row | {"status": "uncheckable", "why": str(problem)[:200]}
    except Exception as problem:
        return row | {"status": "error", "why": f"{type(problem).__name__}: {str(problem)[:200]}"}
    finally:
        torch._dynamo.reset()
    row |= {
        "status": result.verdict.status.value,
        "tests": len(result.tests),
        "unseen": result.unseen,
        "cut short": any("cut short" in note for note in result.notes),
        "first call": round(compiled, 2),
        "seconds": round(time.perf_counter() - start, 2),
        "processor seconds": round(time.process_time() - worked, 2),
    }
    if not result.verdict.holds:
        row["why"] = result.verdict.message[:300]
        row["failures"] = [
            {"test": test.what, "gradients": test.gradients, "residual": test.residual, "limit": test.limit}
            for test in result.failures[:6]
        ]
    return row


def _run_once(function: Callable[..., Any], tensors: list[Any]) -> None:
    """Run forward and backward, so that compiling and tuning do not use up the time of the check."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return
    tensors = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    outputs = function(*tensors)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    live = [output.sum() for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    if live:
        torch.autograd.grad(live, [x for x in tensors if x.requires_grad], allow_unused=True)


def confirm_refutation(target: Target, row: dict[str, Any], device: str) -> dict[str, Any]:
    """Confirm a refuted target by a script, make it smaller while it is confirmed, and return both."""
    kinds = kinds_in([failure["test"] for failure in row["failures"]])
    answers = [confirm(target, device, kind) for kind in kinds[:3]]
    answer = next((answer for answer in answers if answer["confirmed"]), answers[-1])
    if answer["confirmed"] and target.group == "torch.compile" and answer["kind"] == "given":
        until = time.monotonic() + SHRINKING

        def still_wrong(program: Program) -> bool:
            return time.monotonic() < until and bool(confirm(_with_source(target, program), device)["confirmed"])

        small = shrunk(_program_of(target), still_wrong)
        target = _with_source(target, small)
        answer |= {"shrunk": confirm(target, device)}
    if answer["confirmed"]:
        answer |= {"alone": confirm(target, device, answer["kind"], alone=True)}
    return answer | {"script": script(target, device, answer.get("kind", "given"))}


def _program_of(target: Target) -> Program:
    lines = [line.strip() for line in target.source.splitlines() if line.strip().startswith("h")]
    sizes = target.source.partition("torch.randn(")[2].partition(", generator")[0]
    return Program(tuple(lines), tuple(int(size) for size in sizes.split(",")))


def _with_source(target: Target, program: Program) -> Target:
    return Target(name=target.name, group=target.group, source=program.source, mode=target.mode, dtype=target.dtype)


def work(chosen: argparse.Namespace) -> None:
    """Check every target of one worker's share from a number on, a line of JSON each."""
    torch.set_num_threads(1)
    deadline = chosen.deadline
    with Path(chosen.out).open("a") as file:
        for number, make in enumerate(targets_of(chosen)):
            if number % chosen.workers != chosen.share or number < chosen.start:
                continue
            if time.time() > deadline:
                return
            file.write(json.dumps({"begin": number}) + "\n")
            file.flush()
            target = make()
            row = check_target(target, chosen.device, chosen.seconds)
            if row["status"] == "refuted" and chosen.family != "planted":
                row |= confirm_refutation(target, row, chosen.device)
            file.write(json.dumps({"number": number, **row}, default=str) + "\n")
            file.flush()
            if LOST_DEVICE in row.get("why", ""):
                sys.exit(1)


def launch(chosen: argparse.Namespace, parts: Path, keep: Callable[[list[dict[str, Any]]], object]) -> None:
    """Run all workers to their end or to the deadline, and keep their rows every 20 seconds and at the end."""
    folder = parts / f"parts_{chosen.family}_{'_'.join(chosen.modes)}_{chosen.device}"
    folder.mkdir(parents=True, exist_ok=True)
    outs = [folder / f"{chosen.first}_{share}.jsonl" for share in range(chosen.workers)]
    for out in outs:
        out.unlink(missing_ok=True)
    starts = [chosen.start] * chosen.workers
    deadline = time.time() + chosen.minutes * 60

    def begin(share: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, *sys.argv[1:], "--share", str(share), "--start", str(starts[share])]
        command += ["--out", str(outs[share]), "--deadline", str(deadline)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            (str(HERE), str(HERE.parent / "src"), environment.get("PYTHONPATH", ""))
        )
        log = outs[share].with_suffix(".log").open("w")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    running = {share: begin(share) for share in range(chosen.workers)}
    shown = time.monotonic()
    while running:
        time.sleep(0.5)
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            rows = _all_rows(outs)
            keep(rows)
            print(f"{len(rows)} targets done, {len(running)} workers", flush=True)
        for share, process in list(running.items()):
            quiet_for = time.time() - max(
                outs[share].stat().st_mtime if outs[share].exists() else 0, process_start(process)
            )
            if process.poll() == 0 or time.time() > deadline + 60:
                process.kill()
                del running[share]
            elif process.poll() is not None or quiet_for > chosen.stuck:
                process.kill()
                last = _last_begun(outs[share])
                starts[share] = last + 1
                if all(row["number"] != last for row in _rows(outs[share])):
                    with outs[share].open("a") as file:
                        file.write(json.dumps({"number": last, "status": "crashed"}) + "\n")
                running[share] = begin(share)
    keep(_all_rows(outs))


def _all_rows(outs: Iterable[Path]) -> list[dict[str, Any]]:
    rows = (row for out in outs for row in _rows(out) if row["status"] != "no sample")
    return sorted(rows, key=lambda row: row["number"])


_STARTED: dict[int, float] = {}


def process_start(process: subprocess.Popen[bytes]) -> float:
    """Return when a worker was first looked at, so that its imports do not count as silence."""
    return _STARTED.setdefault(process.pid, time.time())


def _rows(out: Path) -> list[dict[str, Any]]:
    if not out.exists():
        return []
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if "number" in line]


def _last_begun(out: Path) -> int:
    if not out.exists():
        return -1
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    return max((line["begin"] for line in lines if "begin" in line), default=-1)


def run_optimizers(folder: Path) -> None:
    """Ask every installed optimizer for the relations of campaign/optimizers.py, and save what differs."""
    start = time.time()
    rows = []
    for target in optimizers.targets():
        row = optimizers.check_optimizer(target)
        rows.append(row)
        print(target.package, target.name, row.get("error") or row["fails"] or "holds", flush=True)
    counts = Counter("not run" if "error" in row else "differs" if row["fails"] else "holds" for row in rows)
    print(dict(counts))
    packages = {row["package"]: version(row["package"]) for row in rows}
    record = {"commit": commit(), **machine(), "versions": packages, "minutes": (time.time() - start) / 60}
    print("saved", save("campaign_optimizers", record | {"counts": dict(counts), "rows": rows}, folder))


def run_settlements(folder: Path, match: str) -> None:
    """Run the script of every cause of refutations, and save how many refutations each of them settles."""
    start = time.time()
    earlier = save_path("settled_refutations", folder)
    before = json.loads(earlier.read_text())["rows"] if match and earlier.exists() else []
    result = settling.settle(RESULTS, match.split(), before)
    print(result["totals"], "unsettled:", result["unsettled"] or "none")
    packages = versions([{"group": name} for name in SETTLED_PACKAGES])
    record = {"commit": commit(), **machine(), "versions": packages, "minutes": (time.time() - start) / 60}
    print("saved", save("settled_refutations", record | result, folder))


def main() -> None:
    """Parse arguments, run, and save a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--modes", nargs="+", default=["eager"])
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--match", default="")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="time of one check")
    parser.add_argument("--minutes", type=float, default=10.0, help="time of the whole run")
    parser.add_argument("--stuck", type=float, default=150.0, help="seconds without a row before a worker is restarted")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="go on behind the last row that today's file has")
    parser.add_argument("--label", default="", help="further part of the name of the result file")
    parser.add_argument("--share", type=int, default=-1, help="worker: which share of the targets")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--out", default="")
    parser.add_argument("--deadline", type=float, default=0.0)
    chosen = parser.parse_args()
    if chosen.family == "optimizers":
        run_optimizers(chosen.folder)
        return
    if chosen.family == "settle":
        run_settlements(chosen.folder, chosen.match)
        return
    if chosen.share >= 0:
        work(chosen)
        return
    start = time.time()
    name = f"campaign_{chosen.family}_{'_'.join(chosen.modes)}" + (f"_{chosen.label}" if chosen.label else "")
    earlier: dict[str, Any] = {"rows": [], "minutes": 0.0, "commits": []}
    if chosen.resume:
        earlier = json.loads(save_path(name, chosen.folder).read_text())
        chosen.start = max(row["number"] for row in earlier["rows"]) + 1
    commits = sorted({commit(), *earlier["commits"]})

    def keep(rows: list[dict[str, Any]]) -> Path:
        minutes = earlier["minutes"] + (time.time() - start) / 60
        record = {"commits": commits, **machine(), "arguments": sys.argv[1:], "minutes": minutes}
        rows = earlier["rows"] + rows
        counts = dict(Counter(row["status"] for row in rows))
        record |= {"workers": chosen.workers, "versions": versions(rows), "counts": counts, "rows": rows}
        return save(name, record, chosen.folder)

    with TemporaryDirectory() as parts:
        launch(chosen, Path(parts), keep)
    record = json.loads(save_path(name, chosen.folder).read_text())
    for row in record["rows"]:
        if row["status"] == "refuted":
            print(row["name"], row["dtype"], row["mode"], "confirmed:", row.get("confirmed"), row.get("error"))
    print(record["counts"])


def versions(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the versions of the packages that were checked, where they are installed as distributions."""
    groups = {row.get("group", "").partition(" ")[0].partition(".")[0] for row in rows} | {"torch", "triton", "numpy"}
    known = {}
    for group in sorted(groups - {""}):
        try:
            known[group] = version(group)
        except PackageNotFoundError:
            continue
    return known


if __name__ == "__main__":
    main()
