"""Default monitors on clean and on broken runs at 125 million parameters in half precision.

    python benchmarks/monitor_scale.py --steps 500 --seconds 240 --out benchmarks/results

A Llama of transformers on bytes of Python's own standard library. The monitor gets the model and the optimizer and
nothing else. Clean runs must raise no alarm; each defect begins at one step, and the alarm must come at the first audit
from then on, with the right law and the right kind.
"""

from __future__ import annotations

import argparse
import gc
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import conserved
from measure import commit, machine, save

Plant = Callable[[nn.Module, int], None]

SIZE: dict[str, dict[str, int]] = {
    "cuda": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "cpu": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
}


def text(device: str) -> Tensor:
    """Bytes of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:120]
    return torch.tensor([*b"".join(file.read_bytes() for file in files)], dtype=torch.long, device=device)


def from_step(first: int, name: str, rows: slice, factor: float) -> Plant:
    """Multiply the gradient of some rows by a factor from a step on."""

    def plant(model: nn.Module, step: int) -> None:
        gradient = model.get_parameter(name).grad
        if step >= first and gradient is not None:
            gradient[rows] *= factor

    return plant


def once(at: int, name: str) -> Plant:
    """Flip one entry of a gradient to ten times its norm, in one step."""

    def plant(model: nn.Module, step: int) -> None:
        gradient = model.get_parameter(name).grad
        if step == at and gradient is not None:
            gradient[5, 7] = 10 * gradient.float().norm()

    return plant


def defects(first: int) -> dict[str, tuple[Plant, str, str]]:
    """By name: what is planted, a part of the law that must be named, the kind of alarm."""
    layer = "model.layers.2." if not torch.cuda.is_available() else "model.layers.5."
    width = 32 if not torch.cuda.is_available() else 64
    return {
        "key head × −1": (
            from_step(first, layer + "self_attn.k_proj.weight", slice(0, width), -1),
            "query_key",
            "loop",
        ),
        "value head × 1.05": (
            from_step(first, layer + "self_attn.v_proj.weight", slice(0, width), 1.05),
            "value_output",
            "loop",
        ),
        "up × 0": (from_step(first, layer + "mlp.up_proj.weight", slice(None), 0), "gated_neurons", "loop"),
        "gain × 1.05": (from_step(first, layer + "input_layernorm.weight", slice(None), 1.05), "gain", "loop"),
        "one entry once": (once(first, layer + "mlp.up_proj.weight"), "", "hardware"),
    }


def train(precision: str, optimizer_name: str, steps: int, plant: Plant | None, device: str) -> dict[str, Any]:
    """Train with a default monitor; what it said, and what it took."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=512, **SIZE[device])
    with torch.device(device):
        model = LlamaForCausalLM(config)
    if precision == "bf16":
        model = model.bfloat16()
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    kept = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in kept]
    if optimizer_name == "Muon":
        optimizers = [torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(others, lr=3e-4)]
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4)]
    monitor = conserved.Monitor(model, optimizers if len(optimizers) > 1 else optimizers[0])
    data, generator = text(device), torch.Generator().manual_seed(0)
    length, batch = (512, 8) if device == "cuda" else (64, 4)
    began, loss = time.perf_counter(), torch.zeros(())
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - length, (batch,), generator=generator).tolist()
        tokens = torch.stack([data[start : start + length] for start in starts])
        with torch.autocast(device, torch.bfloat16, enabled=precision == "autocast"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if plant is not None:
            plant(model, step)
        for optimizer in optimizers:
            optimizer.step()
        monitor.step(loss=loss)
        for optimizer in optimizers:
            optimizer.zero_grad()
    seconds = time.perf_counter() - began
    audits, notes = monitor.audits, monitor.notes
    monitor.close()
    return {
        "precision": precision,
        "optimizer": optimizer_name,
        "steps": steps,
        "seconds": seconds,
        "loss": float(loss.detach()),
        "state": str(getattr(monitor, "state", "")),
        "audits": len(audits),
        "conclusive": sum(entry.conclusive for entry in audits),
        "refuted": [entry.step for entry in audits if entry.refuted],
        "audited": [entry.step for entry in audits],
        "replays": sum(entry.replays for entry in audits),
        "notes": list(notes),
        "alarms": [
            {"code": a.code, "step": a.step, "last": a.last, "laws": list(a.laws)[:6], "message": a.message[:400]}
            for a in monitor.alarms
        ],
    }


def main() -> None:
    """Clean runs first, then one run for each defect."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--optimizers", default="AdamW,Muon")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases: list[tuple[str, str, str, int, Any]] = [
        ("clean", precision, name, chosen.steps, None)
        for name in chosen.optimizers.split(",")
        for precision in ("bf16", "autocast")
        if name != "Muon" or hasattr(torch.optim, "Muon")
    ]
    planted = defects(chosen.first)
    cases += [(label, "autocast", "AdamW", chosen.first + 12, case) for label, case in planted.items()]
    cases += [(label, "bf16", "AdamW", chosen.first + 12, case) for label, case in planted.items()]
    began, done = time.perf_counter(), []
    for label, precision, name, steps, case in cases:
        if time.perf_counter() - began > chosen.seconds:
            print(f"not run for lack of time: {label} {precision} {name}")
            continue
        try:
            record = train(precision, name, steps, case[0] if case else None, device) | {"case": label}
        except Exception as problem:
            record = {"case": label, "precision": precision, "error": f"{type(problem).__name__}: {problem}"[:400]}
        done.append(record)
        print({key: value for key, value in record.items() if key not in ("audited", "steps")}, flush=True)
        if chosen.out:
            save("monitor_scale", {"commit": commit(), "machine": machine(), "runs": done}, chosen.out)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
