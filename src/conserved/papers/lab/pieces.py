r"""Products of float32 matrices on half-precision tensor cores: numbers cut into pieces, one product for all of them.

A number times a power of two is x = h + l + r with h = half(x), l = half(x − h): h and l hold 11 binary digits each, so
|r| ≤ 2⁻²³ |x|, what float32 rounds away (2⁻²⁴) times two. Products of halves are exact in float32, and of

    x w = h_x h_w + l_x h_w + h_x l_w + O(2⁻²² |x w|)

the three large terms are one matrix product if pieces are laid side by side along the summed axis: inputs as
(h, l, h), weights and slopes as (h, h, l). The same two tensors serve the way back: for ∂x slopes meet weights along
the output axis, for ∂W they meet inputs along tokens. Sums over tokens are cut into stretches of equal length that are
added in float64: a tensor core drops digits of a long sum, the same share of it wherever stretches are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

MatrixProducts = Literal["double", "single", "pieces", "half"]
"""How matrices are multiplied: as they are in float64 or float32; in float32 by pieces, see above; or in half precision
(`conserved.papers.lab.half`)."""

_WEIGHTS, _INPUTS, _SLOPES = 2.0**8, 2.0**8, 2.0**10
"""Half precision has 5 digits of exponent. Weights and inputs below 255 and slopes below 64 fit when scaled by these;
slopes are those of a sum over examples, not of a mean. What does not fit becomes infinite and stops the run."""

_STRETCH = 2048
"""Tokens at most that are summed in one go."""

_HEIGHT, _ACROSS = 16, 128
"""Tile of a kernel."""


@dataclass(frozen=True, slots=True)
class _Order:
    """How many pieces, and at which place the remainder is; none at all for numbers that stay whole."""

    count: int
    low: int


_INPUT_ORDER, _OTHER_ORDER, _WHOLE = _Order(3, 1), _Order(3, 2), _Order(0, 0)
"""Of inputs, of weights and slopes, and of everything in float64 or plain float32."""


@cache
def _on_gpu() -> bool:
    return find_spec("triton") is not None


def cut(x: Tensor, order: _Order, scale: float) -> Tensor:
    """(rows, width) in float32 as (rows, count, width) pieces; whole numbers as they are."""
    if order == _WHOLE:
        return x
    if x.is_cuda and _on_gpu():
        from conserved.papers.lab.piece_kernels import cut_rows

        x = x.contiguous()
        rows, width = x.shape
        out = torch.empty(rows, order.count, width, dtype=torch.float16, device=x.device)
        cut_rows[-(-rows // _HEIGHT), -(-width // _ACROSS)](
            x, out, rows, width, scale, COUNT=order.count, LOW=order.low, HEIGHT=_HEIGHT, ACROSS=_ACROSS
        )
        return out
    scaled = x.float() * scale
    high = scaled.half()
    low = (scaled - high.float()).half()
    return torch.stack([low if place == order.low else high for place in range(order.count)], 1)


def multiply(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """factor · a b of halves, summed in float32; three axes are batched over the first."""
    if a.is_cuda:
        whole = torch.mm(a, b, out_dtype=torch.float32) if a.ndim == 2 else torch.bmm(a, b, out_dtype=torch.float32)
        return whole.mul_(factor)
    return (a.float() @ b.float()).mul_(factor)


def stretch(tokens: int) -> int:
    """The largest divisor of a number of tokens that is at most 2048: sums over tokens are cut at its multiples."""
    return next(size for size in range(min(tokens, _STRETCH), 0, -1) if tokens % size == 0)


def _forward(pieces: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ from x or its pieces."""
    if pieces.ndim == 2:
        return pieces @ weight.T
    cut_weight = cut(weight, _OTHER_ORDER, _WEIGHTS)
    return multiply(pieces.flatten(1), cut_weight.flatten(1).T, 1 / (_INPUTS * _WEIGHTS))


def _to_inputs(slopes: Tensor, weight: Tensor) -> Tensor:
    """∂x = ∂y W from ∂y or its pieces."""
    if slopes.ndim == 2:
        return slopes @ weight
    side_by_side = cut(weight, _INPUT_ORDER, _WEIGHTS).transpose(0, 1).flatten(0, 1)
    return multiply(slopes.flatten(1), side_by_side, 1 / (_SLOPES * _WEIGHTS))


def _to_weights(slopes: Tensor, inputs: Tensor) -> Tensor:
    """∂W = Σ_t ∂y_t x_tᵀ from both or the pieces of both."""
    if slopes.ndim == 2:
        return slopes.T @ inputs
    rows = stretch(len(slopes)) * slopes.shape[1]
    left = slopes.reshape(-1, rows, slopes.shape[-1]).transpose(1, 2)
    right = inputs.reshape(-1, rows, inputs.shape[-1])
    return multiply(left, right, 1 / (_SLOPES * _INPUTS)).sum(0, dtype=torch.float64).float()


def _over_rows(slopes: Tensor) -> Tensor:
    """Sums over rows, stretch by stretch."""
    return slopes.unflatten(0, (-1, stretch(len(slopes)))).sum(1).sum(0, dtype=torch.float64).to(slopes.dtype)


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b of float32 rows in pieces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pieces = cut(x, _INPUT_ORDER, _INPUTS)
        ctx.save_for_backward(pieces, weight)
        ctx.biased = bias is not None
        found = _forward(pieces, weight)
        return found if bias is None else found.add_(bias)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        pieces, weight = ctx.saved_tensors
        (slope,) = slopes
        cut_slope = cut(slope, _OTHER_ORDER, _SLOPES)
        of_x = _to_inputs(cut_slope, weight) if ctx.needs_input_grad[0] else None
        return of_x, _to_weights(cut_slope, pieces), _over_rows(slope) if ctx.biased else None


class _Gated(torch.autograd.Function):
    """y = (SiLU(x Bᵀ) ⊙ x Cᵀ ⊙ shares) Aᵀ, with B over C in one matrix; hidden units of all experts in a row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, both: Tensor, bias: Tensor | None, down: Tensor, share: Tensor | None, whole: bool
    ) -> Tensor:
        ctx.orders = (_WHOLE, _WHOLE) if whole else (_INPUT_ORDER, _OTHER_ORDER)
        pieces = cut(x, ctx.orders[0], _INPUTS)
        branches = _forward(pieces, both)
        hidden = gate(branches, bias, share, ctx.orders[0])
        ctx.save_for_backward(pieces, both, bias, down, share, branches, hidden)
        return _forward(hidden, down)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        pieces, both, bias, down, share, branches, hidden = ctx.saved_tensors
        order = ctx.orders[1]
        cut_slope = cut(slopes[0], order, _SLOPES)
        of_down = _to_weights(cut_slope, hidden)
        above = _to_inputs(cut_slope, down)
        cut_above, of_bias, of_share = gate_back(above, branches, bias, share, order)
        return _to_inputs(cut_above, both), _to_weights(cut_above, pieces), of_bias, of_down, of_share, None


def gate(branches: Tensor, bias: Tensor | None, share: Tensor | None, order: _Order) -> Tensor:
    """SiLU(gate) · up · share in pieces, from (rows, 2·width) gates and ups."""
    rows, width = branches.shape[0], branches.shape[1] // 2
    experts = 1 if share is None else share.shape[1]
    if branches.is_cuda and _on_gpu() and (width // experts) % _ACROSS == 0:
        from conserved.papers.lab.piece_kernels import gate_rows

        out = _room(branches, order, width)
        gate_rows[-(-rows // _HEIGHT), width // _ACROSS](
            branches, branches if bias is None else bias, branches if share is None else share.contiguous(), out,
            rows, width, width // experts, _INPUTS, BIASED=bias is not None, SHARED=share is not None,
            COUNT=order.count, LOW=order.low, HEIGHT=_HEIGHT, ACROSS=_ACROSS,
        )  # fmt: skip
        return out
    gates, ups = (branches if bias is None else branches + bias).chunk(2, 1)
    hidden = F.silu(gates) * ups
    return cut(hidden if share is None else hidden * _spread(share, width), order, _INPUTS)


def gate_back(
    above: Tensor, branches: Tensor, bias: Tensor | None, share: Tensor | None, order: _Order
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Slopes of gates and ups in pieces, of their biases and of the shares."""
    rows, width = above.shape
    experts = 1 if share is None else share.shape[1]
    if above.is_cuda and _on_gpu() and (width // experts) % _ACROSS == 0:
        from conserved.papers.lab.piece_kernels import gate_slopes

        tiles = width // _ACROSS
        blocks = -(-rows // _HEIGHT)
        out = _room(above, order, 2 * width)
        shares = above.new_empty(rows if share is not None else 0, tiles)
        biases = above.new_empty(blocks if bias is not None else 0, 2 * width)
        gate_slopes[blocks, tiles](
            above, branches, above if bias is None else bias, above if share is None else share.contiguous(), out,
            shares, biases, rows, width, width // experts, _SLOPES, BIASED=bias is not None, SHARED=share is not None,
            COUNT=order.count, LOW=order.low, HEIGHT=_HEIGHT, ACROSS=_ACROSS,
        )  # fmt: skip
        of_bias = None if bias is None else biases.sum(0, dtype=torch.float64).to(bias.dtype)
        of_share = None if share is None else shares.unflatten(1, (experts, -1)).sum(-1)
        return out, of_bias, of_share
    gates, ups = (branches if bias is None else branches + bias).chunk(2, 1)
    part = gates.sigmoid()
    through = gates * part
    of_share = None if share is None else (above * through * ups).unflatten(1, (experts, -1)).sum(-1)
    if share is not None:
        above = above * _spread(share, width)
    found = torch.cat((above * ups * (part * (1 + gates * (1 - part))), above * through), 1)
    of_bias = None if bias is None else _over_rows(found)
    return cut(found, order, _SLOPES), of_bias, of_share


def _room(like: Tensor, order: _Order, width: int) -> Tensor:
    """For rows of so many numbers, whole or in pieces."""
    if order == _WHOLE:
        return like.new_empty(len(like), width)
    return like.new_empty(len(like), order.count, width, dtype=torch.float16)


def _spread(share: Tensor, width: int) -> Tensor:
    """One column per hidden unit from one column per expert."""
    return share.repeat_interleave(width // share.shape[1], 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, products: MatrixProducts) -> Tensor:
    """x Wᵀ + b along the last axis."""
    if products in ("double", "single"):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return found.unflatten(0, x.shape[:-1])


def gated(
    x: Tensor, both: Tensor, bias: Tensor | None, down: Tensor, share: Tensor | None, products: MatrixProducts
) -> Tensor:
    """(SiLU(x Bᵀ) ⊙ x Cᵀ ⊙ shares of the experts) Aᵀ along the last axis, without the output's bias."""
    shares = None if share is None else share.reshape(-1, share.shape[-1])
    found: Tensor = _Gated.apply(x.reshape(-1, x.shape[-1]), both, bias, down, shares, products in ("double", "single"))
    return found.unflatten(0, x.shape[:-1])
