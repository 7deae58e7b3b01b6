"""Bit flips in weights between steps, and in updates within one: the share that identities of a step see, by size.

python benchmarks/flipped_weights.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from conserved.boundary import Boundary
from conserved.tracking.identities import StepIdentities
from identity_cost import decoder
from measure import commit, machine, save

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def flips(kind: torch.dtype, where: str, count: int, width: int, seed: int) -> list[dict[str, Any]]:
    """Flip one bit in every third step of a run, put it right afterwards, and note what was said."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = decoder(width, 2, 512).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True))
    identities._within_budget = lambda: True  # type: ignore[method-assign]
    named = list(model.named_parameters())
    rows: list[dict[str, Any]] = []

    def step(flip: bool) -> dict[str, Any] | None:
        row = None
        x = torch.randint(512, (2, 32))
        optimizer.zero_grad()
        F.cross_entropy(model(x).float().flatten(0, 1), x.flatten()).backward()
        if flip and where == "weights":
            row = flipped()
        identities.before_optimizer(optimizer, closure=False)
        optimizer.step()
        if flip and where == "updates":
            row = flipped()
        identities.after_optimizer(optimizer)
        identities.after_step()
        return row

    def flipped() -> dict[str, Any]:
        name, p = named[draw.choices(range(len(named)), [q.numel() for _, q in named])[0]]
        index, bit = draw.randrange(p.numel()), draw.randrange(32 if kind == torch.float32 else 16)
        values = p.data.view(-1)
        old, scale = values[index].clone(), float(values.double().square().mean().sqrt())
        values.view(INTEGERS[kind])[index] ^= -(1 << bit) if bit == (31 if kind == torch.float32 else 15) else 1 << bit
        size = abs(float(values[index].double() - old.double())) / max(scale, 1e-30)
        return {"tensor": name, "bit": bit, "size": size, "values": values, "index": index, "old": old}

    for number in range(3 * count):
        row = step(flip=number % 3 == 2)
        alarms = identities.take_alarms()
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
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for width in given.widths:
        for kind in (torch.float32, torch.bfloat16):
            for where in ("weights", "updates"):
                rows = flips(kind, where, given.count, width, seed=width)
                all_: Counter[str] = Counter()
                seen: Counter[str] = Counter()
                for row in rows:
                    all_[decade(row["size"])] += 1
                    seen[decade(row["size"])] += row["seen"]
                name = str(kind).removeprefix("torch.")
                print(width, name, where, {key: f"{seen[key]} of {all_[key]}" for key in sorted(all_)}, flush=True)
                table.append({"width": width, "precision": name, "where": where, "rows": rows})
    if given.out is not None:
        print(save("flipped_weights", {"commit": commit(), "machine": machine(), "table": table}, given.out))


if __name__ == "__main__":
    main()
