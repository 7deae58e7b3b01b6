"""The recorder of a program: it watches operations below autograd, and writes become values.

Every ATen operation that runs is recorded with its arguments, the module it ran in and the line of user code it came
from. Tensors are numbered as values; an operation in place makes a new value, and a view of storage that was written
since is read again from its base.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

from conserved._torch_compat import (
    HigherOrderOperator,
    TorchDispatchMode,
    disable_dynamo,
    storage_key,
    tree_flatten,
    tree_map_only,
)
from conserved.inference.program.captured_program import (
    AUTOGRAD,
    CHECKPOINT,
    CapturedProgram,
    Operation,
    Value,
    ValueRef,
)
from conserved.inference.program.caught_errors import RAISES_BY_VALUES, is_error_caught
from conserved.inference.program.collectives import COLLECTIVES, WAITS, Messages, group_size, is_collective
from conserved.inference.program.decompositions import DECOMPOSED
from conserved.inference.program.gradient_accumulators import has_hooks
from conserved.inference.program.user_frames import NOT_THE_USERS, user_line
from conserved.inference.program.values_on_host import compute_on_host
from conserved.laws.shared_memory import shared_among

KEPT = 100_000
"""Constants of at most this many entries are kept, so that rules can look at their values."""

_SIZED_BY_DATA = tuple(
    f"aten::{name}"
    for name in (
        *("nonzero", "masked_select", "unique", "_unique", "repeat_interleave.Tensor", "bincount"),
        *("to_sparse", "_to_sparse"),
    )
)
"""Operations whose results have as many entries as the values they are given say."""

_KEEPS_SIZE = tuple(
    f"aten::{name}"
    for name in ("index_add", "index_put", "_index_put", "index_copy", "index_reduce", "scatter", "masked_scatter")
)
"""Operations whose result has the size of their first argument, whatever sizes the others have."""

_COUNTED_RESULTS = ("aten::unbind", "aten::split", "aten::chunk", "aten::tensor_split")
"""Operations with as many results as an axis of their argument is long."""

_CREATES = (
    "aten::arange",
    "aten::zeros",
    "aten::ones",
    "aten::full",
    "aten::scalar_tensor",
    "aten::linspace",
    "aten::eye",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::tril_indices",
    "aten::triu_indices",
    "aten::lift_fresh",
)
"""Operations that make tensors of Python numbers."""

CAPTURE = "capture"
"""The function whose callers are not the program: an error that they catch is not one that the program catches."""


@dataclass(slots=True)
class _Storage:
    base: int
    geometry: tuple[tuple[int, ...], tuple[int, ...], int]
    writes: int = 0


class Recorder(TorchDispatchMode):
    """Records what runs below autograd."""

    supports_higher_order_operators = True

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Sequence[tuple[Tensor, Tensor]] = (),
        stand_ins: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self.stand_ins = stand_ins or {}
        """Functions to follow instead of operations, by name."""
        self._fixed = {id(tensor): entries for tensor, entries in constants}
        """Tensors that the program has from its author, by identity, each with the tensor that has its entries."""
        self._constants: dict[int, Tensor | None] = {}
        """Values that nothing trained or given went into: their entries, unless these are many and the program's."""
        self.program = CapturedProgram()
        self._numbers: Any = WeakTensorKeyDictionary()
        self._storages: dict[int, _Storage] = {}
        self._keep: list[Any] = []
        self._messages = Messages()
        self._made: dict[ValueRef, Tensor] = {}
        self._taken: dict[int, Tensor] = {}
        """Buffers that were read, by the number of the value."""
        self._written_storages: set[int] = set()
        self._sized: set[int] = set()
        """Values whose shapes depend on values of others."""
        self.modules: list[str] = []
        self.custom: list[str] = []
        self.busy = False
        """Whether this mode itself looks at tensors."""
        self.validating = False
        """Whether numbers are read by a function of torch that only validates them."""
        self._owners = {_storage(parameter): parameter for parameter in parameters.values()}
        self.rewritten: dict[int, tuple[Tensor, Tensor]] = {}
        """Parameters that the program itself writes to, and what they held before."""
        self.program.tensors = parameters
        self.program.shared = shared_among(parameters)
        for name, parameter in parameters.items():
            if parameter.requires_grad and has_hooks(parameter):
                self.program.hooked.append(name)
            self.program.parameters[name] = self._new(parameter, parameter=name if parameter.requires_grad else None)

    def _keep_parameter(self, tensor: Tensor) -> None:
        """Copy a parameter before the program writes to it, as a teacher that follows its student in `forward`."""
        owner = self._owners.get(_storage(tensor)) if self._owners else None
        if owner is not None and id(owner) not in self.rewritten and not owner.is_meta:
            self.rewritten[id(owner)] = (owner, owner.detach().clone())

    def _once(self, tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return what is made of a tensor, the same whenever it is asked for until somebody writes to the tensor."""
        key = self._read(tensor)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: PyTorch would import its compiler, a second's work, only to keep it away from a mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record = self._record_uncompiled if "torch._dynamo" in sys.modules else self._record
        former, self.busy = self.busy, True
        try:
            return record(func, args, kwargs or {})
        finally:
            self.busy = former

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = f"{func._schema.name}.{func._overloadname}" if hasattr(func, "_schema") else str(func)
        if (other := self.stand_ins.get(name.rsplit(".", 1)[0])) is not None:
            with self:
                return other(*args, **kwargs)
        if is_collective(stem := name.rsplit(".", 1)[0]):
            return self._follow_collective(stem, func, args, kwargs)
        applies, parts = DECOMPOSED.get(name.partition(".")[0], (None, None))
        if applies is not None and parts is not None and applies(*args, **kwargs):
            with self:
                return parts(self._once, *args, **kwargs)
        if name.startswith("aten::lift_fresh"):
            # A tensor that was just made from Python numbers.
            self._fixed[id(args[0])] = args[0]
        recorded = tree_map_only(Tensor, self._read, (args, kwargs))
        if isinstance(func, HigherOrderOperator):
            # The functions it takes may read anything.
            recorded = ((*recorded[0], *map(ValueRef, self.program.parameters.values())), recorded[1])
        written = _written_tensors(func, args, kwargs)
        for tensor in written:
            self._keep_parameter(tensor)
        out = self._constant_number(name, args, recorded[0])
        if out is None:
            out = func(*args, **kwargs)
        results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        # Rules speak of axes, and a list of tensors of different sizes has none.
        nested = any(tensor.is_nested for tensor in (*given, *results))
        operation = Operation(
            name=f"nested::{name.replace('::', '_')}" if nested else name,
            args=recorded[0],
            kwargs=recorded[1],
            results=[],
            module=self.modules[-1] if self.modules else "",
            line=user_line(),
            stopped=not torch.is_grad_enabled() and not self.custom,
            custom=self.custom[-1] if self.custom else "",
        )
        inputs = set(map(id, given))
        for result in results:
            if id(result) in inputs and any(result is target for target in written):
                continue
            operation.results.append(self._new(result))
        for target in written:
            value = self._new(target, fresh_storage=False)
            operation.results.append(value)
        self.program.operations.append(operation)
        if name.startswith("aten::_local_scalar_dense"):
            self.program.read += operation.inputs()
            if self.program.values[operation.inputs()[0]].constant is None and not self.validating:
                # Also a whole number: it may be a row of a table, a length of a slice, or a factor.
                self.program.branches.append(operation.line)
        self._follow_sizes(operation, in_place=bool(written))
        for target, value in zip(written, operation.results[len(operation.results) - len(written) :], strict=True):
            self._write(target, value, operation)
        drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if not drawn:
            self._evaluate(operation, func, results)
        return out

    _record_uncompiled = disable_dynamo(_record)

    def _follow_collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow a collective without communicating; in a group of one process it is a copy."""
        with self:
            if name in WAITS:
                return args[0].clone()
            size = group_size([*args, *kwargs.values()])
            if size is None:
                return func(*args, **kwargs)
            self.program.communicates |= size > 1
            self.custom.append(self.custom[-1] if self.custom else name)
            try:
                note = self._exchange if size > 1 else _copy_over
                if name not in COLLECTIVES:
                    return self._messages.follow(name, note, args)
                return COLLECTIVES[name](size, note, *args, **kwargs)
            finally:
                self.custom.pop()

    def _exchange(self, name: str, source: Tensor, target: Tensor) -> None:
        """Record that entries of one tensor are dealt out into another, or replaced by those of another process."""
        if source.shape == target.shape:
            target.copy_(source)
        elif target.numel() and source.shape[0]:
            # Some values of the right kind: programs read counts of tokens out of what they exchange.
            rows = torch.arange(target.shape[0], device=source.device) % source.shape[0]
            target.copy_(source[rows].view(target.shape))
        operation = Operation(
            name=name,
            args=(self._read(source),),
            kwargs={},
            results=[],
            module=self.modules[-1] if self.modules else "",
            line=user_line(),
            custom=self.custom[-1] if self.custom else "",
        )
        value = self._new(target, fresh_storage=False)
        operation.results.append(value)
        self.program.operations.append(operation)
        self._write(target, value, operation)

    def confirm_messages(self) -> None:
        """Check that every message of the program was answered by one."""
        self._messages.confirm_matched()

    def note_foreign_results(self, name: str, given: Any, out: Any, before: int) -> None:
        """Note results of an autograd function that no recorded operation made from its inputs: code of its own did."""
        tensors = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
        reached = {self.value_of(tensor) for tensor in tensors}
        for operation in self.program.operations[before:]:
            if not reached.isdisjoint(operation.inputs()):
                reached.update(operation.results)
        results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        lost = [tensor for tensor in results if self.value_of(tensor) not in reached]
        if tensors and lost:
            arguments = tree_map_only(Tensor, self._read, given)
            self.program.operations.append(
                Operation(
                    name=f"{AUTOGRAD}{name}",
                    args=arguments[0],
                    kwargs=arguments[1],
                    results=[self._new(tensor) for tensor in lost],
                    module=self.modules[-1] if self.modules else "",
                    line=user_line(),
                    custom=name,
                )
            )

    def _is_sized_by_data(self, operation: Operation) -> bool:
        """Return whether the shape of a result depends on values that are not constant."""
        values = self.program.values
        if operation.name.startswith("aten::index."):
            masks = [ref for ref in tree_flatten(operation.args[1])[0] if isinstance(ref, ValueRef)]
            masks = [ref for ref in masks if values[ref.value].dtype in (torch.bool, torch.uint8)]
            return any(values[ref.value].constant is None for ref in masks)
        if not operation.name.startswith(_SIZED_BY_DATA):
            return False
        return any(values[number].constant is None for number in operation.inputs())

    def _follow_sizes(self, operation: Operation, *, in_place: bool) -> None:
        """Note which results have shapes that depend on data, and where the program's way may depend on these."""
        sized = not self._sized.isdisjoint(operation.inputs())
        if self._is_sized_by_data(operation):
            self.program.sized_by_data = sized = True
        elif sized and (in_place or operation.name.startswith(_KEEPS_SIZE)):
            first = operation.args[0] if operation.args else None
            sized = isinstance(first, ValueRef) and first.value in self._sized
        if sized:
            fixed = {value for value in operation.results if not self.program.values[value].shape}
            self._sized.update(set(operation.results) - fixed)
            axis = operation.args[-1] if len(operation.args) > 1 else 0
            if operation.name.startswith(_COUNTED_RESULTS) and axis == 0:
                self.program.branches.append(operation.line)
        raises = sized or operation.name.startswith(RAISES_BY_VALUES)
        if raises and is_error_caught(sys._getframe(3), CAPTURE, NOT_THE_USERS):
            self.program.branches.append(operation.line)

    def note_size_read(self, tensor: Tensor) -> None:
        """Note that the program looks at a size, which may depend on data."""
        self.busy = True
        if self._sized and self.value_of(tensor) in self._sized:
            self.program.branches.append(user_line())
        self.busy = False

    def reads(self, tensors: Sequence[Tensor]) -> None:
        """Note that Python looked at values without an operation."""
        self.busy = True
        for tensor in tensors:
            value = self.value_of(tensor)
            self.program.read.append(value)
            if self.program.values[value].constant is None:
                self.program.branches.append(user_line())
        self.busy = False

    def function_name(self, function: type[torch.autograd.Function]) -> str:
        """Return an autograd function's name.

        Torch's checkpoints are what they are called in, another's of that name not.
        """
        if function is not CheckpointFunction:
            return function.__name__
        return self.custom[-1] if self.custom else CHECKPOINT

    def value_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's present value."""
        return self._read(tensor).value

    def _constant_number(self, name: str, args: Any, recorded: Any) -> Any:
        """Return the number that a program reads out of a constant whose tensor has no values; None for all else."""
        if not name.startswith("aten::_local_scalar_dense") or not args[0].is_meta:
            return None
        constant = self._constants.get(recorded[0].value)
        return None if constant is None else constant.item()

    def _evaluate(self, operation: Operation, func: Any, results: Sequence[Tensor]) -> None:
        """Follow values that nothing trained or given went into."""
        inputs = operation.inputs()
        if not all(value in self._constants for value in inputs):
            return
        if not inputs and not operation.name.startswith(_CREATES):
            return
        blank = any(tensor.is_meta for tensor in results)
        entries = compute_on_host(operation, func, results, self._constants) if blank else results
        for value, tensor in zip(operation.results, entries, strict=False):
            if not hasattr(tensor, "full_tensor"):
                self._keep_constant(value, tensor, held=blank)

    def _keep_constant(self, value: int, entries: Tensor, *, held: bool) -> None:
        """Note a constant, with its entries if they are few or held by nobody else."""
        self._constants[value] = entries if held else None
        if entries.numel() <= KEPT:
            self._constants[value] = self.program.values[value].constant = entries.detach().cpu()

    def forget_state(self, changed: Sequence[Tensor]) -> None:
        """Take buffers that the program writes to for inputs: what they hold now says nothing about the next call.

        Args:
            changed: buffers whose values or tensors are others after the call.
        """
        others = {id(tensor) for tensor in changed}
        values = self.program.values
        state = {
            number
            for number, tensor in self._taken.items()
            if id(tensor) in others or _storage(tensor) in self._written_storages
        }
        for operation in self.program.operations:
            if state.isdisjoint(operation.inputs()):
                continue
            state.update(operation.results)
            if operation.name.startswith("aten::_local_scalar_dense"):
                self.program.branches.append(operation.line)
        for number in state:
            values[number].constant = None
            self.program.tables.pop(number, None)

    def _new(self, tensor: Tensor, *, parameter: str | None = None, fresh_storage: bool = True) -> int:
        number = len(self.program.values)
        shape = () if tensor.is_nested else tuple(tensor.shape)
        self.program.values.append(Value(shape, tensor.dtype, parameter=parameter))
        key = _storage(tensor)
        writes = 0
        if key is not None:
            store = self._storages.get(key)
            if store is None and fresh_storage:
                self._keep.append(tensor)
                store = self._storages[key] = _Storage(number, _geometry(tensor))
            writes = store.writes if store is not None else 0
        self._numbers[tensor] = (number, writes)
        return number

    def _read(self, tensor: Tensor) -> ValueRef:
        result = self._numbers.get(tensor)
        key = _storage(tensor)
        store = self._storages.get(key) if key is not None else None
        if result is None:
            if store is not None:
                # Another tensor in the same memory, made before the program ran: no gradient passes through it.
                return ValueRef(self._again(tensor, store, stopped=not tensor.requires_grad))
            number = self._new(tensor)
            entries = self._fixed.get(id(tensor))
            if entries is not None and not entries.is_meta and not hasattr(entries, "full_tensor"):
                self._keep_constant(number, entries, held=True)
                self._taken[number] = tensor
                if entries.numel() > KEPT:
                    self.program.tables[number] = entries
            return ValueRef(number)
        number, writes = result
        if store is not None and store.writes != writes:
            return ValueRef(self._again(tensor, store))
        return ValueRef(number)

    def _again(self, tensor: Tensor, store: _Storage, *, stopped: bool = False) -> int:
        """Return a view that is read after its storage was written: what the base holds now."""
        number = len(self.program.values)
        self.program.values.append(Value(tuple(tensor.shape), tensor.dtype))
        self.program.operations.append(
            Operation(
                name="conserved::read",
                args=(ValueRef(store.base), store.geometry, _geometry(tensor)),
                kwargs={},
                results=[number],
                module=self.modules[-1] if self.modules else "",
                line=user_line(),
                stopped=stopped,
            )
        )
        self._numbers[tensor] = (number, store.writes)
        return number

    def _write(self, target: Tensor, value: int, operation: Operation) -> None:
        """Record the base of a storage after part of it was written."""
        key = _storage(target)
        if key is not None:
            self._written_storages.add(key)
        store = self._storages.get(key) if key is not None else None
        if store is None:
            return
        store.writes += 1
        if store.geometry == _geometry(target):
            store.base = value
        else:
            number = len(self.program.values)
            self.program.values.append(Value(store.geometry[0], target.dtype))
            self.program.operations.append(
                Operation(
                    name="conserved::write",
                    args=(ValueRef(store.base), store.geometry, ValueRef(value), _geometry(target)),
                    kwargs={},
                    results=[number],
                    module=operation.module,
                    line=operation.line,
                    stopped=operation.stopped,
                    custom=operation.custom,
                )
            )
            store.base = number
        self._numbers[target] = (value, store.writes)


def _copy_over(name: str, source: Tensor, target: Tensor) -> None:
    """Do what an exchange in a group of one process does."""
    target.copy_(source.view(target.shape))


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    result = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name) if argument.kwarg_only else (args[index] if index < len(args) else None)
            result += [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    return result


def _geometry(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return tuple(tensor.shape), (), 0
    if tensor.is_nested:
        return (), (), 0
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _storage(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return None
