"""What `conserved.check(attention, q, k, v, grad=dout)` says of kernels on the tensors of real training runs.

    python benchmarks/check_precision.py --seconds 200 [--small] [--folder RESULTS]

A byte-level decoder is trained in bf16 autocast on the sources of Python's standard library. At several steps the
queries, keys, values and output gradients of every layer are kept, and each kernel is checked on them. A row has the
verdict, the relative errors that the check reports, and the same error of dQ from a second computation in float64.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import conserved
from attention_kernels import BACKENDS, DEVICE, REFUSALS, Attend, causal_kernel
from attention_training import Shape, Training, corpus
from measure import RESULTS, save

KERNELS = ("flash or math", "cudnn or math", "flash", "math") if DEVICE.type == "cuda" else ("flash", "math")
"""On a GPU kernels refuse float64: there PyTorch may take the math backend for it, as it does by default."""


def kernel_called(name: str) -> Attend:
    """Return causal attention by a kernel, and by the math backend in precisions that it refuses if so named."""
    kernel, _, other = name.partition(" or ")
    if not other:
        return causal_kernel(kernel)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([BACKENDS[kernel], BACKENDS[other]], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def kept_tensors(run: Training, sequences: int) -> list[list[Tensor]]:
    """Return queries, keys, values and output gradient of every layer of one pass, for a few sequences."""
    layers = run.model.attentions()
    for layer in layers:
        layer.kept = []
    run.gradients(run.starts[-1])
    for parameter in run.model.parameters():
        parameter.grad = None if run.graph is None else parameter.grad
    tensors = [[tensor[:sequences].clone() for tensor in layer.kept] for layer in layers]
    for layer in layers:
        layer.kept = None
    return tensors


def float64_error(kernel: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> float:
    """Return the relative error of a kernel's dQ against attention written out in float64."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()

    def exact(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        scores = (a @ b.mT / a.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ c

    def gradient(function: Any, inputs: list[Tensor], out: Tensor) -> Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        (dq,) = torch.autograd.grad(function(*leaves), leaves[:1], out)
        return dq.double()

    right = gradient(exact, [q.double(), k.double(), v.double()], dout.double())
    return float((gradient(kernel_called(kernel), [q, k, v], dout) - right).norm() / right.norm())


def check_layers(run: Training, kernel: str, saved: list[list[Tensor]], clock: float) -> list[dict[str, Any]]:
    """Check one kernel on the tensors of the last layer and of every fourth before it."""
    rows = []
    for layer in range(len(saved) - 1, -1, -4):
        q, k, v, dout = saved[layer]
        if time.monotonic() > clock:
            break
        result = conserved.check(kernel_called(kernel), q, k, v, grad=dout, names=("q", "k", "v"), seconds=3)
        rows.append(
            {
                "kind": run.shape.kind,
                "warm-up": run.shape.warm_up,
                "step": run.done,
                "kernel": kernel,
                "layer": layer,
                "verdict": result.verdict.status.name,
                "errors": {name: error.record() for name, error in result.errors.items()},
                "float64 dq": float64_error(kernel, q, k, v, dout),
                "findings": list(result.precision_notes),
                "message": result.verdict.message,
            }
        )
    return rows


def main() -> None:
    """Train, check, print, save after every step that is looked at."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # kernels say which shapes they refuse
    clock = time.monotonic() + options.seconds
    sizes: dict[str, Any] = {"layers": 6, "width": 192, "head": 32, "length": 128, "batch": 4} if options.small else {}
    moments = (5, 10, 25) if options.small else (5, 25, 100)
    text, rows = corpus(), []
    for kind, warm_up in (("learned", 0), ("rotary", 0), ("learned", 100)):
        rate = 6e-4 if warm_up else 3e-3
        shape = Shape(kind=kind, warm_up=warm_up, rate=rate, steps=moments[-1] + 1, **sizes)
        run = Training(shape, text, seed=0, attention="flash")
        for moment in moments:
            while run.done < moment and time.monotonic() < clock:
                run.step()
            if time.monotonic() > clock:
                break
            torch.cuda.synchronize() if DEVICE.type == "cuda" else None
            saved = kept_tensors(run, 1 if options.small else 2)
            for kernel in KERNELS:
                try:
                    new = check_layers(run, kernel, saved, clock)
                except REFUSALS as problem:
                    print(kind, moment, kernel, type(problem).__name__, str(problem)[:100], flush=True)
                    continue
                rows += new
                if new:
                    errors = [row["errors"]["q"]["error"] for row in new if row["errors"]]
                    verdicts = sorted({row["verdict"] for row in new})
                    print(
                        f"{kind}, warm-up {warm_up}, step {run.done}, {kernel}: "
                        f"dq error median {median(errors or [0]):.2g}, "
                        f"largest {max(errors or [0]):.2g}, float64 {max(row['float64 dq'] for row in new):.2g}, "
                        f"{verdicts}, loss {float(run.loss):.2f}",
                        flush=True,
                    )
                save(
                    "check_precision",
                    {"shape": sizes or "12 layers, width 896, length 512", "rows": rows},
                    options.folder,
                )


if __name__ == "__main__":
    main()
