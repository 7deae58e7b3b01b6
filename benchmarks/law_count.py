"""How long counting and finding the laws of attention takes, by the number of parameters, and where the time goes."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from conserved import blocks, discover
from measure import save

WIDTHS = {"cpu": [16, 32], "cuda": [16, 32, 64, 128]}
"""Attention of width d with four heads has 4 d² parameters."""

HEADS, TOKENS = 4, 8

FLOPS = 6.0
"""Multiplications and additions of a count at two points, in units of D³, at the most (reflections take 2 × 1.2)."""


def parameters(width: int) -> int:
    """Of queries, keys, values and outputs."""
    return 4 * width * width


def predicted(width: int) -> int:
    """QᵀQ − KᵀK and VᵀV − OᵀO for every head."""
    size = width // HEADS
    return HEADS * size * (size + 1)


def measured(width: int, device: str) -> dict[str, Any]:
    """One discovery, with the time at which each stage was done."""
    stages: list[tuple[float, str]] = []
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()

    def note(message: str) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        stages.append((time.perf_counter() - start, message))
        print(f"  {stages[-1][0]:7.2f} s  {message}", flush=True)

    torch.manual_seed(0)
    result = discover(blocks.Attention(width, HEADS), torch.zeros(TOKENS, width), device=device, progress=note)
    note("done")
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    return {
        "parameters": result.parameters,
        "count": result.count,
        "predicted": predicted(width),
        "explained": result.explained,
        "forms": True,
        "origin": result.origin,
        "formulas": [symmetry.formula for symmetry in result.laws],
        "ranks": list(result.ranks),
        "gap": result.gap,
        "verdict": result.verdict.status.value,
        "message": result.verdict.message,
        "peak_gigabytes": peak,
        "seconds": stages[-1][0],
        "stages": stages,
    }


def exponent(rows: list[dict[str, Any]]) -> float | None:
    """By which power of the number of parameters time grew between the last two sizes."""
    if len(rows) < 2:
        return None
    before, last = rows[-2:]
    return math.log(last["seconds"] / before["seconds"]) / math.log(last["parameters"] / before["parameters"])


def speed(device: str) -> float:
    """Operations a second in products of float64 matrices."""
    size = 4096 if device == "cuda" else 512
    matrix = torch.ones(size, size, device=device, dtype=torch.float64)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        taken.append(time.perf_counter() - start)
    return 2.0 * len(matrix) ** 3 / min(taken)


def forecast(rows: list[dict[str, Any]], width: int, rate: float) -> float:
    """An upper estimate of the seconds that a size takes: the last one's in proportion, and products at half speed."""
    size, last = parameters(width), rows[-1]
    return float(last["seconds"] * size / last["parameters"] + FLOPS * size**3 / (rate / 2))


def shown(rows: list[dict[str, Any]], device: str) -> Table:
    """All sizes as a table."""
    table = Table(title=f"laws of attention, {TOKENS} tokens, on {device}")
    for heading in ("parameters", "laws", "predicted", "found", "formulas", "gap", "seconds", "grows as D^"):
        table.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        power = exponent(rows[: index + 1])
        cells = [f"{row[key]:,}" for key in ("parameters", "count", "predicted", "explained")]
        grows = "–" if power is None else f"{power:.2f}"
        table.add_row(*cells, row["origin"], f"{row['gap']:.0e}", f"{row['seconds']:.2f}", grows)
    return table


def main() -> None:
    """Run the sizes of this machine, save each as soon as it is done, and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--widths", type=int, nargs="+", help="of the attention blocks; D is four times the square")
    parser.add_argument("--limit", type=float, help="seconds in all: a size that might not fit any more is not begun")
    options = parser.parse_args()
    began = time.perf_counter()
    print("warm-up", flush=True)
    measured(8, options.device)
    rate = speed(options.device)
    rows: list[dict[str, Any]] = []
    for width in options.widths or WIDTHS[options.device]:
        spent = time.perf_counter() - began
        if options.limit is not None and rows and spent + forecast(rows, width, rate) > options.limit:
            needed = f"up to {forecast(rows, width, rate):.0f} s, {options.limit - spent:.0f} s are left"
            print(f"D = {parameters(width):,} is left out: it may take {needed}", flush=True)
            break
        print(f"D = {parameters(width):,}", flush=True)
        rows.append(measured(width, options.device) | {"exponent": None})
        rows[-1]["exponent"] = exponent(rows)
        path = save("law_count", {"rows": rows, "limit_seconds": options.limit, "flops_per_second": rate})
    Console(width=140).print(shown(rows, options.device))
    print(f"saved {path}, {time.perf_counter() - began:.1f} s in all")


if __name__ == "__main__":
    main()
