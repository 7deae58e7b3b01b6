"""The energy field formed in full, one head at a time, and statistics read off it."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(queries: int, keys: int, *, causal: bool, window: int | None) -> Tensor:
    """Who sees what, one pair at a time."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        at = i + keys - queries
        for j in range(keys):
            near = window is None or abs(at - j) < window
            seen[i, j] = near and (j <= at or not causal)
    return seen


def field(logits: Tensor, seen: Tensor) -> Tensor:
    """Each row minus its mean over the keys it sees; zero where nothing is seen."""
    out = torch.zeros_like(logits)
    for i in range(logits.shape[0]):
        if seen[i].any():
            out[i, seen[i]] = logits[i, seen[i]] - logits[i, seen[i]].mean()
    return out


def leverages(keys: Tensor, tolerance: float = 1e-12) -> tuple[Tensor, int]:
    """Diagonal of the projection onto the span of the centred keys, and its dimension."""
    centred = keys - keys.mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    size = keys.square().sum().sqrt()
    rank = int((s > tolerance * s[0]).logical_and(s > 1e-13 * size).sum())
    return u[:, :rank].square().sum(-1), rank


def ridge_leverages(keys: Tensor, ridge: float) -> Tensor:
    """k (KᵀK + λ)⁻¹ k by solving."""
    centred = keys - keys.mean(0)
    gram = centred.T @ centred
    rank = leverages(keys)[1]
    loading = ridge * gram.trace() / rank
    return (centred * torch.linalg.solve(gram + loading * torch.eye(len(gram), dtype=keys.dtype), centred.T).T).sum(-1)


def entropy(logits: Tensor, seen: Tensor) -> Tensor:
    """Entropy of each row's softmax over what it sees."""
    out = []
    for row, mask in zip(logits, seen, strict=True):
        p = row[mask].softmax(0) if mask.any() else row.new_ones(1)
        out.append(-(p * p.clamp(min=1e-300).log()).sum())
    return torch.stack(out)
