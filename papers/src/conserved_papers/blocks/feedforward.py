"""Feed-forward networks: one hidden layer with an activation, and the gated SwiGLU (paper, equations 3 and 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

ActivationName = Literal["gelu", "silu", "relu", "linear"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "linear": lambda hidden: hidden,
}


class FeedForward(nn.Module):
    """f(x) = A σ(B x + b) + a, with A = down.weight, B = up.weight.

    Args:
        dim: width of the tokens.
        hidden: hidden units.
        activation: "gelu", "silu", "relu" or "linear".
        bias: whether the linear maps have biases.

    Raises:
        ValueError: the activation is another word, or a size is less than one.
    """

    def __init__(self, dim: int, hidden: int, activation: ActivationName = "gelu", bias: bool = False) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"Expected activation to be one of {', '.join(ACTIVATIONS)}, got {activation!r}. Pass one of them."
            )
        _positive(dim=dim, hidden=hidden)
        self.activation = activation
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*tokens dim"]) -> Float[Tensor, "*tokens dim"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


class SwiGLU(nn.Module):
    """f(x) = A (SiLU(B x) ⊙ C x), with A = down.weight, B = gate.weight, C = up.weight.

    Args:
        dim: width of the tokens.
        hidden: hidden units.
        bias: whether the linear maps have biases.

    Raises:
        ValueError: a size is less than one.
    """

    def __init__(self, dim: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        _positive(dim=dim, hidden=hidden)
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*tokens dim"]) -> Float[Tensor, "*tokens dim"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"Expected {name} of at least 1, got {size}. Pass a larger one.")
