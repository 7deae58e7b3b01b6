"""How long it takes to count and write down the laws of attention whose heads are stacked in one parameter."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from conserved import blocks, discover
from measure import save

SIZES = {64: (4, 2), 1024: (16, 2), 4096: (32, 4)}
"""Parameters: width and heads."""

TOKENS = 5


class Stacked(nn.Module):
    """Attention with parameters (heads, d, d_h) through einsum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        shape = (heads, width, width // heads)
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(shape) / width**0.5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("td,hde->hte", x, w) for w in (self.q, self.k, self.v))
        weights = torch.softmax(torch.einsum("hte,hse->hts", q, k) / math.sqrt(q.shape[-1]), -1)
        return torch.einsum("hts,hse,hde->td", weights, v, self.o)


def predicted(width: int, heads: int) -> int:
    """QᵀQ − KᵀK and VᵀV − OᵀO for every head."""
    size = width // heads
    return heads * size * (size + 1)


def measured(model: nn.Module, width: int) -> dict[str, Any]:
    """One discovery, by the clock and in processor time, and how much of it went into the forms."""
    clock, used = time.perf_counter(), time.process_time()
    forms: list[float] = []

    def note(message: str) -> None:
        if message.startswith("reading laws off"):
            forms.append(time.process_time())

    result = discover(model, torch.zeros(TOKENS, width), progress=note)
    end = time.process_time()
    return {
        "parameters": result.parameters,
        "count": result.count,
        "explained": result.explained,
        "complete": result.complete,
        "origin": result.origin,
        "gap": result.gap,
        "seconds": time.perf_counter() - clock,
        "processor_seconds": end - used,
        "forms_processor_seconds": end - forms[0] if forms else 0.0,
    }


def main() -> None:
    """Stacked and plain storage in turns, print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3, help="at the smallest size; larger ones run once")
    options = parser.parse_args()
    table = Table(title="discovery with forms, attention")
    for heading in ("storage", "D", "laws", "found", "by the clock", "processor", "of it forms"):
        table.add_column(heading, justify="left" if heading == "storage" else "right")
    rows = []
    discover(Stacked(4, 2), torch.zeros(TOKENS, 4))
    for size in options.sizes:
        width, heads = SIZES[size]
        for storage, build in (("stacked", Stacked), ("plain", blocks.Attention)):
            if storage == "plain" and size > 1024:
                continue
            torch.manual_seed(0)
            runs = [measured(build(width, heads), width) for _ in range(options.rounds if size == 64 else 1)]
            best = min(runs, key=lambda run: run["processor_seconds"])
            row = {"storage": storage, "predicted": predicted(width, heads), **best, "runs": len(runs)}
            rows.append(row)
            print(row, flush=True)
            times = (f"{row[key]:.2f} s" for key in ("seconds", "processor_seconds", "forms_processor_seconds"))
            table.add_row(storage, f"{size:,}", str(row["count"]), str(row["explained"]), *times)
            save("stacked_forms", {"rows": rows})
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
