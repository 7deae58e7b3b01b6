"""The layout of DTensors: their placements over a mesh of processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from conserved.layout.groups import RankGroup
from conserved.layout.table import ParameterLayout, PieceCut


def dtensor_layout(tensor: Tensor) -> ParameterLayout | None:
    """Return the layout of a DTensor; None for any other tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return None
    cuts: list[PieceCut] = []
    replicated: list[RankGroup] = []
    partial: list[RankGroup] = []
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or tuple(f"mesh axis {axis}" for axis in range(mesh.ndim))
    for axis, placement in enumerate(placements):
        group = RankGroup.of(names[axis], mesh.get_group(axis))
        if group is None:
            continue
        if placement.is_replicate():
            replicated.append(group)
        elif placement.is_partial():
            partial.append(group)
        else:
            # A strided shard (FSDP over tensor parallelism) is gathered by the DTensor itself, in its own order.
            cuts.append(PieceCut(group, int(placement.dim)))
    return ParameterLayout(cuts=tuple(cuts), replicated=tuple(replicated), partial=tuple(partial))


def mesh_ranks(tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every mesh that tensors lie on, without meshes that are a part of another."""
    meshes = {id(mesh): mesh for tensor in tensors if (mesh := getattr(tensor, "device_mesh", None)) is not None}
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes.values()}
    return tuple(sorted(a for a in ranks if not any(set(a) < set(b) for b in ranks)))
