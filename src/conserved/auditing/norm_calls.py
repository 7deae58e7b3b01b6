"""Record every call of a norm function of PyTorch, and the part of a scale that its ε preserves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from conserved.function_listeners import Listeners
from conserved.moment import RowNorm


@dataclass(frozen=True, slots=True, eq=False)
class NormCall:
    """One call of a norm: over which axes, of its input in which shape, and its gain."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    row: RowNorm
    gain: Tensor | None = None
    """A factor for every entry along the axes."""
    channels: Tensor | None = None
    """A factor for every channel, broadcast against the input: of several channels in a row, or several rows in one."""

    def remainder(
        self, x: Float[Tensor, "..."], gradient: Float[Tensor, "..."], remaining_axes: Sequence[int]
    ) -> Float[Tensor, "2 ..."] | None:
        """Return Σ ε/(s + ε) ⟨y, ∂L/∂y⟩ and the squares of its terms, over all rows but along some axes.

        Args:
            x: what was normalised.
            gradient: the gradient of the output.
            kept: axes that are not added up.

        Returns:
            Both sums in float64, with the kept axes after them; None if one of those is normalised over.
        """
        if set(remaining_axes) & set(self.axes):
            return None
        if self.channels is not None:
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * self.channels
        lead = [axis for axis in range(len(self.shape)) if axis not in self.axes]
        sizes = [self.shape[axis] for axis in lead]
        shape = prod(sizes), prod(self.shape[axis] for axis in self.axes)
        values, gradients = (
            tensor.reshape(self.shape).permute(*lead, *self.axes).reshape(shape) for tensor in (x, gradient)
        )
        gain = None if self.gain is None else self.gain.reshape(-1)
        result = self.row.remainder(values, gradients, gain).reshape(2, *sizes)
        others = [1 + index for index, axis in enumerate(lead) if axis not in remaining_axes]
        return result.sum(others, dtype=torch.float64) if others else result.to(torch.float64)


@runtime_checkable
class NormListener(Protocol):
    """A listener to which the norm functions of torch report their calls."""

    def note_call(self, x: Tensor, out: Tensor, norm: NormCall) -> None:
        """Handle a call of a norm, in whatever model."""
        ...


_LISTENERS = Listeners[NormListener]()


@contextmanager
def listen_to_norms(listener: NormListener) -> Iterator[None]:
    """Report the arguments of torch's norm functions to a listener."""
    _LISTENERS.begin(listener)
    try:
        for name, through in _THROUGH.items():
            _LISTENERS.replace(F, name, through)
        yield
    finally:
        _LISTENERS.end(listener)


def _tell(x: Tensor, out: Tensor, norm: NormCall) -> Tensor:
    for listener in _LISTENERS.now():
        listener.note_call(x, out, norm)
    return out


def over_last(
    x: Float[Tensor, "..."], count: int, gain: Float[Tensor, "..."] | None, eps: float, *, centred: bool
) -> NormCall:
    """Return a norm over the last `count` axes."""
    axes = tuple(range(x.ndim - count, x.ndim))
    return NormCall(tuple(x.shape), axes, RowNorm(epsilon=eps, centred=centred), gain=gain)


def _by_channel(x: Tensor, apart: Sequence[int], axes: Sequence[int], weight: Any, eps: float) -> NormCall:
    gain = None if weight is None else weight.reshape(1, -1, *(1,) * (x.ndim - 2))
    return NormCall(tuple(apart), tuple(axes), RowNorm(epsilon=eps, centred=True), channels=gain)


def _through_layer_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def layer_norm(
        input: Tensor,  # noqa: A002
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
    ) -> Tensor:
        out = original(input, normalized_shape, weight, bias, eps)
        return _tell(input, out, over_last(input, len(normalized_shape), weight, eps, centred=True))

    return layer_norm


def _through_rms_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rms_norm(
        input: Tensor,  # noqa: A002
        normalized_shape: Any,
        weight: Any = None,
        eps: float | None = None,
    ) -> Tensor:
        out = original(input, normalized_shape, weight, eps)
        used = torch.finfo(input.dtype).eps if eps is None else eps
        return _tell(input, out, over_last(input, len(normalized_shape), weight, used, centred=False))

    return rms_norm


def _through_group_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def group_norm(
        input: Tensor,  # noqa: A002
        num_groups: int,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
    ) -> Tensor:
        out = original(input, num_groups, weight, bias, eps)
        apart = (input.shape[0], num_groups, input.shape[1] // num_groups, *input.shape[2:])
        return _tell(input, out, _by_channel(input, apart, range(2, len(apart)), weight, eps))

    return group_norm


def _through_batch_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def batch_norm(
        input: Tensor,  # noqa: A002
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        out = original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        dims = [dim for dim in range(input.ndim) if dim != 1]
        return _tell(input, out, _by_channel(input, input.shape, dims, weight, eps))

    return batch_norm


_THROUGH: dict[str, Callable[[Any], Any]] = {
    "layer_norm": _through_layer_norm,
    "rms_norm": _through_rms_norm,
    "group_norm": _through_group_norm,
    "batch_norm": _through_batch_norm,
}
