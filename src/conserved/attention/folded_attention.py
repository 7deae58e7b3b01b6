"""Centered attention whose constants the projections subtract, so that no pass over keys or values is needed.

Keys and values come from linear maps, and a constant can be taken from the bias:

    k - c = x W_kᵀ + (b_k - c),        v - e = x W_vᵀ + (b_v - e)

Matrix products add their bias before they round, so shifted keys and values are rounded once, as plain ones are. What
is left in the step is one pass that adds e to the output. It is needed: the gradient of the next projection is the
product of its output's gradient with O, and not with O - e.

The constants must be known before the projections run. They are those of an earlier call, shared by the sequences of a
batch: means of k̄_i and O_i over sampled rows (`gauge_constants`), which minimise the mean squares that bound the error,
without a gate, because nothing is rounded once more. Any constants are exact. Old ones are worse where the network
moves fast: in the first steps without warm-up they help little, where `centered` helps most.

Keys that are normalised or rotated after their projection cannot be shifted there. Their values can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved._torch_compat import dispatch_modes
from conserved.attention.centered_attention import CenteredAttention, drops, heads_first
from conserved.attention.gauge_constants import ROWS, mean_tokens_of_rows
from conserved.attention.invariance import Attend, NotInvariantError
from conserved.attention.sampled_rows import SampledPositions, group_size, readable_mask

Projection = nn.Linear | tuple[nn.Linear, slice]
"""A linear map to keys or values, or one to several things with the columns that are meant."""


class FoldedAttention(CenteredAttention):
    """An attention function whose keys and values arrive centered, and which adds the constant of the values.

    Made by `folded`; call it as the function that it wraps.
    """

    def __init__(
        self,
        attention: Callable[..., Any],
        *,
        value: Projection,
        key: Projection | None = None,
        every: int = 16,
        causal: bool = False,
        axis: int = -2,
        output_axis: int = -2,
    ) -> None:
        """Wrap a function and shift the projections; `folded` describes the arguments."""
        super().__init__(attention, keys=key is not None, causal=causal, axis=axis, output_axis=output_axis)
        self.every = every
        self.calls = 0
        """Calls with gradients so far."""
        self._columns = [_Columns(projection) for projection in (key, value) if projection is not None]
        self._added: Tensor | None = None

    def apply(
        self,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: Mapping[str, Any],
        *,
        plain: bool = False,
    ) -> Any:
        """Compute attention, restore the values and choose the next constants; arguments as for `CenteredAttention`."""
        if not _shifts():
            return attend(query, key, value)
        self._require_invariance(attend, query, key, value, options, plain=plain)
        if self.causal:
            options = {"is_causal": True, **options}
        q, k, v = (heads_first(tensor, self.axis) for tensor in (query, key, value))
        outputs = attend(query, key, value)
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        if self._added is not None:
            constant = self._added if len(self._added) == 1 or len(self._added) == len(v) else self._added[:1]
            sees = None if plain or readable_mask(q, k, options) is None else self._sees(first, q, k, options)
            first = self._restored(first, constant, sees)
        if self.calls % self.every == 0:
            self._choose(q, k, v, options)
        self.calls += 1
        return (first, *others) if isinstance(outputs, tuple) else first

    def _require_invariance(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any], *, plain: bool
    ) -> None:
        name, returned = getattr(self.attention, "__name__", repr(self.attention)), True
        if not (plain or torch.compiler.is_compiling()):
            invariance = self.invariance(attend, query, key, value, options)
            returned = invariance.returns_value_shift
            if self.keys:
                invariance.require_keys(name)
        if drops(options) or not returned:
            raise NotInvariantError(
                f"Expected {name} to return a constant that is added to all values. With dropout, learned sinks or "
                "gates it does not. Use `centered`, which then centers keys alone, or turn dropout off."
            )

    @torch.no_grad()
    def _choose(self, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> None:
        """Move the constants to the means of k̄_i and O_i over sampled rows of all sequences."""
        device = key.device.type
        stored = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
        with torch.autocast(device, enabled=False):
            sample = SampledPositions.of(query.shape[-2], ROWS, group_size(query, key)).slice
            rows, widths, sees = mean_tokens_of_rows(query.detach(), key.detach(), value.detach(), options, sample)
            weights = torch.ones_like(rows[..., :1]) if sees is None else sees.expand_as(rows[..., :1])
            rows, weights = (part.float().movedim(-3, 0).flatten(1, -2) for part in (rows * weights, weights))
            means = rows.sum(1) / weights.sum(1).clamp_min(1.0)
            means = torch.where(means.isfinite().all(), means, 0.0).to(stored).split(widths, -1)
            for columns, mean in zip(self._columns, means[-len(self._columns) :], strict=True):
                columns.subtract(mean)
            constant = self._columns[-1].constant().view(-1, 1, widths[1]).to(value.dtype)
            constant = constant.expand(*value.shape[:-3], *constant.shape)
            if self._added is None or self._added.shape != constant.shape:
                self._added = constant.contiguous()
            else:
                self._added.copy_(constant)


def _shifts() -> bool:
    """Return whether calls are centered: while gradients are recorded, and nobody reads the program.

    Constants in it would hide the laws of its keys and values.
    """
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not dispatch_modes())


class _Columns:
    """Columns of a linear map, and the constant that is subtracted from them."""

    def __init__(self, projection: Projection) -> None:
        linear, self.slice = projection if isinstance(projection, tuple) else (projection, slice(None))
        if type(linear) is not nn.Linear:
            raise TypeError(f"Expected a torch.nn.Linear, got {type(linear).__name__}. Use `centered` instead.")
        if not isinstance(linear.forward, _ShiftedLinear):
            linear.forward = _ShiftedLinear(linear)  # type: ignore[assignment]
        self.map: Any = linear.forward

    def constant(self) -> Tensor:
        return -self.map.shift[self.slice]

    def subtract(self, more: Tensor) -> None:
        """Subtract a further constant; in place, because a recorded CUDA graph reads the same memory."""
        if self.map.shift is None:
            self.map.shift = torch.zeros(self.map.linear.out_features, device=more.device, dtype=more.dtype)
        self.map.shift[self.slice] -= more.flatten()


class _ShiftedLinear:
    """The forward of a linear map that adds a shift to its bias while gradients are recorded.

    Calls without gradients are unchanged, so that keys and values in a cache stay comparable.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.shift: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if self.shift is not None and _shifts():
            bias = self.shift if bias is None else bias + self.shift
        return F.linear(x, weight, bias)


def folded(
    attention: Callable[..., Any] = F.scaled_dot_product_attention,
    *,
    value: Projection,
    key: Projection | None = None,
    every: int = 16,
    causal: bool = False,
    axis: int = -2,
    output_axis: int | None = None,
) -> FoldedAttention:
    """Return the same attention for one layer, centered by the biases of the layer's own projections.

        layer.attend = conserved.attention.folded(key=layer.k, value=layer.v)      # keys that are not rotated
        layer.attend = conserved.attention.folded(value=layer.v)                   # rotated or normalised keys
        layer.attend = conserved.attention.folded(value=(layer.qkv, slice(1536, 2304)))

    It costs one pass over the output, where `centered` also reads and writes keys and values, and is as accurate once
    the network does not change much from one choice of constants to the next. State dicts do not change. The projection
    must feed this attention alone, and every row must see a key unless a mask tensor says which does not.

    Args:
        attention: a function of queries, keys, values and further arguments.
        value: the map that makes the values, heads of equal width next to each other.
        key: the map that makes the keys, if they enter the scores as it makes them.
        every: calls with gradients from one choice of constants to the next. A recorded CUDA graph chooses in every
            replay or in none.
        causal: as for `centered`.
        axis: as for `centered`.
        output_axis: as for `centered`.

    Returns:
        A function with the signature of `attention`.

    Raises:
        TypeError: a projection is not a plain `torch.nn.Linear`.
        ValueError: `every` is less than one.
    """
    if every < 1:
        raise ValueError(f"Expected every to be at least 1, got {every}. Pass a number of calls.")
    output_axis = axis if output_axis is None else output_axis
    return FoldedAttention(
        attention, value=value, key=key, every=every, causal=causal, axis=axis, output_axis=output_axis
    )
