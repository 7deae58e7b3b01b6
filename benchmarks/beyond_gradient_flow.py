"""Count the laws that the paper's blocks keep under momentum, under Adam and in other metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conserved.certificates import certify
from conserved.discovery import discover
from conserved.discovery.metric import entropy
from conserved_papers.blocks import Attention, FeedForward, MixtureOfExperts, SwiGLU
from measure import commit, machine, save

BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear pair, 3 · 2 · 3": (partial(FeedForward, 3, 2, "linear"), (3,)),
    "GELU network, d = 2, 2 neurons": (partial(FeedForward, 2, 2, "gelu"), (2,)),
    "ReLU network, d = 2, 2 neurons": (partial(FeedForward, 2, 2, "relu"), (2,)),
    "SwiGLU network, d = 2, 2 neurons": (partial(SwiGLU, 2, 2), (2,)),
    "attention, d = 2, one head of 2": (partial(Attention, 2, 1), (3, 2)),
    "rotary attention, d = 2, one plane": (partial(Attention, 2, 1, rotary=True), (3, 2)),
    "softmax mixture, d = 2, 3 experts of 1": (partial(MixtureOfExperts, 2, 1, 3), (2,)),
    "softmax mixture, d = 2, 2 experts of 1": (partial(MixtureOfExperts, 2, 1, 2), (2,)),
    "sigmoid mixture, d = 2, 3 experts of 1": (partial(MixtureOfExperts, 2, 1, 3, "sigmoid"), (2,)),
}
"""The paper's blocks at small sizes, with the shape of an input."""


def example(shape: tuple[int, ...]) -> Tensor:
    """Return an input of that shape, whose type is imitated."""
    return torch.zeros(shape, dtype=torch.float64)


def adam_laws(model: nn.Module, shape: tuple[int, ...], samples: int = 12) -> int:
    """Laws of Adam's first step: parameters less classes of entries whose gradients agree in size for all data."""
    generator = torch.Generator().manual_seed(0)
    parameters = list(model.double().parameters())
    rows = []
    for _ in range(samples):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        output = model(x)
        direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        gradients = torch.autograd.grad((output * direction).sum(), parameters)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]).abs())
    sizes = torch.stack(rows, 1)
    scale = float(sizes.max())
    classes = {
        tuple((row / scale).mul(1e9).round().long().tolist()) for row in sizes if float(row.max()) > 1e-12 * scale
    }
    return len(sizes) - len(classes)


def metrics_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """A preconditioner with one number a tensor, one with a number an entry, and the entropy, of all parameters."""
    generator = torch.Generator().manual_seed(1)
    names = dict(model.named_parameters())
    return {
        "tensor": {name: 1.0 + float(torch.rand((), generator=generator)) for name in names},
        "entry": {name: 0.5 + torch.rand(p.shape, generator=generator).double() for name, p in names.items()},
        "entropy": dict.fromkeys(names, entropy),
    }


def main() -> None:
    """Count the laws of every block and save them."""
    rows = []
    for name, (build, shape) in BLOCKS.items():
        torch.manual_seed(0)
        model = build().double()
        row: dict[str, Any] = {"block": name, "parameters": sum(p.numel() for p in model.parameters())}
        row["gradient"] = discover(model, example(shape), forms=False).count
        momentum = discover(model, example(shape), dynamics="heavy_ball")
        row["momentum"], row["momenta"] = momentum.count, momentum.explained
        row["momentum_verdict"] = momentum.verdict.status.value
        row["adam"] = adam_laws(model, shape)
        for kind, metric in metrics_of(model).items():
            row[kind] = discover(model, example(shape), metric=metric, forms=False).count
            row[f"{kind}_certified"] = certify(model, example(shape), metric=metric).at_most
        rows.append(row)
        print(row, flush=True)
    save("beyond_gradient_flow", {"commit": commit(), **machine(), "rows": rows})


if __name__ == "__main__":
    main()
