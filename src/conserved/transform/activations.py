"""The sizes of what every weight is multiplied with, channel by channel, watched below autograd while a model runs.

No module class is known: whenever a parameter, or a part or transpose of one, enters a matrix product or a convolution,
the other operand is measured along the axis that is summed over. A statistic of a parameter has the parameter's number
of axes, and size one along those that it does not depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import TorchDispatchMode, schema_of, storage_key

STATISTICS = ("max", "mean")

ModelInput = Any
"""A tensor, a tuple of arguments, a dictionary of named ones, or a `Call`: what the model is called with."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Arguments and named arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ChannelSizes:
    """By parameter, the sizes of the channels it is multiplied with, as tensors that broadcast against it."""

    largest: dict[str, Tensor]
    """The largest absolute value of every channel."""
    mean: dict[str, Tensor]
    """The mean absolute value."""
    squares: dict[str, Tensor]
    """The mean square."""
    outputs: dict[str, tuple[int, ...]]
    """The axes of the parameter that are not summed over: one step of a quantiser for each place along them."""


class _Watch(TorchDispatchMode):
    """Measures the other operand of every product that a parameter enters."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._owners = {storage_key(p): (name, p) for name, p in parameters.items() if p.numel()}
        self.largest: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.outputs: dict[str, tuple[int, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = schema_of(func).name
        if name in ("aten::mm", "aten::bmm"):
            self._product(args[0], args[1])
        elif name in ("aten::addmm", "aten::baddbmm"):
            self._product(args[1], args[2])
        elif name == "aten::_grouped_mm":
            self._grouped(args[0], args[1], args[2] if len(args) > 2 else (kwargs or {}).get("offs"))
        elif name == "aten::convolution":
            self._convolution(args[0], args[1], transposed=bool(args[6]), groups=int(args[8]))
        return func(*args, **(kwargs or {}))

    def sizes(self) -> ChannelSizes:
        """Return what was measured."""
        counts = {name: count.clamp_min(1) for name, count in self.counts.items()}
        return ChannelSizes(
            largest=self.largest,
            mean={name: total / counts[name] for name, total in self.sums.items()},
            squares={name: total / counts[name] for name, total in self.squares.items()},
            outputs=self.outputs,
        )

    def _owner(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        owner = self._owners.get(storage_key(tensor))
        return owner if owner is not None and owner[1].is_contiguous() else None

    def _grouped(self, x: Tensor, weights: Tensor, ends: Tensor | None) -> None:
        """Note a grouped product: consecutive rows of x belong to one expert each, up to the offsets in `ends`."""
        if ends is None or x.ndim != 2 or weights.ndim != 3:
            self._product(x, weights)
            return
        first = 0
        for part, last in zip(weights, ends.tolist(), strict=True):
            if last > first:
                self._product(x[first:last], part)
            first = last

    def _product(self, a: Tensor, b: Tensor) -> None:
        for operand, other, axis in ((b, a.mT, -2), (a, b, -1)):
            owner = self._owner(operand)
            if owner is None or other.ndim < 2:
                continue
            values = other.detach()
            if values.ndim == 2 and operand.ndim == 3:
                values = values.expand(operand.shape[0], *values.shape)
            self._place(*owner, operand, axis, values)

    def _place(self, name: str, parameter: Tensor, part: Tensor, axis: int, values: Tensor) -> None:
        """Note the channels (…, n, samples) of the contracted axis of a part of a parameter in the part's places."""
        strides = {parameter.stride(d): d for d in range(parameter.ndim) if parameter.shape[d] > 1}
        axes = [strides.get(stride) for stride in part.stride()]
        contracted = axes[axis]
        batch = axes[0] if part.ndim == 3 else None
        if contracted is None or (part.ndim == 3 and part.shape[0] > 1 and batch is None):
            return
        retained_axes = [d for d in range(parameter.ndim) if d in (contracted, batch) or d not in axes]
        shape = [parameter.shape[d] if d in retained_axes else 1 for d in range(parameter.ndim)]
        offset = part.storage_offset() - parameter.storage_offset()
        index: list[Any] = []
        for d in range(parameter.ndim):
            first = offset // max(parameter.stride(d), 1) % parameter.shape[d]
            size = part.shape[axis] if d == contracted else part.shape[0] if d == batch else 1
            index.append(slice(first, first + size) if d in retained_axes else slice(None))
        if part.ndim == 3 and batch is not None and contracted < batch:
            values = values.transpose(0, 1)
        outputs = tuple(d for d in range(parameter.ndim) if d != contracted)
        self._note(name, shape, tuple(index), values, outputs, parameter.device)

    def _note(
        self, name: str, shape: list[int], index: Any, values: Tensor, outputs: tuple[int, ...], device: torch.device
    ) -> None:
        """Add samples, along the last axis of `values`, to the statistics at some places."""
        if name not in self.largest:
            tables = (self.largest, self.sums, self.squares, self.counts)
            for table in tables:
                table[name] = torch.zeros(shape, dtype=torch.float64, device=device)
            self.outputs[name] = outputs
        if list(self.largest[name].shape) != shape or self.outputs[name] != outputs or not values.shape[-1]:
            return
        sizes = values.abs().to(torch.float32 if values.dtype.itemsize < 4 else values.dtype)
        position = self.largest[name][index]
        position.copy_(torch.maximum(position, sizes.amax(-1).reshape(position.shape)))
        self.sums[name][index] += sizes.sum(-1, dtype=torch.float64).reshape(position.shape)
        self.squares[name][index] += sizes.square().sum(-1, dtype=torch.float64).reshape(position.shape)
        self.counts[name][index] += values.shape[-1]

    def _convolution(self, x: Tensor, weight: Tensor, *, transposed: bool, groups: int) -> None:
        owner = self._owner(weight)
        if owner is None or weight.shape != owner[1].shape or x.ndim != weight.ndim:
            return
        channels = x.detach().transpose(0, 1).flatten(1)
        ones = (1,) * (weight.ndim - 2)
        shape = [weight.shape[0], 1, *ones] if transposed else [1, channels.shape[0], *ones]
        if not transposed and groups > 1:
            each = weight.shape[0] // groups
            channels = channels.unflatten(0, (groups, -1)).repeat_interleave(each, 0)
            shape = [weight.shape[0], weight.shape[1], *ones]
        self._note(owner[0], shape, ..., channels, (1,) if transposed else (0,), weight.device)


def channel_sizes(model: nn.Module, batches: Iterable[ModelInput]) -> ChannelSizes:
    """Run a model, as it is and without gradients, and measure what every weight is multiplied with."""
    if isinstance(batches, Tensor | Mapping):
        raise ValueError("Expected a list of batches, got a single one. Put it in a list.")
    parameters = dict(model.named_parameters())
    sharded = next((name for name, parameter in parameters.items() if hasattr(parameter, "full_tensor")), None)
    if sharded is not None:
        raise ValueError(
            f"Expected a model that is not sharded, got {sharded} in shards. Measure activations on the whole model."
        )
    watch = _Watch(parameters)
    empty = True
    with torch.no_grad():
        for batch in batches:
            empty = False
            with watch:
                call_with(model, batch)
    if empty:
        raise ValueError("Expected at least one batch, got none. Pass batches to measure activations on.")
    return watch.sizes()


def activation_sizes(model: nn.Module, batches: Iterable[ModelInput], *, statistic: str = "max") -> dict[str, Tensor]:
    """Return the size of the activations that every weight is multiplied with, channel by channel.

    Args:
        model: a module; it is run as it is, without gradients.
        batches: batches to run it on: tensors, tuples of arguments, or dictionaries of named ones.
        statistic: "max" for the largest absolute value, as SmoothQuant takes it, or "mean" for the mean, as AWQ does.

    Returns:
        By parameter name, a tensor that broadcasts against the parameter.

    Raises:
        ValueError: there are no batches, the statistic is another word, or a parameter is sharded.
    """
    check_statistic(statistic)
    sizes = channel_sizes(model, batches)
    return sizes.largest if statistic == "max" else sizes.mean


def check_statistic(statistic: str) -> None:
    """Refuse names of statistics that there are not."""
    if statistic not in STATISTICS:
        raise ValueError(f'Expected statistic to be "max" or "mean", got {statistic!r}. Pass one of them.')


def as_call(batch: ModelInput) -> Call:
    """Return the arguments that a batch stands for."""
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, Mapping):
        return Call((), batch)
    return Call(tuple(batch) if isinstance(batch, tuple | list) else (batch,))


def call_with(model: nn.Module, batch: ModelInput) -> Any:
    """Call a model with one batch."""
    call = as_call(batch)
    return model(*call.args, **call.kwargs)
