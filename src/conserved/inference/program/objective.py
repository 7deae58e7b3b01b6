"""The objective of a model: which of the tensors it returns a loss is computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from conserved._torch_compat import tree_flatten

ASIDE = (
    "past_key_values",
    "hidden_states",
    "attentions",
    "cross_attentions",
    "decoder_hidden_states",
    "decoder_attentions",
    "encoder_hidden_states",
    "encoder_attentions",
    "cache_params",
    "mems",
    "router_logits",
    "state",
    "rnn_state",
)
"""Entries of a result that are handed on to the next call or looked at, not trained on."""


def loss_outputs(result: Any) -> list[Tensor]:
    """Return the tensors of a model's result that a loss is computed from.

    A loss, if the result holds one, is judged alone; of a dictionary or of an output of transformers all entries but
    those that are handed on (caches, hidden states); of anything else every floating-point tensor.
    """
    if isinstance(result, Tensor):
        return [result]
    named = _entries(result)
    if named is not None:
        loss = named.get("loss")
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            return [loss]
        outputs = [leaf for name, entry in named.items() if name not in ASIDE for leaf in tensors(entry)]
    else:
        outputs = tensors(result)
    return [leaf for leaf in outputs if leaf.is_floating_point() or leaf.is_complex()]


def _entries(result: Any) -> dict[str, Any] | None:
    if isinstance(result, Mapping):
        return dict(result)
    if hasattr(result, "__dataclass_fields__") or (hasattr(result, "_fields") and isinstance(result, tuple)):
        names = getattr(result, "_fields", None) or result.__dataclass_fields__
        return {name: getattr(result, name) for name in names if getattr(result, name, None) is not None}
    return None


def tensors(result: Any) -> list[Tensor]:
    """Return all tensors in a nested result."""
    if isinstance(result, Tensor):
        return [result]
    named = _entries(result)
    if named is not None:
        return [leaf for entry in named.values() for leaf in tensors(entry)]
    if isinstance(result, list | tuple | set):
        return [leaf for entry in result for leaf in tensors(entry)]
    if hasattr(result, "__dict__") and not isinstance(result, nn.Module | type):
        leaves, _ = tree_flatten(list(vars(result).values()))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return []
