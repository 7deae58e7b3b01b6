"""What an audit of a large model costs on an accelerator: the first call, later ones, and its share of a step.

    TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/scale_cost.py --cell llama:8B:bf16 --out $OUT

Timings mean something on a quiet machine alone. Beside them stands the time of one `_foreach_norm` over all weights and
gradients, which reads them once, as an audit has to.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import conserved
from conserved.auditing.gradient_peaks import PeakHistory
from measure import commit, machine, save
from scale_table import Cell, table


def timed(work: Callable[[], object], times: int) -> list[float]:
    """Return the seconds of each of several calls, until the device has finished."""
    taken = []
    for _ in range(times):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return taken


def main() -> None:
    """Measure one model; save after every number, the most important first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", default="llama:8B:bf16")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", default="1x512,4x512,16x512,4x4096")
    parser.add_argument("--planted", type=float, default=0.0, help="seconds for wrong factors afterwards")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    maker, size, precision = chosen.cell.split(":")
    cell = Cell(maker, size, precision, chosen.vocabulary, device)
    record: dict[str, Any] = {"commit": commit(), "machine": machine(), "cell": chosen.cell}

    def note(**numbers: Any) -> None:
        record.update(numbers)
        print(numbers, flush=True)
        if chosen.out:
            save("scale_cost", record, chosen.out)

    began = time.perf_counter()
    cell.construct()
    note(parameters=cell.parameters, built=time.perf_counter() - began)
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(map(int, text.split("x"))) for text in chosen.tokens.split(",")]
    tokens = cell.tokens(generator, *batches[0])
    began = time.perf_counter()
    laws = conserved.recognize(cell.model, tokens[:1, :16], loss="cross_entropy")
    recognized = time.perf_counter() - began
    cell.backward(tokens)
    audit = partial(conserved.audit, cell.model, laws, precision=cell.kind, sized=False)
    (first,) = timed(audit, 1)
    note(**{"recognize": recognized, "first audit": first, "first call": recognized + first, "laws": len([*laws])})
    later = timed(audit, 12)
    gradients = [p.grad for p in cell.model.parameters() if p.grad is not None]
    weights = [p.detach() for p in cell.model.parameters()]
    reading = timed(lambda: (torch._foreach_norm(weights), torch._foreach_norm(gradients)), 6)
    note(**{"audit": later, "reading once": reading})
    history = PeakHistory()
    note(**{"audit with peaks": timed(partial(audit, peaks=history), 5)})
    passes = {}
    for batch, length in batches:
        taken = timed(partial(cell.backward, cell.tokens(generator, batch, length)), 3)
        passes[f"{batch * length}"] = taken
        share = float(np.median(later)) / (float(np.median(later)) + float(np.median(taken[1:])))
        note(**{"passes": passes, f"share at {batch * length} tokens": share})
    cell.laws = {"cross_entropy": laws, "any": laws}
    options = argparse.Namespace(regimes="fresh", cell_seconds=chosen.planted)
    note(table=table(cell, options, lambda result: note(table=result)))
    allocated = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    note(**{"GB at most": allocated})


if __name__ == "__main__":
    main()
