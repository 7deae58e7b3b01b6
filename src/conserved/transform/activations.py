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
from torch.utils._python_dispatch import TorchDispatchMode

Batch = Any
"""A tensor, a tuple of arguments, a dictionary of named ones, or a `Call`: what the model is called with."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Arguments and named arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class _Watch(TorchDispatchMode):
    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._owners = {p.untyped_storage()._cdata: (name, p) for name, p in parameters.items() if p.numel()}
        self.largest: dict[str, Tensor] = {}
        self.total: dict[str, Tensor] = {}
        self.count: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::mm", "aten::bmm"):
            self._product(args[0], args[1])
        elif name in ("aten::addmm", "aten::baddbmm"):
            self._product(args[1], args[2])
        elif name == "aten::_grouped_mm":
            self._product(args[0], args[1])
        elif name == "aten::convolution":
            self._convolution(args[0], args[1], transposed=bool(args[6]), groups=int(args[8]))
        return func(*args, **(kwargs or {}))

    def _owner(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        found = self._owners.get(tensor.untyped_storage()._cdata)
        return found if found is not None and found[1].is_contiguous() else None

    def _product(self, a: Tensor, b: Tensor) -> None:
        for operand, other, axis in ((b, a.mT, -2), (a, b, -1)):
            owner = self._owner(operand)
            if owner is None or other.ndim < 2:
                continue
            sizes = other.detach().abs()
            if sizes.ndim == 2 and operand.ndim == 3:
                sizes = sizes.expand(operand.shape[0], *sizes.shape)
            self._note(*owner, operand, axis, sizes.amax(-1), sizes.mean(-1, dtype=torch.float64))

    def _note(self, name: str, whole: Tensor, part: Tensor, axis: int, largest: Tensor, mean: Tensor) -> None:
        """Write statistics of the contracted axis of a part of a parameter to the places of that part."""
        strides = {whole.stride(d): d for d in range(whole.ndim) if whole.shape[d] > 1}
        axes = [strides.get(stride) for stride in part.stride()]
        contracted = axes[axis]
        batch = axes[0] if part.ndim == 3 else None
        if contracted is None or (part.ndim == 3 and part.shape[0] > 1 and batch is None):
            return
        kept = [d for d in range(whole.ndim) if d in (contracted, batch) or d not in axes]
        shape = [whole.shape[d] if d in kept else 1 for d in range(whole.ndim)]
        if name not in self.largest:
            self.largest[name] = torch.zeros(shape, dtype=torch.float64, device=whole.device)
            self.total[name], self.count[name] = torch.zeros_like(self.largest[name]), 0.0
        if list(self.largest[name].shape) != shape:
            return
        offset = part.storage_offset() - whole.storage_offset()
        index: list[Any] = []
        for d in range(whole.ndim):
            first = offset // max(whole.stride(d), 1) % whole.shape[d]
            size = part.shape[axis] if d == contracted else part.shape[0] if d == batch else 1
            index.append(slice(first, first + size) if d in kept else slice(None))
        place = self.largest[name][tuple(index)]
        values = largest.to(torch.float64)
        if part.ndim == 3 and batch is not None and contracted < batch:
            values, mean = values.mT, mean.mT
        place.copy_(torch.maximum(place, values.reshape(place.shape)))
        self.total[name][tuple(index)] += mean.reshape(place.shape)
        self.count[name] += 1

    def _convolution(self, x: Tensor, weight: Tensor, *, transposed: bool, groups: int) -> None:
        owner = self._owner(weight)
        if owner is None or weight.shape != owner[1].shape or x.ndim != weight.ndim:
            return
        name = owner[0]
        sizes = x.detach().abs().transpose(0, 1).flatten(1)
        largest, mean = sizes.amax(1).to(torch.float64), sizes.mean(1, dtype=torch.float64)
        ones = (1,) * (weight.ndim - 2)
        if transposed:
            shape: tuple[int, ...] = (weight.shape[0], 1, *ones)
            values = [one.reshape(shape) for one in (largest, mean)]
        elif groups == 1:
            values = [one.reshape(1, -1, *ones) for one in (largest, mean)]
        else:
            each = weight.shape[0] // groups
            values = [
                one.reshape(groups, -1).repeat_interleave(each, 0).reshape(weight.shape[0], weight.shape[1], *ones)
                for one in (largest, mean)
            ]
        if name in self.largest:
            self.largest[name] = torch.maximum(self.largest[name], values[0])
            self.total[name] += values[1]
        else:
            self.largest[name], self.total[name] = values
        self.count[name] = self.count.get(name, 0.0) + 1


def activation_sizes(model: nn.Module, batches: Iterable[Batch], *, statistic: str = "max") -> dict[str, Tensor]:
    """For every weight the largest ("max") or mean absolute value ("mean") of what it is multiplied with, by channel.

    Args:
        model: a module; it is run as it is, without gradients.
        batches: what to run it on: tensors, tuples of arguments, or dictionaries of named ones.
        statistic: "max", as SmoothQuant takes it, or "mean", as AWQ does.

    Returns:
        By parameter name, a tensor that broadcasts against the parameter.

    """
    if statistic not in ("max", "mean"):
        raise ValueError(f'statistic is "max" or "mean"; got {statistic!r}.')
    watch = _Watch(dict(model.named_parameters()))
    empty = True
    with torch.no_grad():
        for batch in batches:
            empty = False
            with watch:
                run(model, batch)
    if empty:
        raise ValueError("There are no batches to measure activations on.")
    if statistic == "max":
        return watch.largest
    return {name: total / watch.count[name] for name, total in watch.total.items()}


def run(model: nn.Module, batch: Batch) -> Any:
    """Call a model with one batch."""
    if isinstance(batch, Call):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
