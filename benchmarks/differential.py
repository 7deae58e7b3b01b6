"""Random programs and functions by PyTorch with autograd, floats, balls and the second checker: do all four agree?"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from conserved.discover import Unsuitable  # noqa: E402
from measure import save  # noqa: E402
from random_functions import compared, random_function  # noqa: E402
from random_programs import Compared, compare, random_case  # noqa: E402


def campaign(what: str, seeds: range, one: Callable[[int, Counter[str]], Compared]) -> dict[str, Any]:
    """Many comparisons; how many were made, left open or refused by all, and which disagreed."""
    used: Counter[str] = Counter()
    found: dict[str, Any] = {"what": what, "tried": len(seeds), "compared": 0, "open": 0, "refused": 0, "no_program": 0}
    disagreements: list[dict[str, Any]] = []
    start = time.perf_counter()
    for seed in seeds:
        try:
            result = one(seed, used)
        except Unsuitable:
            found["no_program"] += 1
            continue
        found["open"] += result.open
        found["refused"] += result.refused
        found["compared"] += not (result.open or result.refused)
        if result.disagreements:
            disagreements.append({"seed": seed, "first": result.disagreements[0]})
    seconds = time.perf_counter() - start
    return found | {"disagreements": disagreements, "seconds": seconds, "operators": dict(sorted(used.items()))}


def program(brackets: int) -> Callable[[int, Counter[str]], Compared]:
    """Values and gradients of a random program, or a bracket."""

    def one(seed: int, used: Counter[str]) -> Compared:
        case = random_case(seed)
        used.update(node.op for node in case.program.nodes)
        return compare(case, brackets=brackets)

    return one


def function(seed: int, used: Counter[str]) -> Compared:
    """A random function in PyTorch against its traced program."""
    written = random_function(seed)
    found = compared(written)
    used.update(written.used)
    return found


def main() -> None:
    """Run the campaigns and store what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=11_000)
    parser.add_argument("--brackets", type=int, default=1_250)
    parser.add_argument("--functions", type=int, default=1_500)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [
        campaign("programs: value and gradient", range(chosen.programs), program(0)),
        campaign("programs: brackets of two fields", range(100_000, 100_000 + chosen.brackets), program(1)),
        campaign("programs: brackets of three fields", range(200_000, 200_000 + chosen.brackets // 10), program(2)),
        campaign("functions in PyTorch: value and gradient", range(300_000, 300_000 + chosen.functions), function),
    ]
    for row in rows:
        print({key: value for key, value in row.items() if key != "operators"})
    print(save("differential", {"rows": rows}))


if __name__ == "__main__":
    main()
