"""Tiny models of torch.nn layers, with the number of laws that the Lie closure has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo import Case, case, images, token_ids


class Attending(nn.Module):
    """Self-attention by torch.nn.MultiheadAttention on one sequence."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Crossing(nn.Module):
    """Attention from one sequence to another of other width."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[:, :3], torch.cat((x, x[:, :1] ** 2), 1), need_weights=False)[0]


class Remembering(nn.Module):
    """A decoder layer that attends to a fixed function of its own input."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 3, dropout=0.0, activation="gelu", norm_first=norm_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.sin())


def encoder(*, layers: int = 1, norm: bool = False, **options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, **options)  # type: ignore[arg-type]
    final = nn.LayerNorm(4) if norm else None
    return nn.TransformerEncoder(layer, layers, norm=final, enable_nested_tensor=False)


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


TORCH_CASES: list[Case] = [
    # Two heads of GL(2) twice make 12; the key bias is inert.
    case("attention, packed", lambda: Attending(), 16),
    case("attention, packed, no bias", lambda: Attending(bias=False), 12),
    case("attention, learned extra key", lambda: Attending(add_bias_kv=True), 16),
    case("attention, extra key of zeros", lambda: Attending(add_zero_attn=True), 12),
    case("attention, separate projections", lambda: Crossing(), 16),
    # Attention 16, two norms 8, Σ out_proj.bias − Σ linear2.bias.
    case("encoder layer, norm first", lambda: encoder(norm_first=True, activation="gelu"), 25),
    case("encoder layer, norm first, ReLU", lambda: encoder(norm_first=True), 28),
    # Attention 16; sums over the stream axis of out_proj (4 + 1) and linear2 (3 + 1); the scale of the second sum.
    case("encoder layer, norm last", lambda: encoder(activation="gelu"), 26),
    case("decoder layer, norm first", lambda: Remembering(norm_first=True), 46),
    case("decoder layer, norm last", lambda: Remembering(norm_first=False), 48),
    case("chain of linear maps", lambda: chain(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 4)), 9),
    case("chain with ReLU", lambda: chain(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), 3),
    case(
        "nested chain with leaky ReLU",
        lambda: chain(chain(nn.Linear(4, 3), nn.LeakyReLU()), nn.Linear(3, 5), nn.LeakyReLU(), nn.Linear(5, 2)),
        8,
    ),
    case("chain with GELU", lambda: chain(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), 0),
    case("chain with LayerNorm", lambda: chain(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)), 11),
    case("chain with RMSNorm", lambda: chain(nn.Linear(4, 5), nn.RMSNorm(5), nn.ReLU(), nn.Linear(5, 2)), 6),
    case(
        "embedding and linear map",
        lambda: chain(nn.Embedding(5, 3), nn.Linear(3, 4)),
        6,
        sample=token_ids(5, 4),
    ),
    case(
        "convolutions",
        lambda: chain(
            nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3)
        ),
        6,
        sample=images(4),
    ),
    case(
        "convolutions, flattened",
        lambda: chain(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
        2,
        sample=images(4),
    ),
    case("classifier", lambda: chain(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)), 7, loss="cross_entropy"),
]
"""What is recognised and what discover counts are the same number in each."""

SEEDS = {"encoder layer, norm first, ReLU": 1, "nested chain with leaky ReLU": 1}
"""A seed of the count where the default one meets a point at which a ReLU is never or always on."""
