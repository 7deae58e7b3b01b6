"""How long a certificate takes to make and to check, by the number of parameters, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from conserved import certify
from conserved.blocks import Attention, FeedForward, SwiGLU, TransformerBlock
from measure import save

STAGES = {
    "traced": "trace",
    "looking": "trace",
    "brackets": "find laws",
    "proving": "choose words",
    "laws": "prove rank",
}
"""The stage that is over when a message begins like this; what follows the last one is the proof of the laws."""


def pre_norm(dim: int, hidden: int) -> nn.Module:
    """Layer norms, attention with two heads, GELU, biases and residuals."""
    return TransformerBlock(Attention(dim, 2, bias=True), FeedForward(dim, hidden, bias=True)).double()


def rotary(dim: int, hidden: int) -> nn.Module:
    """RMS norms, rotary positions, query/key norm, SwiGLU."""
    return TransformerBlock(Attention(dim, 2, rotary=True, qk_norm=True), SwiGLU(dim, hidden), "rms").double()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "pre-norm block": (lambda: pre_norm(4, 3), 4),
    "RMS, rotary, query/key norm, SwiGLU": (lambda: rotary(4, 3), 4),
    "two pre-norm blocks": (lambda: nn.Sequential(pre_norm(4, 3), pre_norm(4, 3)), 4),
    "pre-norm block, width 8": (lambda: pre_norm(8, 12), 8),
    "RMS block, width 8": (lambda: rotary(8, 10), 8),
}


def measured(build: Callable[[], nn.Module], width: int) -> dict[str, Any]:
    """One certificate, made and checked."""
    torch.manual_seed(0)
    stages: dict[str, float] = {}
    start = last = time.perf_counter()

    def note(message: str) -> None:
        nonlocal last
        now = time.perf_counter()
        stage = STAGES[message.split()[0]]
        # The first of several messages of a kind ends the stage before; the others belong to their own.
        stage = (
            {"find laws": "choose words", "prove rank": "prove laws"}.get(stage, stage) if stage in stages else stage
        )
        stages[stage] = stages.get(stage, 0.0) + now - last
        last = now

    found = certify(build(), torch.zeros(5, width), progress=note)
    made = time.perf_counter()
    stages["prove laws"] = stages.get("prove laws", 0.0) + made - last
    verdict = found.check()
    return {
        "parameters": found.parameters,
        "laws": found.at_most,
        "found": found.found,
        "verdict": verdict.status.value,
        "seconds": made - start,
        "check_seconds": time.perf_counter() - made,
        "stages": stages,
    }


def main() -> None:
    """Certify every model, print a table and save it."""
    table = Table(title="certificates, one process")
    names = ("trace", "find laws", "choose words", "prove rank", "prove laws")
    for heading in ("model", "D", "laws", "verdict", "made in", *names, "checked in"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    measured(*MODELS["pre-norm block"])
    rows = []
    for name, model in MODELS.items():
        row = {"model": name, **measured(*model)}
        rows.append(row)
        print(f"{name}: {row['seconds']:.1f} s", flush=True)
        cells = [f"{row['stages'].get(stage, 0.0):.1f}" for stage in names]
        laws = f"{row['found']} of {row['laws']}"
        table.add_row(
            name,
            f"{row['parameters']}",
            laws,
            row["verdict"],
            f"{row['seconds']:.1f} s",
            *cells,
            f"{row['check_seconds']:.1f} s",
        )
    Console(width=150).print(table)
    print(f"saved {save('certificates', {'rows': rows})}")


if __name__ == "__main__":
    main()
