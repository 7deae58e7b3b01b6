"""What each identity of a step costs: thread time of every check, in one run with all of them on, by size of the model.

python benchmarks/identity_cost.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from conserved.boundary import Boundary
from conserved.tracking.identities import StepIdentities
from measure import commit, machine, save

SIZES = {"0.3 M": (64, 2, 1_000), "6 M": (256, 4, 8_000), "40 M": (512, 6, 32_000)}
"""Width, layers and vocabulary."""


def decoder(width: int, layers: int, vocabulary: int) -> Any:
    """Return a decoder of torch's own layers."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(vocabulary, width), nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.LayerNorm(width), nn.Linear(width, vocabulary),
    )  # fmt: skip


def measured(name: str, steps: int) -> dict[str, Any]:
    """Train with all identities and without laws; return milliseconds a step of every check, and of the step."""
    width, layers, vocabulary = SIZES[name]
    torch.manual_seed(0)
    model = decoder(width, layers, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True))
    # Every check in every step, also those that the budget would leave out.
    identities._within_budget = lambda: True  # type: ignore[method-assign]
    rows: list[dict[str, float]] = []
    times = []
    for _ in range(steps):
        before, began = dict(identities.seconds), time.thread_time()
        x = torch.randint(vocabulary, (2, 64))
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        identities.before_optimizer(optimizer, closure=False)
        optimizer.step()
        identities.after_optimizer(optimizer)
        identities.after_step()
        spent = {key: identities.seconds[key] - before[key] for key in before}
        rows.append(spent)
        times.append(time.thread_time() - began - sum(spent.values()))
    identities.close()
    alarms = len(identities.take_alarms())
    step = median(times[2:])
    checks = {key: 1e3 * median([row[key] for row in rows[2:]]) for key in rows[0]}
    first = {key: 1e3 * rows[0][key] for key in rows[0]}
    parameters = sum(p.numel() for p in model.parameters())
    result = {
        "parameters": parameters,
        "step ms": 1e3 * step,
        "check ms": checks,
        "first step ms": first,
        "alarms": alarms,
    }
    print(name, f"{parameters / 1e6:.1f} M, step {1e3 * step:.1f} ms, {alarms} alarms")
    for key, value in sorted(checks.items(), key=lambda item: -item[1]):
        print(f"  {key:24s} {value:8.3f} ms  {value / step / 10:6.2f} %   first {first[key]:.1f} ms")
    return result | {"alarms": alarms}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: measured(name, given.steps) for name in given.sizes}
    if given.out is not None:
        record = {"commit": commit(), "machine": machine(), "load": os.getloadavg(), "sizes": rows}
        print(save("identity_cost", record, given.out))


if __name__ == "__main__":
    main()
