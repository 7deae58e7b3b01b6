"""Count and find the conservation laws of a block of one's own.

The block is a bilinear gate with a normalised low-rank bypass: y = C((A x) ⊙ (B x)) + V U x/‖U x‖. What is conserved?
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conserved import discover


class BilinearGate(nn.Module):
    """C((A x) ⊙ (B x)), and beside it a low-rank map of unit length inside."""

    def __init__(self, dim: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.c = nn.Linear(hidden, dim, bias=False)
        self.u, self.v = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        inside = self.u(x)
        return self.c(self.a(x) * self.b(x)) + self.v(inside / inside.norm(dim=-1, keepdim=True))


def main() -> None:
    """The laws, with how well they are known."""
    torch.manual_seed(0)
    found = discover(BilinearGate(dim=4, hidden=3, rank=2), torch.zeros(6, 4))
    print(found.summary())


if __name__ == "__main__":
    main()
