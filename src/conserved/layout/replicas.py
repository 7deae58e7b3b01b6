"""Do processes that should hold a tensor alike hold it alike? Gradients first, then parameters.

Identities are linear: gradients that were not added up over processes satisfy every identity of one process. What shows
it is that replicas disagree. Every tensor is reduced to three numbers, and a group exchanges those in one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conserved.layout.groups import RankGroup
from conserved.layout.table import ModelLayout
from conserved.symmetry.view import local
from conserved.tolerances import RESIDUAL_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A tensor that processes of a group should hold alike, and do not."""

    name: str
    what: str
    """"gradient" or "parameter"."""
    group: RankGroup
    spread: float
    """The largest difference of a fingerprint, relative to the norm of the tensor."""
    limit: float
    ranks: tuple[int, ...]
    """Global ranks that differ from the first of the group."""
    partial: bool
    """Whether the gradient of each process is a part of a sum that the stack has to add up."""

    def text(self) -> str:
        """Say which tensor differs where, and the usual cause."""
        ranks = ", ".join(map(str, self.ranks))
        cause = "The parameters were initialised differently, or updates differed."
        if self.what == "gradient":
            cause = "It was not reduced over all processes of the group, or changed after it was."
        if self.what == "gradient" and self.partial:
            cause = "Each process has the part of its own tokens, and the sum over the group is missing."
        return (
            f"The {self.what} of {self.name} should be the same on the {self.group} {self.group.ranks}, and differs by "
            f"{self.spread:.2g} of its norm between rank {self.group.ranks[0]} and rank {ranks}. {cause}"
        )


def compare_replicas(
    layout: ModelLayout, points: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> tuple[list[Disagreement], int]:
    """Compare what processes should hold alike; every process of every group has to call it.

    Args:
        layout: where parameters are replicated.
        points: parameters by name.
        gradients: their gradients, after all reductions.

    Returns:
        Tensors that differ by more than rounding, gradients first and furthest apart first, and the bytes sent.
    """
    differing: list[Disagreement] = []
    moved = 0
    groups = layout.replica_groups()
    for group in sorted(groups, key=lambda group: (group.name, group.size)):
        names = [
            name
            for name in groups[group]
            if name in points and name in gradients and _is_replica(gradients[name], points[name], group)
        ]
        tensors = [("gradient", name, gradients[name]) for name in names]
        tensors += [("parameter", name, points[name]) for name in names]
        device = next((tensor.device for *_, tensor in tensors), torch.device("cpu"))
        counts = group.gather(torch.tensor([len(tensors)], device=device))
        if not tensors or bool((counts != len(tensors)).any()):
            continue
        prints = torch.stack([projections(local(tensor)) for *_, tensor in tensors])
        every = group.gather(prints)
        moved += (group.size - 1) * prints.numel() * prints.element_size()
        sizes = every[..., 0].amax(0).clamp_min(1e-300)
        apart = ((every - every[0]).abs().amax(-1) / sizes).cpu()
        for index, (kind, name, tensor) in enumerate(tensors):
            limit = RESIDUAL_TOLERANCE.get(tensor.dtype, 0.0)
            distances = apart[:, index]
            if not bool((distances <= limit).all()):
                differing.append(
                    Disagreement(
                        name=name,
                        what=kind,
                        group=group,
                        spread=float(distances.nan_to_num(nan=float("inf")).max()),
                        limit=limit,
                        ranks=tuple(r for r, d in zip(group.ranks, distances.tolist(), strict=True) if not d <= limit),
                        partial=group in layout[name].partial,
                    )
                )
    return sorted(differing, key=lambda item: (item.what != "gradient", -item.spread)), moved


def _is_replica(gradient: Tensor, point: Tensor, group: RankGroup) -> bool:
    """Return whether a gradient should be alike on a group: one of a DTensor may still be a partial sum there."""
    placements = getattr(gradient, "placements", None)
    if placements is None or placements == getattr(point, "placements", None):
        return True
    mesh: Any = gradient.device_mesh  # type: ignore[attr-defined]
    axes = [axis for axis in range(mesh.ndim) if RankGroup.of("", mesh.get_group(axis)) == group]
    return bool(axes) and all(placements[axis].is_replicate() for axis in axes)


def projections(tensor: Tensor, first: int = 0) -> Tensor:
    """Return the norm, and two sums with fixed irregular weights that change with every entry.

    Args:
        tensor: a tensor, or the entries of a flat one from number `first` on.
        first: the number of its first entry, which says where the weights begin.
    """
    flat = tensor.detach().flatten().double()
    index = torch.arange(first, first + flat.numel(), device=flat.device, dtype=torch.float64)
    weights = [torch.frac(index * step) - 0.5 for step in (0.6180339887498949, 0.7548776662466927)]
    return torch.stack((torch.linalg.vector_norm(flat), *(flat @ weight for weight in weights)))
