"""What a default monitor costs: import, first step, step ratios side by side, the stride it settles at, memory.

    python benchmarks/harmless_cost.py --steps 5000 --out benchmarks/results

Ratios are of one run in turns, so that a noisy moment hits both; the load of the machine is recorded beside them.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure import commit, machine, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conserved import Monitor
from harmless_programs import ARCHITECTURES


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet(width: int = 16) -> nn.Module:
    """Return a ResNet of 20 convolutions."""
    blocks = [Residual(width * a, width * b, 1 + (a < b)) for a, b in ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8))]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


class Gpt(nn.Module):
    """A GPT of torch's own layers, without dropout."""

    def __init__(self, width: int = 128, depth: int = 8) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(x, mask=mask, is_causal=True)).flatten(0, 1)


class Wide(nn.Module):
    """A multilayer perceptron whose step is long though its tensors are few."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (256, 1024, 1024, 1024, 10)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


LARGER: dict[str, tuple[Callable[..., nn.Module], Callable[[], Tensor]]] = {
    "ResNet": (resnet, lambda: torch.randn(8, 3, 32, 32)),
    "ResNet, large batch": (resnet, lambda: torch.randn(64, 3, 32, 32)),
    "GPT": (Gpt, lambda: torch.randint(256, (4, 64))),
    "GPT, deep": (lambda: Gpt(64, 24), lambda: torch.randint(256, (2, 64))),
    "wide": (Wide, lambda: torch.randn(64, 256)),
}
"""Programs with steps of 10 ms and more."""


class Run:
    """One model in training, with a monitor or without."""

    def __init__(self, architecture: str, *, watched: bool) -> None:
        torch.manual_seed(0)
        build, self.inputs = (ARCHITECTURES | LARGER)[architecture]
        self.model: nn.Module = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.monitor = Monitor(self.model, self.optimizer) if watched else None

    def step(self) -> float:
        """Train one step; return its seconds."""
        began = time.perf_counter()
        out = self.model(self.inputs())
        loss = F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.step(loss=loss)
        return time.perf_counter() - began


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measured(architecture: str, steps: int) -> dict[str, Any]:
    """Run a model with a monitor and without, in turns."""
    plain, watched = Run(architecture, watched=False), Run(architecture, watched=True)
    first = {"first step, s": plain.step(), "first watched step, s": watched.step()}
    times: list[tuple[float, float]] = []
    held = {}
    for number in range(2, steps + 1):
        times.append((plain.step(), watched.step()))
        if number in (steps // 5, steps):
            held[f"resident bytes after {number} steps"] = memory()
    assert watched.monitor is not None
    early, half = times[:40], times[len(times) // 2 :]
    row = {
        "model": architecture,
        "steps": steps,
        **first,
        "step, ms": 1e3 * median(a for a, _ in half),
        "added, ms (mean)": 1e3 * sum(b - a for a, b in half) / len(half),
        "added in steps 2 to 41, ms (mean)": 1e3 * sum(b - a for a, b in early) / len(early),
        "ratio of medians in steps 2 to 41": median(b for _, b in early) / median(a for a, _ in early),
        "ratio of sums": sum(b for _, b in half) / sum(a for a, _ in half),
        "ratio of medians": median(b for _, b in half) / median(a for a, _ in half),
        "every": watched.monitor.every,
        "alarms": len(watched.monitor.alarms),
        "state": watched.monitor.state,
        **held,
    }
    watched.monitor.close()
    return row


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    logging.getLogger("conserved").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    script = "import time, torch; a = time.perf_counter(); import conserved; print(time.perf_counter() - a)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    record: dict[str, Any] = {"import after torch, s": float(done.stdout), "load": os.getloadavg()}
    names = ["mlp", "convolutional", "gpt", "llama", "lstm", *LARGER]
    record["rows"] = []
    for name in [one for one in names if given.only in one]:
        record["rows"].append(measured(name, given.steps if name == "mlp" else given.others))
        print(record["rows"][-1], flush=True)
    print({key: value for key, value in record.items() if key != "rows"})
    if given.out is not None:
        print(save("harmless_cost", {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
