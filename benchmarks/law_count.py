"""How long counting and finding the laws of attention takes, by the number of parameters, and where the time goes."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from conserved import blocks, discover
from measure import save

SIZES = {"cpu": [(16, 4, True), (32, 4, True)], "cuda": [(16, 4, True), (64, 4, True), (128, 4, False)]}
"""Width, heads and whether forms are looked for too."""

TOKENS = 8


def predicted(width: int, heads: int) -> int:
    """QᵀQ − KᵀK and VᵀV − OᵀO for every head."""
    size = width // heads
    return heads * size * (size + 1)


def measured(width: int, heads: int, forms: bool, device: str) -> dict[str, Any]:
    """One discovery, with the time at which each stage was done."""
    stages: list[tuple[float, str]] = []
    start = time.perf_counter()

    def note(message: str) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        stages.append((time.perf_counter() - start, message))
        print(f"  {stages[-1][0]:7.1f} s  {message}", flush=True)

    found = discover(
        blocks.Attention(width, heads), torch.zeros(TOKENS, width), device=device, forms=forms, progress=note
    )
    return {
        "parameters": found.parameters,
        "count": found.count,
        "predicted": predicted(width, heads),
        "explained": found.explained,
        "forms": forms,
        "ranks": list(found.ranks),
        "gap": found.gap,
        "verdict": found.verdict.status.value,
        "seconds": time.perf_counter() - start,
        "stages": stages,
    }


def main() -> None:
    """Run the sizes of this machine, print them as a table and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    measured(8, 2, True, device)
    table = Table(title=f"laws of attention, {TOKENS} tokens, on {device}")
    for heading in ("parameters", "laws", "predicted", "found", "gap", "seconds"):
        table.add_column(heading, justify="right")
    rows = [measured(*size, device) for size in SIZES[device]]
    for row in rows:
        found = f"{row['explained']:,}" if row["forms"] else "–"
        cells = (f"{row['parameters']:,}", f"{row['count']:,}", f"{row['predicted']:,}", found)
        table.add_row(*cells, f"{row['gap']:.0e}", f"{row['seconds']:.1f}")
    Console(width=100).print(table)
    print(f"saved {save('law_count', {'rows': rows})}")


if __name__ == "__main__":
    main()
