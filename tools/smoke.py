"""Use the library once on the installed versions: recognize, audit, check, watch, count, move.

    python tools/smoke.py

Continuous integration runs it on the lowest supported versions of the requirements.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy
import scipy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved


class Product(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return gradient * gain, (gradient * x).sum(0)


class Gained(nn.Module):
    """A linear map behind a gain, which together have one law a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Product.apply(x, self.gain))


def main() -> int:
    """Run each part once, and return the exit status."""
    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "numpy": numpy.__version__, "scipy": scipy.__version__}
    print(f"Python {sys.version.split()[0]},", ", ".join(f"{name} {version}" for name, version in versions.items()))
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(5, 3)
    laws = conserved.recognize(model, x)
    print(laws)
    monitor = conserved.Monitor(model, optimizer, laws)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        audit = conserved.audit(model, laws)
        optimizer.step()
        monitor.step()
    checks = [conserved.check(F.silu, x), conserved.check(F.layer_norm, torch.randn(4, 6), normalized_shape=(6,))]
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    checks.append(conserved.check(F.scaled_dot_product_attention, q, k, v))
    print(audit, monitor, *checks, sep="\n")
    count = conserved.discover(model, x).count
    print(conserved.transform.equalize(model, x))
    decoder = conserved.blocks.DecoderLM(vocab=20, dim=8, depth=2, heads=2, hidden=12)
    print(repr(conserved.recognize(decoder, torch.zeros(2, 6, dtype=torch.long))))
    own = conserved.recognize(Gained(), x)
    print(own)
    passed = len(own) > 0 and audit.ok and not monitor.alarms and all(check.ok for check in checks) and count == 4
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
