"""Teach conserved a new component: a feed-forward network with a squared ReLU.

relu(s·z)² = s² relu(z)², so row i of `up` can be scaled by s while column i of `down` is scaled by s⁻²: a scaling
symmetry with degrees +1 and −2, whose law is ‖up_i‖² − 2 ‖down_i‖².
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conserved import Component, Leg, Symmetry, recognize, register
from conserved.kind import Scaling
from conserved.recognize import Site


class SquaredReLU(nn.Module):
    """x ↦ down(relu(up(x))²)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network."""
        return self.down(torch.relu(self.up(x)) ** 2)


def neurons(site: Site) -> list[Symmetry]:
    """The symmetries inside the module at `site`."""
    legs = [Leg(view) for view in site.linear("up").outputs()] + [
        Leg(view, -2) for view in site.linear("down").inputs()
    ]
    return [Symmetry(block=site.path, family="neurons", kind=Scaling(), legs=tuple(legs))]


register(Component(type=SquaredReLU, laws=neurons))


def main() -> None:
    """Recognise it, and let one backward pass say whether the rule is right."""
    torch.manual_seed(0)
    model = nn.Sequential(SquaredReLU(8, 16), SquaredReLU(8, 16)).double()
    laws = recognize(model)
    print(laws.summary())
    x = torch.randn(32, 8, dtype=torch.float64)
    print(laws.verify(lambda: model(x).square().mean()))


if __name__ == "__main__":
    main()
