"""Every operator of PyTorch's own catalogue of sample inputs, with every argument: do the typing rules tell the truth?

A sample of an operator becomes small programs: its tensors are trained, or made of trained ones by maps and biases, and
its results are read by trained maps. Laws are inferred, and every identity is tested in float64 at random parameters.
An operator whose rule overlooks a keyword lists a law that fails there. To show that rules do not forbid too much, the
scales that the program really has are counted: the null space of θ ∘ G over many random points.

    python benchmarks/operator_catalogue.py [--operators 20] [--samples 6]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch

from conserved import recognize
from measure import commit, machine, save
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
    if not laws.checked and "no exact" not in laws.checked.reason:
        record["unchecked"] = laws.checked.reason
    return record


def main() -> None:
    """Run the catalogue and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--match", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    totals: Counter[str] = Counter()
    rows: dict[str, Any] = {}
    start = time.perf_counter()
    scales = np.zeros(2, dtype=np.int64)
    for operator in operators(options.match)[: options.operators]:
        row: Counter[str] = Counter()
        wrong, errors = {}, set()
        for case in cases(operator, samples=options.samples):
            found = measured(case)
            row["programs"] += 1
            row["laws"] += found.get("laws", 0)
            row["ruled"] += not found.get("unknown") and "error" not in found
            row["errors"] += "error" in found
            row["unchecked"] += "unchecked" in found
            if "error" in found:
                errors.add(found["error"])
            if "wrong" in found:
                row["wrong"] += 1
                wrong[found["case"]] = found["wrong"]
                print("WRONG", found["case"], found["wrong"], flush=True)
            if case.countable:
                pair = np.array((torus_laws(case), true_scales(case)))
                if pair[1] >= 0:
                    scales += pair
                    row["scales found"] += int(pair[0])
                    row["scales there are"] += int(pair[1])
        if row["programs"]:
            rows[operator.full_name] = (
                dict(row) | ({"failed": wrong} if wrong else {}) | ({"why": sorted(errors)[:3]} if errors else {})
            )
            totals.update(row)
            totals["operators"] += 1
            totals["operators with a rule"] += bool(row["ruled"])
    totals["seconds"] = round(time.perf_counter() - start)
    print(dict(totals), "scales found of those there are:", scales)
    if options.match == "" and options.operators >= 10_000:
        save(
            "operator_catalogue", {"commit": commit(), "machine": machine(), "totals": dict(totals), "operators": rows}
        )


if __name__ == "__main__":
    main()
