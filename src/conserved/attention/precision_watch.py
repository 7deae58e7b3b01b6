"""Listen to the attention calls of a model and predict, in the backward pass, how much of dQ and dK is rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from conserved.attention.attention_calls import AttentionCall, observe_attention
from conserved.attention.precision import AttentionPrecision
from conserved.attention.queries_and_keys import Capture, captured
from conserved.attention.rounding import Delta, attention_rounding
from conserved.boundary import guarded

_FUSED = ("ScaledDotProduct", "FlashAttn", "Flash", "FlexAttention", "EfficientAttention", "Cudnn")
"""Parts of the names of backward functions of fused kernels."""

_WALK = 8
"""Nodes between an output and its kernel: transpositions, casts, the addition of a constant."""


@contextmanager
def watch_precision(
    model: nn.Module, *, sequences: int = 1, into: AttentionPrecision | None = None
) -> Iterator[AttentionPrecision]:
    """Predict the rounding of dQ and dK of every attention call; forward and backward pass both go inside.

        with conserved.attention.watch_precision(model) as precision:
            for batch in batches:
                loss(model, batch).backward()
                precision.step()
        print(precision.summary())

    Calls of PyTorch's scaled_dot_product_attention and of transformers' attention interface are seen, compiled ones and
    torch.nn.MultiheadAttention's fast path are not. Nothing of the run changes. A prediction costs about a forward and
    a backward pass of attention in float32 for the sequences that are looked at.

    Args:
        model: the model to listen to.
        sequences: how many sequences of each batch are looked at.
        into: the object to add to; by default a new one.

    Yields:
        An `AttentionPrecision`: `.rows`, `.alarms`, `.summary()`, `.plot(path)`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `sequences` is not positive.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module, got {type(model).__name__}. Pass the model that is trained.")
    if sequences < 1:
        raise ValueError(f"Expected at least one sequence, got {sequences}. Pass sequences=1.")
    precision = AttentionPrecision() if into is None else into

    def on_call(call: AttentionCall) -> None:
        listen_for_rounding(call, precision, sequences)

    with observe_attention(model, on_call):
        yield precision


def listen_for_rounding(
    call: AttentionCall, precision: AttentionPrecision, sequences: int = 1, *, half_only: bool = False
) -> None:
    """Predict the rounding of one call when its output gradient arrives; for listeners that observe calls already.

    Args:
        call: the call, while it happens.
        precision: the object to add the prediction to.
        sequences: how many sequences of the batch are looked at.
        half_only: whether to leave out calls whose output is not stored in half precision.
    """
    if call.at not in ("product", "interface") or not torch.is_grad_enabled():
        return
    with torch.no_grad():
        capture = captured(call)
    path, problem = call.path, capture.problem or _problem(call, capture)
    if problem:
        precision.skipped[path] = problem
        return
    # Neither the call nor a tensor with a graph may be kept by what the call keeps: nobody but the garbage collector
    # would free the graphs of whole passes, and it does not know how large they are.
    capture = replace(capture, q=capture.q.detach(), k=capture.k.detach())
    value = (call.args[0] if call.args else call.kwargs["value"]).detach()

    def output_arrived(output: Tensor, tokens_first: bool) -> None:
        if not output.requires_grad or (half_only and output.dtype not in (torch.bfloat16, torch.float16)):
            return
        kernel, delta = kernel_of(output)
        stored = _few(output, sequences, tokens_first=tokens_first)
        values = _few(value, sequences)

        def gradient_arrived(gradient: Tensor) -> None:
            part = _few(gradient, sequences, tokens_first=tokens_first)
            precision.add(path, kernel, _predict(capture, values, stored, part, delta))

        output.register_hook(guarded(gradient_arrived))

    call.output_listeners.append(output_arrived)


def kernel_of(output: Tensor) -> tuple[str, Delta]:
    """Return the name of the kernel that made an output, and where its softmax correction comes from.

    Args:
        output: the output of attention, or what transpositions, casts and additions make of it.

    Returns:
        The name of its backward function, or "math"; and "output" for fused kernels, "scores" otherwise.
    """
    node: Any = output.grad_fn
    for _ in range(_WALK):
        if node is None:
            break
        if any(part in node.name() for part in _FUSED):
            return node.name().removesuffix("0").removesuffix("Backward"), "output"
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return "math", "scores"


def _predict(capture: Capture, value: Tensor, output: Tensor, gradient: Tensor, delta: Delta) -> Any:
    count = len(output)
    device = capture.q.device.type
    # Under autocast the kernel rounds its inputs first.
    q, k, v = (tensor[:count].to(output.dtype) for tensor in (capture.q, capture.k, value))
    mask = capture.mask if capture.mask is None or len(capture.mask) == 1 else capture.mask[:count]
    with torch.autocast(device, enabled=False):
        return attention_rounding(
            q,
            k,
            v,
            output,
            gradient,
            scale=capture.scale,
            causal=capture.causal,
            window=capture.window,
            mask=mask,
            delta=delta,
        )


def _problem(call: AttentionCall, capture: Capture) -> str:
    if capture.softcap is not None:
        return "its scores are capped"
    dropout = call.kwargs.get("dropout_p", call.kwargs.get("dropout", 0.0))
    if call.at == "product" and len(call.args) > 2:
        dropout = call.args[2]
    return "it drops probabilities at random" if dropout else ""


def _few(tensor: Tensor, sequences: int, *, tokens_first: bool = False) -> Tensor:
    """Return the first sequences as (batch, heads, length, width)."""
    tensor = tensor.detach()
    while tensor.ndim < 4:
        tensor = tensor[None]
    tensor = tensor.flatten(0, -4)[:sequences]
    return tensor.transpose(1, 2) if tokens_first else tensor
