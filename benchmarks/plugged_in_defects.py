"""Wrong backward passes through the places users plug code into: which are seen, by what, and what each audit covers.

python benchmarks/plugged_in_defects.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from measure import save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import conserved
from plugged_in import CASES, Planted, loss_of, reduced


def audited(case: Planted, wrong: str) -> conserved.Audit:
    """The audit of one backward pass of the case's model, watched."""
    model = case.build(wrong)
    with torch.no_grad():
        # Fresh gains are all one, and fresh biases zero: what a trained model has is more telling.
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    with conserved.gauge(model) as gauge:
        loss_of(model).backward()
    if hasattr(model, "reduce"):
        # Reduced gradients are not those of the pass that was watched.
        reduced(model, 0)
    return conserved.audit(model, gauge=gauge)


def row(case: Planted) -> dict[str, Any]:
    """What is seen of one case, and that the same code with a right backward is not accused."""
    right, result = audited(case, ""), audited(case, case.defect)
    by = [] if not result.failures else ["identity"]
    if result.gauge is not None and result.gauge.seen and result.gauge.verdict == conserved.Verdict.REFUTED:
        by.append("gauge")
    if any(item.matters for item in result.findings):
        by.append("no gradient")
    return {
        "place": case.place,
        "defect": case.defect,
        "seen": not result.ok,
        "by": ", ".join(by),
        "residual": result.worst,
        "broken": result.failures[0].name if result.failures else "",
        "status": result.verdict.status.value,
        "green": result.ok and result.conclusive,
        "parameters": result.coverage.parameters,
        "modules": result.coverage.modules,
        "unseen": case.unseen,
        "right": right.verdict.status.value,
        "right_worst": right.worst,
    }


def main() -> None:
    """Run all cases, print the table, save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if options.only in case.name:
            rows.append(row(case))
            one = rows[-1]
            print(
                f"{case.name:62s} {one['status']:13s} by {one['by'] or '–':22s} {one['residual']:8.2g} "
                f"covers {100 * one['parameters']:3.0f} % / {100 * one['modules']:3.0f} %  right: {one['right']}",
                flush=True,
            )
    silent = [one for one in rows if one["green"] and not one["unseen"]]
    accused = [one for one in rows if one["right"] == "refuted"]
    seen = sum(one["seen"] for one in rows)
    print(f"{len(rows)} defects, {seen} seen, {sum(bool(one['unseen']) for one in rows)} listed as unseeable, ", end="")
    print(f"{len(silent)} silently green, {len(accused)} right backwards accused")
    if options.out:
        save("plugged_in_defects", {"rows": rows}, options.out)


if __name__ == "__main__":
    main()
