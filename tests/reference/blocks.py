"""The papers' formulas written out token by token and head by head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from conserved.blocks import Attention, MixtureOfExperts, SwiGLU


def rotation(width: int, position: int, pairing: str) -> Tensor:
    """R_p of the paper's Section 4.2 as a full matrix, for row vectors x R."""
    matrix = torch.zeros(width, width, dtype=torch.float64)
    m = width // 2
    for j in range(m):
        angle = position * 10000.0 ** (-j / m)
        a, b = (2 * j, 2 * j + 1) if pairing == "interleaved" else (j, j + m)
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b] = -math.sin(angle)
        matrix[b, a] = math.sin(angle)
    return matrix


def _affine(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer.weight @ x
    return y if layer.bias is None else y + layer.bias


def _rms(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    assert norm.eps is not None
    return x / torch.sqrt((x * x).mean() + norm.eps) * norm.weight


def attention(module: Attention, x: Tensor) -> Tensor:
    """Equations (5) and (7), one sequence, one output token at a time."""
    length, width = x.shape[0], module.head_dim
    repeat = module.heads // module.kv_heads
    output = torch.zeros(length, module.dim, dtype=x.dtype)
    for p in range(length):
        mixed = []
        for head in range(module.heads):
            shared = head // repeat
            q = _affine(module.q, x[p])[head * width : (head + 1) * width]
            q = _rms(q, module.q_norm) if module.q_norm is not None else q
            logits, values = [], []
            for s in range(length):
                if module.causal and s > p:
                    continue
                k = _affine(module.k, x[s])[shared * width : (shared + 1) * width]
                k = _rms(k, module.k_norm) if module.k_norm is not None else k
                turn = rotation(width, p - s, module.rotary) if module.rotary else torch.eye(width, dtype=x.dtype)
                logits.append(module.scale * (q @ turn @ k))
                values.append(_affine(module.v, x[s])[shared * width : (shared + 1) * width])
            weights = torch.stack(logits).exp()
            weights = weights / weights.sum()
            mixed.append(sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros(width, dtype=x.dtype)))
        output[p] = _affine(module.o, torch.cat(mixed))
    return output


def swiglu(module: SwiGLU, x: Tensor) -> Tensor:
    """Equation (4), one token."""
    gate, up = _affine(module.gate, x), _affine(module.up, x)
    return _affine(module.down, gate / (1 + torch.exp(-gate)) * up)


def mixture(module: MixtureOfExperts, x: Tensor) -> Tensor:
    """Equation (8) and its sparse and sigmoid variants, one token; ties go to the lower index."""
    scores = (module.router.weight @ x).detach()
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[: module.active]
    raw = {i: torch.exp(scores[i]) if module.gate == "softmax" else 1 / (1 + torch.exp(-scores[i])) for i in order}
    total = sum(raw.values(), torch.zeros((), dtype=x.dtype))
    output = torch.zeros_like(x)
    for i in order:
        expert = module.experts[i]
        assert isinstance(expert, SwiGLU)
        output = output + raw[i] / total * swiglu(expert, x)
    return output
