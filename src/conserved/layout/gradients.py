"""The gradients of a step wherever a stack keeps them: `.grad`, Megatron's `main_grad`, or shards of its buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conserved.layout.deepspeed import is_linked, joined_gradients
from conserved.layout.flat_shards import FlatShard


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient that an optimizer will use, as this process holds it.

    Megatron's data parallelism adds `.grad` to `main_grad` in the backward pass and leaves at most a placeholder.
    """
    if isinstance(parameter, FlatShard):
        return parameter.gradient()
    main_gradient = getattr(parameter, "main_grad", None)
    return main_gradient if isinstance(main_gradient, Tensor) else parameter.grad


def reduced_gradients(wrapper: nn.Module | None, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return gradients of which this process holds a reduced shard only, put together, and the bytes sent.

    Megatron's distributed optimizer reduces and scatters gradients: in the buffer of a process its own shard is right,
    and the rest is what the process computed itself. Every process of the data-parallel group has to call it.

    Args:
        wrapper: the data-parallel module around the model.
        parameters: parameters by name.

    Returns:
        By name, whole gradients of parameters in such buffers; empty if there are none.
    """
    if is_linked(parameters.values()):
        return joined_gradients(wrapper, parameters)
    names = {id(parameter): name for name, parameter in parameters.items()}
    gradients: dict[str, Tensor] = {}
    moved = 0
    for buffer, bucket, group in _scattered_buckets(wrapper):
        size = dist.get_world_size(group)
        shard = bucket.grad_data.detach().chunk(size)[dist.get_rank(group)].contiguous()
        parts = [torch.empty_like(shard) for _ in range(size)]
        dist.all_gather(parts, shard, group=group)
        moved += (size - 1) * shard.numel() * shard.element_size()
        flat = torch.cat(parts)
        for parameter in bucket.params:
            name = names.get(id(parameter))
            if name is not None:
                start, end, _ = buffer.param_index_map[parameter]
                gradients[name] = flat[start - bucket.offset : end - bucket.offset].view(parameter.shape)
    return gradients, moved


def scatters_gradients(wrapper: nn.Module | None) -> bool:
    """Return whether a wrapper leaves each process with a shard of the reduced gradients."""
    return next(_scattered_buckets(wrapper), None) is not None


def owned_ranges(wrapper: nn.Module | None, parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return for every parameter the entries of whose gradient this process holds the reduced value.

    Args:
        wrapper: the data-parallel module around the model.
        parameters: parameters of the model.

    Returns:
        First entry and end of the flat gradient; all of it where gradients are not scattered.
    """
    ranges = {id(parameter): (0, parameter.numel()) for parameter in parameters}
    for buffer, bucket, group in _scattered_buckets(wrapper):
        size = bucket.grad_data.numel() // dist.get_world_size(group)
        first = bucket.offset + size * dist.get_rank(group)
        for parameter in bucket.params:
            if id(parameter) in ranges:
                start, end, _ = buffer.param_index_map[parameter]
                begin = min(max(first, start), end)
                ranges[id(parameter)] = (begin - start, max(begin, min(first + size, end)) - start)
    return [ranges[id(parameter)] for parameter in parameters]


def _scattered_buckets(wrapper: nn.Module | None) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the buffer, the bucket and the process group of gradients that are scattered, in the order of the model."""
    if wrapper is None:
        return
    # Virtual stages of a pipeline are a list of models, each in a wrapper of its own.
    for module in wrapper.modules():
        if getattr(getattr(module, "ddp_config", None), "use_distributed_optimizer", False):
            yield from _buckets_of(module)


def _buckets_of(wrapper: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    groups = {
        id(bucket): getattr(collected, "intra_distributed_optimizer_instance_group", None)
        for word in ("bucket_groups", "expert_parallel_bucket_groups")
        for collected in getattr(wrapper, word, ())
        for bucket in collected.buckets
    }
    for word in ("buffers", "expert_parallel_buffers"):
        buffers = getattr(wrapper, word, ())
        # `buffers` of a plain module is a method.
        for buffer in buffers if isinstance(buffers, list | tuple) else ():
            for bucket in buffer.buckets:
                group = groups.get(id(bucket))
                if group is not None and dist.get_world_size(group) > 1:
                    yield buffer, bucket, group
