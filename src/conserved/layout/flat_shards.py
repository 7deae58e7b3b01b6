"""Parameters of which every process holds a range of the flattened entries, as FSDP1 and ZeRO-3 keep them.

`FullyShardedDataParallel` joins the parameters of a unit in one flat tensor and cuts that without regard to shapes.
Its modules keep pieces of the flat tensor or nothing at all, without a shape that laws could speak of. ZeRO-3 of
DeepSpeed empties parameters between calls. Here each parameter gets a `FlatShard` with its own name and shape, which
gathers itself as a DTensor does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from conserved._torch_compat import FSDP1_CHILD, FSDP1_FLAT, FlatUnit, children_of, flat_units, tree_map_only
from conserved.layout.deepspeed import PartitionedParameter, is_partitioned, partitioned_parameters
from conserved.layout.groups import RankGroup
from conserved.layout.table import ParameterLayout

_Attribute = tuple[int, str]
"""The identity of a module, and the name of a parameter there."""


class FlatShard(Tensor):
    """A tensor that lies in pieces of its flattened entries on the processes of a group.

    Whatever reads its values gathers it, so that all processes of the group have to do so together.
    """

    _piece: Callable[[], Tensor | None]
    """Returns the entries of this process, or None if there are none yet."""
    _gradient: Callable[[], Tensor | None]
    group: RankGroup | None
    replicas: RankGroup | None
    """Processes that hold the same entries."""
    counts: tuple[int, ...]
    """The number of entries on each process of the group."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, **_: Any) -> FlatShard:
        """Return a tensor that has a shape and no memory of its own."""
        make: Any = Tensor._make_wrapper_subclass
        result: FlatShard = make(cls, tuple(shape), dtype=dtype, device=device)
        return result

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        piece: Callable[[], Tensor | None],
        counts: tuple[int, ...],
        group: RankGroup | None,
        replicas: RankGroup | None,
        gradient: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self._piece, self._gradient = piece, gradient
        self.counts, self.group, self.replicas = counts, group, replicas

    def to_local(self) -> Tensor:
        """Return the entries of this process; zeros where there are none yet."""
        piece = self._piece()
        if piece is None:
            own = 0 if self.group is None else self.group.own_place
            return torch.zeros(self.counts[own], dtype=self.dtype, device=self.device)
        return piece.detach().flatten().to(self.dtype)

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, gathered from all processes of the group."""
        piece = self.to_local()
        if self.group is None:
            return piece.view(self.shape)
        # Pieces have several lengths, and a gathering of equal ones is the one that every backend has.
        padded = piece.new_zeros(max(self.counts))
        padded[: piece.numel()] = piece
        parts = self.group.gather(padded)
        return torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)]).view(self.shape)

    def gradient(self) -> FlatShard:
        """Return its gradient, in the same pieces."""
        return self._like(self._gradient)

    def placement(self) -> ParameterLayout:
        """Return over which processes it is replicated."""
        return ParameterLayout(replicated=() if self.replicas is None else (self.replicas,))

    def _like(self, piece: Callable[[], Tensor | None]) -> FlatShard:
        return FlatShard(
            self.shape,
            self.dtype,
            self.device,
            piece=piece,
            counts=self.counts,
            group=self.group,
            replicas=self.replicas,
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute on whole tensors; a detached one stays in pieces."""
        aten = torch.ops.aten
        same_shape = func in (aten.view.default, aten._unsafe_view.default) and tuple(args[1]) == tuple(args[0].shape)
        if same_shape or func in (aten.detach.default, aten.alias.default):
            return args[0]._like(args[0]._piece)
        args, kwargs = tree_map_only(FlatShard, FlatShard.full_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say shape and group; values would have to be gathered."""
        return f"FlatShard(shape={tuple(self.shape)}, dtype={self.dtype}, group={self.group})"


_SHARDS: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], dict[_Attribute, FlatShard]]] = WeakKeyDictionary()
"""By model: its flat tensors, and what they are made of."""


def has_flat_shards(model: nn.Module) -> bool:
    """Return whether FSDP1 or ZeRO-3 sharded parts of a model, which leaves its parameters no shapes of their own."""
    return any(FSDP1_CHILD in children_of(module) for module in model.modules()) or is_partitioned(model.parameters())


def is_sharded(model: nn.Module) -> bool:
    """Return whether a process holds only pieces of some parameters, which have to be gathered."""
    return has_flat_shards(model) or any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def processes_of(tensor: Any) -> int:
    """Return among how many processes a sharded tensor lies."""
    if isinstance(tensor, FlatShard):
        return 1 if tensor.group is None else tensor.group.size
    return int(tensor.device_mesh.size())


def flat_shards(model: nn.Module) -> dict[_Attribute, FlatShard]:
    """Return the parameters that are kept flat, by where they were; the same objects as long as these are kept."""
    units = flat_units(model)
    partitioned = [*partitioned_parameters(model)]
    state = (*(id(unit.flat) for unit in units), *(id(item.parameter) for item in partitioned))
    known = _SHARDS.get(model)
    if known is not None and known[0] == state:
        return known[1]
    shards: dict[_Attribute, FlatShard] = {}
    for unit in units:
        shards |= {(id(module), attribute): shard for (module, attribute), shard in _shards_of(unit)}
        for module, attribute, first, name in unit.tied:
            shards[id(module), attribute] = shards[id(first), name]
    made: dict[int, FlatShard] = {}
    for item in partitioned:
        if id(item.parameter) not in made:
            made[id(item.parameter)] = _shard_of(item)
        shards[id(item.module), item.attribute] = made[id(item.parameter)]
    _SHARDS[model] = (state, shards)
    return shards


def forget_flat_shards(model: nn.Module) -> None:
    """Let go of what was made of a model's flat tensors, which refer back to the model."""
    _SHARDS.pop(model, None)


def named_parameters_of(model: nn.Module) -> dict[str, Any]:
    """Return every parameter once, by its name; those that are kept flat under the names that they had before."""
    if not has_flat_shards(model):
        return dict(model.named_parameters())
    owned: dict[int, dict[str, FlatShard]] = {}
    for (owner, name), shard in flat_shards(model).items():
        owned.setdefault(owner, {})[name] = shard
    result: dict[str, Any] = {}
    named: set[int] = set()
    for path, module in model.named_modules():
        clean = f"{path}.".replace(f"{FSDP1_CHILD}.", "").strip(".")
        own = dict(module.named_parameters(recurse=False)) | owned.get(id(module), {})
        for name, parameter in own.items():
            if id(parameter) not in named and name != FSDP1_FLAT:
                named.add(id(parameter))
                result[f"{clean}.{name}" if clean else name] = parameter
    return result


def _shards_of(unit: FlatUnit) -> Iterator[tuple[tuple[nn.Module, str], FlatShard]]:
    """Yield the parameters of one unit."""
    group = RankGroup.of("shard", unit.group)
    among = group if unit.sharded else None
    size, own = (1, 0) if among is None else (among.size, among.own_place)
    replicas = RankGroup.of("replica", unit.replicas) if unit.sharded else group
    for module, attribute, shape, start, original in unit.members:
        end = start + prod(shape)
        cuts = [min(max(index * unit.length, start), end) for index in range(size + 1)]
        ranges = list(itertools.pairwise(cuts))
        first, last = (entry - own * unit.length for entry in ranges[own])
        shard = FlatShard(
            shape,
            unit.flat.dtype,
            unit.flat.device,
            piece=_reader(unit, first, last),
            gradient=_gradient_reader(unit, original, first, last),
            counts=tuple(b - a for a, b in ranges),
            group=among,
            replicas=replicas,
        )
        shard.requires_grad_(original.requires_grad)
        yield (module, attribute), shard


def _shard_of(item: PartitionedParameter) -> FlatShard:
    """Return a parameter that ZeRO-3 cut."""
    shard = FlatShard(
        item.parameter.ds_shape,
        item.parameter.dtype,
        item.parameter.ds_tensor.device,
        piece=item.piece,
        gradient=item.gradient,
        counts=item.counts(),
        group=RankGroup.of("shard", item.group),
        replicas=None,
    )
    shard.requires_grad_(item.parameter.requires_grad)
    return shard


def _reader(unit: FlatUnit, first: int, last: int) -> Callable[[], Tensor | None]:
    return lambda: unit.shard()[first:last]


def _gradient_reader(unit: FlatUnit, original: Tensor, first: int, last: int) -> Callable[[], Tensor | None]:
    def read() -> Tensor | None:
        # With `use_orig_params` the optimizer takes the gradient of the original, which is a piece as well.
        gradient = original.grad
        return gradient if gradient is None or original is not unit.flat else gradient.flatten()[first:last]

    return read
