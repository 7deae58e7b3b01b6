"""Every operator of PyTorch's own catalogue of sample inputs, with every argument: do the typing rules tell the truth?

A sample of an operator becomes small programs: its tensors are trained, or made of trained ones by maps and biases, and
its results are read by trained maps. Laws are inferred, and every identity is tested in float64 at random parameters.
An operator whose rule overlooks a keyword lists a law that fails there. To show that rules do not forbid too much, the
scales that the program really has are counted: the null space of θ ∘ G over many random points.

    python benchmarks/operator_catalogue.py [--operators 20] [--samples 6] [--scales]

All samples take hours of one core; parts of them can be run side by side and merged:

    python benchmarks/operator_catalogue.py --samples 0 --part 3/6 --lines part3.jsonl --minutes 7
    python benchmarks/operator_catalogue.py --merge part*.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from conserved import recognize
from measure import save
from operator_samples import Case, cases, operators, torus_laws, true_scales


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


def table_row(operator: Any, options: argparse.Namespace, end: float) -> dict[str, Any] | None:
    """The programs of one operator, counted; None when there is no time left for all of them."""
    row: Counter[str] = Counter()
    wrong, errors, unchecked = {}, set(), set()
    for case in cases(operator, samples=options.samples, part=options.part):
        if time.time() > end:
            return None
        record = measured(case)
        row["programs"] += 1
        row["laws"] += record.get("laws", 0)
        row["ruled"] += not record.get("unknown") and "error" not in record
        row["errors"] += "error" in record
        row["unchecked"] += "unchecked" in record
        if "error" in record:
            errors.add(record["error"])
        if "unchecked" in record:
            unchecked.add(record["unchecked"])
        if "wrong" in record:
            row["wrong"] += 1
            wrong[record["case"]] = record["wrong"]
            print("WRONG", record["case"], record["wrong"], flush=True)
        if case.countable and options.scales:
            inferred, there = torus_laws(case), true_scales(case)
            if there >= 0:
                row["scales found"] += inferred
                row["scales there are"] += there
    details = {"failed": wrong, "why": sorted(errors)[:3], "why unchecked": sorted(unchecked)[:3]}
    return dict(row) | {key: value for key, value in details.items() if value}


def merged(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The rows of all operators from files of parts, one operator a line."""
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            name, row = json.loads(line)
            whole = rows.setdefault(name, {})
            for key, value in row.items():
                if isinstance(value, dict):
                    whole.setdefault(key, {}).update(value)
                elif isinstance(value, list):
                    whole[key] = sorted({*whole.get(key, []), *value})[:3]
                else:
                    whole[key] = whole.get(key, 0) + value
    return dict(sorted(rows.items()))


def save_table(rows: dict[str, dict[str, Any]], samples: int, measured_at: str = "") -> None:
    """Print the totals and save the table; operators about which there is nothing to say keep their counts alone."""
    totals: Counter[str] = Counter()
    for row in rows.values():
        totals.update({key: value for key, value in row.items() if isinstance(value, int)})
        totals["operators"] += bool(row.get("programs"))
        totals["operators with a rule"] += bool(row.get("ruled"))
    print(dict(totals))
    table = {name: {key: value for key, value in row.items() if value} for name, row in rows.items()}
    record = {"samples of an operator": samples, "totals": dict(totals), "operators": table}
    save("operator_catalogue", record | ({"commit": measured_at} if measured_at else {}))


def main() -> None:
    """Run the catalogue and save the table, or one part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=8, help="of each operator and precision; 0 for all")
    parser.add_argument("--match", default="")
    parser.add_argument("--scales", action="store_true", help="count the scales that small programs really have")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th sample from the K-th; needs --lines")
    parser.add_argument("--lines", type=Path, help="file of one operator a line, continued where it ends")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further program after that")
    parser.add_argument("--merge", type=Path, nargs="+", help="files of parts to make a table of; nothing is run")
    parser.add_argument("--commit", default="", help="with --merge: the commit at which the parts were measured")
    options = parser.parse_args()
    options.samples = options.samples or 1_000_000
    number, parts = map(int, options.part.split("/"))
    options.part = (number, parts)
    if options.merge:
        save_table(merged(options.merge), options.samples, options.commit)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    end = time.time() + 60 * options.minutes
    rows: dict[str, dict[str, Any]] = {}
    known = merged([options.lines]) if options.lines and options.lines.exists() else {}
    for operator in operators(options.match)[: options.operators]:
        if operator.full_name in known:
            continue
        row = table_row(operator, options, end)
        if row is None:
            print(f"part {number}: no time left at {operator.full_name}", flush=True)
            break
        rows[operator.full_name] = row
        if options.lines:
            with options.lines.open("a") as file:
                file.write(json.dumps([operator.full_name, row], ensure_ascii=False) + "\n")
    if not options.lines and options.match == "" and options.operators >= 10_000:
        save_table(rows, options.samples)
    else:
        print({key: sum(row.get(key, 0) for row in rows.values()) for key in ("programs", "laws", "wrong", "errors")})


if __name__ == "__main__":
    main()
