"""Gradients under DeepSpeed's ZeRO-1 and ZeRO-2, of which every process holds a range of the joined tensor.

Parameters are whole on every process. Right before the inner optimizer steps, the fp32 copy of a process's range has
the reduced gradient of that range, clipped by one factor; before and after that, nothing has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_LINKED = "_hp_mapping"
"""The attribute by which ZeRO-1 and ZeRO-2 link a parameter to the fp32 copy of its range."""


def is_linked(parameters: Iterable[Tensor]) -> bool:
    """Return whether ZeRO-1 or ZeRO-2 keeps fp32 copies of parameters."""
    return any(hasattr(parameter, _LINKED) for parameter in parameters)


def is_partitioned(parameters: Iterable[Tensor]) -> bool:
    """Return whether ZeRO-3 cut parameters, whose modules fetch them from other processes whenever they run."""
    return any(hasattr(parameter, "ds_tensor") for parameter in parameters)


def joined_gradients(engine: nn.Module | None, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return gradients put together from the ranges of all processes, and the bytes sent.

    Args:
        engine: DeepSpeed's engine around the model; every process of its data-parallel group has to call this.
        parameters: parameters by name.

    Returns:
        By name; empty if some group of parameters has no gradient now, because groups are stepped one after the other.
    """
    optimizer: Any = getattr(engine, "optimizer", None)
    ranges = getattr(optimizer, "single_partition_of_fp32_groups", None) or ()
    if not ranges or any(own.grad is None for own in ranges):
        return {}, 0
    names = {id(parameter): name for name, parameter in parameters.items()}
    gradients: dict[str, Tensor] = {}
    moved = 0
    members = zip(ranges, optimizer.round_robin_bit16_groups, optimizer.real_dp_process_group, strict=True)
    for own, joined, group in members:
        shard = own.grad.detach().contiguous()
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, shard, group=group)
        moved += (len(parts) - 1) * shard.numel() * shard.element_size()
        pieces = torch.cat(parts)[: sum(p.numel() for p in joined)].split([p.numel() for p in joined])
        for parameter, piece in zip(joined, pieces, strict=True):
            if id(parameter) in names:
                gradients[names[id(parameter)]] = piece.view(parameter.shape)
    return gradients, moved
