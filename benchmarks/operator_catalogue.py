"""Every operator of PyTorch's own catalogue of sample inputs, with every argument: do the typing rules tell the truth?

A sample of an operator becomes small programs: its tensors are trained, or made of trained ones by maps and biases, and
its results are read by trained maps. Laws are inferred, and every identity is tested in float64 at random parameters.
An operator whose rule overlooks a keyword lists a law that fails there. To show that rules do not forbid too much, the
scales that the program really has are counted: the null space of θ ∘ G over many random points.

    python benchmarks/operator_catalogue.py [--operators 20] [--samples 6] [--scales]

All samples take an hour of one core; processes share them, and what a time limit cut off can be continued:

    python benchmarks/operator_catalogue.py --samples 0 --workers 16 --lines first.jsonl --minutes 8
    python benchmarks/operator_catalogue.py --samples 0 --workers 16 --lines second.jsonl --done first.jsonl
    python benchmarks/operator_catalogue.py --samples 0 --merge first.jsonl second.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections import Counter
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from conserved import recognize
from measure import save
from operator_samples import Case, cases, number_of_samples, operators, torus_laws, true_scales


def measured(case: Case) -> dict[str, Any]:
    """What inference says of one program, and whether it is so."""
    record: dict[str, Any] = {"case": case.name}
    try:
        laws = recognize(case.program, torch.ones(1))
    except Exception as problem:
        # Operators raise what they like on samples that are meant to fail, and some cannot be differentiated.
        return record | {
            "error": f"{type(problem).__name__}: {str(problem).splitlines()[0][:100] if str(problem) else ''}"
        }
    assert laws.checked is not None
    record |= {"laws": len(laws), "unknown": sorted(laws.unknown), "points": laws.checked.points}
    if laws.checked.refuted:
        record["wrong"] = dict(laws.checked.refuted)
    if not laws.checked and len(laws):
        record["unchecked"] = laws.checked.reason
    return record


Task = tuple[str, tuple[int, int], int, bool, float]
"""An operator's full name, which part of its samples, how many samples, whether to count scales, when to stop."""


def table_row(task: Task) -> tuple[str, str, dict[str, Any] | None]:
    """The programs of a part of an operator, counted; None when there is no time left for all of them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, part, samples, scales, end = task
    key = f"{part[0]}/{part[1]}"
    row: Counter[str] = Counter()
    overloads: Counter[str] = Counter()
    wrong, errors, unchecked = {}, set(), set()
    last = ""
    for case in cases(_operator(name), samples=samples, part=part):
        if time.time() > end:
            return name, key, None
        record = measured(case)
        sample = case.name.rpartition(" ")[0]
        row["samples"] += sample != last
        last = sample
        overloads.update(case.overloads())
        row["programs"] += 1
        row["laws"] += record.get("laws", 0)
        row["ruled"] += not record.get("unknown") and "error" not in record
        row["errors"] += "error" in record
        row["without a law"] += record.get("laws", 1) == 0
        row["unchecked"] += "unchecked" in record
        if "error" in record:
            errors.add(record["error"])
        if "unchecked" in record:
            unchecked.add(record["unchecked"])
        if "wrong" in record:
            row["wrong"] += 1
            wrong[record["case"]] = record["wrong"]
            print("WRONG", record["case"], record["wrong"], flush=True)
        if case.countable and scales:
            inferred, there = torus_laws(case), true_scales(case)
            if there >= 0:
                row["programs with scales counted"] += 1
                row["as many scales as there are"] += inferred == there
                row["scales found"] += inferred
                row["scales there are"] += there
    details = {
        "overloads": dict(overloads),
        "failed": wrong,
        "why": sorted(errors)[:3],
        "why unchecked": sorted(unchecked)[:3],
    }
    return name, key, dict(row) | {key: value for key, value in details.items() if value}


@cache
def _operator(name: str) -> Any:
    return next(operator for operator in operators(name) if operator.full_name == name)


SPLIT = 24
"""Samples of an operator that one task runs, about: operators with many are shared by several processes."""


def tasks(options: argparse.Namespace, end: float) -> list[Task]:
    """Every operator in parts, without what earlier files hold; those with the most samples begin, unless told so."""
    done = {(name, part) for file in options.done for name, part, _ in _lines(file)}
    result = []
    for operator in operators(options.match)[: options.operators]:
        parts = max(1, min(number_of_samples(operator), 2 * options.samples) // SPLIT)
        result += [
            (operator.full_name, (part, parts), options.samples, options.scales, end)
            for part in range(parts)
            if (operator.full_name, f"{part}/{parts}") not in done
        ]
    return sorted(result, key=lambda task: task[1][1], reverse=not options.smallest_first)


def _lines(file: Path) -> list[tuple[str, str, dict[str, Any]]]:
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def merged(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The rows of all operators from files of parts, one operator a line."""
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, _, row in _lines(file):
            whole = rows.setdefault(name, {})
            for key, value in row.items():
                if key == "overloads":
                    whole[key] = dict(Counter(whole.get(key, {})) + Counter(value))
                elif isinstance(value, dict):
                    whole.setdefault(key, {}).update(value)
                elif isinstance(value, list):
                    whole[key] = sorted({*whole.get(key, []), *value})[:3]
                else:
                    whole[key] = whole.get(key, 0) + value
    return dict(sorted(rows.items()))


def save_table(rows: dict[str, dict[str, Any]], samples: int, measured_at: dict[str, str]) -> None:
    """Print the totals and save the table; operators about which there is nothing to say keep their counts alone."""
    totals: Counter[str] = Counter()
    overloads: Counter[str] = Counter()
    for row in rows.values():
        totals.update({key: value for key, value in row.items() if isinstance(value, int)})
        totals["operators"] += bool(row.get("programs"))
        totals["operators with a rule"] += bool(row.get("ruled"))
        totals["operators without a sample that fits"] += not row.get("programs")
        overloads.update(row.pop("overloads", {}))
    totals["overloads"] = len(overloads)
    print(dict(totals))
    table = {name: {key: value for key, value in row.items() if value} for name, row in rows.items()}
    record = {
        "samples of an operator": "all" if samples >= ALL else samples,
        "totals": dict(totals),
        "programs by overload": dict(sorted(overloads.items())),
        "operators": table,
    }
    save("operator_catalogue", record | measured_at)


ALL = 1_000_000
"""More samples than an operator has."""


def main() -> None:
    """Run the catalogue, or what is not done of it, and save the table unless a part was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=8, help="of each operator and precision; 0 for all")
    parser.add_argument("--match", default="")
    parser.add_argument("--scales", action="store_true", help="count the scales that small programs really have")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lines", type=Path, help="file of one part of an operator a line, added to as parts end")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="such files: what they hold is not run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further program after that")
    parser.add_argument("--smallest-first", action="store_true", help="begin with operators of few samples")
    parser.add_argument("--merge", type=Path, nargs="+", help="such files to make a table of; nothing is run")
    parser.add_argument("--commit", default="", help="with --merge: the commit at which the parts were measured")
    parser.add_argument("--torch", default="", help="with --merge: the version of torch that ran them")
    options = parser.parse_args()
    options.samples = options.samples or ALL
    if options.merge:
        where = {"commit": options.commit, "torch": options.torch}
        save_table(merged(options.merge), options.samples, {key: value for key, value in where.items() if value})
        return
    lines = options.lines or Path(tempfile.mkdtemp()) / "lines.jsonl"
    chosen = tasks(options, time.time() + 60 * options.minutes)
    print(f"{len(chosen)} parts of {len({task[0] for task in chosen})} operators", flush=True)
    left = 0
    with get_context("spawn").Pool(options.workers) as pool, lines.open("a") as file:
        for name, part, row in pool.imap_unordered(table_row, chosen, 1):
            if row is None:
                left += 1
                continue
            file.write(json.dumps([name, part, row], ensure_ascii=False) + "\n")
            file.flush()
    rows = merged([lines])
    print({key: sum(row.get(key, 0) for row in rows.values()) for key in ("programs", "laws", "wrong", "errors")})
    print(f"{left} parts left for want of time")
    if not options.lines and options.match == "" and options.operators >= 10_000:
        save_table(rows, options.samples, {})


if __name__ == "__main__":
    main()
