"""Entries of many tensors at once: every entry of a small model, a moving comb through the tensors of a large one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conserved.symmetry.view import local

ENTRIES = 1 << 15
"""Entries that are read of all tensors together in one step."""

LEAST = 64
"""Entries that are read of a tensor at least, if it has as many."""


@dataclass(frozen=True, slots=True, eq=False)
class EntrySample:
    """Which entries of some tensors are read in one step: `offset::stride` of each, in the order of its elements."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    """How many entries of each."""
    number: int
    """The number of the step: it moves the comb, so that all entries have their turn."""

    @staticmethod
    def of(tensors: Sequence[Tensor], number: int, entries: int = ENTRIES) -> EntrySample:
        """Spread a number of entries over tensors by their size."""
        counts = [local(tensor).numel() for tensor in tensors]
        share = entries / max(sum(counts), 1)
        strides = tuple(
            1 if share >= 1 else max(1, math.ceil(count / max(LEAST, int(count * share)))) for count in counts
        )
        sizes = tuple(
            -(-(count - number % stride) // stride) if count > number % stride else 0
            for count, stride in zip(counts, strides, strict=True)
        )
        return EntrySample(tuple(tensors), strides, sizes, number)

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are still the tensors, of the sizes they had."""
        return len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors, strict=True))

    def read(self, values: Sequence[Tensor] | None = None) -> Tensor:
        """Return the sampled entries of tensors of the same shapes, one after the other, in float64."""
        parts = [
            _entries(local(tensor.detach()), self.number % stride, stride)
            for tensor, stride in zip(self.tensors if values is None else values, self.strides, strict=True)
        ]
        return join(parts)

    def per_tensor(self, entries: Tensor) -> tuple[Tensor, ...]:
        """Split sampled entries by tensor."""
        return entries.split(self.sizes)

    def spread(self, numbers: Tensor) -> Tensor:
        """Repeat one number of each tensor for all of its entries."""
        return numbers.repeat_interleave(torch.tensor(self.sizes, device=numbers.device))


def join(parts: Sequence[Tensor]) -> Tensor:
    """Join vectors of any type into one of float64; each type is converted once."""
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    if all(part.dtype == parts[0].dtype for part in parts):
        return torch.cat(list(parts)).double()
    device = parts[0].device
    return torch.cat([part.double().to(device) for part in parts])


def largest_by_tensor(entries: Tensor, sample: EntrySample) -> Tensor:
    """Return the largest magnitude of each tensor's sampled entries; 0 where there are none."""
    groups = torch.arange(len(sample.sizes), device=entries.device).repeat_interleave(
        torch.tensor(sample.sizes, device=entries.device)
    )
    largest = torch.zeros(len(sample.sizes), dtype=entries.dtype, device=entries.device)
    return largest.scatter_reduce(0, groups, entries.abs(), "amax")


def _entries(values: Tensor, offset: int, stride: int) -> Tensor:
    """Return every `stride`-th entry in the order of elements, without copying the tensor."""
    if values.is_contiguous():
        return values.view(-1)[offset::stride]
    if stride == 1:
        return values.reshape(-1)
    index = torch.arange(offset, values.numel(), stride, device=values.device)
    return values[torch.unravel_index(index, values.shape)]
