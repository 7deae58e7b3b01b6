"""Where backpropagation stops: `detach` and `no_grad` regions, marked while a function is traced.

A traced graph shows what is computed, not what is differentiated. So, while tracing, every value that autograd would
take for a constant passes through an operator of its own, `conserved::stop`, which becomes the `stop` of programs.
What has no such meaning (values written under `no_grad`, hooks on gradients, functions with a backward of their own) is
refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conserved import _torch_compat
from conserved._torch_compat import TorchDispatchMode, schema_of, storage_key, tree_leaves, tree_map
from conserved.discovery.function import ParameterFunction, without_fused_kernels
from conserved.discovery.inputs import UnsuitableError
from conserved.inference.program.gradient_accumulators import has_hooks, held_elsewhere
from conserved.laws.shared_memory import overlaps_itself

_LIBRARY = torch.library.Library("conserved", "DEF")
_LIBRARY.define("stop(Tensor value) -> Tensor")
_LIBRARY.impl("stop", lambda value: value.clone(), "CompositeExplicitAutograd")

STOP = torch.ops.conserved.stop.default

_LEAVING = {
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.__array__: "a conversion to NumPy",
    torch.Tensor.data.__get__: "Tensor.data",  # type: ignore[attr-defined]
    torch.Tensor.__repr__: "the text of a tensor",
    torch.Tensor.__format__: "the text of a tensor",
    torch.Tensor.__dlpack__: "Tensor.__dlpack__",
    torch.Tensor.__reduce_ex__: "a pickled copy",
    torch.Tensor.data_ptr: "Tensor.data_ptr",
    torch.Tensor.untyped_storage: "Tensor.untyped_storage",
    torch.Tensor.storage: "Tensor.storage",
    inspect.getattr_static(torch.Tensor, "grad").__get__: "Tensor.grad",
    torch.Tensor.register_hook: "Tensor.register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "Tensor.register_post_accumulate_grad_hook",
    torch.Tensor.detach_: "Tensor.detach_",
}
"""Functions that hide a value from autograd, or add code of their own to the backward pass."""


class _Marking(TorchDispatchMode):
    """Puts `STOP` behind every value that autograd would not look behind."""

    def __init__(self) -> None:
        super().__init__()
        self.apart: dict[int, Any] = {}
        """Storages of marked copies of values that live elsewhere: writing into them would be lost."""
        self.inside: dict[int, Any] = {}
        """Storages made under `no_grad`, which may be written there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stopped = not torch.is_grad_enabled()
        if func is STOP:
            return func(*args, **kwargs)
        if schema_of(func).is_mutable:
            return self._written(func, args, kwargs, stopped)
        result = func(*args, **kwargs)
        if not stopped and func is not torch.ops.aten.detach.default:
            return result
        given: set[int] = set()
        tree_map(lambda value: given.add(_home(value)) if isinstance(value, Tensor) else None, (args, kwargs))
        return tree_map(lambda value: self._marked(value, given, stopped) if _real(value) else value, result)

    def _marked(self, value: Tensor, given: set[int], stopped: bool) -> Tensor:
        home = _home(value)
        if stopped and home in self.inside:
            return value
        marked: Tensor = STOP(value)
        where = self.inside if stopped and home not in given else self.apart
        where[_home(marked)] = marked.untyped_storage()
        return marked

    def _written(self, func: Any, args: Any, kwargs: Any, stopped: bool) -> Any:
        names = [a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write]
        given = dict(zip([a.name for a in schema_of(func).arguments], args, strict=False)) | kwargs
        targets = [given[name] for name in names if isinstance(given.get(name), Tensor)]
        for target in targets:
            home = _home(target)
            if not stopped:
                self.inside.pop(home, None)
            if _real(target) and (home in self.apart or (stopped and home not in self.inside)):
                raise UnsuitableError(
                    f"{func} writes into a value that backpropagation does not follow (detach or no_grad), so the "
                    "gradient is that of the value before. Write it without changing values in place."
                )
        if stopped:
            args, kwargs = tree_map(
                lambda v: STOP(v) if _real(v) and not any(v is target for target in targets) else v, (args, kwargs)
            )
        return func(*args, **kwargs)


def _home(value: Tensor) -> int:
    """Return which storage a tensor lies in; sparse tensors have none, and are refused by the trace."""
    return storage_key(value) if value.layout == torch.strided else -id(value)


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


_LOOKED_AT_BY_US = {torch.Tensor.untyped_storage, torch.Tensor.data_ptr}


def _ours() -> bool:
    """Return whether the marking itself, or PyTorch while it traces, looks at a tensor; `_home` reads storages."""
    path = sys._getframe(2).f_code.co_filename
    return path in (__file__, _torch_compat.__file__) or "/torch/" in path


class _InSight(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVING and not (func in _LOOKED_AT_BY_US and _ours()):
            raise UnsuitableError(
                f"The function uses {_LEAVING[func]}: what becomes of that value, or of its gradient, cannot be seen "
                "in its graph. Write it with operators on tensors (detach has a meaning, and may stay)."
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def stops_marked() -> Iterator[None]:
    """Trace with a mark wherever backpropagation stops."""
    with torch.enable_grad(), _InSight(), _Marking():
        yield


def refuse_own_backwards(function: ParameterFunction, theta: Tensor, x: Any) -> None:
    """Refuse functions whose backward pass somebody wrote: a proof about the forward pass would say nothing of it."""
    with torch.enable_grad(), without_fused_kernels():
        output = function(theta.detach().clone().requires_grad_(), x)
    seen: set[Any] = set()
    pending = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            raise UnsuitableError(
                f"The function uses {name}, an autograd function with a backward pass of its own (a custom function or "
                "a backward hook of a module). A certificate is about derivatives of what is computed; write it with "
                "operators of PyTorch."
            )
        pending += [after for after, _ in node.next_functions]


def refuse_hooks(parameters: dict[str, Any]) -> None:
    """Refuse parameters with hooks that change their gradients, and those whose entries share one place."""
    held_ids = {id(tensor) for tensor in held_elsewhere(parameters.values())}
    for name, parameter in parameters.items():
        if has_hooks(parameter):
            raise UnsuitableError(
                f"Expected parameters without hooks, got {name}, which has a hook on its gradient. Remove it: "
                "with it, training does not follow the gradient."
            )
        if id(parameter) in held_ids:
            raise UnsuitableError(
                f"Expected nothing to hold on to the gradient of {name}, got a graph that is alive, a wrapper, or a "
                "node with hooks, which may change it. Drop it, or certify a copy.deepcopy of the model."
            )
        if parameter.requires_grad and overlaps_itself(parameter.detach()):
            raise UnsuitableError(
                f"Expected the entries of {name} to lie in places of their own, got a tensor that overlaps itself "
                "(expand or as_strided): a step moves an entry by the gradients of all in its place. Clone it."
            )


class _OutsideReads(TorchDispatchMode):
    """Refuses operations on memory of parameters that the function was not handed as its argument."""

    def __init__(self, owned: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.homes = {_home(tensor): name for name, tensor in owned.items() if tensor.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor) and (name := self.homes.get(_home(value))) is not None:
                raise UnsuitableError(
                    f"The function reads {name} from outside its parameters (a list, a closure or a global), so it "
                    f"would be certified at one value of {name}. Read it from the module, or from the argument."
                )
        return func(*args, **(kwargs or {}))


def refuse_outside_reads(function: ParameterFunction, owned: Mapping[str, Tensor], theta: Tensor, x: Any) -> None:
    """Raise UnsuitableError if a function reads parameters in a way that does not see substituted values.

    Args:
        function: the function, which is given θ.
        owned: the tensors that are the parameters where the function comes from, and copies of them inside it.
        theta: a point.
        x: an input.
    """
    with torch.no_grad(), without_fused_kernels(), _OutsideReads(owned):
        function(theta.detach().clone(), x)
