"""The paper's blocks at small sizes, with their invariants and constraints written in its own notation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from conserved_papers.blocks import Attention, FeedForward, MixtureOfExperts, SwiGLU
from conserved_papers.blocks.transformer import SinusoidalPositions
from conserved_papers.claims.certified import Build, Parameters

gelu_network: Build = partial(FeedForward, 3, 4, "gelu")
silu_network: Build = partial(FeedForward, 3, 4, "silu")
swiglu_network: Build = partial(SwiGLU, 3, 4)
attention: Build = partial(Attention, 4, 2, scale=1.0)
"""Equation (5) as printed: no scale."""
rotary_attention: Build = partial(Attention, 4, 1, rotary=True, scale=1.0)
"""Equation (7): one head with two planes."""
two_rotary_heads: Build = partial(Attention, 4, 2, rotary=True, scale=1.0)
"""Equation (7): two heads of one plane each."""
mixture: Build = partial(MixtureOfExperts, 3, 2, 3)
sparse_mixture: Build = partial(MixtureOfExperts, 3, 2, 3, top_k=2)
switch_mixture: Build = partial(MixtureOfExperts, 3, 2, 3, top_k=1)
sigmoid_mixture: Build = partial(MixtureOfExperts, 3, 2, 3, "sigmoid")
sparse_sigmoid_mixture: Build = partial(MixtureOfExperts, 3, 2, 3, "sigmoid", top_k=2)
narrow_sparse_mixture: Build = partial(MixtureOfExperts, 1, 1, 4, top_k=2)
"""Four experts on inputs of one number, two of them active."""


def sinusoidal_attention() -> nn.Module:
    return nn.Sequential(SinusoidalPositions(), attention())


FFN = "d = 3 and 4 neurons"
TWO_HEADS = "d = 4 and two heads of two"
TWO_PLANES = "d = 4 and one head of two planes"
TWO_ROTARY_HEADS = "d = 4 and two heads of one plane"
EXPERTS = "d = 3 and three experts of two neurons"


def heads(theta: Parameters, count: int, prefix: str = "") -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return Q_i, K_i, V_i, O_i of every head as the paper writes them, d × d_h."""
    q, k, v = (theta[f"{prefix}{name}.weight"].unflatten(0, (count, -1)) for name in "qkv")
    o = theta[f"{prefix}o.weight"].unflatten(1, (count, -1))
    for i in range(count):
        yield q[i].mT, k[i].mT, v[i].mT, o[:, i]


def upper(matrix: Tensor) -> Tensor:
    """Return the entries on and above the diagonal."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns]


def gram_differences(theta: Parameters, *, count: int = 2, prefix: str = "", sign: float = -1.0) -> Tensor:
    """Return Q_iᵀQ_i − K_iᵀK_i and V_iᵀV_i − O_iᵀO_i."""
    parts = []
    for q, k, v, o in heads(theta, count, prefix):
        parts += [upper(q.mT @ q + sign * k.mT @ k), upper(v.mT @ v + sign * o.mT @ o)]
    return torch.cat(parts)


def plane_differences(theta: Parameters, *, count: int = 1, sign: float = -1.0) -> Tensor:
    """Return ‖Q^(j)‖² − ‖K^(j)‖² for every plane, and VᵀV − OᵀO."""
    parts = []
    for q, k, v, o in heads(theta, count):
        planes = [m.unflatten(1, (-1, 2)).square().sum((0, 2)) for m in (q, k)]
        parts += [planes[0] + sign * planes[1], upper(v.mT @ v - o.mT @ o)]
    return torch.cat(parts)


def neuron_differences(theta: Parameters, *, prefix: str = "", sign: float = -1.0) -> Tensor:
    """Return ‖A_:,i‖² − ‖C_i,:‖² for every neuron."""
    down, up = theta[f"{prefix}down.weight"], theta[f"{prefix}up.weight"]
    return down.square().sum(0) + sign * up.square().sum(1)


def expert_differences(theta: Parameters, *, count: int = 3) -> Tensor:
    return torch.cat([neuron_differences(theta, prefix=f"experts.{i}.") for i in range(count)])


def mixture_invariants(theta: Parameters, *, count: int = 3) -> Tensor:
    """Return the neurons of every expert, and Σ_i W_i."""
    return torch.cat([expert_differences(theta, count=count), theta["router.weight"].sum(0)])


def swiglu_constraints(theta: Parameters, gradient: Parameters, *, prefix: str = "", sign: float = 1.0) -> Tensor:
    """Return the left-hand sides of ∇_B h = 0 and ∇_{A_:,i}h C_i,: + A_:,i ∇_{C_i,:}h = 0."""
    a, c = theta[f"{prefix}down.weight"], theta[f"{prefix}up.weight"]
    da, dc = gradient[f"{prefix}down.weight"], gradient[f"{prefix}up.weight"]
    mixed = torch.einsum("ai,ic->iac", da, c) + sign * torch.einsum("ai,ic->iac", a, dc)
    return torch.cat([gradient[f"{prefix}gate.weight"].flatten(), mixed.flatten()])


def attention_constraints(theta: Parameters, gradient: Parameters, *, sign: float = 1.0) -> Tensor:
    """Return the left-hand sides of K (∇_Q h)ᵀ + (∇_K h) Qᵀ = 0 and O (∇_V h)ᵀ + (∇_O h) Vᵀ = 0 for every head."""
    parts = []
    for (q, k, v, o), (dq, dk, dv, do) in zip(heads(theta, 2), heads(gradient, 2), strict=True):
        parts += [k @ dq.mT + sign * dk @ q.mT, o @ dv.mT + sign * do @ v.mT]
    return torch.cat([part.flatten() for part in parts])


def rotary_constraints(theta: Parameters, gradient: Parameters, *, count: int = 1, turned: bool = True) -> Tensor:
    """Return the left-hand sides of K^(j)(∇_{Q^(j)}h)ᵀ + ∇_{K^(j)}h Q^(j)ᵀ = 0, with and without J in between.

    Those of values and outputs follow.
    """
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    parts = []
    for (q, k, v, o), (dq, dk, dv, do) in zip(heads(theta, count), heads(gradient, count), strict=True):
        for plane in (slice(j, j + 2) for j in range(0, q.shape[1], 2)):
            qj, kj, dqj, dkj = (m[:, plane] for m in (q, k, dq, dk))
            parts.append(kj @ dqj.mT + dkj @ qj.mT)
            if turned:
                parts.append(kj @ turn @ dqj.mT + dkj @ turn @ qj.mT)
        parts.append(o @ dv.mT + do @ v.mT)
    return torch.cat([part.flatten() for part in parts])


def mixture_constraints(theta: Parameters, gradient: Parameters) -> Tensor:
    """Return the constraints of every expert, and ∇_{W_1}h = … = ∇_{W_n}h."""
    router = gradient["router.weight"]
    experts = [swiglu_constraints(theta, gradient, prefix=f"experts.{i}.") for i in range(3)]
    return torch.cat([*experts, (router[1:] - router[:1]).flatten()])


def still_router_constraints(theta: Parameters, gradient: Parameters) -> Tensor:
    """Return the constraints of every expert, and ∇_W h = 0."""
    experts = [swiglu_constraints(theta, gradient, prefix=f"experts.{i}.") for i in range(3)]
    return torch.cat([*experts, gradient["router.weight"].flatten()])


def still_router_invariants(theta: Parameters) -> Tensor:
    """Return the neurons of every expert and every entry of the router."""
    return torch.cat([expert_differences(theta), theta["router.weight"].flatten()])
