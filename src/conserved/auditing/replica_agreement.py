"""Do the replicas agree? Parameters and gradients that every process should hold alike, compared across processes.

Gradient identities are linear and hold for each process's own gradient, so an all-reduce that was left out does not
break them. Disagreement of replicas is what shows it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conserved.output.result import PrintableResult
from conserved.plain_data import record_of
from conserved.symmetry.view import local
from conserved.verdict import Evidence, Status, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One tensor that should be the same everywhere: how far apart the processes are, relative to its size."""

    name: str
    what: str
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicas(PrintableResult):
    """Every replicated parameter and gradient, furthest apart first."""

    rows: tuple[Replica, ...]
    ranks: int
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether there are several replicas and they agree."""
        return self.verdict.holds

    @property
    def worst(self) -> float:
        """The largest relative distance; 0 if nothing is replicated."""
        return self.rows[0].spread if self.rows else 0.0

    @property
    def verdict(self) -> Verdict:
        """One verdict on all tensors."""
        apart = [row for row in self.rows if not row.spread <= self.tolerance]
        if self.ranks < 2 or not self.rows:
            return Verdict(status=Status.INCONCLUSIVE, message="Nothing is replicated over several processes.")
        evidence = tuple(
            Evidence(what=f"{row.what} of {row.name} across processes", value=row.spread, limit=self.tolerance)
            for row in (apart or self.rows[:1])
        )
        if not apart:
            message = f"All {len(self.rows)} tensors agree over {self.ranks} processes."
            return Verdict(status=Status.VERIFIED, message=message, evidence=evidence)
        kinds = {row.what for row in apart}
        cause = (
            "The parameters themselves differ: they were initialised differently or updates differed."
            if "parameter" in kinds
            else "The gradients were not reduced over all processes, or changed after they were."
        )
        message = f"{len(apart)} of {len(self.rows)} tensors differ between {self.ranks} processes. {cause}"
        return Verdict(status=Status.REFUTED, message=message, evidence=evidence)

    def summary(self) -> str:
        """Return the verdict with its evidence."""
        return str(self.verdict)

    def __repr__(self) -> str:
        return f"<Replicas: {self.verdict.status.value}, {len(self.rows)} tensors over {self.ranks} processes>"

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return self.verdict.record() | record_of(self, "ranks rows")


def check_replicas(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, tolerance: float = 0.0, buffers: bool = False
) -> Replicas:
    """Compare all parameters and gradients that should be equal over a process group; every process must call it.

    Plain tensors should be equal on all processes of the group, a DTensor along the mesh dimensions over which it is
    replicated. Each tensor is reduced to three numbers, so four small collectives serve the whole model. Processes may
    hold different tensors: those that all have are compared, and a gradient that only some have is reported.

    Args:
        model: the replica of this process; its gradients are compared where there are any.
        group: the processes that hold plain tensors in common; by default all of them.
        tolerance: the largest difference allowed, relative to the norm of the tensor; 0 asks for equality to the bit.
        buffers: whether buffers are compared as well. Statistics of a batch norm differ between two passes of a
            `DistributedDataParallel` model by design, unless the norm is a `SyncBatchNorm`.

    Returns:
        The spread of every tensor over the processes, furthest apart first, with one verdict. Outside a distributed run
        it is INCONCLUSIVE.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected a torch.nn.Module, got {type(model).__name__}. Pass the model that processes replicate."
        )
    if not (dist.is_available() and dist.is_initialized()):
        return Replicas(rows=(), ranks=1, tolerance=tolerance)
    tensors = [
        (name, kind, tensor)
        for name, parameter in model.named_parameters()
        for kind, tensor in (("parameter", parameter.detach()), ("gradient", parameter.grad))
        if tensor is not None
    ]
    if buffers:
        tensors += [(name, "buffer", b) for name, b in model.named_buffers() if b.is_floating_point()]
    replicas: list[Replica] = []
    # A process without plain tensors takes part as well.
    alike: dict[Any, list[tuple[str, str, Tensor]]] = {dist.group.WORLD if group is None else group: []}
    for name, kind, tensor in tensors:
        for over in _groups(tensor, group):
            alike.setdefault(over, []).append((name, kind, local(tensor)))
    ranks = 1
    for over, members in alike.items():
        ranks = max(ranks, dist.get_world_size(over))
        members, missing = _held_by_all(members, over, model)
        replicas += missing
        if not members:
            continue
        prints = torch.stack([_print(tensor) for *_, tensor in members])
        low, high = prints.clone(), prints.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=over)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=over)
        spreads = ((high - low).abs().amax(-1) / high[:, 0].clamp_min(1e-300)).tolist()
        replicas += [Replica(name=n, what=w, spread=spread) for (n, w, _), spread in zip(members, spreads, strict=True)]
    ordered = sorted(replicas, key=lambda row: -row.spread if row.spread == row.spread else -float("inf"))
    return Replicas(rows=tuple(ordered), ranks=ranks, tolerance=tolerance)


def _held_by_all(
    members: list[tuple[str, str, Tensor]], over: Any, model: nn.Module
) -> tuple[list[tuple[str, str, Tensor]], list[Replica]]:
    """Return the tensors that every process of a group has, and gradients that only some have of a parameter of all.

    What processes have may differ: stages of a pipeline hold other parameters, and a branch that one process skips
    leaves no gradient there. A reduction of as many numbers as each has would abort, or take one tensor for another.
    """
    listed = [f"{kind} {name}" for name, kind, _ in members]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    header = torch.tensor([len(listed), zlib.crc32(repr(listed).encode())], dtype=torch.float64, device=device)
    low, high = header.clone(), header.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=over)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=over)
    if bool((low == high).all()):
        return members, []
    everyone: list[Any] = [None] * dist.get_world_size(over)
    dist.all_gather_object(everyone, listed, group=over)
    common = set(everyone[0]).intersection(*everyone[1:])
    some = set().union(*everyone) - common
    parted = sorted(item.partition(" ")[2] for item in some if item.startswith("gradient "))
    missing = [Replica(name=n, what="gradient", spread=math.inf) for n in parted if f"parameter {n}" in common]
    return [item for item, key in zip(members, listed, strict=True) if key in common], missing


def _groups(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the process groups within which a tensor should be equal."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return [dist.group.WORLD if group is None else group]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return [mesh.get_group(axis) for axis, placement in enumerate(placements) if placement.is_replicate()]


def _print(tensor: Tensor) -> Tensor:
    """Return a fingerprint: the norm, and two sums with fixed pseudo-random weights that see a change of any entry."""
    flat = tensor.detach().flatten().to(torch.float64)
    index = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    # Irrational rotations: weights that repeat nowhere and need no generator state that might differ by process.
    first, second = (torch.frac(index * step) - 0.5 for step in (0.6180339887498949, 0.7548776662466927))
    return torch.stack((torch.linalg.vector_norm(flat), flat @ first, flat @ second))
