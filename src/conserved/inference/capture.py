"""The program as a list of operations: one forward pass is watched below autograd, and writes become values.

Every ATen operation that runs is recorded with its arguments, the module it ran in and the line of user code it came
from. Tensors are numbered as values; an operation in place makes a new value, and a view of storage that was written
since is read again from its base. Nothing is compiled: control flow runs as Python, so whatever PyTorch can run can
be captured, on real tensors or on the meta device.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

from conserved import _torch_compat
from conserved._torch_compat import (
    AutogradFunctionBase,
    TorchDispatchMode,
    buffers_of,
    disable_dynamo,
    preserve_version_counter,
    storage_key,
    tree_flatten,
    tree_map_only,
    without_mkldnn,
)
from conserved.inference.caught_errors import RAISES_BY_VALUES, is_error_caught
from conserved.inference.collectives import COLLECTIVES, WAITS, Messages, group_size, is_collective
from conserved.inference.decompositions import DECOMPOSED
from conserved.inference.gradient_accumulators import has_accumulator_hooks, has_node_hooks
from conserved.inference.hidden_inputs import HiddenInputs
from conserved.inference.objective import loss_outputs
from conserved.inference.program_state import CHECKING, REWRITTEN
from conserved.laws.shared_memory import overlapping, overlaps_itself

AUTOGRAD = "autograd::"
"""Before the name of an autograd function that computes outside PyTorch, where it stands as one operation."""

CHECKPOINT = "torch.utils.checkpoint"
"""In place of a name: torch computes the forward pass again and differentiates it, so its backward is a derivative."""

KEPT = 100_000
"""Constants of at most this many entries are kept, so that rules can look at their values."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A value of the program, by number."""

    value: int


@dataclass(slots=True)
class Value:
    """A tensor of the program: its shape, and its entries, on the host, if it is a small constant."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    constant: Tensor | None = None
    parameter: str | None = None


@dataclass(slots=True)
class Operation:
    """One step: what ran, on which values, with which results; where it stands in the user's program."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]
    module: str
    line: str
    stopped: bool = False
    """Whether no gradient is recorded through it."""
    custom: str = ""
    """The autograd function in whose forward it ran: its backward is whatever its author wrote."""

    _inputs: list[int] | None = None

    def inputs(self) -> list[int]:
        """Return the values it reads."""
        if self._inputs is None:
            leaves = tree_flatten((self.args, self.kwargs))[0]
            self._inputs = [leaf.value for leaf in leaves if isinstance(leaf, ValueRef)]
        return self._inputs


@dataclass(slots=True)
class CapturedProgram:
    """All operations of one forward pass, and the values it ends with."""

    operations: list[Operation] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    """Parameters that share their storage with another one without being the same parameter."""
    hooked: list[str] = field(default_factory=list)
    """Parameters with hooks that may change their gradients."""
    hooked_values: set[int] = field(default_factory=set)
    """Values with such hooks."""
    hooked_nodes: bool = False
    """Whether a node of the graph of gradients has hooks of its own, which no value shows."""
    read: list[int] = field(default_factory=list)
    """Values that Python read a number from."""
    branches: list[str] = field(default_factory=list)
    """Lines that read a number out of something that is no constant, and may have gone another way for other inputs."""
    hidden: list[str] = field(default_factory=list)
    """State besides tensors that it reads or changes: another call may compute something else."""
    sized_by_data: bool = False
    """Whether shapes depend on values: other inputs may read other parts of a parameter."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    communicates: bool = False
    """Whether it exchanges tensors with other processes: what it computes is then a part of a whole program."""
    _makers: dict[int, Operation] = field(default_factory=dict)
    _read_values: set[int] | None = None

    def maker(self, value: int) -> Operation | None:
        """Return the operation that a value is a result of."""
        if not self._makers:
            self._makers.update({result: operation for operation in self.operations for result in operation.results})
        return self._makers.get(value)

    def restrict(self, live: Sequence[int]) -> None:
        """Name the operations that the outputs depend on; `is_read` looks at these only."""
        self._read_values = {number for index in live for number in self.operations[index].inputs()}
        self._read_values.update(self.outputs)

    @property
    def decisions(self) -> str:
        """Reasons why another call may take another path, in words; empty if none was seen."""
        lines = list(dict.fromkeys(self.branches))
        numbers = [f"numbers it reads, in {', '.join(lines[:2])}"] if lines else []
        return "; ".join([*self.hidden[:2], *numbers])

    def is_read(self, value: int) -> bool:
        """Return whether an operation that the outputs depend on reads a value, or it is an output."""
        if self._read_values is None:
            self.restrict(range(len(self.operations)))
        assert self._read_values is not None
        return value in self._read_values

    def padding_row(self, value: int, row: int) -> Tensor | None:
        """Return a row of a parameter that is a look-up table; None if it is not one, or has no values."""
        name = self.values[value].parameter
        table = self.tensors.get(name) if name is not None else None
        if table is None or table.is_meta or hasattr(table, "full_tensor"):
            return None
        return table.detach()[row]


@dataclass(slots=True)
class _Storage:
    base: int
    geometry: tuple[tuple[int, ...], tuple[int, ...], int]
    writes: int = 0


def shared_among(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the trained parameters that have entries in common with others, or with themselves.

    A step moves these twice.
    """
    trained = {name: parameter.detach() for name, parameter in parameters.items() if parameter.requires_grad}
    among = overlapping(trained)
    return [name for name, parameter in trained.items() if name in among or overlaps_itself(parameter)]


def has_hooks(parameter: Tensor) -> bool:
    """Return whether hooks are registered on a parameter that may change its gradient before or after it is
    accumulated.
    """
    on_tensor = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(on_tensor) or has_accumulator_hooks(parameter)


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


class Recorder(TorchDispatchMode):
    """Records what runs below autograd."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Sequence[Tensor] = (),
        stand_ins: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self.stand_ins = stand_ins or {}
        """Functions to follow instead of operations, by name."""
        self._fixed = {id(tensor) for tensor in constants}
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
            self._fixed.add(id(args[0]))
        recorded = tree_map_only(Tensor, self._read, (args, kwargs))
        written = _written_tensors(func, args, kwargs)
        for tensor in written:
            self._keep_parameter(tensor)
        out = func(*args, **kwargs)
        results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        operation = Operation(
            name=name,
            args=recorded[0],
            kwargs=recorded[1],
            results=[],
            module=self.modules[-1] if self.modules else "",
            line=_line(),
            stopped=not torch.is_grad_enabled() and not self.custom,
            custom=self.custom[-1] if self.custom else "",
        )
        inputs = {id(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)}
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
        self._evaluate(operation, results, drawn=drawn)
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
            line=_line(),
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
                    line=_line(),
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
        if raises and is_error_caught(sys._getframe(3), capture.__name__, _NOT_THE_USERS):
            self.program.branches.append(operation.line)

    def note_size_read(self, tensor: Tensor) -> None:
        """Note that the program looks at a size, which may depend on data."""
        self.busy = True
        if self._sized and self.value_of(tensor) in self._sized:
            self.program.branches.append(_line())
        self.busy = False

    def reads(self, tensors: Sequence[Tensor]) -> None:
        """Note that Python looked at values without an operation."""
        self.busy = True
        for tensor in tensors:
            value = self.value_of(tensor)
            self.program.read.append(value)
            if self.program.values[value].constant is None:
                self.program.branches.append(_line())
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

    def _evaluate(self, operation: Operation, results: Sequence[Tensor], *, drawn: bool) -> None:
        """Keep small constants that nothing trained or given went into."""
        values = self.program.values
        inputs = operation.inputs()
        if drawn or any(values[number].constant is None for number in inputs):
            return
        if inputs or operation.name.startswith(_CREATES):
            for number, tensor in zip(operation.results, results, strict=False):
                if not tensor.is_meta and tensor.numel() <= KEPT and not hasattr(tensor, "full_tensor"):
                    values[number].constant = tensor.detach().cpu()

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

    def _new(self, tensor: Tensor, *, parameter: str | None = None, fresh_storage: bool = True) -> int:
        number = len(self.program.values)
        self.program.values.append(Value(tuple(tensor.shape), tensor.dtype, parameter=parameter))
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
            if id(tensor) in self._fixed and not tensor.is_meta and tensor.numel() <= KEPT:
                self.program.values[number].constant = tensor.detach().cpu()
                self._taken[number] = tensor
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
                line=_line(),
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
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _storage(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return None


_NOT_THE_USERS = (
    "/torch/",
    "/conserved/inference/",
    "/conserved/tracking/",
    "/conserved/auditing/",
    "/conserved/boundary.py",
    "/conserved/_torch_compat.py",
    "/jaxtyping/",
    "/beartype/",
    "<@beartype",
    "/typeguard/",
    "/wrapt/",
    "/functools.py",
    "/contextlib.py",
)
"""Parts of the paths of code that stands between the operation and the line that asked for it."""


def _line() -> str:
    """Return the innermost line outside PyTorch, this package and wrappers of functions."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in _NOT_THE_USERS):
            return f"{frame.f_code.co_name} ({path.rpartition('/')[2]}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@contextlib.contextmanager
def _watched(recorder: Recorder, model: nn.Module | None) -> Iterator[None]:
    """Record names of modules while they run, and the autograd functions that run inside them."""
    paths = {id(module): path for path, module in model.named_modules()} if model is not None else {}

    def enter(module: nn.Module, *_: Any) -> None:
        recorder.modules.append(paths.get(id(module), recorder.modules[-1] if recorder.modules else ""))

    def leave(module: nn.Module, *_: Any) -> None:
        if recorder.modules:
            recorder.modules.pop()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    # Beneath the public `apply`, which programs may have bound long ago: op = MyFunction.apply.
    # No mode of PyTorch sees an autograd function being applied, so its base class is changed for this while.
    base: Any = AutogradFunctionBase
    former = inspect.getattr_static(base, "apply")
    nested = "apply" in vars(base)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if (other := recorder.stand_ins.get(f"{AUTOGRAD}{cls.__name__}")) is not None:
            return other(*args, **kwargs)
        before = len(recorder.program.operations)
        recorder.custom.append(recorder.function_name(cls))
        try:
            out = former.__get__(None, cls)(*args, **kwargs)
        finally:
            recorder.custom.pop()
        recorder.note_foreign_results(cls.__name__, (args, kwargs), out, before)
        return out

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if nested:
            base.apply = former
        else:
            del base.apply
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _undisturbed(model: nn.Module | None) -> Iterator[list[Tensor]]:
    """Restore buffers and random numbers afterwards, also for a live graph that will still be differentiated.

    A forward may count calls or update running statistics. Only buffers that changed are written back, and the
    counters by which autograd notices writes stay as they were: the values that graphs saved are there again.

    Yields a list that holds the buffers that changed, once the block has ended.
    """
    changed: list[Tensor] = []
    owned = [(module, dict(buffers_of(module))) for module in model.modules()] if model is not None else []
    buffers = [buffer for buffer in model.buffers() if not buffer.is_meta] if model is not None else []
    copies = [buffer.detach().clone() for buffer in buffers]
    counted = [buffer for buffer in buffers if not buffer.is_inference()]
    try:
        with (
            contextlib.ExitStack() as counters,
            torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []),
        ):
            for buffer in counted:
                # One by one: torch before 2.7 takes no tuple.
                counters.enter_context(preserve_version_counter(buffer))
            try:
                yield changed
            finally:
                for module, before in owned:
                    changed += [
                        b for name, b in before.items() if b is not None and buffers_of(module).get(name) is not b
                    ]
                    buffers_of(module).update(before)
                for buffer, value in zip(buffers, copies, strict=True):
                    if not _is_unchanged(buffer, value):
                        changed.append(buffer)
                        buffer.data.copy_(value)
    finally:
        del copies


@contextlib.contextmanager
def _restored(recorder: Recorder) -> Iterator[None]:
    """Write back the parameters that a program wrote to."""
    try:
        yield
    finally:
        for parameter, value in recorder.rewritten.values():
            REWRITTEN[parameter] = True
            with preserve_version_counter(parameter):
                parameter.data.copy_(value)


def _is_unchanged(buffer: Tensor, value: Tensor) -> bool:
    """Return whether a buffer is what it was, NaN included."""
    same = buffer.detach() == value
    return bool((same | (buffer.detach() != buffer.detach())).all()) if buffer.is_floating_point() else bool(same.all())


_READS = {
    Tensor.__repr__: "printed",
    Tensor.__format__: "formatted",
    Tensor.tolist: "listed",
    Tensor.numpy: "converted to NumPy",
    Tensor.__array__: "converted to NumPy",
    Tensor.__dlpack__: "exported",
    Tensor.__reduce_ex__: "pickled",
    Tensor.data_ptr: "read by address",
    Tensor.untyped_storage: "read from its storage",
    Tensor.storage: "read from its storage",
    inspect.getattr_static(Tensor, "grad").__get__: "read from the last gradient",
    torch.equal: "compared",
    Tensor.equal: "compared",
    torch.allclose: "compared",
    Tensor.allclose: "compared",
}
"""Functions that hand values to Python without an operation that could be recorded."""


_SIZES = {
    inspect.getattr_static(Tensor, "shape").__get__,
    Tensor.size,
    Tensor.__len__,
    Tensor.numel,
    Tensor.nelement,
    Tensor._nnz,
}
"""Functions that tell the size of a tensor."""


_OWN_FILES = frozenset({__file__, _torch_compat.__file__})
"""Files whose own reads of tensors, as of a storage, are not reads of the program."""


class _ReadsAndHooks(TorchFunctionMode):
    """A mode that notes reads of values and hooks on them, after which Python may do anything to gradients."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            self.recorder.program.hooked_values.add(self.recorder.value_of(args[0]))
        if func in _READS and not self.recorder.busy and sys._getframe(1).f_code.co_filename not in _OWN_FILES:
            self.recorder.reads([leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)])
        if func in _SIZES and not self.recorder.busy and _asked_by_program(sys._getframe(1)):
            self.recorder.note_size_read(args[0])
        validates = func is F.one_hot and (*args[1:], (kwargs or {}).get("num_classes", -1))[0] != -1
        former, self.recorder.validating = self.recorder.validating, self.recorder.validating or validates
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.recorder.validating = former


def _asked_by_program(frame: FrameType | None) -> bool:
    """Return whether code of the program called a method of a tensor, and not a function of torch."""
    while frame is not None and frame.f_code.co_filename.endswith(("/torch/overrides.py", "/torch/_tensor.py")):
        frame = frame.f_back
    return frame is not None and not any(part in frame.f_code.co_filename for part in _NOT_THE_USERS)


def _hidden_inputs(run: Callable[[], Any], model: nn.Module | None) -> list[str]:
    """Return what a further call of a program reads or changes beside its tensors; caches are filled by then."""
    hidden = HiddenInputs(run, model)
    token = CHECKING.set(True)
    try:
        with _undisturbed(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), without_mkldnn(), hidden:
            run()
    finally:
        CHECKING.reset(token)
    return hidden.names


def capture(
    run: Callable[[], Any],
    parameters: Mapping[str, Tensor],
    model: nn.Module | None = None,
    stand_ins: Mapping[str, Callable[..., Any]] | None = None,
) -> CapturedProgram:
    """Return the operations of `run()`; what it returns, in any nesting, are the outputs of the program.

    Operations named in `stand_ins` are not run; what is written there is, and followed, in their place.
    """
    recorder = Recorder(parameters, list(model.buffers()) if model is not None else (), stand_ins)
    hidden = HiddenInputs(run, model)
    with (
        _undisturbed(model) as changed,
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        without_mkldnn(),
        _watched(recorder, model),
        _restored(recorder),
        recorder,
        _ReadsAndHooks(recorder),
        hidden,
    ):
        result = run()
    recorder.confirm_messages()
    recorder.forget_state(changed)
    outputs = loss_outputs(result)
    if hidden.names and not recorder.program.communicates:
        # A first call imports modules and fills caches; in another process' company none may be made for that.
        recorder.program.hidden = _hidden_inputs(run, model)
    recorder.program.outputs = [recorder.value_of(leaf) for leaf in outputs]
    recorder.program.hooked_nodes = has_node_hooks(outputs)
    return recorder.program
