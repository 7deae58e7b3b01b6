r"""Prediction of the rounding of dQ and dK of an attention call, head by head, from what a listener observes.

Fused kernels take δ_i = dO_i·fl(O_i) from the stored output. The stored output O' is seen, and the exact one follows
from q, k and v, so the error of δ is not estimated but computed:

    ε_i = dO_i·(O'_i - O_i),        O_i = Σ_j P_ij v_j  in float32 (float64 for float32 inputs)

It enters dS_ij = P_ij (dP_ij - δ_i) as -P_ij ε_i, hence, with a the scale of the scores,

    ΔdQ_i = -a ε_i Σ_j P_ij k_j,        ΔdK_j = -a Σ_i ε_i P_ij q_i

The kernel also rounds dS before its products and rounds the results. These errors are independent: their squares add,

    |ΔdQ_i|² += a² σ² Σ_j dS_ij² |k_j|² + σ² |dQ_i|²,        |ΔdK_j|² += a² σ² Σ_i dS_ij² |q_i|² + σ² |dK_j|²

σ is the root mean square of a relative rounding error, sqrt(3 / (8 ln 2) / 3) u = 0.425 u: uniform within half a unit
of the last place, averaged over mantissas that are distributed logarithmically. The relative error of a head is the
root of the summed squares over the norm of the exact gradient. The math backend of PyTorch keeps P, dP and dS in
float32 (`delta="scores"`), so that only the rounding of the results remains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from conserved.attention.band import Band

Delta = Literal["output", "scores"]

_RELATIVE_RMS = math.sqrt(1 / (8 * math.log(2)))
"""Root mean square of a relative rounding error in units of roundoff: derived above."""

_BLOCK_ENTRIES = 2**24
"""Scores that are held at a time."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionRounding:
    """Predicted relative rounding error of dQ by query head and of dK by key head, and the norms they relate to."""

    query: Tensor
    key: Tensor
    query_norm: Tensor
    key_norm: Tensor

    def __repr__(self) -> str:
        worst = [float(errors.max()) if errors.numel() else 0.0 for errors in (self.query, self.key)]
        return f"<AttentionRounding: {len(self.query)} heads, worst dQ {worst[0]:.2g}, worst dK {worst[1]:.2g}>"


def attention_rounding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    output_gradient: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    delta: Delta = "output",
    precision: torch.dtype | None = None,
) -> AttentionRounding:
    """Predict the relative rounding errors of dQ and dK of one attention call.

    Args:
        query: (batch, heads, queries, width), as the kernel got them.
        key: (batch, key heads, keys, width); query heads of a group follow each other.
        value: (batch, key heads, keys, value width).
        output: (batch, heads, queries, value width), as the kernel stored it.
        output_gradient: the gradient of the output.
        scale: factor of the scores; by default 1 / sqrt(width).
        causal: whether queries see no later keys.
        window: how many of the last keys a query sees, itself included; None for all.
        mask: True where a query sees a key, or a bias that is added to the scores; broadcasts to
            (batch, heads, queries, keys).
        delta: "output" for kernels that compute the softmax correction from the stored output, which are all fused
            ones; "scores" for the math backend.
        precision: the precision that the kernel stores in; by default that of `query`.

    Returns:
        Errors and norms by head, over all sequences of the batch.

    Raises:
        ValueError: shapes do not fit.
    """
    _validate(query, key, value, output, output_gradient)
    groups = query.shape[1] // key.shape[1]
    stored = query.dtype if precision is None else precision
    sigma = _RELATIVE_RMS * torch.finfo(stored).eps / 2
    exact = torch.float64 if torch.finfo(stored).bits >= 32 else torch.float32
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        q, o, g = (tensor.to(exact).unflatten(1, (-1, groups)) for tensor in (query, output, output_gradient))
        k, v = (tensor.to(exact).unsqueeze(2) for tensor in (key, value))
        sums = _Sums(k, sigma, scale)
        block = max(1, _BLOCK_ENTRIES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
        for start in range(0, query.shape[2], block):
            rows = slice(start, start + block)
            bias = _bias(rows, query, key, causal=causal, window=window, mask=mask)
            bias = None if bias is None else _grouped(bias, groups).to(exact)
            error = o[..., rows, :] if delta == "output" else None
            sums.add(q[..., rows, :], k, v, error, g[..., rows, :], bias)
        return sums.result()


class _Sums:
    """Squares over rows and sums over keys, (batch, key heads, groups, …)."""

    def __init__(self, key: Tensor, sigma: float, scale: float) -> None:
        self.sigma, self.scale = sigma, scale
        self.query_error = self.query_square = torch.zeros((), device=key.device, dtype=key.dtype)
        self.key_gradient = torch.zeros_like(key[:, :, 0])
        self.key_shift = torch.zeros_like(self.key_gradient)
        self.key_variance = torch.zeros((), device=key.device, dtype=key.dtype)

    def add(
        self, q: Tensor, k: Tensor, v: Tensor, stored: Tensor | None, gradient: Tensor, bias: Tensor | None
    ) -> None:
        """Add a block of rows."""
        scores = self.scale * (q @ k.mT)
        scores = scores if bias is None else scores + bias
        weights = scores.softmax(-1).nan_to_num(0.0)
        products = gradient @ v.mT
        correction = (weights * products).sum(-1, keepdim=True)
        score_gradient = weights * (products - correction)
        query_gradient = self.scale * (score_gradient @ k)
        self.query_square = self.query_square + query_gradient.square().sum((-2, -1))
        self.key_gradient = self.key_gradient + self.scale * (score_gradient.mT @ q).sum(2)
        if stored is None:
            return
        squares, variance = score_gradient.square(), (self.scale * self.sigma) ** 2
        noise = (squares @ k.square().sum(-1, keepdim=True)).sum((-2, -1))
        self.query_error = self.query_error + variance * noise
        noise = (squares.mT @ q.square().sum(-1, keepdim=True)).sum((2, -2, -1))
        self.key_variance = self.key_variance + variance * noise
        # Rows that see no key have no output, whatever is stored there.
        sees = weights.sum(-1, keepdim=True) > 0
        error = torch.where(sees, (gradient * (stored - weights @ v)).sum(-1, keepdim=True), 0.0)
        mean_key = weights @ k
        self.query_error = self.query_error + self.scale**2 * (error * mean_key).square().sum((-2, -1))
        self.key_shift = self.key_shift + self.scale * ((weights * error).mT @ q).sum(2)

    def result(self) -> AttentionRounding:
        """Return errors by head, over the batch."""
        square, error = self.query_square.sum(0).flatten(), self.query_error.sum(0).flatten()
        error = error + self.sigma**2 * square
        key_square = self.key_gradient.square().sum((0, -2, -1))
        key_error = self.key_shift.square().sum((0, -2, -1)) + self.key_variance.sum(0)
        key_error = key_error + self.sigma**2 * key_square
        return AttentionRounding(
            query=_ratio(error, square),
            key=_ratio(key_error, key_square),
            query_norm=square.sqrt(),
            key_norm=key_square.sqrt(),
        )


def _ratio(error: Tensor, square: Tensor) -> Tensor:
    """Return the root of a quotient of squares; nothing relative to nothing is no error."""
    return torch.where(error == 0, 0.0, error / square).sqrt()


def _bias(
    rows: slice, query: Tensor, key: Tensor, *, causal: bool, window: int | None, mask: Tensor | None
) -> Tensor | None:
    """Return what is added to the scores of some rows; -inf hides a key."""
    queries, keys = query.shape[2], key.shape[2]
    band = Band.of(queries, keys, causal=causal, window=window)
    allowed = None if band.whole else band.visible(queries, keys, query.device)[rows]
    if mask is None and allowed is None:
        return None
    bias = torch.zeros((), device=query.device)
    if mask is not None:
        part = mask if mask.shape[-2] == 1 else mask[..., rows, :]
        bias = _hidden(part) if part.dtype == torch.bool else part.float()
    return bias if allowed is None else bias + _hidden(allowed)


def _hidden(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, -torch.inf)


def _grouped(bias: Tensor, groups: int) -> Tensor:
    """Give a bias of (batch, heads, rows, keys) the axes (batch, key heads, groups, rows, keys)."""
    while bias.ndim < 4:
        bias = bias[None]
    return bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (-1, groups))


def _validate(query: Tensor, key: Tensor, value: Tensor, output: Tensor, gradient: Tensor) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if any(tensor.ndim != 4 for tensor in (query, key, value, output, gradient)):
        raise ValueError(f"Expected tensors of four axes, got {shapes}. Pass (batch, heads, length, width).")
    if not key.shape[1] or query.shape[1] % key.shape[1] or key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"Expected query heads to be a multiple of key heads, got {shapes}. Check the layout.")
    if output.shape != gradient.shape or output.shape[:3] != query.shape[:3]:
        raise ValueError(
            f"Expected an output and a gradient of shape {(*query.shape[:3], value.shape[-1])}, got "
            f"{tuple(output.shape)} and {tuple(gradient.shape)}. Pass tokens along the third axis."
        )
