"""What each identity of a step costs alone: a step with it over a step without, in turns within one process.

    python benchmarks/identity_cost.py --out benchmarks/results
    python benchmarks/identity_cost.py --device cuda --sizes 125M --out benchmarks/results

Every identity is asked in every step, also those that the time budget of a monitor would leave out. "with budget" is a
set of all identities as a monitor holds them. On a processor, seconds are those of the thread; on a GPU, wall seconds
up to its last kernel.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from conserved.boundary import Boundary
from conserved.tracking.identities import StepIdentities
from conserved.tracking.identities.step_identities import standard_identities
from measure import commit, machine, save

SIZES = {"0.3M": (64, 2, 1_000), "6M": (256, 4, 8_000), "40M": (512, 6, 32_000), "125M": (768, 12, 26_000)}
"""Width, layers and vocabulary."""

TOKENS = {"cpu": (2, 64), "cuda": (8, 512)}


def decoder(width: int, layers: int, vocabulary: int) -> Any:
    """Return a decoder of torch's own layers."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(vocabulary, width), nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.LayerNorm(width), nn.Linear(width, vocabulary),
    )  # fmt: skip


class Training:
    """A model in training, of which single steps are timed."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.vocabulary = device, SIZES[name][2]
        self.model = decoder(*SIZES[name]).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def seconds(self, identities: StepIdentities | None) -> float:
        """Make one step and return the seconds it took."""
        x = torch.randint(self.vocabulary, TOKENS[self.device], device=self.device)
        began = self._now()
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = F.cross_entropy(self.model(x).flatten(0, 1), x.flatten())
        loss.backward()
        if identities is not None:
            identities.before_optimizer(self.optimizer, closure=False)
        self.optimizer.step()
        if identities is not None:
            identities.after_optimizer(self.optimizer)
            identities.after_step()
        return self._now() - began

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time()


def compare(bare: Training, watched: Training, identities: StepIdentities, steps: int) -> dict[str, float]:
    """Return what identities add to a step, in milliseconds and as a share; their first step by itself."""
    first = watched.seconds(identities)
    without, added = [], []
    for number in range(steps):
        # In pairs, so that what else the machine does meets both; who is first changes.
        own = watched.seconds(identities) if number % 2 else None
        without.append(bare.seconds(None))
        added.append((watched.seconds(identities) if own is None else own) - without[-1])
    identities.close()
    return {
        "step ms": 1e3 * median(without),
        "added ms": 1e3 * median(added),
        "share": median(added) / median(without),
        "first step ms": 1e3 * (first - median(without)),
        "alarms": len(identities.take_alarms()),
    }


def measured(name: str, device: str, steps: int, save_row: Callable[[str, dict[str, Any]], None]) -> None:
    """Measure every identity alone, then all, then all within the budget of a monitor."""
    bare, watched = Training(name, device), Training(name, device)
    for training in (bare, watched, bare, watched):
        training.seconds(None)
    choices: dict[str, list[Any] | None] = {one.name: [one] for one in standard_identities()}
    choices |= {"none": [], "all": None, "with budget": None}
    for key, chosen in choices.items():
        identities = StepIdentities(watched.model, watched.model, [watched.optimizer], Boundary(strict=True), chosen)
        if key != "with budget":
            identities._within_budget = lambda: True  # type: ignore[method-assign]
        row = compare(bare, watched, identities, 4 * steps if key == "with budget" else steps)
        save_row(f"{name} {key}", row | {"parameters": sum(p.numel() for p in bare.model.parameters())})
        print(
            f"{name} {key:24s} step {row['step ms']:8.2f} ms, added {row['added ms']:8.3f} ms = {row['share']:7.2%}, "
            f"first {row['first step ms']:.1f} ms, {row['alarms']} alarms",
            flush=True,
        )


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", nargs="*", default=["0.3M", "6M", "40M"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--name", default="identity_cost")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}

    def save_row(key: str, row: dict[str, Any]) -> None:
        rows[key] = row
        if given.out is not None:
            record = {"commit": commit(), "machine": machine() | {"on": given.device}, "load": os.getloadavg()}
            save(given.name, record | {"rows": rows}, given.out)

    for name in given.sizes:
        measured(name, given.device, given.steps, save_row)


if __name__ == "__main__":
    main()
