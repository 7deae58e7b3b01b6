"""Collectives as one process sees them: followed as the operations they stand for, without communicating.

All processes run one program, each with its own pieces. Read off one of them, the contributions of the others are
stand-ins of the same type: the sum over a group of p processes is p times this process's tensor, a gathered tensor is p
copies of it. What is inferred this way holds for the whole program if every sum over pieces is taken over the group:
a replicated parameter is one leg, a parameter in pieces is a leg on each process.

An exchange that deals out parts of an axis (all_to_all, reduce_scatter) gives every process other entries. It is
followed where these entries are not distinguished by any law, as tokens are not, and fixes its input otherwise.

A message to one process is matched with one that is received: in a ring every process gets what its neighbour has in
the place of its own. Where processes only send or only receive, as stages of a pipeline do, one process does not show
the program, and it is not followed. Following makes no collective: other processes may be somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conserved._torch_compat import finished_work
from conserved.errors import ConservedError

ALL_TO_ALL = "conserved::all_to_all"
"""The operation that deals out entries of the first axis among processes."""

REDUCE_SCATTER = "conserved::reduce_scatter"
"""The operation that sums over processes and deals out entries of the first axis."""

FROM_PEER = "conserved::from_peer"
"""The operation that replaces a tensor by what another process has in its place."""

SUMS = ("sum", "avg", "mean")


class UnfollowedCollectiveError(ConservedError, RuntimeError):
    """A program exchanges tensors in a way that one process does not show."""


FollowCollective = Callable[..., Any]
"""Computes the results of a collective from the size of its group and its arguments."""

NoteExchange = Callable[[str, Tensor, Tensor], None]
"""Notes that a tensor was dealt out into another."""


def group_size(arguments: Sequence[Any]) -> int | None:
    """Return the number of processes of a collective, from its process group or its name; None if it has none."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(argument).size())
            except (RuntimeError, AttributeError, TypeError):
                continue
        if isinstance(argument, str):
            try:
                return int(_group_by_name(argument).size())
            except (ValueError, RuntimeError, KeyError, TypeError):
                continue
        if isinstance(argument, dist.ProcessGroup):
            return int(argument.size())
    return None


def _group_by_name(name: str) -> Any:
    """Return the process group of a name, as functional collectives have it."""
    module: Any = dist.distributed_c10d
    return module._resolve_process_group(name)


def _reduction(arguments: Sequence[Any]) -> str:
    """Return the name of the reduction of a collective: sum, avg, max, …"""
    for argument in arguments:
        if isinstance(argument, str) and argument.lower() in (*SUMS, "max", "min", "product"):
            return argument.lower()
        op = getattr(argument, "op", None)
        if isinstance(argument, torch.ScriptObject) and op is not None:
            try:
                return str(op()).rpartition(".")[2].lower()
            except RuntimeError:
                continue
    return "sum"


def _reduce(x: Tensor, reduction: str, size: int) -> Tensor:
    """Return what a reduction makes of a tensor that all processes have alike."""
    if reduction in ("avg", "mean"):
        return x.clone()
    if reduction in ("max", "min"):
        stacked = x.unsqueeze(0).expand(size, *x.shape)
        return stacked.amax(0) if reduction == "max" else stacked.amin(0)
    return x**size if reduction == "product" else x * size


def _all_reduce_in_place(size: int, note: NoteExchange, tensors: list[Tensor], *rest: Any, **named: Any) -> Any:
    for tensor in tensors:
        tensor.copy_(_reduce(tensor, _reduction([*rest, *named.values()]), size))
    return tensors, finished_work()


def _broadcast_in_place(size: int, note: NoteExchange, tensors: list[Tensor], *rest: Any, **named: Any) -> Any:
    return tensors, finished_work()


def _all_gather_lists(
    size: int, note: NoteExchange, outputs: list[list[Tensor]], inputs: list[Tensor], *rest: Any, **named: Any
) -> Any:
    for parts, tensor in zip(outputs, inputs, strict=True):
        for part in parts:
            part.copy_(tensor)
    return outputs, finished_work()


def _all_gather_base(size: int, note: NoteExchange, output: Tensor, x: Tensor, *rest: Any, **named: Any) -> Any:
    output.copy_(torch.cat([x] * size).view(output.shape))
    return output, finished_work()


def _all_reduce_coalesced(size: int, note: NoteExchange, tensors: list[Tensor], *rest: Any, **named: Any) -> Any:
    return _all_reduce_in_place(size, note, tensors, *rest, **named)[1]


def _all_gather_many(
    size: int, note: NoteExchange, outputs: list[Tensor], inputs: list[Tensor], *rest: Any, **named: Any
) -> Any:
    for output, x in zip(outputs, inputs, strict=True):
        _all_gather_base(size, note, output, x)
    return finished_work()


def _gather_lists(
    size: int, note: NoteExchange, outputs: list[list[Tensor]], inputs: list[Tensor], *rest: Any, **named: Any
) -> Any:
    # Only one process has places for what is gathered.
    return _all_gather_lists(size, note, outputs, inputs[: len(outputs)])[1]


def _reduce_scatter_lists(
    size: int, note: NoteExchange, outputs: list[Tensor], inputs: list[list[Tensor]], *rest: Any, **named: Any
) -> Any:
    for output, parts in zip(outputs, inputs, strict=True):
        if not output.dim():
            raise UnfollowedCollectiveError("reduce_scatter of numbers is not followed")
        note(REDUCE_SCATTER, torch.cat([*parts]), output)
    return outputs, finished_work()


def _reduce_scatter_many(
    size: int, note: NoteExchange, outputs: list[Tensor], inputs: list[Tensor], *rest: Any, **named: Any
) -> Any:
    for output, x in zip(outputs, inputs, strict=True):
        note(REDUCE_SCATTER, x, output)
    return finished_work()


def _all_to_all_lists(
    size: int, note: NoteExchange, outputs: list[Tensor], inputs: list[Tensor], *rest: Any, **named: Any
) -> Any:
    if len({tuple(tensor.shape[1:]) for tensor in (*inputs, *outputs)}) > 1 or not inputs[0].dim():
        raise UnfollowedCollectiveError("all_to_all of tensors that differ beside their first axis is not followed")
    joined = torch.cat([*inputs])
    for output in outputs:
        note(ALL_TO_ALL, joined, output)
    return outputs, finished_work()


def _barrier(size: int, note: NoteExchange, *rest: Any, **named: Any) -> Any:
    return finished_work()


def _nothing(size: int, note: NoteExchange, *rest: Any, **named: Any) -> None:
    return None


def _reduce_scatter_base(size: int, note: NoteExchange, output: Tensor, x: Tensor, *rest: Any, **named: Any) -> Any:
    note(REDUCE_SCATTER, x, output)
    return output, finished_work()


def _all_to_all_base(size: int, note: NoteExchange, output: Tensor, x: Tensor, *rest: Any, **named: Any) -> Any:
    note(ALL_TO_ALL, x, output)
    return finished_work()


def _all_reduce(size: int, note: NoteExchange, x: Tensor, reduction: str, *rest: Any, **named: Any) -> Tensor:
    return _reduce(x, reduction.lower(), size)


def _all_gather(size: int, note: NoteExchange, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return torch.cat([x] * size)


def _reduce_scatter(size: int, note: NoteExchange, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    output = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    note(REDUCE_SCATTER, x, output)
    return output


def _all_to_all(size: int, note: NoteExchange, x: Tensor, splits: Sequence[int], *rest: Any, **named: Any) -> Tensor:
    rows = sum(splits) if splits else x.shape[0]
    output = x.new_empty((rows, *x.shape[1:]))
    note(ALL_TO_ALL, x, output)
    return output


def _same(size: int, note: NoteExchange, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return x


def _all_reduce_to(size: int, note: NoteExchange, x: Tensor, reduction: str, *rest: Any, **named: Any) -> Tensor:
    return x.copy_(_reduce(x, reduction.lower(), size))


def _all_reduce_each(size: int, note: NoteExchange, xs: list[Tensor], reduction: str, *rest: Any) -> list[Tensor]:
    return [_reduce(x, reduction.lower(), size) for x in xs]


def _all_gather_to(size: int, note: NoteExchange, x: Tensor, *rest: Any, out: Tensor) -> Tensor:
    return out.copy_(torch.cat([x] * size))


def _all_gather_each(size: int, note: NoteExchange, xs: list[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.cat([x] * size) for x in xs]


def _reduce_scatter_to(size: int, note: NoteExchange, x: Tensor, *rest: Any, out: Tensor) -> Tensor:
    note(REDUCE_SCATTER, x, out)
    return out


def _reduce_scatter_each(size: int, note: NoteExchange, xs: list[Tensor], *rest: Any) -> list[Tensor]:
    return [_reduce_scatter(size, note, x) for x in xs]


class Messages:
    """Messages to and from single processes, matched with each other in order."""

    def __init__(self) -> None:
        self._sent: list[Tensor] = []
        self._awaited: list[Tensor] = []

    def send(self, note: NoteExchange, tensor: Tensor) -> None:
        """Note that a tensor is sent to another process."""
        for position, target in enumerate(self._awaited):
            if _fits(tensor, target):
                del self._awaited[position]
                return note(FROM_PEER, tensor, target)
        self._sent.append(tensor.clone())

    def receive(self, note: NoteExchange, target: Tensor) -> None:
        """Note that what another process sends is written to a tensor."""
        for position, tensor in enumerate(self._sent):
            if _fits(tensor, target):
                del self._sent[position]
                return note(FROM_PEER, tensor, target)
        self._awaited.append(target)

    def follow(self, name: str, note: NoteExchange, arguments: Sequence[Any]) -> Any:
        """Follow an operation that sends or receives.

        Raises:
            UnfollowedCollectiveError: it is neither.
        """
        kind = name.rpartition("::")[2]
        if kind == "batch_p2p_ops":
            kinds, tensors = arguments[0], arguments[3]
            for each, tensor in zip(kinds, tensors, strict=True):
                (self.send if each == "isend" else self.receive)(note, tensor)
            return [*tensors]
        if kind in ("send", "isend", "recv_", "recv_any_source_", "irecv"):
            given = arguments[0]
            for tensor in given if isinstance(given, list | tuple) else (given,):
                (self.send if kind.endswith("send") else self.receive)(note, tensor)
            return given if name.startswith("_c10d_functional") else finished_work()
        raise UnfollowedCollectiveError(f"{name} is a collective that is not followed")

    def confirm_matched(self) -> None:
        """Check that all messages were matched.

        Raises:
            UnfollowedCollectiveError: some were not: processes run programs of their own.
        """
        if self._sent or self._awaited:
            raise UnfollowedCollectiveError(
                "The model sends tensors to processes that it gets none from. Pass laws= of the model in one process."
            )


def _fits(tensor: Tensor, target: Tensor) -> bool:
    return tensor.shape == target.shape and tensor.dtype == target.dtype


def is_collective(name: str) -> bool:
    """Return whether an operator exchanges tensors between processes."""
    return name.startswith(("c10d::", "_c10d_functional")) and name != "c10d::check_for_nan"


_FUNCTIONAL: dict[str, FollowCollective] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _same,
    "broadcast_": _same,
    "all_reduce_": _all_reduce_to,
    "all_reduce_coalesced": _all_reduce_each,
    "all_gather_into_tensor_out": _all_gather_to,
    "all_gather_into_tensor_coalesced": _all_gather_each,
    "reduce_scatter_tensor_out": _reduce_scatter_to,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_each,
}

COLLECTIVES: dict[str, FollowCollective] = {
    "c10d::allreduce_": _all_reduce_in_place,
    "c10d::broadcast_": _broadcast_in_place,
    "c10d::allgather_": _all_gather_lists,
    "c10d::_allgather_base_": _all_gather_base,
    "c10d::_reduce_scatter_base_": _reduce_scatter_base,
    "c10d::alltoall_base_": _all_to_all_base,
    "c10d::alltoall_": _all_to_all_lists,
    "c10d::reduce_": _all_reduce_coalesced,
    "c10d::gather_": _gather_lists,
    "c10d::reduce_scatter_": _reduce_scatter_lists,
    "c10d::allreduce_coalesced_": _all_reduce_coalesced,
    "c10d::allgather_into_tensor_coalesced_": _all_gather_many,
    "c10d::reduce_scatter_tensor_coalesced_": _reduce_scatter_many,
    "c10d::barrier": _barrier,
    "c10d::monitored_barrier_": _nothing,
    **{
        f"{space}::{name}": f
        for space in ("_c10d_functional", "_c10d_functional_autograd")
        for name, f in _FUNCTIONAL.items()
    },
}
"""By operator, what it is followed as."""

WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""Wait for a functional collective; the tensor is the same."""
