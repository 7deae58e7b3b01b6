r"""Key coherence: whether some key is a direction of its own, and what a Gaussian cloud of keys would show.

The leverage of key j is ℓ_j = k_cjᵀ (K_cᵀK_c)⁺ k_cj, the squared length of row j of an orthonormal basis of the column
space of K_c; Σ ℓ_j = r = rank K_c. Coherence (L/r) max ℓ_j lies between 1 and L/r. It bounds how far the energy field
can concentrate: with K_c = U S Vᵀ, column j of E is s Q V S u_j =: M u_j with ‖M‖ = ‖E‖, so its energy is at most
‖E‖² ℓ_j. With shares p_j = ‖E_:j‖²/‖E‖_F² that makes max p ≤ max ℓ / stable rank, and since Σ p² ≤ max p,

    participation = 1/(L Σ p²) ≥ stable rank / (coherence · r).

For L ≤ d + 1 keys in general position ℓ_j = 1 − 1/L for all j, whatever the keys: coherence then says nothing. A ridge,
ℓ_j(λ) = k_cjᵀ (K_cᵀK_c + λ)⁻¹ k_cj, keeps directions of negligible size out of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from conserved.attention.moments import TokenMoments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeySpace:
    """The space the centred keys of every head span, and maps that make leverages squared lengths."""

    rank: Int[Tensor, "*heads"]
    whitening: Float[Tensor, "*heads d d2"]
    ridge_whitening: Float[Tensor, "*heads d d2"] | None
    ridge_dimension: Float[Tensor, "*heads"] | None
    offset: Float[Tensor, "*heads"]
    """√n ‖mean‖: the size of what centring took away."""

    @staticmethod
    def of(keys: TokenMoments, ridge: float | None = None, *, tolerance: float = 1e-12) -> KeySpace:
        """Build the space from the moments of the keys; λ is `ridge` times their mean squared singular value.

        Directions smaller than `tolerance` times the largest are not counted.
        """
        values, basis = _singular(keys)
        offset = keys.count.sqrt() * torch.linalg.vector_norm(keys.mean, dim=-1)
        eps = torch.finfo(torch.float64).eps
        largest = values[..., :1] if values.shape[-1] else offset[..., None]
        # Centring keys far from the origin leaves their rounding behind.
        floor = torch.maximum(tolerance * largest, 8 * eps * offset[..., None])
        significant = values > floor
        rank = significant.sum(-1)
        whitening = basis.mT * torch.where(significant, 1 / values, 0.0)[..., None, :]
        if ridge is None:
            return KeySpace(rank=rank, whitening=whitening, ridge_whitening=None, ridge_dimension=None, offset=offset)
        if not ridge > 0:
            raise ValueError(
                f"Expected a positive ridge, got {ridge}. Pass a fraction of the keys' mean squared singular value."
            )
        squares = torch.where(significant, values.square(), 0.0)
        loading = ridge * squares.sum(-1, keepdim=True) / rank.clamp(min=1)[..., None]
        softened = torch.where(significant, 1 / (squares + loading).sqrt(), 0.0)
        return KeySpace(
            rank=rank,
            whitening=whitening,
            ridge_whitening=basis.mT * softened[..., None, :],
            ridge_dimension=(squares * softened.square()).sum(-1),
            offset=offset,
        )


def _singular(keys: TokenMoments) -> tuple[Tensor, Tensor]:
    """Return singular values of the scatter factor in descending order, and its right singular vectors as rows."""
    if not keys.orthogonal:
        _, values, basis = torch.linalg.svd(keys.factor, full_matrices=False)
        return values, basis
    values = torch.linalg.vector_norm(keys.factor, dim=-1)
    return values, keys.factor / torch.where(values > 0, values, 1.0)[..., None]


@lru_cache(maxsize=256)
def gaussian_coherence(length: int, width: int, samples: int = 16, seed: int = 0) -> tuple[float, float]:
    """Return the coherence of Gaussian keys, as a reference for the coherence of a head.

    It does not depend on their covariance, since leverages do not change under a linear map of the keys.

    Args:
        length: number of keys, at least 2.
        width: entries of a key.
        samples: number of clouds drawn, at least 2.
        seed: the seed they are drawn with.

    Returns:
        Mean and standard deviation of the coherence over the samples.

    Raises:
        ValueError: a number is too small.
    """
    if length < 2 or width < 1 or samples < 2:
        raise ValueError(
            f"Expected at least two keys, one entry and two samples, got {length}, {width} and {samples}. Pass "
            "more of them."
        )
    generator = torch.Generator().manual_seed(seed)
    coherences = []
    for _ in range(samples):
        keys = torch.randn(length, width, generator=generator)
        centred = (keys - keys.mean(0)).double()
        basis = torch.linalg.qr(centred).Q if length > width else torch.linalg.svd(centred, full_matrices=False).U
        rank = min(width, length - 1)
        coherences.append(length / rank * float(basis[:, :rank].square().sum(-1).max()))
    values = torch.tensor(coherences, dtype=torch.float64)
    return float(values.mean()), float(values.std())
