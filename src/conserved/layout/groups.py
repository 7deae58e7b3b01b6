"""A group of processes that holds the pieces, or the replicas, of a parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Processes that share a parameter: two groups of the same ranks are equal, whatever handles they have."""

    name: str = field(compare=False)
    """Its purpose in words: "tensor parallel"."""
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    handle: Any = field(compare=False, repr=False)
    """The process group of torch.distributed."""

    @staticmethod
    def of(name: str, handle: Any) -> RankGroup | None:
        """Return a process group that this process is in; None for no group, one of others, and one of one process."""
        if handle is None or handle == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        ranks = tuple(dist.get_process_group_ranks(handle))
        return RankGroup(name, ranks, handle) if len(ranks) > 1 else None

    @property
    def size(self) -> int:
        """The number of processes in it."""
        return len(self.ranks)

    @property
    def own_place(self) -> int:
        """The place of this process in the group."""
        return self.ranks.index(dist.get_rank())

    def sum(self, values: Tensor) -> None:
        """Add up a tensor over the processes, in place."""
        dist.all_reduce(values, group=self.handle)

    def gather(self, values: Tensor) -> Tensor:
        """Return the tensors of all processes along a new first axis, in the order of `ranks`."""
        parts = [torch.empty_like(values) for _ in self.ranks]
        dist.all_gather(parts, values.contiguous(), group=self.handle)
        return torch.stack(parts)

    def __str__(self) -> str:
        return f"{self.name} group of {self.size}"


def whole_world() -> RankGroup | None:
    """Return the group of all processes; None outside a distributed run and in one of a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return RankGroup.of("world", dist.group.WORLD)
