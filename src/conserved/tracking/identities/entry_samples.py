"""Entries of many tensors at once: every entry of a small model, a moving comb through the tensors of a large one.

A model has hundreds of tensors, and a call of torch takes microseconds whatever its size. So views of what is read
twice are made once, and sums and maxima of all tensors are one call each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from conserved.symmetry.view import local

ENTRIES = {"cpu": 1 << 13}
MOST_ENTRIES = 1 << 15
"""Entries that are read of all tensors together in one step, by device: on a processor each takes its time, on others
the launch of a kernel does."""

LEAST = 64
"""Entries that are read of a tensor at least, if it has as many."""


class EntrySample:
    """The entries of some tensors that are read in one step: `offset::stride` of each, in the order of its elements.

    Args:
        tensors: the tensors.
        strides: of each, the distance of entries that are read.
        counts: of each, how many entries this process holds.
        number: the number of the step, which moves the comb, so that all entries have their turn.
    """

    def __init__(self, tensors: Sequence[Tensor], strides: Sequence[int], counts: Sequence[int], number: int) -> None:
        self.tensors, self.number = tuple(tensors), number
        self._strides, self._counts = tuple(strides), tuple(counts)
        self.sizes = tuple(
            -(-(count - number % stride) // stride) if count > number % stride else 0
            for count, stride in zip(counts, strides, strict=True)
        )
        """How many entries of each are read."""
        self._views: tuple[list[Tensor], list[int]] | None = None
        """Views of the tensors' own entries, and where the tensors were when they were made."""

    @staticmethod
    def of(tensors: Sequence[Tensor], number: int, entries: int | None = None) -> EntrySample:
        """Spread a number of entries over tensors by their size."""
        if entries is None:
            entries = ENTRIES.get(tensors[0].device.type, MOST_ENTRIES) if tensors else 0
        counts = [_own(tensor).numel() for tensor in tensors]
        share = entries / max(sum(counts), 1)
        strides = [1 if share >= 1 else max(1, math.ceil(count / max(LEAST, int(count * share)))) for count in counts]
        return EntrySample(tensors, strides, counts, number)

    def part(self, indices: Sequence[int]) -> EntrySample:
        """Return the same entries of some of the tensors."""
        tensors = [self.tensors[i] for i in indices]
        strides, counts = ([values[i] for i in indices] for values in (self._strides, self._counts))
        return EntrySample(tensors, strides, counts, self.number)

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are still the tensors, of the sizes they had."""
        return len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors, strict=True))

    def read(self, values: Sequence[Tensor] | None = None) -> Tensor:
        """Return the sampled entries of tensors of the same shapes, one after the other, in float64."""
        if values is None:
            return join(self._own_views())
        return join(self._slice([_own(value) for value in values]))

    def _own_views(self) -> list[Tensor]:
        """Return the entries of the sample's tensors, as views where that is possible."""
        values = [_own(tensor) for tensor in self.tensors]
        indices = [value.data_ptr() for value in values]
        # Steps write in place, so that views of before a step show what is there after it.
        if self._views is None or self._views[1] != indices:
            views = self._slice(values)
            if not all(value.is_contiguous() for value in values):
                return views
            self._views = (views, indices)
        return self._views[0]

    def _slice(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [
            _entries(value, self.number % stride, stride) for value, stride in zip(values, self._strides, strict=True)
        ]

    def per_tensor(self, entries: Tensor) -> tuple[Tensor, ...]:
        """Split sampled entries by tensor."""
        return entries.split(self.sizes)

    def spread(self, numbers: Tensor) -> Tensor:
        """Repeat one number of each tensor for all of its entries."""
        return numbers[self._groups]

    def largest(self, entries: Tensor) -> Tensor:
        """Return the largest magnitude of each tensor's entries; 0 where there are none."""
        largest = torch.zeros(len(self.sizes), dtype=entries.dtype, device=entries.device)
        return largest.scatter_reduce(0, self._groups, entries.abs(), "amax")

    def sums(self, entries: Tensor) -> Tensor:
        """Return the sum of each tensor's entries, for every row of `entries`."""
        total = torch.zeros(*entries.shape[:-1], len(self.sizes), dtype=entries.dtype, device=entries.device)
        return total.index_add_(-1, self._groups, entries)

    @cached_property
    def _groups(self) -> Tensor:
        """The place of each entry's tensor."""
        device = self.tensors[0].device if self.tensors else None
        sizes = torch.tensor(self.sizes, device=device)
        return torch.arange(len(self.sizes), device=device).repeat_interleave(sizes, output_size=sum(self.sizes))


def all_sampled(tensors: Sequence[Tensor]) -> bool:
    """Return whether a sample of these tensors has all of their entries."""
    most = ENTRIES.get(tensors[0].device.type, MOST_ENTRIES) if tensors else 0
    return sum(_own(tensor).numel() for tensor in tensors) <= most


def join(parts: Sequence[Tensor]) -> Tensor:
    """Join vectors of any type into one of float64; each type is converted once."""
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    if all(part.dtype == parts[0].dtype for part in parts):
        return torch.cat(list(parts)).double()
    device = parts[0].device
    return torch.cat([part.double().to(device) for part in parts])


def _own(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds; `local` without a copy of what is dense already."""
    return local(tensor) if tensor.is_sparse or hasattr(tensor, "to_local") else tensor


def _entries(values: Tensor, offset: int, stride: int) -> Tensor:
    """Return every `stride`-th entry in the order of elements, without copying the tensor."""
    values = values.detach()
    if values.is_contiguous():
        flat = values.view(-1)
        return flat if stride == 1 else flat[offset::stride]
    if stride == 1:
        return values.reshape(-1)
    index = torch.arange(offset, values.numel(), stride, device=values.device)
    return values[torch.unravel_index(index, values.shape)]
