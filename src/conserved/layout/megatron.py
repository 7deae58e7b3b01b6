"""The layout that Megatron Core writes on parameters as attributes, and the groups of its `parallel_state`.

| attribute | meaning |
|---|---|
| `tensor_model_parallel`, `partition_dim`, `partition_stride` | cut over the tensor-parallel group along that axis |
| `allreduce = False` | an expert: other processes of the expert group hold other experts |
| `sequence_parallel` | replicated, and each process's gradient is the part of its own tokens |

A model need not be Megatron's to carry these attributes. Its groups are then the `tp_group` of the module that owns the
parameter, or all processes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from conserved.boundary import Boundary
from conserved.layout.groups import RankGroup, whole_world
from conserved.layout.table import ParameterLayout, PieceCut

_ATTRIBUTES = ("tensor_model_parallel", "sequence_parallel", "allreduce")
"""Attributes that a parameter of such a stack has at least one of somewhere in the model."""


def carries_attributes(parameters: Mapping[str, Tensor]) -> bool:
    """Return whether some parameter says in Megatron's words how it is laid out."""
    return any(hasattr(parameter, word) for parameter in parameters.values() for word in _ATTRIBUTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """The groups that attributes refer to; None where there is one process."""

    tensor: RankGroup | None = None
    data: RankGroup | None = None
    expert: RankGroup | None = None
    expert_tensor: RankGroup | None = None
    expert_data: RankGroup | None = None

    @staticmethod
    def current() -> ParallelGroups:
        """Return the groups of Megatron's parallel state; without one, all processes are tensor parallel."""
        state = sys.modules.get("megatron.core.parallel_state")
        if state is None or not state.model_parallel_is_initialized():
            return ParallelGroups(tensor=whole_world())
        tensor = RankGroup.of("tensor parallel", state.get_tensor_model_parallel_group())
        data = RankGroup.of("data parallel", state.get_data_parallel_group(with_context_parallel=True))
        return ParallelGroups(
            tensor=tensor,
            data=data,
            expert=_group(state, "expert parallel", "get_expert_model_parallel_group"),
            expert_tensor=_group(state, "expert tensor parallel", "get_expert_tensor_parallel_group"),
            expert_data=_group(state, "expert data parallel", "get_expert_data_parallel_group"),
        )


def _group(state: Any, name: str, getter: str) -> RankGroup | None:
    """Return a group that older releases may not have, and that some processes are not in."""
    get: Callable[..., Any] | None = getattr(state, getter, None)
    if get is None:
        return None
    if "check_initialized" in inspect.signature(get).parameters:
        return RankGroup.of(name, get(check_initialized=False))
    try:
        return RankGroup.of(name, get())
    except AssertionError:
        # Releases before 0.13 assert that there is a group.
        return None


def stage_ranks() -> tuple[int, ...]:
    """Return the ranks of this process's stage of a pipeline; empty without a pipeline.

    A stage runs its first pass when the one before has sent its activations: stages cannot wait for each other there.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return ()
    stages = state.get_pipeline_model_parallel_world_size()
    if stages < 2:
        return ()
    # In Megatron's default order of ranks, stages are the outermost dimension.
    size = dist.get_world_size() // stages
    first = dist.get_rank() // size * size
    ranks = tuple(range(first, first + size))
    groups = ParallelGroups.current()
    others = {rank for group in (groups.tensor, groups.data) if group is not None for rank in group.ranks}
    return ranks if others <= set(ranks) else (dist.get_rank(),)


def is_shared_with_stages(parameter: Tensor) -> bool:
    """Return whether a parameter is the table that the first and the last stage of a pipeline share."""
    marked = getattr(parameter, "shared_embedding", False) or getattr(parameter, "shared", False)
    return bool(marked) and bool(stage_ranks())


@dataclass(frozen=True, slots=True)
class SharedTableRanks:
    """Processes of the two stages that share a table, in the same order."""

    first: tuple[int, ...]
    last: tuple[int, ...]


def shared_table_ranks() -> SharedTableRanks | None:
    """Return the data-parallel processes that hold this process's part of a shared table, on both stages.

    Returns:
        None without a pipeline, and on stages between the first and the last.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not stage_ranks():
        return None
    group = _group(state, "embedding", "get_embedding_group")
    if group is None or dist.get_rank() not in (group.ranks[0], group.ranks[-1]):
        return None
    data = ParallelGroups.current().data
    ranks = (dist.get_rank(),) if data is None else data.ranks
    # Stages are laid out alike: from one stage to the other all ranks differ by the same number.
    shift = group.ranks[-1] - group.ranks[0]
    if dist.get_rank() == group.ranks[0]:
        return SharedTableRanks(ranks, tuple(rank + shift for rank in ranks))
    return SharedTableRanks(tuple(rank - shift for rank in ranks), ranks)


def megatron_layout(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, ParameterLayout]:
    """Return the layout of parameters that carry Megatron's attributes, or stand beside such."""
    groups = ParallelGroups.current()
    unmarked = [n for n, p in parameters.items() if not getattr(p, "tensor_model_parallel", False)]
    sharded = _axes_of_checkpoint(model, parameters, unmarked) if groups.tensor is not None else {}
    owners = _owners(model)
    return {
        name: _parameter_layout(parameter, groups, owners.get(id(parameter), ParameterOwner()), sharded.get(name))
        for name, parameter in parameters.items()
    }


@dataclass(frozen=True, slots=True)
class ParameterOwner:
    """Attributes of the module that owns a parameter."""

    tensor: RankGroup | None = None
    """The tensor-parallel group that it names; None for one of a single process."""
    names_group: bool = False
    expert: bool = False


def _parameter_layout(
    parameter: Tensor, groups: ParallelGroups, owner: ParameterOwner, axis: int | None
) -> ParameterLayout:
    # Without expert parallelism, releases mark experts as reduced over all data-parallel processes, which is right
    # only if experts are cut as everything else is (Megatron-LM #5916). The module knows better.
    expert = owner.expert or not getattr(parameter, "allreduce", True)
    tensor = groups.expert_tensor if expert else groups.tensor
    if owner.names_group and (owner.tensor is not None or expert):
        tensor = owner.tensor
    data = groups.expert_data if expert else groups.data
    cuts: tuple[PieceCut, ...] = ()
    replicated = [data]
    if tensor is not None and (axis is not None or getattr(parameter, "tensor_model_parallel", False)):
        # State-space layers mark parameters without an axis: they have one entry, or one row, per local head.
        marked = max(0, int(getattr(parameter, "partition_dim", 0)))
        stride = max(1, int(getattr(parameter, "partition_stride", 1)))
        cuts = (PieceCut(tensor, marked if axis is None else axis, stride),)
    else:
        replicated.append(tensor)
    own = (groups.expert,) if expert and groups.expert is not None else ()
    partial = tensor is not None and not cuts and bool(getattr(parameter, "sequence_parallel", False))
    return ParameterLayout(
        cuts=cuts,
        replicated=tuple(dict.fromkeys(group for group in replicated if group is not None)),
        partial=(tensor,) if partial and tensor is not None else (),
        own=own,
    )


def _owners(model: nn.Module) -> dict[int, ParameterOwner]:
    """Return what the module that owns each parameter says about it, by the identity of the parameter."""
    owners: dict[int, ParameterOwner] = {}
    for module in model.modules():
        handle, expert = vars(module).get("tp_group"), bool(vars(module).get("is_expert", False))
        if handle is not None or expert:
            group = None if handle is None else RankGroup.of("tensor parallel", handle)
            owner = ParameterOwner(group, names_group=handle is not None, expert=expert)
            owners |= {id(parameter): owner for parameter in module.parameters(recurse=False)}
    return owners


def _axes_of_checkpoint(model: nn.Module, parameters: Mapping[str, Tensor], names: list[str]) -> dict[str, int]:
    """Return axes of parameters that checkpoints cut though no attribute says so, as learnable attention sinks.

    A module's own `sharded_state_dict` states the global shape of what it saves.
    """
    wanted = {id(parameters[name]): name for name in names}
    axes: dict[str, int] = {}
    state = sys.modules.get("megatron.core.parallel_state")
    data = None if state is None else Boundary(logs=False).attempt("layout", state.get_data_parallel_group)
    for module in model.modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if id(p) in wanted}
        describe = getattr(module, "sharded_state_dict", None)
        if not own or describe is None:
            continue
        # Another library's code: a module that cannot describe itself is taken at its attributes.
        more = {"metadata": {"dp_cp_group": data}} if "metadata" in inspect.signature(describe).parameters else {}
        described = Boundary(logs=False).attempt("layout", describe, prefix="", **more) or {}
        for entry in described.values():
            name = wanted.get(id(getattr(entry, "data", None))) or _same_storage(entry, own, wanted)
            axis = _cut_axis(entry)
            if name is not None and axis is not None:
                axes[name] = axis
    return axes


def _same_storage(entry: Any, own: Mapping[str, Tensor], wanted: Mapping[int, str]) -> str | None:
    """Return the parameter that shares memory with an entry of a checkpoint."""
    data = getattr(entry, "data", None)
    if not isinstance(data, Tensor):
        return None
    return next((wanted[id(p)] for p in own.values() if p.data_ptr() == data.data_ptr() and p.numel()), None)


def _cut_axis(entry: Any) -> int | None:
    """Return the axis along which the global shape of an entry is larger than that of this process."""
    global_shape, local = getattr(entry, "global_shape", None), getattr(entry, "local_shape", None)
    skipped = getattr(entry, "prepend_axis_num", 0)
    if global_shape is None or local is None:
        return None
    return next((a for a, (w, p) in enumerate(zip(global_shape[skipped:], local, strict=False)) if w != p), None)
