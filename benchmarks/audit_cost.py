"""What an audit costs against the backward pass it checks, and against torch.autograd.gradcheck on one layer.

python benchmarks/audit_cost.py --device cuda    # a decoder of 0.6 billion parameters at 4 × 2,048 tokens
python benchmarks/audit_cost.py --device cpu     # a small one
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from conserved import LawSet, audit, blocks, gauge, recognize
from measure import save

SIZES = {
    "cuda": {
        "vocab": 32_768,
        "dim": 1_024,
        "depth": 36,
        "heads": 16,
        "hidden": 3_584,
        "kv_heads": 8,
        "batch": 4,
        "length": 2_048,
    },
    "cpu": {
        "vocab": 2_048,
        "dim": 256,
        "depth": 4,
        "heads": 4,
        "hidden": 704,
        "kv_heads": 2,
        "batch": 8,
        "length": 512,
    },
}


def build(size: dict[str, int], device: str, precision: str) -> tuple[nn.Module, Callable[[], torch.Tensor], int]:
    """A decoder, one forward pass of it up to the loss, and its number of parameters."""
    torch.manual_seed(0)
    model = blocks.DecoderLM(
        size["vocab"],
        size["dim"],
        size["depth"],
        size["heads"],
        size["hidden"],
        kv_heads=size["kv_heads"],
        max_length=size["length"],
        positions="rotary-half",
    ).to(device, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    tokens = torch.randint(size["vocab"], (size["batch"], size["length"] + 1), device=device)

    def forward() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "autocast"):
            logits = model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, forward, sum(p.numel() for p in model.parameters())


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def decoder(device: str, precision: str, rounds: int) -> dict[str, Any]:
    """Forward and backward, audit and gauge, in turns."""
    model, forward, count = build(SIZES[device], device, precision)

    def backward() -> None:
        forward().backward()

    laws = recognize(model, loss="cross_entropy")
    taken: dict[str, list[float]] = {"forward and backward": [], "the same, gauged": [], "audit": []}
    result = None
    for number in range(rounds + 1):
        model.zero_grad()
        plain = seconds(backward, device)
        start = time.perf_counter()
        result = audit(model, laws)
        if device == "cuda":
            torch.cuda.synchronize()
        audited = time.perf_counter() - start
        model.zero_grad()
        with gauge(model):
            gauged = seconds(backward, device)
        if number > 0:
            for name, value in zip(taken, (plain, gauged, audited), strict=True):
                taken[name].append(value)
    assert result is not None
    medians = {name: median(values) for name, values in taken.items()}
    only, audited_too = with_and_without(model, laws, device, precision, rounds)
    by_itself = medians["audit"] / only
    return {
        "precision": precision,
        "parameters": count,
        "identities": len(result.rows),
        "verdict": result.verdict.status.value,
        "worst residual": result.worst,
        "seconds": medians | {"backward alone": only, "backward and audit": audited_too},
        # On a processor nothing overlaps, and the backward pass varies by more than an audit takes.
        "audit / backward": audited_too / only - 1 if device == "cuda" else by_itself,
        "audit by itself / backward": by_itself,
        "audit / (forward and backward)": medians["audit"] / medians["forward and backward"],
        "gauge / (forward and backward)": medians["the same, gauged"] / medians["forward and backward"] - 1,
        "size": SIZES[device],
    }


def with_and_without(model: nn.Module, laws: LawSet, device: str, precision: str, rounds: int) -> tuple[float, float]:
    """Seconds of the backward pass without the forward pass, and of the backward pass with an audit right after it.

    On a GPU the host is then ahead of the device, as it is in training, and part of the audit's work on it is hidden.
    """
    size = SIZES[device]
    tokens = torch.randint(size["vocab"], (size["batch"], size["length"] + 1), device=device)
    result: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        # In an order that gives neither the cooler device.
        for audited in (False, True, True, False):
            model.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "autocast"):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

            def work(loss: torch.Tensor = loss, audited: bool = audited) -> None:
                loss.backward()
                if audited:
                    audit(model, laws)

            taken = seconds(work, device)
            if number > 0:
                result[audited].append(taken)
    return median(result[False]), median(result[True])


def one_layer(device: str, rounds: int = 3) -> dict[str, Any]:
    """One attention layer, width 16 and 8 tokens: audit of one backward pass against gradcheck of all parameters."""
    torch.manual_seed(0)
    layer = blocks.Attention(16, 2, rotary=True, causal=True).to(device, torch.float64)
    laws = recognize(layer)
    x = torch.randn(8, 16, device=device, dtype=torch.float64)
    names, tensors = zip(*layer.named_parameters(), strict=True)

    def function(*given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,)).sin().sum()

    def audited() -> None:
        layer.zero_grad()
        layer(x).sin().sum().backward()
        assert audit(layer, laws).ok

    def checked() -> None:
        assert torch.autograd.gradcheck(function, tensors)

    taken: dict[str, list[float]] = {"backward and audit": [], "gradcheck": []}
    for _ in range(rounds):
        taken["backward and audit"].append(seconds(audited, device))
        taken["gradcheck"].append(seconds(checked, device))
    medians = {name: median(values) for name, values in taken.items()}
    return {"seconds": medians, "gradcheck / audit": medians["gradcheck"] / medians["backward and audit"]}


def main() -> None:
    """Time everything side by side, print ratios and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        # Small operations on a machine that others use too spend their time waiting for the other thread.
        torch.set_num_threads(1)
    precisions = ("bfloat16", "autocast", "float32") if chosen.device == "cuda" else ("float32",)
    models = [decoder(chosen.device, precision, chosen.rounds) for precision in precisions]
    layer = one_layer(chosen.device)
    table = Table(title="audit of a decoder against the pass it checks")
    for heading in (
        "precision",
        "parameters",
        "identities",
        "backward (ms)",
        "audit by itself (ms)",
        "it adds",
        "gauge / pass",
        "worst",
    ):
        table.add_column(heading, justify="right")
    for row in models:
        table.add_row(
            row["precision"],
            f"{row['parameters']:,}",
            f"{row['identities']:,}",
            f"{1e3 * row['seconds']['backward alone']:.1f}",
            f"{1e3 * row['seconds']['audit']:.2f}",
            f"{100 * row['audit / backward']:.2f} %",
            f"{100 * row['gauge / (forward and backward)']:.2f} %",
            f"{row['worst residual']:.1e} {row['verdict']}",
        )
    Console(width=130).print(table)
    print(f"one attention layer: gradcheck takes {layer['gradcheck / audit']:.0f} times backward and audit")
    print(f"saved {save('audit_cost', {'models': models, 'one layer': layer})}")


if __name__ == "__main__":
    main()
