"""What the search in gradients adds to inference, on random programs and on the blocks of the tests.

Takes every program of the grammar with fewer inferred laws than the Lie closure counts, and every block that inference
does not exhaust, and searches their gradients for formulas without reading the program.
"""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

from conserved.discovery import discover
from conserved.discovery.inputs import UnsuitableError
from conserved.laws.independence import rank_of_gradients
from law_checks import count, subject
from measure import RESULTS, save
from program_grammar import build, compose
from zoo import LAWFUL

PROGRAMS = RESULTS / "inferred_programs_cpu_2026-11-18.json"


def program_row(seed: int, inferred: int) -> dict[str, Any]:
    """Return the laws of a random program: counted, inferred, and found by the search alone."""
    _, _, loss, words = compose(seed)
    row: dict[str, Any] = {"words": words, "inferred": inferred}
    start = time.perf_counter()
    try:
        result = count(subject(build(seed), loss=loss), forms=True)
    except (UnsuitableError, RuntimeError, NotImplementedError) as problem:
        return row | {"error": str(problem).splitlines()[0][:120]}
    seconds = time.perf_counter() - start
    return row | {"count": result.count, "searched": result.explained, "seconds": round(seconds, 2)}


def block_row(case: Any) -> dict[str, Any]:
    """Return the same of a block of the tests."""
    model = case.model()
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    inferred = rank_of_gradients(case.laws(model).symmetries, theta)
    result = discover(model, case.short_sample, loss=case.loss, infer=False)
    return {"count": result.count, "inferred": inferred, "searched": result.explained}


def main() -> None:
    """Search everything that inference leaves short, and save how many laws the search adds."""
    warnings.simplefilter("ignore")
    stored = json.loads(PROGRAMS.read_text())
    rows = {seed: stored["rows"][seed]["independent"] for seed in stored["summary"]["short"]}
    programs = {seed: program_row(int(seed), inferred) for seed, inferred in rows.items()}
    blocks = {case.name: block_row(case) for case in LAWFUL if case.missed}
    more = [seed for seed, row in programs.items() if row.get("searched", 0) > row["inferred"]]
    complete = [seed for seed in more if programs[seed]["searched"] == programs[seed]["count"]]
    summary = {
        "programs": len(programs),
        "not searched": sum("error" in row for row in programs.values()),
        "with more laws": len(more),
        "with all laws": len(complete),
        "laws added": sum(programs[seed]["searched"] - programs[seed]["inferred"] for seed in more),
        "blocks": blocks,
    }
    print(json.dumps(summary, indent=1))
    save("blind_search", {"summary": summary, "rows": programs})


if __name__ == "__main__":
    main()
