"""Probe whether a function of queries, keys and values ignores a shift of all keys and returns a shift of all values.

The probe uses numbers on a grid of eighths, so that shifted keys and values have no rounding in any precision. All
queries share a component and keys are shifted along it and against it, which moves the scores by about 48 where they
vary by about 1. Learned sinks, capped scores, extra keys, norms of keys and positions inside the function show then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conserved.attention.attention_calls import unheard
from conserved.errors import ConservedError

Attend = Callable[[Tensor, Tensor, Tensor], Any]

_TF32_ROUNDOFF = 2.0**-11
"""Unit roundoff of the coarsest arithmetic that kernels use for float32 matrix products."""

_VALUE_SHIFT = 2.125
"""An odd number of eighths, as the shift of keys is: steps of quantised keys and values do not divide it."""


class NotInvariantError(ConservedError, ValueError):
    """Raised when a function is not unchanged by the shifts that `conserved.attention.centered` makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariance:
    """Largest deviation of an attention function under a shift of all keys and under a shift of all values.

    Deviations are relative to the largest probe value, which is 1. `other_outputs` is the deviation of the further
    tensors that the function returns, such as a log-sum-exp.
    """

    keys: float
    values: float
    other_outputs: float
    limit: float

    @property
    def ignores_key_shift(self) -> bool:
        """Whether a constant added to all keys leaves the output unchanged."""
        return self.keys <= self.limit and self.other_outputs <= self.limit

    @property
    def returns_value_shift(self) -> bool:
        """Whether a constant added to all values is added to every output row that sees a key."""
        return self.values <= self.limit * (1 + _VALUE_SHIFT)

    def require_keys(self, name: str) -> None:
        """Raise NotInvariantError, with the likely reason, unless a shift of keys is invisible.

        Args:
            name: the name of the function, for the message.
        """
        if self.ignores_key_shift:
            return
        if self.keys <= self.limit:
            reason = "Another output depends on the shift (a log-sum-exp does). Return the output alone"
        elif self.returns_value_shift:
            reason = (
                "Its rows sum to one, so its scores are capped, or it normalises or rotates keys itself. Wrap the "
                "function that takes keys as the scores use them, or pass keys=False to center values only"
            )
        else:
            reason = (
                "Its rows do not sum to one, so a learned sink, an extra key or a gate takes part in its softmax. "
                "This attention cannot be centered"
            )
        raise NotInvariantError(
            f"Expected {name} to ignore a constant added to all keys, got a change of "
            f"{max(self.keys, self.other_outputs):.2g} where rounding allows {self.limit:.2g}. {reason}."
        )


def probe_invariance(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    signs: Tensor | None = None,
    axis: int = -2,
    output_axis: int = -2,
) -> Invariance:
    """Call an attention function with shifted keys and values of its own shapes and measure what changes.

    The probe runs in float32 if the function accepts that and otherwise in the precision of `query`. Every call gets
    the same random numbers, and the state of the generators is restored.

    Args:
        attend: a function of queries, keys and values; the output, or a tuple that begins with it, is returned.
        query: any queries of the shape, dtype and device that the function takes.
        key: any keys of that kind.
        value: any values of that kind.
        signs: the sign of the shift of every token, where documents are shifted by constants of their own.
        axis: the axis of tokens in queries, keys and values, counted from the end.
        output_axis: that of the output.

    Returns:
        The deviations.
    """
    device = query.device.type
    weights = [torch.ones(1, device=query.device)] * 2
    if signs is not None:
        weights = [signs.reshape(-1, *[1] * (-axis_here - 1)) for axis_here in (axis, output_axis)]
    with unheard(), torch.no_grad(), torch.autocast(device, enabled=False):
        if query.dtype in (torch.float32, torch.float64):
            return _probe(attend, query, key, value, query.dtype, weights)
        try:
            return _probe(attend, query, key, value, torch.float32, weights)
        except (RuntimeError, TypeError, ValueError, AssertionError):
            # Kernels for half precision refuse float32 with an error of any of these types.
            return _probe(attend, query, key, value, query.dtype, weights)


def _probe(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, weights: list[Tensor]
) -> Invariance:
    # NumPy's generator also works within torch.func transforms, which refuse random operations.
    generator = np.random.default_rng(41)

    def grid(like: Tensor, largest: int) -> Tensor:
        draws = generator.integers(-largest, largest + 1, tuple(like.shape))
        return torch.from_numpy(draws / 8).to(device=like.device, dtype=dtype)

    draws = generator.integers(0, 2, query.shape[-1]) * 2.0 - 1.0
    signs = torch.from_numpy(draws).to(device=query.device, dtype=dtype)
    q, k, v = 4 * grid(query, 3) + 2 * signs, grid(key, 8), grid(value, 8)
    # 3 for a width of 64: the shift of scores is 2 · shift · sqrt(width); at most 12, so that sums fit in 8 bits.
    shift = (2 * round(4 * min(11.75, max(1.0, 24 / query.shape[-1] ** 0.5))) + 1) / 8 * signs
    inward, outward = (weight.to(dtype) for weight in weights)
    shift = shift * inward
    plain = _call(attend, q, k, v)
    raised, lowered = _call(attend, q, k + shift, v), _call(attend, q, k - shift, v)
    # A weak sink takes nothing from a row until scores are lowered.
    moved = [
        _value_deviation(_call(attend, q, keys, v + _VALUE_SHIFT * inward)[0], outputs[0], _VALUE_SHIFT * outward)
        for keys, outputs in ((k, plain), (k - shift, lowered))
    ]
    others = [_deviation(a, b) for a, b in zip(plain[1:], raised[1:], strict=True)]
    roundoff = max(torch.finfo(dtype).eps / 2, _TF32_ROUNDOFF)
    return Invariance(
        keys=max(_deviation(raised[0], plain[0]), _deviation(lowered[0], plain[0])),
        values=max(moved),
        other_outputs=max(others, default=0.0),
        # Rounding of probabilities, of the output and of the sum of a row, each in both calls, and as much again.
        limit=12 * roundoff,
    )


def _call(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return every floating tensor of the output in float32, computed with fixed random numbers."""
    devices = [query.device] if query.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type=query.device.type if devices else "cuda"):
        torch.manual_seed(0)
        outputs = attend(query, key, value)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return [item.float() for item in outputs if isinstance(item, Tensor) and item.is_floating_point()]


def _value_deviation(moved: Tensor, plain: Tensor, shift: Tensor) -> float:
    """Return how far an output with shifted values is from the shifted output; rows that see no key stay zero."""
    empty = (plain == 0).all(-1, keepdim=True) & (moved == 0).all(-1, keepdim=True)
    return _deviation(moved, torch.where(empty, 0.0, plain + shift))


def _deviation(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference; a row that is NaN in both is equal, in one alone is infinitely far."""
    if not actual.numel():
        return 0.0
    both = actual.isnan() & expected.isnan()
    difference = torch.where(both, 0.0, actual - expected).abs()
    return float(difference.nan_to_num(nan=torch.inf).max())
