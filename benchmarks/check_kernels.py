"""conserved.check on kernels that others wrote, and on past releases with a published wrong gradient.

python benchmarks/check_kernels.py --prepare .carry                     # installs the packages, each in its folder
python benchmarks/check_kernels.py --carry .carry --out results         # on a GPU: all of them, several at a time
python benchmarks/check_kernels.py --carry .carry --device cpu --only entmax --past

Every package runs in a process of its own, which is started again if a kernel takes it down; results are written line
by line, so that a run cut short leaves what it has found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from conserved.checking import UncheckableError, check
from kernels_of_others import CASES, PACKAGES, PAST, Case
from measure import RESULTS, save

HERE = Path(__file__).resolve().parent
STUCK = 280.0
"""Seconds without a new line after which a process is taken to hang; it is begun again behind that case."""


def rows_of(cases: list[Case]) -> list[tuple[Case, torch.dtype, int]]:
    """Every case in every precision and length, precision by precision so that one failure does not hide the rest."""
    return [(case, dtype, length) for case in cases for dtype in case.dtypes for length in case.lengths]


def name_of(case: Case, dtype: torch.dtype, length: int) -> dict[str, Any]:
    """What a row is about."""
    return {
        "package": case.package,
        "kernel": case.name,
        "dtype": str(dtype)[6:],
        "length": length,
        "defect": case.defect,
    }


def run_one(case: Case, dtype: torch.dtype, length: int, device: str, *, compare: bool) -> dict[str, Any]:
    """Check one kernel in one precision at one length; and gradcheck's word on it, where it has one."""
    torch.manual_seed(0)
    row = name_of(case, dtype, length)
    start = time.perf_counter()
    try:
        fn, tensors, options = case.build(dtype, length, device)
        fn(*tensors)
    except Exception as problem:  # a package that does not import or compile here is reported and passed over
        return row | {"unavailable": _short(problem)}
    row["first call"] = time.perf_counter() - start
    try:
        warm = check(fn, *tensors, seconds=case.seconds, **options)
        seconds = warm.seconds
        result = warm
        if warm.seconds < 0.5 * case.seconds:
            result = check(fn, *tensors, seconds=case.seconds, **options)
            seconds = result.seconds
    except UncheckableError as problem:
        return row | {"uncheckable": str(problem)}
    except Exception as problem:
        return row | {"error": _short(problem)}
    row |= {
        "status": result.verdict.status.value,
        "message": result.verdict.message,
        "ok": result.ok,
        "conclusive": result.conclusive,
        "seconds": seconds,
        "first check": warm.seconds,
        "symmetries": [result.probed.describe(symmetry) for symmetry in result.symmetries],
        "tests": {
            method: len([test for test in result.tests if test.method.value == method])
            for method in ("presence", "identity", "relation", "derivative")
        },
        "worst": {
            method: max((test.worst for test in result.tests if test.method.value == method), default=0.0)
            for method in ("identity", "relation", "derivative")
        },
        "residual": {
            method: max((test.residual for test in result.tests if test.method.value == method), default=0.0)
            for method in ("identity", "relation", "derivative")
        },
        "failures": [test.record() for test in result.failures[:12]],
        "untested": {name: list(why) for name, why in result.untested.items()},
        "notes": list(result.notes),
        "text": str(result),
    }
    if compare:
        row["gradcheck"] = gradcheck(case, length, device)
    return row


def gradcheck(case: Case, length: int, device: str) -> str:
    """What torch.autograd.gradcheck says of the kernel in double precision, in its fast mode, and how long it takes."""
    try:
        fn, tensors, _ = case.build(torch.float64, length, device)
        inputs = [
            item.detach().requires_grad_() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
            for item in tensors
        ]
        start = time.perf_counter()
        held = torch.autograd.gradcheck(fn, inputs, fast_mode=True, raise_exception=False)
        return f"{'passes' if held else 'fails'} in {time.perf_counter() - start:.1f} s"
    except Exception as problem:
        return f"cannot run: {_short(problem)}"


def _short(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:160] if lines else ''}"


def work(chosen: list[Case], start: int, device: str, out: Path) -> None:
    """The cases of one package, from a row on, a line of JSON each."""
    compared: set[str] = set()
    for number, (case, dtype, length) in enumerate(rows_of(chosen)):
        if number < start:
            continue
        with out.open("a") as file:
            file.write(json.dumps({"begin": number, **name_of(case, dtype, length)}) + "\n")
        row = run_one(case, dtype, length, device, compare=case.name not in compared and dtype != torch.float16)
        compared.add(case.name)
        with out.open("a") as file:
            file.write(json.dumps({"number": number, **row}, default=str) + "\n")
        if device != "cpu":
            torch.cuda.synchronize()
        print(_line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    text = row.get("status") or next((key for key in ("unavailable", "uncheckable", "error") if key in row), "?")
    detail = row.get("unavailable") or row.get("uncheckable") or row.get("error") or row.get("message", "")
    taken = f"{row['seconds']:.1f} s" if "seconds" in row else ""
    head = f"{row['package']:<30} {row['kernel']:<34} {row['dtype']:<9} {row['length']:>5}"
    return f"{head} {text:<13} {taken:>7}  {detail[:110]}"


def speed(device: str) -> dict[str, Any]:
    """How long the check of PyTorch's attention takes at (2, 8, 2048, 64) in bfloat16, after a first one."""
    import torch.nn.functional as F

    shape = (2, 8, 2048, 64) if device != "cpu" else (1, 2, 128, 32)
    tensors = [torch.randn(*shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
    taken: dict[str, Any] = {"shape": list(shape)}
    for causal in (False, True):

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        checks = [check(attention, *tensors) for _ in range(3)]
        label = "causal" if causal else "full"
        taken[label] = {
            "seconds": [result.seconds for result in checks],
            "status": checks[-1].verdict.status.value,
            "tests": len(checks[-1].tests),
            "text": str(checks[-1]),
        }
        print(f"SDPA {shape} bfloat16 {label}: {[round(result.seconds, 2) for result in checks]} s", flush=True)
    return taken


def groups_of(cases: list[Case]) -> dict[str, list[Case]]:
    """Cases by the folder of their package, large ones in several groups, kernels that autotune for minutes alone."""
    result: dict[str, list[Case]] = {}
    for case in cases:
        key = case.folder or "torch"
        key += "-past" if case.defect else ""
        number, most = 0, 1 if case.folder == "fla060" else 18
        while len(rows_of(result.get(f"{key}#{number}", []))) >= most:
            number += 1
        result.setdefault(f"{key}#{number}", []).append(case)
    return result


def launch(chosen: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """A process for each group, as many at a time as asked for; those that die or hang go on behind the case."""
    cases = _chosen(chosen)
    waiting = list(groups_of(cases).items())
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    restarts: dict[str, int] = {}
    deadline = time.monotonic() + chosen.seconds
    groups = dict(waiting)

    def begin(key: str, start: int) -> None:
        folder = groups[key][0].folder
        environment = dict(os.environ) | {"TRITON_PRINT_AUTOTUNING": "0"}
        extra = [str(Path(chosen.carry) / folder)] if folder else []
        environment["PYTHONPATH"] = os.pathsep.join(
            [*extra, str(HERE), str(HERE.parent / "src"), environment.get("PYTHONPATH", "")]
        )
        words = [sys.executable, str(HERE / "check_kernels.py"), "--group", key, "--start", str(start)]
        words += ["--device", chosen.device, "--out", str(out), "--carry", str(chosen.carry)]
        words += ["--only", chosen.only] if chosen.only else []
        words += ["--past"] if chosen.past else []
        log = (out / f"{key.replace('#', '_')}.log").open("ab")
        running[key] = (subprocess.Popen(words, env=environment, stdout=None, stderr=log), time.monotonic())

    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < chosen.workers:
            begin(waiting.pop(0)[0], 0)
        time.sleep(0.5)
        for key, (process, born) in list(running.items()):
            path = out / f"{key.replace('#', '_')}.jsonl"
            last = path.stat().st_mtime if path.exists() else 0.0
            quiet = min(time.monotonic() - born, time.time() - last)
            if process.poll() is None and quiet < STUCK:
                continue
            hung = process.poll() is None
            if hung:
                process.kill()
                process.wait()
            del running[key]
            if process.returncode == 0 and not hung:
                continue
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            started_at = max((line["begin"] for line in lines if "begin" in line), default=-1)
            if started_at >= 0 and not any(line.get("number") == started_at for line in lines):
                lost = next(line for line in lines if line.get("begin") == started_at)
                lost = {key_: value for key_, value in lost.items() if key_ != "begin"}
                reason = "hung" if hung else f"the process ended with {process.returncode}"
                with path.open("a") as file:
                    file.write(json.dumps({"number": started_at, **lost, "error": reason}) + "\n")
            restarts[key] = restarts.get(key, 0) + 1
            if restarts[key] <= 6 and started_at + 1 < len(rows_of(groups[key])) and started_at >= 0:
                begin(key, started_at + 1)
    for process, _ in running.values():
        process.kill()
        process.wait()
    result = []
    for key in groups:
        path = out / f"{key.replace('#', '_')}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        result += [line for line in lines if "number" in line]
    return result


def _chosen(chosen: argparse.Namespace) -> list[Case]:
    cases = PAST if chosen.past else [*PAST, *sorted(CASES, key=lambda case: case.folder != "fla060")]
    return [case for case in cases if not chosen.only or chosen.only in f"{case.package} {case.name} {case.folder}"]


def prepare(folder: Path) -> None:
    """Install every package into its folder, without dependencies, and drop what kernels do not need."""
    for name, packages in PACKAGES.items():
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--no-build-isolation"]
        subprocess.run([*words, "--upgrade", "--target", str(folder / name), *packages.split()], check=False)
    keep = {"unsloth": "unsloth/kernels", "diffusers": "diffusers/models/attention_dispatch.py"}
    for name, wanted in keep.items():
        for path in sorted((folder / name).rglob("*"), reverse=True):
            inside = path.relative_to(folder / name).as_posix()
            if path.is_file() and not inside.startswith(wanted):
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    for path in folder.glob("flaggems/flag_gems/runtime/backend/_*"):
        if path.is_dir() and path.name != "_nvidia":
            subprocess.run(["rm", "-r", str(path)], check=False)
    print(subprocess.run(["du", "-sm", str(folder)], capture_output=True, text=True, check=False).stdout.strip())


def main() -> None:
    """Prepare, work on one group, or launch all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--carry", type=Path, default=Path(".carry"))
    parser.add_argument("--out", type=Path, default=Path("build/check_kernels"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=440.0, help="time after which processes are ended")
    parser.add_argument("--only", default="", help="cases with this text in package, kernel or folder")
    parser.add_argument("--past", action="store_true", help="past releases with a known defect only")
    parser.add_argument("--group")
    parser.add_argument("--start", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.prepare:
        prepare(chosen.prepare)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.group:
        cases = groups_of(_chosen(chosen))[chosen.group]
        work(cases, chosen.start, chosen.device, chosen.out / f"{chosen.group.replace('#', '_')}.jsonl")
        return
    timing = speed(chosen.device) if not chosen.only and not chosen.past else {}
    with TemporaryDirectory() as folder:
        rows = launch(chosen, Path(folder))
        logs = {path.stem: path.read_text(errors="replace")[-2000:] for path in Path(folder).glob("*.log")}
    sound = [row for row in rows if not row["defect"] and "status" in row]
    alarms = [row for row in sound if row["status"] == "refuted"]
    kernels = {(row["package"], row["kernel"]) for row in sound}
    past = [row for row in rows if row["defect"] and "status" in row]
    seen = {row["defect"] for row in past if row["status"] == "refuted"}
    known = {row["defect"] for row in past}
    print(f"{len(sound)} checks of {len(kernels)} kernels, {len(alarms)} refuted")
    print(f"of {len(known)} past defects {len(seen)} seen")
    for row in alarms:
        print(f"  {row['package']} {row['kernel']} {row['dtype']} {row['length']}: {row['message']}")
    record = {
        "logs": logs,
        "speed": timing,
        "rows": rows,
        "kernels": len(kernels),
        "refuted": len(alarms),
        "past defects seen": sorted(seen),
    }
    print(f"saved {save('check_kernels', record, chosen.out if chosen.out != RESULTS else RESULTS)}")


if __name__ == "__main__":
    main()
