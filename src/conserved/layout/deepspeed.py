"""Parameters and gradients under DeepSpeed's ZeRO, of which every process holds ranges of flattened entries.

Under ZeRO-1 and ZeRO-2 parameters are whole on every process. Right before the inner optimizer steps, the fp32 copy of
a process's range has the reduced gradient of that range, clipped by one factor; before and after that, nothing has.
Under ZeRO-3 every parameter is cut by itself into equal ranges of its flattened entries, the last of which is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionedParameter:
    """A parameter that ZeRO-3 cut, of which this process keeps a range of the flattened entries."""

    module: nn.Module
    attribute: str
    parameter: Any
    """The parameter itself, which is empty while no module needs it."""

    @property
    def group(self) -> Any:
        """The processes among which it is cut."""
        return self.parameter.ds_process_group

    def counts(self) -> tuple[int, ...]:
        """Return the number of entries on each process, without padding."""
        length, entries = int(self.parameter.ds_tensor.ds_numel), int(self.parameter.ds_numel)
        return tuple(max(0, min(length, entries - rank * length)) for rank in range(dist.get_world_size(self.group)))

    def piece(self) -> Tensor:
        """Return the entries of this process."""
        own: Tensor = self.parameter.ds_tensor.data
        return own[: self._own_count()]

    def gradient(self) -> Tensor | None:
        """Return the reduced gradient of these entries, up to one factor of all gradients; None before there is one."""
        optimizer = getattr(self.parameter, "_z3_optimizer", None)
        if optimizer is None or not self.parameter.requires_grad:
            return None
        group, start, count = optimizer.grad_position[optimizer.get_param_id(self.parameter)]
        flat = optimizer.fp32_partitioned_groups_flat[group].grad
        # Groups are prepared one after the other: of several, the others still have gradients that are not scaled.
        if flat is not None and (len(optimizer.fp32_partitioned_groups_flat) == 1 or optimizer.offload_optimizer):
            return flat.narrow(0, start, count)[: self._own_count()]
        partition: Tensor | None = getattr(optimizer, _PARTITIONS, {}).get(self.parameter.ds_id)
        return None if partition is None else partition.flatten()[: self._own_count()]

    def _own_count(self) -> int:
        return self.counts()[dist.get_rank(self.group)]


_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""The attribute under which ZeRO-3 keeps reduced gradients of this process's ranges."""


def partitioned_parameters(model: nn.Module) -> Iterator[PartitionedParameter]:
    """Yield the parameters that ZeRO-3 cut, wherever a module has them; a tied one comes more than once."""
    for module in model.modules():
        # The table of ZeRO-3 fetches a parameter that is asked for by name.
        for attribute, parameter in module._parameters.items():
            if parameter is not None and hasattr(parameter, "ds_tensor"):
                yield PartitionedParameter(module=module, attribute=attribute, parameter=parameter)


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
