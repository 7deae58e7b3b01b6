"""Causal attention as Triton kernels, with defects that can be planted in the backward pass.

The kernels are plain: one block of queries against blocks of keys with a running softmax, and the two backward passes
that recompute the weights from the stored log-sum. `defect` names what to get wrong.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DEFECTS = {
    "none": 0,
    "softmax correction missing": 1,
    "dK without the scale": 2,
    "mask ignored in the backward": 3,
    "last block of queries skipped in dK and dV": 4,
    "correction of the next row": 5,
}

BLOCK = 64


@triton.jit
def _forward(q_at, k_at, v_at, o_at, log_sum_at, scale, length, width: tl.constexpr, block: tl.constexpr):
    """One block of queries of one head: o = softmax(q kᵀ·scale) v and the log of the row sums."""
    start = tl.program_id(0) * block
    base = tl.program_id(1) * length * width
    rows = start + tl.arange(0, block)
    columns = tl.arange(0, width)
    inside = rows[:, None] < length
    q = tl.load(q_at + base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
    top = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    output = tl.zeros([block, width], tl.float32)
    for first in range(0, start + block, block):
        indices = first + tl.arange(0, block)
        there = indices[:, None] < length
        k = tl.load(k_at + base + indices[:, None] * width + columns[None, :], mask=there, other=0.0)
        v = tl.load(v_at + base + indices[:, None] * width + columns[None, :], mask=there, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        seen = (rows[:, None] >= indices[None, :]) & (indices[None, :] < length)
        score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - highest[:, None])
        fade = tl.exp(top - highest)
        total = total * fade + tl.sum(weight, 1)
        output = output * fade[:, None] + tl.dot(weight.to(v.dtype), v)
        top = highest
    output = output / total[:, None]
    tl.store(o_at + base + rows[:, None] * width + columns[None, :], output.to(q.dtype), mask=inside)
    tl.store(log_sum_at + tl.program_id(1) * length + rows, top + tl.log(total), mask=rows < length)


@triton.jit
def _backward_keys(
    q_at, k_at, v_at, do_at, log_sum_at, delta_at, dk_at, dv_at, scale, length,
    width: tl.constexpr, block: tl.constexpr, defect: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys, from all blocks of queries that see it."""
    start = tl.program_id(0) * block
    base = tl.program_id(1) * length * width
    row_base = tl.program_id(1) * length
    indices = start + tl.arange(0, block)
    columns = tl.arange(0, width)
    there = indices[:, None] < length
    k = tl.load(k_at + base + indices[:, None] * width + columns[None, :], mask=there, other=0.0)
    v = tl.load(v_at + base + indices[:, None] * width + columns[None, :], mask=there, other=0.0)
    dk = tl.zeros([block, width], tl.float32)
    dv = tl.zeros([block, width], tl.float32)
    begin = start
    end = length
    if defect == 3:
        begin = 0
    if defect == 4:
        end = length - block
    for first in range(begin, end, block):
        rows = first + tl.arange(0, block)
        inside = rows[:, None] < length
        q = tl.load(q_at + base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
        do = tl.load(do_at + base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
        log_sum = tl.load(log_sum_at + row_base + rows, mask=rows < length, other=0.0)
        shift = rows
        if defect == 5:
            shift = rows + 1
        delta = tl.load(delta_at + row_base + shift, mask=shift < length, other=0.0)
        weight = tl.exp(tl.dot(q, tl.trans(k)) * scale - log_sum[:, None])
        seen = (rows[:, None] < length) & (indices[None, :] < length)
        if defect != 3:
            seen = seen & (rows[:, None] >= indices[None, :])
        weight = tl.where(seen, weight, 0.0)
        dv += tl.dot(tl.trans(weight.to(do.dtype)), do)
        grad = tl.dot(do, tl.trans(v))
        if defect != 1:
            grad = grad - delta[:, None]
        dk += tl.dot(tl.trans((weight * grad).to(q.dtype)), q)
    if defect != 2:
        dk = dk * scale
    tl.store(dk_at + base + indices[:, None] * width + columns[None, :], dk.to(k.dtype), mask=there)
    tl.store(dv_at + base + indices[:, None] * width + columns[None, :], dv.to(k.dtype), mask=there)


@triton.jit
def _backward_queries(
    q_at, k_at, v_at, do_at, log_sum_at, delta_at, dq_at, scale, length,
    width: tl.constexpr, block: tl.constexpr, defect: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries."""
    start = tl.program_id(0) * block
    base = tl.program_id(1) * length * width
    row_base = tl.program_id(1) * length
    rows = start + tl.arange(0, block)
    columns = tl.arange(0, width)
    inside = rows[:, None] < length
    q = tl.load(q_at + base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
    do = tl.load(do_at + base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
    log_sum = tl.load(log_sum_at + row_base + rows, mask=rows < length, other=0.0)
    shift = rows
    if defect == 5:
        shift = rows + 1
    delta = tl.load(delta_at + row_base + shift, mask=shift < length, other=0.0)
    dq = tl.zeros([block, width], tl.float32)
    end = start + block
    if defect == 3:
        end = length
    for first in range(0, end, block):
        indices = first + tl.arange(0, block)
        there = indices[:, None] < length
        k = tl.load(k_at + base + indices[:, None] * width + columns[None, :], mask=there, other=0.0)
        v = tl.load(v_at + base + indices[:, None] * width + columns[None, :], mask=there, other=0.0)
        weight = tl.exp(tl.dot(q, tl.trans(k)) * scale - log_sum[:, None])
        seen = (rows[:, None] < length) & (indices[None, :] < length)
        if defect != 3:
            seen = seen & (rows[:, None] >= indices[None, :])
        weight = tl.where(seen, weight, 0.0)
        grad = tl.dot(do, tl.trans(v))
        if defect != 1:
            grad = grad - delta[:, None]
        dq += tl.dot((weight * grad).to(k.dtype), k)
    tl.store(dq_at + base + rows[:, None] * width + columns[None, :], (dq * scale).to(q.dtype), mask=inside)


class CausalAttention(torch.autograd.Function):
    """softmax(q kᵀ·scale) v over the keys up to each query, for (batch, heads, length, width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, defect: str) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, heads, length, width = q.shape
        output = torch.empty_like(q)
        log_sum = torch.empty(batch, heads, length, device=q.device, dtype=torch.float32)
        grid = (triton.cdiv(length, BLOCK), batch * heads)
        _forward[grid](q, k, v, output, log_sum, scale, length, width, BLOCK)
        ctx.save_for_backward(q, k, v, output, log_sum)
        ctx.scale, ctx.defect = scale, DEFECTS[defect]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sum = ctx.saved_tensors
        do = grads[0].contiguous()
        batch, heads, length, width = q.shape
        delta = (do.float() * output.float()).sum(-1).contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grid = (triton.cdiv(length, BLOCK), batch * heads)
        shared = (q, k, v, do, log_sum, delta)
        _backward_keys[grid](*shared, dk, dv, ctx.scale, length, width, BLOCK, ctx.defect)
        _backward_queries[grid](*shared, dq, ctx.scale, length, width, BLOCK, ctx.defect)
        return dq, dk, dv, None, None
