"""The share of planted defects that conserved.check sees, by line of defence, in float32 and bfloat16.

Defects of `broken_kernels`, and those of `hidden_defects`, which sit in tails, last blocks, single rows and rare
inputs. The latter are also planted into functions that run in bfloat16 alone, as many kernels do: these have no more
precise form. For a defect that is not seen, the size is kept that the check states: "an error below ... would not have
been seen".

python benchmarks/check_catalogue.py [--seeds 1] [--workers 2] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from broken_kernels import CATALOGUE, FAMILIES, inputs_for, kernel
from conserved import Check, check
from conserved.checking import Method
from hidden_defects import HIDDEN, hidden_function, hidden_inputs, names_of
from measure import RESULTS, save

LINES = {Method.PRESENCE: "1", Method.IDENTITY: "2", Method.RELATION: "3", Method.DERIVATIVE: "4"}

FORMS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "bfloat16 alone": (torch.bfloat16, True),
}
"""The forms that a function with a hidden defect has: its precision, and whether it takes no other."""

Task = tuple[str, int, str, int, str]
"""A defect of one of the two lists: the list, its number there, the form, the seed of the inputs, the device."""


def run(which: str, number: int, form: str, seed: int, device: str) -> dict[str, Any]:
    """Check one function with a defect: which lines of defence see it, and what the check says."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dtype, alone = FORMS[form]
    if which == "planted":
        planted = CATALOGUE[number]
        name, kind = planted.name, planted.family
        function, names = kernel(planted.family, planted.defect), FAMILIES[planted.family].names
        inputs = inputs_for(planted.family, dtype, seed)
    else:
        hidden = HIDDEN[number]
        name, kind = hidden.name, hidden.kind
        function, names = hidden_function(hidden, only=dtype if alone else None), names_of(hidden.function)
        inputs = hidden_inputs(hidden.function, dtype, seed)
    result = check(function, *(value.to(device) for value in inputs), names=names)
    row = {"list": which, "name": name, "kind": kind, "form": form, "seed": seed, **_seen(result)}
    if not row["lines"]:
        right = (
            kernel(planted.family)
            if which == "planted"
            else hidden_function(hidden, only=dtype if alone else None, clean=True)
        )
        row["errors"] = errors_of(function, right, inputs, names)
        stated = result.sensitivity
        row["below what is stated"] = all(
            whole <= stated[name].share or worst_row <= stated[name].row
            for name, (whole, worst_row) in row["errors"].items()
        )
    print(
        f"{form:<15} {name:<60} {','.join(row['lines']) or 'none':<8} {row['unseen'] or row['meaning'][:70]}",
        flush=True,
    )
    return row


def errors_of(
    function: Callable[..., torch.Tensor],
    right: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
) -> dict[str, tuple[float, float]]:
    """The relative error of every gradient at some inputs: of all of it, and of a row relative to a usual one."""

    def gradients(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        given = [value.clone().requires_grad_(value.is_floating_point()) for value in inputs]
        out = call(*given)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        out.backward(weights)
        return [value.grad.double() for value in given if value.grad is not None]

    result = {}
    for name, wrong, true in zip(names, gradients(function), gradients(right), strict=False):
        rows = [g.reshape(-1, g.shape[-1] if g.ndim > 1 else 1).norm(dim=1) for g in (wrong - true, true)]
        usual = float(rows[1].norm()) / math.sqrt(len(rows[1])) or 1.0
        result[name] = (float((wrong - true).norm() / true.norm()), float(rows[0].max()) / usual)
    return result


def _seen(result: Check) -> dict[str, Any]:
    lines = {LINES[test.method] for test in result.failures}
    return {
        "lines": sorted(lines),
        "meaning": next((test.meaning for test in result.failures if test.meaning), ""),
        "where": next((test.where for test in result.failures if test.where), ""),
        "unseen": "" if lines else result.unseen,
        "seconds": result.seconds,
        "suspects": result.suspects,
    }


def shares(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The share seen in every form: of all defects, by line of defence, and of hidden ones by kind."""
    table: dict[str, dict[str, float]] = {}
    for which in ("planted", "hidden"):
        for form in FORMS:
            mine = [row for row in rows if row["list"] == which and row["form"] == form]
            if not mine:
                continue
            share = {"all": mean(bool(row["lines"]) for row in mine)}
            share |= {line: mean(line in row["lines"] for row in mine) for line in LINES.values()}
            if which == "hidden":
                kinds = sorted({row["kind"] for row in mine})
                share |= {kind: mean(bool(row["lines"]) for row in mine if row["kind"] == kind) for kind in kinds}
            table[f"{which}, {form}"] = share
    return table


def main() -> None:
    """Check every defect in every form, print the shares and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="defects whose name holds this; nothing is saved then")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", default="0/1", help="K/N: every N-th check from the K-th")
    parser.add_argument("--lines", type=Path, help="file that rows are added to, one a line; nothing is saved then")
    parser.add_argument("--merge", type=Path, nargs="+", help="such files to make a table of; nothing is run")
    chosen = parser.parse_args()
    if chosen.merge:
        texts = [line for file in chosen.merge for line in file.read_text().splitlines()]
        store([json.loads(text) for text in texts], chosen)
        return
    tasks: list[Task] = []
    for seed in range(chosen.seeds):
        for number, planted in enumerate(CATALOGUE):
            if chosen.only in planted.name:
                tasks += [("planted", number, form, seed, chosen.device) for form in ("float32", "bfloat16")]
        for number, hidden in enumerate(HIDDEN):
            if chosen.only in hidden.name:
                tasks += [("hidden", number, form, seed, chosen.device) for form in FORMS]
    part, parts = map(int, chosen.part.split("/"))
    with get_context("spawn").Pool(chosen.workers) as pool:
        rows = pool.starmap(run, tasks[part::parts], 1)
    if chosen.lines:
        with chosen.lines.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    elif not chosen.only:
        store(rows, chosen)


def store(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> None:
    """Print the shares seen of some rows and save the table."""
    table = shares(rows)
    for name, share in table.items():
        print(name, {kind: f"{part:.1%}" for kind, part in share.items()})
    record = {
        "defects": len(CATALOGUE),
        "hidden defects": len(HIDDEN),
        "checks": len(rows),
        "where": chosen.device,
        "families": len(FAMILIES),
        "shares": table,
        "seconds": sum(row["seconds"] for row in rows),
        "seconds a check": mean(row["seconds"] for row in rows),
        "workers": chosen.workers,
        "rows": rows,
    }
    print(f"saved {save('check_catalogue', record, chosen.out)}")


if __name__ == "__main__":
    main()
