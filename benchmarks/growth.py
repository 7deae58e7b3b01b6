"""How the cost of an audit and of a watched AdamW step grows with the number of parameters, beside what others do.

python benchmarks/growth.py                   # 1 to 97 million parameters on a processor
python benchmarks/growth.py --device cuda     # 10 million to 2 billion on a GPU

Every row is measured with the device waited for before and after, in turns with its peers: one sum over parameters and
gradients, which is the least that reading them can cost; the laws of a float64 copy, which is how drift is usually
looked at; and the histograms of `wandb.watch(log="all")` where that package is installed. `torch.linalg.svd` of one
square weight and `torch.autograd.gradcheck` of one attention layer of width 32 are measured once each. Audits are in
bfloat16 on a GPU, steps in float32.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor, MonitorConfig, audit, blocks, recognize
from measure import RESULTS, save

Shape = dict[str, Any]

SHAPES: dict[str, list[Shape]] = {
    "cpu": [
        {"vocab": 2048, "dim": 128, "depth": 4, "heads": 4, "hidden": 352},
        {"vocab": 4096, "dim": 256, "depth": 8, "heads": 8, "hidden": 704},
        {"vocab": 8192, "dim": 768, "depth": 12, "heads": 12, "hidden": 2048},
    ],
    "cuda": [
        {"vocab": 8192, "dim": 256, "depth": 8, "heads": 4, "hidden": 768, "kv_heads": 2},
        {"vocab": 16_384, "dim": 512, "depth": 16, "heads": 8, "hidden": 1536, "kv_heads": 4},
        {"vocab": 32_768, "dim": 1024, "depth": 36, "heads": 16, "hidden": 3584, "kv_heads": 8},
        {"vocab": 65_536, "dim": 2048, "depth": 36, "heads": 16, "hidden": 6144, "kv_heads": 8},
    ],
}

TOKENS = 64


def decoder(shape: Shape, device: str, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], None]]:
    """A decoder, and a pass forward and backward on a short text."""
    torch.manual_seed(0)
    with torch.device(device):  # two billion numbers are not drawn on the host
        model = blocks.DecoderLM(**shape, max_length=TOKENS, positions="rotary-half").to(dtype)
    tokens = torch.randint(shape["vocab"], (2, TOKENS + 1), device=device)

    def backward() -> None:
        model.zero_grad()
        logits: Tensor = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()

    return model, backward


def timed(call: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds until a call has returned, and until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    returned = time.perf_counter() - began
    if device == "cuda":
        torch.cuda.synchronize()
    return returned, time.perf_counter() - began


def in_turns(
    prepare: Callable[[], object], calls: dict[str, Callable[[], object]], device: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Median seconds of every call, until it returned and until all was done; the first two rounds do not count."""
    result: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        prepare()
        for name, call in calls.items():
            taken = timed(call, device)
            result[name] += [taken] if number > 1 else []
    return {
        name: {"returned": median(one for one, _ in taken), "done": median(one for _, one in taken)}
        for name, taken in result.items()
    }


def audits(shape: Shape, device: str, rounds: int) -> dict[str, Any]:
    """An audit read at once and one that is queued, beside one sum over everything they read."""
    model, backward = decoder(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    laws = recognize(model, loss="cross_entropy")

    def read() -> list[Tensor]:
        return [one.sum() for p in model.parameters() for one in (p.detach(), p.grad) if one is not None]

    calls: dict[str, Callable[[], object]] = {
        "audit, read at once": lambda: audit(model, laws).ok,
        "audit, queued": lambda: audit(model, laws, wait=False),
        "sum over parameters and gradients": read,
    }
    return {"parameters": sum(p.numel() for p in model.parameters()), **in_turns(backward, calls, device, rounds)}


def steps(shape: Shape, device: str, rounds: int) -> dict[str, Any]:
    """`monitor.step()` after a step of AdamW, beside the laws of a float64 copy and wandb's histograms."""
    model, backward = decoder(shape, device, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    config = MonitorConfig(keep=4, alarms=())
    monitor = Monitor(model, optimizer, loss="cross_entropy", audit=None, config=config)
    laws = recognize(model, loss="cross_entropy")

    def copied() -> object:
        theta = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
        return {name: value.cpu() for name, value in laws.values(theta).items()}

    calls: dict[str, Callable[[], object]] = {"monitor.step, AdamW": monitor.step, "laws of a float64 copy": copied}
    if find_spec("wandb") is not None:
        calls["wandb.watch(log='all')"] = histograms(model)

    def prepare() -> None:
        backward()
        optimizer.step()

    result = in_turns(prepare, calls, device, rounds)
    return {"parameters": sum(p.numel() for p in model.parameters()), **result}


def histograms(model: nn.Module) -> Callable[[], object]:
    """The histograms of every parameter and gradient that `wandb.watch(log="all")` takes in a step, and their log."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(mode="offline", dir=tempfile.mkdtemp(), project="growth")

    def log() -> None:
        for name, parameter in model.named_parameters():
            for kind, one in (("parameters", parameter.detach()), ("gradients", parameter.grad)):
                if one is not None:
                    run._torch.log_tensor_stats(one, f"{kind}/{name}")
        run.log({"step": 1})

    return log


def peers(device: str, rounds: int) -> dict[str, Any]:
    """Singular values of one weight, and gradcheck of a small attention layer with everything about it audited."""
    weight = torch.randn(1024, 1024, device=device)
    layer = blocks.Attention(32, 4).to(device, torch.float64)
    x = torch.randn(2, 8, 32, device=device, dtype=torch.float64, requires_grad=True)
    laws = recognize(layer, x.detach())

    def backward() -> None:
        layer.zero_grad()
        layer(x).square().sum().backward()

    calls: dict[str, Callable[[], object]] = {
        "torch.linalg.svd of 1024 × 1024": lambda: torch.linalg.svd(weight),
        "gradcheck of an attention layer of width 32": lambda: torch.autograd.gradcheck(layer, (x,), fast_mode=False),
        "audit of that layer": lambda: audit(layer, laws).ok,
    }
    return in_turns(backward, calls, device, min(rounds, 3))


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The p of cost ∝ parameters^p, by least squares over all sizes and between the two largest."""
    result = {}
    sizes = [math.log(row["parameters"]) for row in rows]
    for name in (name for name in rows[0] if name != "parameters"):
        costs = [math.log(row[name]["done"]) for row in rows]
        middle, mean = sum(sizes) / len(sizes), sum(costs) / len(costs)
        grad = sum((x - middle) * (y - mean) for x, y in zip(sizes, costs, strict=True))
        result[name] = grad / sum((x - middle) ** 2 for x in sizes)
        result[f"{name}, last two"] = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
    return result


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    logging.getLogger("conserved").setLevel(logging.ERROR)
    # Saved whenever there is something new: a larger size may not come to its end.
    record: dict[str, Any] = {"peers": peers(chosen.device, chosen.rounds)}
    print({name: f"{1e3 * one['done']:.2f} ms" for name, one in record["peers"].items()})
    for name, work in (("audit", audits), ("monitor", steps)):
        rows: list[dict[str, Any]] = []
        for shape in SHAPES[chosen.device]:
            rows.append(work(shape, chosen.device, chosen.rounds))
            gc.collect()
            text = [f"{key} {1e3 * one['done']:.2f} ms" for key, one in rows[-1].items() if key != "parameters"]
            print(f"{rows[-1]['parameters']:>13,} parameters: " + ", ".join(text), flush=True)
            record[name] = {"rows": rows, "exponents": exponents(rows) if len(rows) > 1 else {}}
            saved = save("growth", record, chosen.out)
        print({key: round(value, 2) for key, value in record[name]["exponents"].items()}, flush=True)
    print(saved)


if __name__ == "__main__":
    main()
