"""Collectives as one process sees them: followed as the operations they stand for, without communicating.

All processes run one program, each with its own pieces. Read off one of them, the contributions of the others are
stand-ins of the same type: the sum over a group of p processes is p times this process's tensor, a gathered tensor is p
copies of it. What is inferred this way holds for the whole program if every sum over pieces is taken over the group:
a replicated parameter is one leg, a parameter in pieces is a leg on each process.

An exchange that deals out parts of an axis (all_to_all, reduce_scatter) gives every process other entries. It is
followed where these entries are not told apart by any law, as tokens are not, and fixes its input otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conserved._torch_compat import finished_work

ALL_TO_ALL = "conserved::all_to_all"
"""The operation that deals out entries of the first axis among processes."""

REDUCE_SCATTER = "conserved::reduce_scatter"
"""The operation that sums over processes and deals out entries of the first axis."""

SUMS = ("sum", "avg", "mean")

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


_FUNCTIONAL: dict[str, FollowCollective] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _same,
}

COLLECTIVES: dict[str, FollowCollective] = {
    "c10d::allreduce_": _all_reduce_in_place,
    "c10d::broadcast_": _broadcast_in_place,
    "c10d::allgather_": _all_gather_lists,
    "c10d::_allgather_base_": _all_gather_base,
    "c10d::_reduce_scatter_base_": _reduce_scatter_base,
    "c10d::alltoall_base_": _all_to_all_base,
    **{
        f"{space}::{name}": f
        for space in ("_c10d_functional", "_c10d_functional_autograd")
        for name, f in _FUNCTIONAL.items()
    },
}
"""By operator, what it is followed as."""

WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""Wait for a functional collective; the tensor is the same."""
