"""Attention kernels by name, ways to call them, and the same calls in float64: shared by benchmarks of attention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from conserved.attention import centered
from conserved.attention.invariance import NotInvariantError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
REFUSALS = (RuntimeError, NotImplementedError, ImportError, TypeError, NotInvariantError)
"""What kernels raise for arguments that they do not support."""

Attend = Callable[..., Tensor]


def backend(name: str) -> Any:
    """Choose a kernel of PyTorch's function; another name leaves the choice to PyTorch."""
    return sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext()


def head_inputs(kind: str, *, queries: int, keys: int, heads: int, groups: int, width: int) -> list[Tensor]:
    """Queries, keys, values and an output gradient of one kind of head, in float32."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = normal(2, heads * groups, queries, width), normal(2, heads, keys, width), normal(2, heads, keys, width)
    if kind == "common":  # deep layers early in training
        k, v = 0.3 * k + 2 * normal(2, heads, 1, width), 0.03 * v + normal(2, heads, 1, width)
    if kind == "large scores":
        q, k = 4 * q, 4 * k
    if kind == "sink":  # all queries attend to the first key, whose value is near zero
        direction = normal(2, heads, 1, width)
        q = 0.3 * q + direction.repeat_interleave(groups, 1)
        k, v = 0.3 * k + 0.3 * normal(2, heads, 1, width), 0.1 * v + normal(2, heads, 1, width)
        k[..., 0, :], v[..., 0, :] = 1.5 * direction[..., 0, :], 0.01 * normal(2, heads, width)
    return [tensor.to(DEVICE) for tensor in (q, k, v, normal(2, heads * groups, queries, width))]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to call attention: the function, how it is centered, and a mask that says the same in float64."""

    attend: Attend
    mended: Attend
    mask: Tensor | None
    queries: int
    keys: int
    groups: int = 1


def variants(kernel: str, length: int) -> Iterator[tuple[str, Variant]]:
    """Ways to call a kernel that it supports."""
    triangle = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    window = triangle & ~torch.ones_like(triangle).tril(-length // 4)
    if kernel in BACKENDS:
        causal: dict[str, Any] = {"is_causal": True}
        yield "causal", _product(kernel, causal, triangle, length, length)
        yield "full", _product(kernel, {}, None, length, length)
        yield "cross", _product(kernel, {}, None, length // 2, length)
        yield "grouped", _product(kernel, causal | {"enable_gqa": True}, triangle, length, length, groups=4)
        yield "window mask", _product(kernel, {"attn_mask": window}, window, length, length)
    elif kernel.startswith("flex"):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        function: Any = torch.compile(flex_attention) if kernel == "flex compiled" else flex_attention
        for name, mask in (("causal", triangle), ("window", window)):
            block = create_block_mask(_rule(length, name), None, None, length, length, device=DEVICE.type)
            attend = centered(function)
            yield (
                name,
                Variant(
                    attend=lambda q, k, v, b=block: function(q, k, v, block_mask=b),
                    mended=lambda q, k, v, b=block, a=attend: a(q, k, v, block_mask=b),
                    mask=mask,
                    queries=length,
                    keys=length,
                ),
            )
    elif kernel == "varlen":
        yield "packed", _varlen(length)
    elif kernel == "fla":
        yield "causal", _fla(triangle, length)
        yield "grouped", _fla(triangle, length, groups=4)
        yield "window", _fla(window, length, window_size=length // 4)
    elif kernel == "rounded accumulators":
        mended = centered(rounded_attention)
        options: dict[str, Any] = {"attend": rounded_attention, "mended": mended, "mask": triangle}
        yield "causal", Variant(**options, queries=length, keys=length)
    else:
        written: Any = torch.compile(_written_out) if kernel == "written out, compiled" else _written_out
        mended = centered(written)
        yield (
            "causal",
            Variant(
                attend=lambda q, k, v: written(q, k, v, triangle),
                mended=lambda q, k, v: mended(q, k, v, triangle),
                mask=triangle,
                queries=length,
                keys=length,
            ),
        )


def _rule(length: int, name: str) -> Any:
    width = length // 4 if name == "window" else length
    return lambda b, h, q, k: (q >= k) & (q - k < width)


def _product(kernel: str, options: dict[str, Any], mask: Tensor | None, *sizes: int, groups: int = 1) -> Variant:
    mended = centered()

    def plain_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with backend(kernel):
            return F.scaled_dot_product_attention(q, k, v, **options)

    def mended_call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with backend(kernel):
            return mended(q, k, v, **options)

    queries, keys = sizes
    return Variant(attend=plain_call, mended=mended_call, mask=mask, queries=queries, keys=keys, groups=groups)


def _varlen(length: int) -> Variant:
    from torch.nn.attention.varlen import varlen_attn

    named = inspect.signature(varlen_attn).parameters
    cut = torch.tensor([0, length // 3, length, 2 * length], dtype=torch.int32, device=DEVICE)

    def packed(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, causal: bool) -> Tensor:
        options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in named else {"is_causal": causal}
        output: Any = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, length, length, **options)
        return output

    def call(function: Attend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v)]
            output = function(*flat, cu_seqlens=cut, causal=True)
            return output.unflatten(0, (2, -1)).transpose(1, 2)

        return attend

    mended = centered(packed, axis=-3)
    position = torch.arange(length, device=DEVICE)
    first = (position[:, None] >= position) & ((position < length // 3)[:, None] == (position < length // 3))
    mask = torch.stack((first, position[:, None] >= position))[:, None]
    return Variant(attend=call(packed), mended=call(mended), mask=mask, queries=length, keys=length)


def _fla(mask: Tensor, length: int, *, groups: int = 1, **options: Any) -> Variant:
    from fla.ops.attn import parallel_attn

    mended = centered(parallel_attn, axis=-3, causal=True)

    def call(function: Attend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tokens_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
            return function(*tokens_first, **options).transpose(1, 2)

        return attend

    calls = {"attend": call(parallel_attn), "mended": call(mended)}
    return Variant(**calls, mask=mask, queries=length, keys=length, groups=groups)


class _RoundedAttention(torch.autograd.Function):
    """Causal flash attention whose sums and outputs are all stored in half precision, as in arXiv 2510.04212."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _causal_scores(q, k)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        output = (weights @ v) / total
        ctx.save_for_backward(q, k, v, output, largest + total.log())
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, output, log_sum = ctx.saved_tensors
        gradient = gradients[0].to(q.dtype)
        weights = (_causal_scores(q, k) - log_sum).exp()
        delta = (gradient * output).sum(-1, keepdim=True)
        scores = weights * (gradient @ v.mT - delta) / math.sqrt(q.shape[-1])
        return scores @ k, scores.mT @ q, weights.mT @ gradient


def _causal_scores(q: Tensor, k: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf)


def rounded_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention with sums in half precision; autocast does not widen its exponentials."""
    with torch.autocast(q.device.type, enabled=False):
        output: Tensor = _RoundedAttention.apply(q, k, v)
        return output


def causal_kernel(name: str) -> Attend:
    """Return causal attention over (batch, heads, length, width) by the kernel of a name, with grouped heads."""
    if name in BACKENDS:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with backend(name):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

        return attend
    if name == "flex compiled":
        return _flex_causal
    if name == "rounded accumulators":
        return rounded_attention
    if name == "fla":
        return lambda q, k, v: _fla(torch.empty(0), 0).attend(q, k, v)
    raise ValueError(f"Expected a kernel's name, got {name!r}.")


def _flex_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    block, grouped = _causal_block(q.shape[2]), q.shape[1] != k.shape[1]
    output: Tensor = _compiled_flex()(q, k, v, block_mask=block, enable_gqa=grouped)
    return output


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_block(length: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_rule(length, "causal"), None, None, length, length, device=DEVICE.type)


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def passes(attend: Attend, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, dQ, dK and dV."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def exact_passes(tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """The same in float64, by the math backend."""
    groups = tensors[0].shape[1] // tensors[1].shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups > 1)

    q, k, v, gradient = (tensor.double() for tensor in tensors)
    return passes(attend, q, k, v, gradient)


def seen_by_attention(gradients: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the size of a change of queries as causal attention sees it, squared, by head.

    A change Δ_i of a query changes its scores by a Δ_i·k_j. Softmax ignores what is the same for all keys, so what
    matters is the variance of Δ_i·k_j over the keys of the row, weighted by the attention.
    """
    groups = q.shape[1] // k.shape[1]
    q, k, gradients = q.double(), k.double().repeat_interleave(groups, 1), gradients.double()
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf).softmax(-1)
    changes = gradients @ k.mT
    mean = (weights * changes).sum(-1, keepdim=True)
    return (weights * (changes - mean).square()).sum((0, 2, 3))


def by_head(actual: Tensor, exact: Tensor) -> Tensor:
    """Relative error of every head, over the batch."""
    error = (actual.double() - exact).square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))
    return error.sqrt()


def digits(value: Any) -> float:
    """Return a number rounded to three digits, for files."""
    return float(f"{float(value):.3g}")
