"""Teach conserved an operator it has no rule for: a fused squared ReLU.

relu(s·z)² = s² relu(z)² for every s > 0, so row i of `up` can be scaled by s while column i of `down` is scaled by s⁻²:
a scaling with degrees +1 and −2, whose law is ‖up_i‖² − 2 ‖down_i‖². Nothing is said about the module; the rule is
about the operator, wherever it stands.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor, nn

from conserved import recognize, register_operator
from conserved.inference.rules.products import power
from conserved.inference.rules.step import Known, Step


@torch.library.custom_op("example::squared_relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    """As a fused kernel would do it: one operator, opaque to PyTorch."""
    return x.relu() ** 2


squared_relu.register_fake(torch.empty_like)
squared_relu.register_autograd(
    lambda ctx, grad: 2 * ctx.saved_tensors[0].relu() * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Network(nn.Module):
    """x ↦ down(relu(up(x))²)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network."""
        return self.down(squared_relu(self.up(x)))


def main() -> None:
    """Before and after the rule; one backward pass says whether it is right."""
    torch.manual_seed(0)
    model = nn.Sequential(Network(8, 16), nn.Tanh(), Network(8, 16)).double()
    x = torch.randn(32, 8, dtype=torch.float64)
    laws = recognize(model, x)
    print(f"{len(laws)} laws; operators without a rule: {dict(laws.unknown)}")

    @register_operator("example::squared_relu")
    def rule(step: Step) -> Known:
        """The entries of the result scale as the square of those of the argument."""
        return power(step, step.type(step.arg(0)), Fraction(2))

    laws = recognize(model, x)
    print(laws.summary())
    print(laws.verify(lambda: model(x).square().mean()))


if __name__ == "__main__":
    main()
