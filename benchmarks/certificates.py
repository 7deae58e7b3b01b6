"""How long a certificate takes to make and to check, by the number of parameters, how large it is, where time goes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from conserved import certify
from conserved.blocks import Attention, DecoderLM, FeedForward, SwiGLU, TransformerBlock
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


def decoder() -> nn.Module:
    """Embedding, two blocks with rotary positions, RMS norms and SwiGLU, final norm and head."""
    return DecoderLM(vocab=5, dim=4, depth=2, heads=2, hidden=3).double()


Model = tuple[Callable[[], nn.Module], torch.Tensor, str]
"""How to build it, an input to imitate, and the loss."""

MODELS: dict[str, Model] = {
    "pre-norm block": (lambda: pre_norm(4, 3), torch.zeros(5, 4), "regression"),
    "RMS, rotary, query/key norm, SwiGLU": (lambda: rotary(4, 3), torch.zeros(5, 4), "regression"),
    "two pre-norm blocks": (
        lambda: nn.Sequential(pre_norm(4, 3), pre_norm(4, 3)),
        torch.zeros(5, 4),
        "regression",
    ),
    "two-block decoder, tokens to cross-entropy": (decoder, torch.tensor([0, 1, 2, 4]), "cross_entropy"),
    "pre-norm block, width 8": (lambda: pre_norm(8, 12), torch.zeros(5, 8), "regression"),
    "RMS block, width 8": (lambda: rotary(8, 10), torch.zeros(5, 8), "regression"),
    "pre-norm block, width 16": (lambda: pre_norm(16, 26), torch.zeros(5, 16), "regression"),
}


def measured(
    build: Callable[[], nn.Module],
    example: torch.Tensor,
    loss: str,
    keep: Callable[[dict[str, Any]], object] = lambda row: None,
) -> dict[str, Any]:
    """One certificate, made and checked, by the clock and in processor time; `keep` gets what is known before it is
    checked."""
    torch.manual_seed(0)
    stages: dict[str, float] = {}
    start = last = time.process_time()
    clock = time.perf_counter()

    def note(message: str) -> None:
        nonlocal last
        now = time.process_time()
        stage = STAGES[message.split()[0]]
        # The first of several messages of a kind ends the stage before; the others belong to their own.
        stage = (
            {"find laws": "choose words", "prove rank": "prove laws"}.get(stage, stage) if stage in stages else stage
        )
        stages[stage] = stages.get(stage, 0.0) + now - last
        last = now
        print(f"  {now - start:7.1f} s  {message}", flush=True)

    result = certify(build(), example, loss=loss, progress=note)
    made, made_clock = time.process_time(), time.perf_counter()
    stages["prove laws"] = stages.get("prove laws", 0.0) + made - last
    row = {
        "parameters": result.parameters,
        "laws": result.at_most,
        "found": result.found,
        "complete": result.complete,
        "verdict": result.verdict.status.value,
        "evidence": [str(item) for item in result.verdict.evidence],
        "bytes": len(json.dumps(result.record(), ensure_ascii=False).encode()),
        "seconds": made_clock - clock,
        "processor_seconds": made - start,
        "stages": stages,
    }
    keep(row)
    again, again_clock = time.process_time(), time.perf_counter()
    verdict = result.check()
    assert verdict == result.verdict.status
    row["check_seconds"] = time.perf_counter() - again_clock
    row["check_processor_seconds"] = time.process_time() - again
    return row


def main() -> None:
    """Certify every model, print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    only = parser.parse_args().only
    table = Table(title="certificates, one process, processor seconds")
    names = ("trace", "find laws", "choose words", "prove rank", "prove laws")
    for heading in ("model", "D", "laws", "verdict", "size", "made in", *names, "checked in"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    rows = []
    for name, model in MODELS.items():
        if only not in name:
            continue
        row = {"model": name, **measured(*model)}
        rows.append(row)
        print(f"{name}: {row['processor_seconds']:.1f} s", flush=True)
        cells = [f"{row['stages'].get(stage, 0.0):.1f}" for stage in names]
        laws = f"{row['found']} of {row['laws']}"
        table.add_row(
            name,
            f"{row['parameters']}",
            laws,
            row["verdict"],
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['processor_seconds']:.1f} s",
            *cells,
            f"{row['check_processor_seconds']:.1f} s",
        )
        saved = save("certificates", {"rows": rows})
    Console(width=160).print(table)
    print(f"saved {saved}")


if __name__ == "__main__":
    main()
