"""The keys of a running model as its attention uses them, each of which may be replaced: after norms and rotary
positions, before the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from conserved.attention.attention_calls import AttentionCall, attention_heard

See = Callable[[str, Tensor, str], Tensor]
"""Given where, keys (…, heads, length, width), and why a shift of them may be visible (empty if not): keys to use."""


@contextmanager
def keys_seen(model: nn.Module, see: See) -> Iterator[None]:
    """Within it, every attention of the model passes its keys through `see`."""

    def tell(call: AttentionCall) -> Tensor | None:
        if call.keys is None:
            return None
        return see(call.path, call.keys, _visible(call.module, call.kwargs) if call.at == "interface" else "")

    with attention_heard(model, tell):
        yield


def _visible(module: nn.Module, options: dict[str, Any]) -> str:
    """Why adding one vector to all keys may change what this attention computes; empty if it does not."""
    if options.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
        return "learned sink logits take part in its softmax"
    cap = options.get("softcap") or getattr(module, "attn_logit_softcapping", None)
    return "its scores are capped" if cap else ""
