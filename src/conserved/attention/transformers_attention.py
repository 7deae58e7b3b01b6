"""Centered attention as an attention implementation of transformers, by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from conserved.attention.centered_attention import centered
from conserved.attention.invariance import NotInvariantError
from conserved.optional import require

_VISIBLE = {
    "s_aux": "learned sink logits take part in its softmax",
    "softcap": "its scores are capped",
}
"""Arguments of transformers' interface with which a shift of all keys is visible, and why."""


def register_with_transformers(name: str = "centered", *, base: str = "sdpa") -> str:
    """Register centered attention with transformers, for `attn_implementation=name`.

        conserved.attention.register_with_transformers()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="centered")

    Or, for a model that exists: `model.set_attn_implementation("centered")`. Layers with learned sinks or capped scores
    raise an error when they are called.

    Args:
        name: the name to register.
        base: the registered implementation that computes attention: "sdpa", "flex_attention", "flash_attention_2", ….

    Returns:
        The name.

    Raises:
        ValueError: transformers has no implementation called `base`.
        MissingPackageError: transformers is not installed.
    """
    modeling = require("transformers.modeling_utils", "Registering an attention implementation")
    masking = require("transformers.masking_utils", "Registering an attention implementation")
    implementation = modeling.AttentionInterface().get(base, None)
    if implementation is None:
        known = sorted(modeling.AttentionInterface().valid_keys())
        raise ValueError(f"Expected base to be one of {known}, got {base!r}. Pass a registered implementation.")
    modeling.AttentionInterface.register(name, _Implementation(implementation, base))
    mask = masking.AttentionMaskInterface().get(base, None)
    if mask is not None:
        masking.AttentionMaskInterface.register(name, mask)
    return name


class _Implementation:
    """The function that transformers calls."""

    def __init__(self, implementation: Any, base: str) -> None:
        self.implementation = implementation
        self.base = base
        self.calls_product = base == "sdpa"
        """Whether listeners observe this attention where it calls PyTorch's function."""
        self._centered = centered(implementation, output_axis=-3)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Compute attention as the base does, with centered keys and values."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return self.implementation(module, q, k, v, attention_mask, **options)

        if options.get("cache") is not None:
            return attend(query, key, value)  # a paged cache replaces the keys inside of the implementation
        for argument, reason in _VISIBLE.items():
            if options.get(argument) is not None:
                raise NotInvariantError(
                    f"Expected attention that ignores a constant added to all keys, got {type(module).__name__}, where "
                    f"{reason}. Use attn_implementation='eager' for this model, or another that it supports."
                )
        given = options.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if given is None else given)
        read = options | {"attention_mask": attention_mask, "is_causal": causal and attention_mask is None}
        plain = self.base == "sdpa" and attention_mask is None
        return self._centered.apply(attend, query, key, value, read, plain=plain)
