"""The keys of a running model as its attention uses them, each of which may be replaced: after norms and rotary
positions, before the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from conserved.attention.attention_calls import AttentionCall, observe_attention
from conserved.attention.precision import AttentionPrecision
from conserved.attention.precision_watch import listen_for_rounding

See = Callable[[str, Tensor, str], Tensor]
"""Given where, keys (…, heads, length, width), and why a shift of them may be visible (empty if not): keys to use."""


@contextmanager
def keys_seen(model: nn.Module, see: See, precision: AttentionPrecision | None = None) -> Iterator[None]:
    """Pass the keys of every attention of the model through `see`.

    Args:
        model: the model to listen to.
        see: gets keys and returns those to use.
        precision: gets a prediction of the rounding of dQ and dK of every call in half precision; None for none.
    """

    def on_call(call: AttentionCall) -> Tensor | None:
        if precision is not None:
            listen_for_rounding(call, precision, half_only=True)
        if call.keys is None:
            return None
        return see(call.path, call.keys, _visible(call.module, call.kwargs) if call.at == "interface" else "")

    with observe_attention(model, on_call):
        yield


def _visible(module: nn.Module, options: dict[str, Any]) -> str:
    """Return why adding one vector to all keys may change what this attention computes; empty if it does not."""
    if options.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
        return "learned sink logits take part in its softmax"
    cap = options.get("softcap") or getattr(module, "attn_logit_softcapping", None)
    return "its scores are capped" if cap else ""
