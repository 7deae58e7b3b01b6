"""A copy of a model without values that has made-up ones."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import buffers_of, parameters_of


def materialize(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model whose parameters have no values here, on the meta device or sharded, with random ones.

    None if it holds integers without values: what they index cannot be made up.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_meta]
    if any(not buffer.is_floating_point() for buffer in buffers):
        return None
    # Sharded models come as a copy already, whose attributes may refer to processes and cannot be copied.
    result = model if any(map(is_sharded, model.parameters())) else copy.deepcopy(model)
    filled: dict[int, Tensor] = {}
    for module in result.modules():
        tables: tuple[MutableMapping[str, Any], ...] = (parameters_of(module), buffers_of(module))
        for kind in tables:
            for name, tensor in kind.items():
                if tensor is None or not (tensor.is_meta or is_sharded(tensor)):
                    continue
                if id(tensor) not in filled:
                    value = draw_values(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
                    if isinstance(tensor, nn.Parameter):
                        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                    filled[id(tensor)] = value
                kind[name] = filled[id(tensor)]
    return result


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "full_tensor")


def draw_values(tensor: Tensor) -> Tensor:
    """Return a tensor without values with random ones; zeros and ones if it holds integers.

    Others are left as they are.
    """
    if not tensor.is_meta:
        return tensor
    generator = torch.Generator().manual_seed(tensor.numel())
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, generator=generator).to(tensor.dtype) - 0.5
    return torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype)
