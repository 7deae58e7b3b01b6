"""Queries and keys of a running model, as its attention uses them: one capture for each call of attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved._torch_compat import DisableTorchFunction
from conserved.attention.attention_calls import AttentionCall, observe_attention
from conserved.attention.band import Band
from conserved.errors import InvalidInputError


class NoAttentionError(InvalidInputError, ValueError):
    """A model ran without a call of attention that could be observed; the message says which calls can be."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """One call of attention: (batch, heads, length, width) queries and keys, and who may see what.

    `mask` is True where a query sees a key, with axes that broadcast to (batch, heads, queries, keys); None leaves it
    to `causal` and `window`. `problem` says why the call cannot be described, if it cannot.
    """

    path: str
    q: Tensor
    k: Tensor
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    problem: str = ""


CaptureListener = Callable[[Capture], None]


@contextmanager
def listening(model: nn.Module, on_capture: CaptureListener) -> Iterator[None]:
    """Report every call of attention inside `model` to `on_capture` within the context."""

    def on_call(call: AttentionCall) -> None:
        if call.part:
            return
        with torch.no_grad():
            capture = captured(call)
            # What is computed about the call is no part of the model.
            with DisableTorchFunction():
                on_capture(capture)

    with observe_attention(model, on_call):
        yield


def captured(call: AttentionCall) -> Capture:
    """Return the queries and keys of a call, and who sees whom."""
    if call.at == "inputs":
        return _multihead(call.path, call.module, call.args, call.kwargs)
    assert call.keys is not None
    if call.at == "block":
        block: Any = call.module
        q, _ = block.queries_and_keys(call.args[0] if call.args else call.kwargs["x"])
        return _called(call.path, q, call.keys, scale=block.scale, causal=block.causal)
    assert call.queries is not None
    if call.at == "product":
        return _product(call.path, call.queries, call.keys, *call.args, **call.kwargs)
    mask = call.args[1] if len(call.args) > 1 else call.kwargs.get("attention_mask")
    return _from_transformers(call.path, call.module, call.queries, call.keys, mask, call.kwargs)


def _called(path: str, q: Tensor, k: Tensor, *, scale: float | None, mask: Any = None, **more: Any) -> Capture:
    """Return a call in (batch, heads, length, width), with its mask read."""
    while q.ndim < 4:
        q, k = q[None], k[None]
    q, k = q.detach().flatten(0, -4), k.detach().flatten(0, -4)
    allowed, problem = _allowed(mask)
    return Capture(
        path=path,
        q=q,
        k=k,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=allowed,
        problem=problem,
        **more,
    )


def _allowed(mask: Any) -> tuple[Tensor | None, str]:
    """Return a mask as booleans with four axes; a bias that is not one cannot be described."""
    if mask is None:
        return None, ""
    if not isinstance(mask, Tensor):
        return None, f"its mask is a {type(mask).__name__}"
    if mask.dtype == torch.bool:
        allowed = mask
    elif mask.is_floating_point():
        allowed = mask > torch.finfo(mask.dtype).min / 2
        if bool((mask[allowed] != 0).any()):
            return None, "a bias that is not a mask is added to its logits"
    else:
        allowed = mask != 0
    while allowed.ndim < 4:
        allowed = allowed[None]
    return allowed, ""


def _from_transformers(path: str, module: Any, q: Tensor, k: Tensor, mask: Any, options: dict[str, Any]) -> Capture:
    given = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if given is None else given) and q.shape[-2] > 1
    window = options.get("sliding_window")
    extra = [name for name in ("position_bias", "s_aux") if options.get(name) is not None]
    if isinstance(mask, Tensor) and mask.ndim == 2:
        # Backends without a mask of four axes take one of padding, and know the rest by themselves.
        mask = mask[:, None, None, :].bool()
        band = Band.of(q.shape[-2], k.shape[-2], causal=causal, window=window or None)
        mask = mask if band.whole else mask & band.visible(q.shape[-2], k.shape[-2], q.device)
    capture = _called(
        path,
        q,
        k,
        scale=options.get("scaling"),
        mask=mask,
        causal=causal and mask is None,
        window=window if causal and mask is None else None,
        softcap=options.get("softcap"),
    )
    return replace(capture, problem=f"it takes {extra[0]}") if extra else capture


def _product(
    path: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Capture:
    if is_causal and query.shape[-2] != key.shape[-2]:
        # PyTorch's own triangle begins at the first query and key.
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        is_causal = False
    return _called(path, query, key, scale=scale, mask=attn_mask, causal=is_causal)


_MULTIHEAD = inspect.signature(nn.MultiheadAttention.forward)


def _multihead(path: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """Return queries and keys of torch.nn.MultiheadAttention, projected again from what it is given."""
    given = _MULTIHEAD.bind(module, *args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    x, y = options["query"], options["key"]
    if x.is_nested or y.is_nested:
        return Capture(path=path, q=x, k=y, scale=1.0, problem="its inputs are nested tensors")
    if x.ndim == 2:
        x, y = x[None], y[None]
    elif not module.batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    width = module.embed_dim
    if module.in_proj_weight is not None:
        wq, wk, _ = module.in_proj_weight.chunk(3)
    else:
        wq, wk = module.q_proj_weight, module.k_proj_weight
    bq, bk = (None, None) if module.in_proj_bias is None else module.in_proj_bias.split([width, width, width])[:2]
    with torch.no_grad(), DisableTorchFunction():
        q, k = F.linear(x, wq, bq), F.linear(y, wk, bk)
        extra = 0
        if module.bias_k is not None:
            k, extra = torch.cat((k, module.bias_k.expand(len(k), -1, -1)), 1), 1
        q, k = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k))
        if module.add_zero_attn:
            k, extra = torch.cat((k, torch.zeros_like(k[:, :, :1])), 2), extra + 1
        mask, problem = _multihead_mask(options, len(q), module.num_heads, extra)
    capture = _called(path, q, k, scale=None, mask=mask)
    return replace(capture, problem=problem) if problem else capture


def _multihead_mask(options: dict[str, Any], batch: int, heads: int, extra: int) -> tuple[Tensor | None, str]:
    """Return both masks of torch.nn.MultiheadAttention as one; True there hides a key."""
    total: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask"):
        mask = options[name]
        if mask is None:
            continue
        if mask.dtype != torch.bool:
            if bool(((mask != 0) & (mask != -torch.inf)).any()):
                return None, f"{name} adds a bias to its logits"
            mask = mask == -torch.inf
        seen = F.pad(~mask, (0, extra), value=True)
        if name == "key_padding_mask":
            seen = (seen if seen.ndim == 2 else seen[None])[:, None, None, :]
        elif seen.ndim == 3:
            seen = seen.unflatten(0, (batch, heads))
        total = seen if total is None else total & seen
    return total, ""
