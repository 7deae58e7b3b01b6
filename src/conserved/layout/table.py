"""One table that says of every parameter where its pieces are, and over which processes it is replicated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from conserved.layout.groups import RankGroup


@dataclass(frozen=True, slots=True)
class PieceCut:
    """One way in which a parameter is cut: this process holds a slice of `axis`, the others of the group the rest.

    With a `stride` of s the axis is s parts one after the other (gate and up of a fused projection), each of which is
    cut by itself: every process holds its slice of the first part, then its slice of the second.
    """

    group: RankGroup
    axis: int
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """The positions of the pieces of one parameter."""

    cuts: tuple[PieceCut, ...] = ()
    replicated: tuple[RankGroup, ...] = ()
    """Groups whose processes hold the same values, and the same gradient once it is reduced."""
    partial: tuple[RankGroup, ...] = ()
    """Of these, groups over which each process's own gradient is a partial sum until the stack adds it up."""
    own: tuple[RankGroup, ...] = ()
    """Groups whose processes hold other parameters by this name: experts."""

    def text(self) -> str:
        """Return the layout in words."""
        parts = [f"axis {cut.axis} cut over the {cut.group}" for cut in self.cuts]
        parts += [f"one of its own on each process of the {group}" for group in self.own]
        parts += [f"replicated over the {group}" for group in self.replicated]
        return "; ".join(parts) or "on one process"


WHOLE = ParameterLayout()
"""A parameter that this process alone holds, or of which nothing is known."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelLayout(Mapping[str, ParameterLayout]):
    """The layout of every parameter of a model, by name."""

    parameters: Mapping[str, ParameterLayout] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()
    """DTensors, which gather themselves: they are read whole, and nothing is added up."""
    joint: bool = False
    """Whether processes have to audit in the same steps: the same on all of them."""
    meshes: tuple[tuple[int, ...], ...] = ()
    """Ranks of a stage, or of the meshes that DTensors lie on if nothing else is cut; none is within another."""

    def __getitem__(self, name: str) -> ParameterLayout:
        return self.parameters.get(name, WHOLE)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    @property
    def spread(self) -> tuple[RankGroup, ...]:
        """Groups over which some parameter is cut, each once, in the same order on all their processes."""
        groups = {
            group: group
            for name, layout in self.parameters.items()
            if name not in self.gathered
            for group in (*(cut.group for cut in layout.cuts), *layout.own)
        }
        # By name: ranks would order the groups differently on different processes.
        return tuple(sorted(groups.values(), key=lambda group: (group.name, group.size)))

    def replica_groups(self) -> dict[RankGroup, list[str]]:
        """Return the parameters that the processes of each group should hold alike, in the order of the model."""
        groups: dict[RankGroup, list[str]] = {}
        for name, layout in self.parameters.items():
            for group in layout.replicated:
                groups.setdefault(group, []).append(name)
        return groups

    @property
    def data_parallel(self) -> RankGroup | None:
        """The group over which every parameter is replicated, if processes audit together and nothing is in pieces."""
        layouts = [*self.parameters.values()]
        if not self.joint or self.gathered or any(layout.cuts or layout.own or layout.partial for layout in layouts):
            return None
        groups = {layout.replicated for layout in layouts}
        (only,) = groups if len(groups) == 1 else ((),)
        return only[0] if len(only) == 1 else None

    @property
    def joint_ranks(self) -> tuple[int, ...]:
        """Ranks of the processes that audit together, the same tuple on all of them; empty if each audits alone."""
        if not self.joint:
            return ()
        return self.meshes[0] if len(self.meshes) == 1 else tuple(range(dist.get_world_size()))

    def summary(self) -> str:
        """Return one line for all parameters that are laid out alike."""
        lines: dict[str, list[str]] = {}
        for name, layout in self.parameters.items():
            lines.setdefault(layout.text(), []).append(name)
        return "\n".join(
            f"{text}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for text, names in lines.items()
        )
