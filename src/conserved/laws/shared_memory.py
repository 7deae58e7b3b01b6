"""Tensors that share memory though they are several: tied through `.data`, or one a slice of another.

Two parameters with one memory have two names and two gradients, and every step moves both. What a parameter's name
and identity say is then not enough; where its numbers lie is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_LISTED = 1 << 22
"""Entries up to which interleaved tensors are compared entry by entry; larger ones count as overlapping."""


def shared_among(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the trained parameters that have entries in common with others, or with themselves.

    A step moves these twice.
    """
    trained = {name: parameter.detach() for name, parameter in parameters.items() if parameter.requires_grad}
    among = overlapping(trained)
    return [name for name, parameter in trained.items() if name in among or overlaps_itself(parameter)]


def overlapping(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, for every tensor that shares an entry with another, the other's name. One object is never two tensors."""
    placed = [(start, end, name) for name, tensor in tensors.items() for start, end in _extent(tensor)]
    result: dict[str, str] = {}
    reach: list[tuple[int, int, str]] = []
    for start, end, name in sorted(placed):
        reach = [interval for interval in reach if interval[1] > start]
        for *_, other in reach:
            if tensors[other] is not tensors[name] and _share(tensors[other], tensors[name]):
                result.setdefault(name, other)
                result.setdefault(other, name)
        reach.append((start, end, name))
    return result


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two entries of a tensor lie in one place, as after `expand` or `as_strided`.

    Axes sorted by stride do not overlap if each step goes beyond everything the smaller ones reach. Where that fails,
    addresses decide; a tensor too large for that counts as overlapping.
    """
    if not _extent(tensor):
        return False
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(local.shape, local.stride(), strict=True) if n > 1):
        if stride <= reach:
            return local.numel() > _LISTED or len(np.unique(_addresses(local))) < local.numel()
        reach += stride * (size - 1)
    return False


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of a model, once: parameters, buffers, and tensors that are plain attributes."""
    result: dict[str, Tensor] = dict(model.named_parameters())
    seen = {id(tensor) for tensor in result.values()}
    for path, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        for name, tensor in (*module.named_buffers(recurse=False), *attributes.items()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                result[f"{path}.{name}" if path else name] = tensor
    return result


def memory_of(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors of the same numbers: one object, or several tied through `.data`."""
    extent = _extent(tensor)
    return (*extent, tuple(tensor.shape), tensor.stride(), tensor.dtype) if extent else id(tensor)


def _extent(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the bytes from a tensor's first entry to its last.

    The result is None where a tensor has no memory of its own that can be seen.
    """
    if is_lazy(tensor) or tensor.is_meta or tensor.is_sparse or not tensor.numel():
        return []
    try:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        start = local.data_ptr()
    except (RuntimeError, NotImplementedError):
        return []
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return [(start, start + (last + 1) * local.element_size())] if start else []


def _share(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors whose extents overlap have an entry in common."""
    if _is_filled(a) and _is_filled(b):
        return True
    if a.element_size() != b.element_size() or max(a.numel(), b.numel()) > _LISTED:
        return True
    return bool(np.isin(_addresses(a), _addresses(b)).any())


def _is_filled(tensor: Tensor) -> bool:
    """Return whether a tensor has no gaps."""
    (extent,) = _extent(tensor)
    return extent[1] - extent[0] == prod(tensor.shape) * tensor.element_size()


def _addresses(tensor: Tensor) -> NDArray[np.int64]:
    addresses = np.full((1,) * max(tensor.ndim, 1), tensor.data_ptr(), dtype=np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = np.arange(size, dtype=np.int64) * stride * tensor.element_size()
        addresses = addresses + steps.reshape([-1 if index == axis else 1 for index in range(tensor.ndim)])
    return addresses.ravel()
