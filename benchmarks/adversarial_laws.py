"""Adversarial models and the models of the inference table: is every listed law one, and what does the check cost?

For each model: laws that were inferred, those that the check on the program in float64 left out, those that an
independent check (backward passes and finite moves) finds wrong, and the CPU seconds of inference with and without it.

    python benchmarks/adversarial_laws.py [--set table | programs | held_out | blind | structures]
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import adversarial_architectures
import adversarial_blind
import adversarial_combined
import adversarial_held_out
import adversarial_programs
import adversarial_structures
from adversarial_models import models
from catalogue import entries
from conserved import recognize
from conserved.inference import infer
from conserved.inference.validation.program_check import EXACT
from law_checks import check, subject, undefined
from measure import RESULTS, save

Case = tuple[str, Any, tuple[Any, ...], dict[str, Any], str]


def adversaries() -> Iterator[Case]:
    """The models of `tests/adversarial_models.py`."""
    for one in models():
        yield one.name, one.model, one.args, {}, one.loss


def programs() -> Iterator[Case]:
    """The models of `tests/adversarial_programs.py`."""
    for name, (model, args) in adversarial_programs.programs():
        yield name, model, args, {}, "any"


OTHER_INPUTS: dict[str, list[tuple[Any, ...]]] = {}
"""By model, further inputs of other sizes and ranges, on which its laws are checked as well."""


def held_out() -> Iterator[Case]:
    """The models of `tests/adversarial_held_out.py`."""
    for name, (model, inputs) in adversarial_held_out.held_out():
        OTHER_INPUTS[name] = inputs[1:]
        yield name, model, inputs[0], {}, "any"


def blind() -> Iterator[Case]:
    """The models of `tests/adversarial_blind.py`."""
    for name, (model, inputs) in adversarial_blind.blind():
        OTHER_INPUTS[name] = inputs[1:]
        yield name, model, inputs[0], {}, "any"


def structures() -> Iterator[Case]:
    """The models of `tests/adversarial_structures.py`."""
    for name, (model, inputs) in adversarial_structures.structures():
        OTHER_INPUTS[name] = inputs[1:]
        yield name, model, inputs[0], {}, "any"


def combined() -> Iterator[Case]:
    """The models of `tests/adversarial_combined.py`."""
    for name, (model, inputs) in adversarial_combined.combined():
        OTHER_INPUTS[name] = inputs[1:]
        yield name, model, inputs[0], {}, "any"


def architectures() -> Iterator[Case]:
    """The models of `tests/adversarial_architectures.py`."""
    for name, (model, inputs) in adversarial_architectures.architectures():
        OTHER_INPUTS[name] = inputs[1:]
        yield name, model, inputs[0], {}, "any"


def table() -> Iterator[Case]:
    """The models of the inference table."""
    for entry in entries():
        try:
            torch.manual_seed(0)
            model, args, kwargs = entry.build()
        except ImportError:
            continue
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        except RuntimeError:
            # A package may make buffers in float64, so that its model runs in that precision only.
            model = model.double()
            args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        yield entry.name, model, args, kwargs, entry.loss


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def measured(case: Case, seconds: list[float]) -> dict[str, Any]:
    """What is listed for one model and whether it is true; what the check took is added to `seconds`."""
    name, model, args, kwargs, loss = case
    before = len(seconds)
    start = time.process_time()
    try:
        laws = recognize(model, *args, loss=loss, **kwargs)
    except Exception as problem:
        # The record says which models cannot be followed.
        return {"name": name, "error": f"{type(problem).__name__}: {problem}"[:160]}
    whole = time.process_time() - start
    assert laws.checked is not None
    record: dict[str, Any] = {"name": name, "laws": len(laws), "points": laws.checked.points, "seconds": whole}
    record["check_seconds"] = sum(seconds[before:])
    if laws.checked.refuted:
        record["refuted"] = dict(laws.checked.refuted)
    if laws.checked.one_size:
        record["one_size"] = dict(laws.checked.one_size)
    if laws.checked.reason:
        record["reason"] = laws.checked.reason
    if laws.checked.limit > 1e-9:
        record["limit"] = laws.checked.limit
    return record


def _as_given(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return model, args, kwargs


def independently(case: Case, points: int = 1) -> dict[str, str]:
    """Laws that backward passes and finite moves of the tests' own find wrong, at so many random parameters."""
    title, model, args, kwargs, loss = case
    laws = recognize(model, *args, loss=loss, **kwargs)
    # A law through a backward or a hook of the author's is assumed, and there to see whether that is right.
    laws = laws.select(lambda law: law.source != "assumed")
    wrong: dict[str, str] = {}
    inputs = (args, *OTHER_INPUTS.get(title, ()))
    for seed, given in itertools.product(range(points), inputs):
        build = partial(_as_given, model, given, kwargs)
        prepared = subject(build, loss="regression" if loss == "any" else loss, seed=seed)
        # A finite move says nothing about a program that changes with every call.
        with torch.no_grad():
            repeats = torch.equal(prepared.seen(), prepared.seen())
        if repeats and not undefined(prepared):
            # Saturated inputs leave more rounding than the tests' own limit of 1e-12, and less than that of the check.
            result = check(laws, prepared)
            wrong |= {n: str(why) for n, why in result.wrong.items() if not _is_rounding(str(why))}
    return wrong


def _is_rounding(why: str) -> bool:
    """Whether all that is off is an identity, by less than the check on the program allows."""
    return why.startswith("identity ") and float(why.split()[1].rstrip(",;")) <= EXACT


SETS = {
    "adversaries": adversaries,
    "programs": programs,
    "held_out": held_out,
    "blind": blind,
    "structures": structures,
    "combined": combined,
    "architectures": architectures,
    "table": table,
}
NAMES = {
    "adversaries": "adversarial_laws",
    "programs": "adversarial_programs",
    "held_out": "held_out_laws",
    "blind": "blind_laws",
    "structures": "structure_laws",
    "combined": "combined_laws",
    "architectures": "architecture_laws",
    "table": "checked_table",
}


def main() -> None:
    """Run all models and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=SETS, default="adversaries", help="which models; see their functions here")
    parser.add_argument("--only", default="", help="models whose name holds this; nothing is saved then")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th model from the K-th")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--independent", type=int, default=1, help="check every n-th model independently; 0 for none")
    parser.add_argument("--points", type=int, default=1, help="random parameters of the independent check")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seconds: list[float] = []
    inner = vars(infer)["check_on_program"]

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - start)

    vars(infer)["check_on_program"] = timed
    rows, totals = [], Counter[str]()
    first, parts = map(int, options.part.split("/"))
    for number, case in enumerate(SETS[options.set]()):
        if options.only not in case[0] or number % parts != first:
            continue
        row = measured(case, seconds)
        totals["models"] += 1
        totals["errors"] += "error" in row
        totals["laws"] += row.get("laws", 0)
        totals["checked"] += bool(row.get("points"))
        totals["without laws"] += "no law" in row.get("reason", "")
        totals["left out"] += len(row.get("refuted", {}))
        totals["hold at one size"] += len(row.get("one_size", {}))
        totals["in lower precision"] += "limit" in row
        if "error" not in row and options.independent and number % options.independent == 0:
            try:
                wrong = independently(case, options.points)
            except Exception as problem:
                # Models that do not run in float64, or have no gradient, are not checked a second time.
                row["not_checked_twice"] = f"{type(problem).__name__}: {problem}"[:120]
            else:
                totals["checked twice"] += 1
                totals["wrong"] += len(wrong)
                if wrong:
                    row["wrong"] = wrong
        if "refuted" in row or "wrong" in row or "error" in row:
            print(row, flush=True)
        rows.append(row)
    spent = {key: round(sum(row.get(key, 0.0) for row in rows), 1) for key in ("seconds", "check_seconds")}
    print(dict(totals), spent)
    if not options.only:
        name = NAMES[options.set] + (f"_part{first}" if parts > 1 else "")
        save(name, {"totals": dict(totals), "cpu": spent, "rows": [_brief(row) for row in rows]}, options.out)


def _brief(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if "seconds" in key else value for key, value in row.items()}


if __name__ == "__main__":
    main()
