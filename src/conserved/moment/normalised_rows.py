r"""The part of the scale of rows that the ε of a norm preserves: one pass over what it read and what came back.

A norm gives y = g ∘ x/√(s + ε), with s the mean square of a row x, whose mean is taken away before if the norm centres.
Along the scale of the row its derivative is ε/(s + ε) y, where without ε it would be zero; so with D = ∂L/∂y each row
contributes

    ε/(s + ε) ⟨y, D⟩ = ε (s + ε)^(−3/2) Σ_i x_i g_i D_i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.moment import triton_backend
from conserved.moment.launches import power

_WIDEST = 8192
"""Entries of the longest row that a program of the kernel holds at once."""

_TILE = 4096
"""Entries that a program reads where rows are short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNorm:
    """How a norm treats a row: its ε, and whether it takes the mean away first."""

    epsilon: float
    centred: bool

    def remainder(
        self,
        x: Float[Tensor, "rows width"],
        gradient: Float[Tensor, "rows width"],
        gain: Float[Tensor, " #width"] | None,
    ) -> Float[Tensor, "2 rows"]:
        """Return ε/(s + ε) ⟨y, D⟩ of every row, and the sum of the squares of its terms; at least in float32.

        Args:
            x: what was normalised.
            gradient: D, the gradient of the output.
            gain: g, one number for each entry of a row or one for all; None for 1.

        Returns:
            Both numbers of every row. Nothing waits for the device.
        """
        gain = None if gain is None else gain.expand(x.shape[1])
        tensors = [tensor.detach().contiguous() for tensor in (x, gradient, gain) if tensor is not None]
        short = 0 < x.shape[1] <= _WIDEST and x.shape[0] > 0
        if short and all(t.dtype in triton_backend.TYPES for t in tensors) and triton_backend.available(x.device):
            return self._by_kernel(*tensors)
        return self._by_torch(*tensors)

    def _by_torch(self, x: Tensor, gradient: Tensor, gain: Tensor | None = None) -> Tensor:
        kind = torch.promote_types(torch.promote_types(x.dtype, gradient.dtype), torch.float32)
        values = x.to(kind)
        if self.centred:
            values = values - values.mean(1, keepdim=True)
        root = (torch.linalg.vector_norm(values, dim=1).square() / x.shape[1] + self.epsilon).sqrt()
        products = values * gradient.to(kind)
        if gain is not None:
            products *= gain
        products *= (self.epsilon / root**3)[:, None]
        return torch.stack((products.sum(1), torch.linalg.vector_norm(products, dim=1).square()))

    def _by_kernel(self, x: Tensor, gradient: Tensor, gain: Tensor | None = None) -> Tensor:
        from conserved.moment import kernels

        rows, width = x.shape
        across = power(width, _WIDEST)
        down = max(1, _TILE // across)
        result = torch.empty(2, rows, device=x.device)
        with torch.cuda.device_of(x):
            kernels.norm_remainders[(-(-rows // down),)](
                x,
                gradient,
                x if gain is None else gain,
                result,
                rows,
                width,
                self.epsilon,
                HEIGHT=down,
                WIDTH=across,
                CENTRED=self.centred,
                GAINED=gain is not None,
                num_warps=8 if across > 2048 else 4,
            )
        return result
