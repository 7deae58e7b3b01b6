"""Undoes what a pass that is none of training writes to tensors anywhere: in closures, attributes, globals, hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import (
    COMPILED_CODE_RUNS_INSIDE_MODES,
    HigherOrderOperator,
    TorchDispatchMode,
    in_function_transform,
    preserve_version_counter,
    runs_compiled_code,
    schema_of,
    tree_leaves,
)
from conserved.rank_agreement import several_processes

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

_WRITTEN_IN_SECRET = ("running_mean", "running_var")
"""Arguments that operations write to though their schemas do not say so."""


class _FirstWrites(TorchDispatchMode):
    """Copies every memory that was there before, before the first operation writes to it in place."""

    supports_higher_order_operators = True

    def __init__(self, undo: contextlib.ExitStack) -> None:
        super().__init__()
        self._undo = undo
        self._made: set[int] = set()
        """Addresses of memory that operations of this block made."""
        self._kept: dict[int, tuple[Any, Any]] = {}
        """By its address, memory that was written to, and a copy of what it held."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such inside, and neither eagerly nor compiled anew."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: PyTorch would import its compiler, a second's work, only to keep it away from a mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        for position, argument in enumerate(schema_of(func).arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or argument.name in _WRITTEN_IN_SECRET:
                self._keep(args[position] if position < len(args) else kwargs.get(argument.name))
        out = func(*args, **kwargs)
        for value in out if isinstance(out, tuple | list) else (out,):
            if type(value) is Tensor:
                address = _address(value)
                if address and not _is_view_of(value, args, address):
                    self._made.add(address)
        return out

    def _keep(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if type(tensor) not in _PLAIN:
                continue
            address = _address(tensor)
            if address and address not in self._made and address not in self._kept:
                storage = tensor.untyped_storage()
                self._kept[address] = storage, storage.clone()
                if not tensor.is_inference():
                    self._undo.enter_context(preserve_version_counter(tensor))

    def restore(self) -> None:
        """Write back what memory held before the block."""
        for storage, content in self._kept.values():
            if storage.nbytes() == content.nbytes():
                storage.copy_(content)


def _address(tensor: Tensor) -> int:
    """Return where the entries of a tensor are; 0 if it has no memory of its own."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        # Tensors of function transforms, and those that stand for shapes.
        return 0


def _is_view_of(value: Tensor, args: Any, address: int) -> bool:
    return any(type(leaf) in _PLAIN and _address(leaf) == address for leaf in tree_leaves(args))


@contextlib.contextmanager
def writes_undone() -> Iterator[None]:
    """Restore all memory that operations of this process write to inside the block, and its version counters.

    Parameters that are sharded over processes are gathered in every pass, so several processes are left alone. Where
    compiled code would run eagerly inside a mode, a process that compiled any is left alone too.
    """
    eager = not COMPILED_CODE_RUNS_INSIDE_MODES and runs_compiled_code()
    if several_processes() or in_function_transform() or eager:
        yield
        return
    with contextlib.ExitStack() as undo:
        writes = _FirstWrites(undo)
        undo.callback(writes.restore)
        with writes:
            yield
