r"""Natural attention (Aranda, 2024): the layer, its energy form and bounds, and steps that use a Fisher-like metric.

The layer is Y = A X W_V with A = softmax(Z), Z = X W_Q W_Kᵀ Xᵀ / √d. The note proposes F = A Aᵀ as an approximation of
the Fisher matrix. As written that is an L × L matrix over tokens; parameters are d × d, and F is singular whenever A is
(uniform attention has rank one), so it needs a shape and a damping.

*Values.* For squared error ½‖Y − T‖² with A held fixed the loss is quadratic in W_V with Hessian M ⊗ I,
M = Xᵀ Aᵀ A X: the Gauss–Newton metric. The damped step is

    W_V ← W_V − η (M + δ)⁻¹ Xᵀ Aᵀ R,   R = ∂ℓ/∂Y.

In an eigenvector of M of eigenvalue λ the error is multiplied by 1 − ηλ/(λ + δ) exactly. With F = A Aᵀ the step that
fits is Xᵀ Aᵀ (A Aᵀ + δ)⁻¹ R. By (M + δ)⁻¹ Xᵀ Aᵀ = Xᵀ Aᵀ (A X Xᵀ Aᵀ + δ)⁻¹ the two agree when X Xᵀ = 1: the note's
metric is Gauss–Newton for orthonormal tokens.

*Queries and keys* (this project's choice). Softmax sees the logits up to a shift of each row, so the natural length of
a change of W_Q is that of the change of the energy field it makes: ‖X δW_Q K_cᵀ‖²/d = tr(δW_Qᵀ XᵀX δW_Q K_cᵀK_c)/d,
with K_c the centred keys. That is a Kronecker product, inverted by two d × d solves; likewise for W_K with X_c and QᵀQ.
Over a batch the mean of products is replaced by the product of means, as in K-FAC (Martens and Grosse, 2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

Metric = Literal["gauss-newton", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Seen:
    """Tensors of the last forward pass."""

    x: Tensor
    weights: Tensor
    pull: list[Tensor]
    """The gradient of the loss in the output, once there has been a backward pass."""


class NaturalAttention(nn.Module):
    """softmax(X W_Q W_Kᵀ Xᵀ / √d) X W_V with square weights: the note's Definition 1, one head.

    Args:
        dim: the width d of the tokens.

    Raises:
        ValueError: `dim` is less than one.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"Expected dim of at least 1, got {dim}. Pass the width of the layer.")
        self.dim = dim
        self.q, self.k, self.v = (nn.Parameter(torch.randn(dim, dim) / math.sqrt(dim)) for _ in range(3))
        self.seen: _Seen | None = None

    def energy(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch length length"]:
        """Return lemma 2: E = X W_Q W_Kᵀ Xᵀ / √d, the logits before they are centred."""
        return (x @ self.q) @ (x @ self.k).mT / math.sqrt(self.dim)

    def weights(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch length length"]:
        """Return the attention matrix A."""
        return self.energy(x).softmax(-1)

    def forward(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch length dim"]:
        weights = self.weights(x)
        out = weights @ x @ self.v
        self.seen = seen = _Seen(x=x.detach(), weights=weights.detach(), pull=[])
        if out.requires_grad:
            out.register_hook(lambda gradient: seen.pull.append(gradient.detach()))
        return out

    def energy_bound(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch"]:
        """Return ‖X‖⁴ ‖W_Q W_Kᵀ‖_F² / d ≥ ‖E‖_F², with the operator norm of X.

        ‖X M Xᵀ‖_F ≤ ‖X‖ ‖M‖_F ‖X‖. Theorem 3 has ‖X‖_F and ‖W_Q‖_F ‖W_K‖_F, both larger; it is a bound and conserves
        nothing.
        """
        product = torch.linalg.matrix_norm(self.q @ self.k.mT)
        return torch.linalg.matrix_norm(x, ord=2) ** 4 * product**2 / self.dim

    def note_bound(self, x: Float[Tensor, "*batch length dim"]) -> Float[Tensor, "*batch"]:
        """Return theorem 3 for one head: ‖X‖_F⁴ ‖W_Q‖_F² ‖W_K‖_F² / d, which is d ‖X‖_F⁴ for ‖W‖_F² = d."""
        sizes = torch.linalg.matrix_norm(self.q) ** 2 * torch.linalg.matrix_norm(self.k) ** 2
        return torch.linalg.matrix_norm(x) ** 4 * sizes / self.dim


def token_fisher(weights: Float[Tensor, "*batch l l"], damping: float = 0.0) -> Float[Tensor, "*batch l l"]:
    """Return the note's metric of tokens F = A Aᵀ, damped.

    Args:
        weights: the attention matrix A, (…, length, length).
        damping: added to the diagonal; F is positive definite only if it is above zero.

    Returns:
        F, of the shape of A.
    """
    return weights @ weights.mT + damping * torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)


def value_metric(x: Float[Tensor, "*batch l d"], weights: Float[Tensor, "*batch l l"]) -> Float[Tensor, "d d"]:
    """Return Xᵀ Aᵀ A X, summed over the batch: the Hessian of half the squared error in each column of W_V.

    Args:
        x: the tokens X, (…, length, d).
        weights: the attention matrix A, (…, length, length).

    Returns:
        A d × d matrix.
    """
    mixed = (weights @ x).flatten(0, -2)
    return mixed.mT @ mixed


class NaturalDescent(torch.optim.Optimizer):
    """Steps of a NaturalAttention layer in the metrics above, from the tokens and weights of its last forward pass.

    Metrics are means over tokens, so that for the loss ‖Y − T‖²/(2 · tokens) a rate of one is a Newton step of the
    values.

    Args:
        layer: the layer to train.
        lr: the learning rate.
        damping: relative to the largest eigenvalue of each factor; to the values' A Aᵀ of "tokens" it is added as it
            is.
        metric: "gauss-newton", or "tokens" for the note's A Aᵀ on the values, sequence by sequence.

    Raises:
        ValueError: the rate or the damping is not positive, or the metric is another word.
    """

    def __init__(
        self, layer: NaturalAttention, lr: float, damping: float = 1e-3, metric: Metric = "gauss-newton"
    ) -> None:
        if lr <= 0 or damping <= 0:
            raise ValueError(f"Expected a positive rate and damping, got {lr} and {damping}. Pass numbers above 0.")
        if metric not in ("gauss-newton", "tokens"):
            raise ValueError(f'Expected metric to be "gauss-newton" or "tokens", got {metric!r}. Pass one of them.')
        super().__init__(layer.parameters(), {"lr": lr, "damping": damping})
        self.layer, self.metric = layer, metric

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step from the gradients of the last backward pass.

        Args:
            closure: not used; it is there because optimizers take one.

        Raises:
            RuntimeError: there was no forward and backward pass.
        """
        layer, seen = self.layer, self.layer.seen
        if seen is None or layer.v.grad is None:
            raise RuntimeError(
                "Expected a layer whose backward pass has run, got none. Run the layer and backward() before a step."
            )
        group = self.param_groups[0]
        rate, damping = group["lr"], group["damping"]
        tokens = seen.x.shape[:-1].numel()
        q, k = seen.x @ layer.q, seen.x @ layer.k
        centred_k, centred_x = k - k.mean(-2, keepdim=True), seen.x - seen.x.mean(-2, keepdim=True)
        moves = {layer.v: self._value_step(seen, layer.v.grad, tokens, damping)}
        seen.pull.clear()
        if layer.q.grad is not None:
            moves[layer.q] = _kronecker(seen.x, centred_k, layer.q.grad, layer.dim, damping)
        if layer.k.grad is not None:
            moves[layer.k] = _kronecker(centred_x, q, layer.k.grad, layer.dim, damping)
        for parameter, move in moves.items():
            parameter.sub_(move, alpha=rate)

    def _value_step(self, seen: _Seen, gradient: Tensor, tokens: int, damping: float) -> Tensor:
        if self.metric == "gauss-newton":
            return _solved(value_metric(seen.x, seen.weights) / tokens, gradient, damping)
        residual = torch.linalg.solve(token_fisher(seen.weights, damping), tokens * sum(seen.pull))
        return (seen.weights @ seen.x).flatten(0, -2).mT @ residual.flatten(0, -2)


def _solved(metric: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """Return (M + δ ‖M‖)⁻¹ G."""
    size = torch.linalg.matrix_norm(metric, ord=2)
    identity = torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
    return torch.linalg.solve(metric + damping * size * identity, gradient)


def _kronecker(left: Tensor, right: Tensor, gradient: Tensor, dim: int, damping: float) -> Tensor:
    """Return the step in the metric tr(δᵀ L δ R)/d with L and R the mean second moments of `left` and `right`."""
    a = left.flatten(0, -2).mT @ left.flatten(0, -2) / left.shape[:-1].numel()
    b = right.flatten(0, -2).mT @ right.flatten(0, -2) / right.shape[:-1].numel() / dim
    return _solved(b, _solved(a, gradient, damping).mT, damping).mT
