"""Bit flips in weights between steps, and in updates within one: the share that identities of a step see, by size.

    python benchmarks/flipped_weights.py --out benchmarks/results
    python benchmarks/flipped_weights.py --cells 125M,1.4B --count 1000 --seconds 120 --name flipped_updates --out $OUT

Sizes of flips in weights are relative to the root mean square of the tensor, in updates to the norm of its update.
Small decoders run a new pass in every step. Models of `--cells` keep the gradients of one pass, so that a step is the
optimizer's alone and thousands fit into minutes.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.boundary import Boundary
from conserved.tracking.identities import StepIdentities
from identity_cost import decoder
from measure import commit, machine, save
from scale_models import MAKERS

WRITES = ("not the rule's", "something else wrote", "bits changed", "did not land")
"""Codes of alarms that are about written weights."""

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@dataclass(eq=False)
class Case:
    """A model, how its gradients are made, and whether each step makes new ones."""

    model: nn.Module
    backward: Callable[[], None]
    repeats: bool


def small_case(kind: torch.dtype, width: int) -> Case:
    """Build a small decoder that runs a pass in every step."""
    model = decoder(width, 2, 512).to(kind)

    def backward() -> None:
        model.zero_grad()
        x = torch.randint(512, (2, 32))
        F.cross_entropy(model(x).float().flatten(0, 1), x.flatten()).backward()

    return Case(model, backward, repeats=True)


def large_case(kind: torch.dtype, size: str, device: str) -> Case:
    """Build a Llama of a size that people train; its gradients are those of one pass."""
    torch.set_default_dtype(kind)
    try:
        with torch.device(device):
            model = MAKERS["llama"].build(size, 32000)
    finally:
        torch.set_default_dtype(torch.float32)

    def backward() -> None:
        x = torch.randint(32000, (2, 256 if device == "cuda" else 16), device=device)
        logits = MAKERS["llama"].logits(model, x)
        F.cross_entropy(logits.float().flatten(0, 1), x.flatten()).backward()

    return Case(model, backward, repeats=False)


def flips(case: Case, kind: torch.dtype, where: str, count: int, seed: int, seconds: float) -> list[dict[str, Any]]:
    """Flip one bit in every third step of a run, put it right afterwards, and note what was said."""
    draw = random.Random(seed)
    model = case.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if case.repeats else 3e-4)
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True))
    identities._within_budget = lambda: True  # type: ignore[method-assign]
    named = list(model.named_parameters())
    device = named[0][1].device.type
    rows: list[dict[str, Any]] = []
    case.backward()

    def step(flip: bool) -> dict[str, Any] | None:
        row = None
        if case.repeats:
            case.backward()
        if flip and where == "weights":
            row = flipped()
        identities.before_optimizer(optimizer, closure=False)
        optimizer.step()
        if flip and where == "updates":
            row = flipped()
        identities.after_optimizer(optimizer)
        identities.after_step()
        if device == "cuda":
            # Numbers are read when they have arrived: a loop would hear of them a step later.
            torch.cuda.synchronize()
            identities.step.receive(wait=True)
        return row

    def flipped() -> dict[str, Any]:
        name, p = named[draw.choices(range(len(named)), [q.numel() for _, q in named])[0]]
        index, bit = draw.randrange(p.numel()), draw.randrange(32 if kind == torch.float32 else 16)
        values = p.data.view(-1)
        old, scale = values[index].clone(), _norm(values) / math.sqrt(p.numel())
        if where == "updates":
            state = optimizer.state[p]
            count, root = float(state["step"]), state["exp_avg_sq"].float().sqrt()
            scale = _norm(state["exp_avg"].float() / (root / math.sqrt(1 - 0.999**count) + 1e-8))
            scale *= optimizer.param_groups[0]["lr"] / (1 - 0.9**count)
        values.view(INTEGERS[kind])[index] ^= -(1 << bit) if bit == (31 if kind == torch.float32 else 15) else 1 << bit
        size = abs(float(values[index].double() - old.double())) / max(scale, 1e-30)
        return {"tensor": name, "bit": bit, "size": size, "values": values, "index": index, "old": old}

    began = time.perf_counter()
    for number in range(3 * count):
        if time.perf_counter() - began > seconds:
            break
        row = step(flip=number % 3 == 2)
        # Low precision swallows small updates, and large models step along one gradient again: those are not flips.
        alarms = [alarm for alarm in identities.take_alarms() if alarm.code in WRITES]
        if row is not None:
            row["values"][row["index"]] = row["old"]
            for key in ("values", "index", "old"):
                del row[key]
            identities.restart()
            row |= {"seen": bool(alarms), "named": any(a.tensor == row["tensor"] for a in alarms)}
            rows.append(row)
        elif alarms:
            rows.append({"false alarm": [str(a) for a in alarms], "seen": False, "named": False, "size": math.nan})
    identities.close()
    return rows


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float32))


def decade(size: float) -> str:
    """Return the bin of a relative size."""
    if math.isnan(size):
        return "no flip"
    for limit in (1e-4, 1e-2, 0.1, 1.0, 1e3):
        if size < limit:
            return f"< {limit:g}"
    return "larger"


def main() -> None:
    """Flip, print the table, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--cells", default="", help="sizes of large models, separated by commas, in place of widths")
    parser.add_argument("--places", nargs="*", default=["weights", "updates"])
    parser.add_argument("--precisions", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit for each model, precision and place")
    parser.add_argument("--name", default="flipped_weights")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    for size in given.cells.split(",") if given.cells else given.widths:
        for kind in (getattr(torch, name) for name in given.precisions):
            for where in given.places:
                seed = len(table) if given.cells else size
                torch.manual_seed(seed)
                case = large_case(kind, size, device) if given.cells else small_case(kind, size)
                rows = flips(case, kind, where, given.count, seed, given.seconds)
                del case
                gc.collect()
                name = str(kind).removeprefix("torch.")
                table.append({"size": size, "precision": name, "where": where} | _counts(rows, bool(given.cells)))
                print(table[-1] if given.cells else {k: v for k, v in table[-1].items() if k != "rows"}, flush=True)
                if given.out is not None:
                    save(given.name, {"commit": commit(), "machine": machine(), "table": table}, given.out)


def _counts(rows: list[dict[str, Any]], brief: bool) -> dict[str, Any]:
    """Count flips and those seen, by relative size; with all rows unless there are thousands."""
    total: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for row in rows:
        total[decade(row["size"])] += 1
        seen[decade(row["size"])] += row["seen"]
    counts: dict[str, Any] = {"flips": {key: f"{seen[key]} of {total[key]}" for key in sorted(total)}}
    alarms = [row for row in rows if "false alarm" in row]
    return counts | {"false alarms": alarms[:5]} if brief else counts | {"rows": rows}


if __name__ == "__main__":
    main()
