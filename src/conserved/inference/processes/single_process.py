"""The program of one process inside a model that runs on several: the same modules without what parallelises them.

FSDP2, composable data parallelism and tensor parallelism leave the code of a model alone. They give modules another
class, hooks, or a `forward` of their own that moves tensors between processes before and after the class's. Compiled
modules hold a function that runs the modules they were made of. A copy without all of these computes what one process
with whole parameters would.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from conserved._torch_compat import FSDP1_CHILD, FSDP1_FLAT, buffers_of, children_of, parameters_of
from conserved.inference.program.program_state import is_filled
from conserved.layout import flat_shards

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_WITH_KWARGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

_DEEPEST = 6
"""Functions inside functions that are looked through: decorators of decorators are rarely more than three."""


class StandInWrapper(nn.Module):
    """A module that calls the only module inside it, under the name that the wrapper it stands for gave it."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module inside."""
        (inner,) = self._modules.values()
        assert inner is not None
        return inner(*args, **kwargs)


def runs_on_several(model: nn.Module) -> bool:
    """Return whether parts of a model have classes, hooks or forwards that move tensors between processes.

    Args:
        model: any module.

    Returns:
        True if `single_process_copy` differs from the model.
    """
    return any(
        _first_class(type(module)) is not type(module)
        or FSDP1_CHILD in children_of(module)
        or "_hf_hook" in vars(module)
        or any(_of_stack(hook) for name in _HOOKS for hook in getattr(module, name).values())
        or ("forward" in vars(module) and _moves_tensors(vars(module)["forward"]))
        for module in model.modules()
    )


def single_process_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the modules of a model that computes what the model computes, on one process.

    Args:
        model: any module; it is not changed.

    Returns:
        Modules of the first class of each, without hooks of the stack and without compiled code. Parameters,
        buffers and all other attributes are shared with the model.
    """
    made: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        result: nn.Module
        if id(module) in made:
            return made[id(module)]
        cls = _first_class(type(module))
        inner = children_of(module).get(FSDP1_CHILD)
        if inner is not None:
            # Its parameters have names without this wrapper.
            result = made[id(module)] = copy(inner)
            return result
        inner = children_of(module).get("_orig_mod")
        if inner is not None and len(children_of(module)) == 1:
            result = made[id(module)] = StandInWrapper("_orig_mod", nn.Identity())
            children_of(result)["_orig_mod"] = copy(inner)
            result.training = module.training
            return result
        result = made[id(module)] = cls.__new__(cls)
        vars(result).update(vars(module))
        result._compiled_call_impl = None
        # The copy shares its tensors with the module, but has tables of its own.
        result.__dict__["_parameters"] = {n: p for n, p in parameters_of(module).items() if n != FSDP1_FLAT}
        result.__dict__["_buffers"] = dict(buffers_of(module))
        result.__dict__["_modules"] = {
            name: child if child is None else copy(child) for name, child in children_of(module).items()
        }
        _copy_hooks(module, result)
        return result

    twin = copy(model)
    for module in model.modules():
        if FSDP1_CHILD not in children_of(module):
            _copy_forward(module, made)
    for (owner, attribute), shard in flat_shards(model).items():
        # FSDP1 leaves views of its flat tensor as attributes, or nothing; ZeRO-3 empties parameters.
        vars(made[owner]).pop(attribute, None)
        made[owner]._parameters[attribute] = shard  # type: ignore[assignment]
    return twin


def _copy_hooks(module: nn.Module, copy: nn.Module) -> None:
    """Give a copy the hooks of a module that are not those of the stack."""
    for name in _HOOKS:
        hooks = OrderedDict((key, hook) for key, hook in getattr(module, name).items() if not _of_stack(hook))
        setattr(copy, name, hooks)
    for name in _WITH_KWARGS:
        setattr(copy, name, OrderedDict(getattr(module, name)))


def _copy_forward(module: nn.Module, made: dict[int, nn.Module]) -> None:
    """Give a copy the forward of its own that a module has, bound to the copy, or its class's."""
    copy_, forward = made[id(module)], vars(module).get("forward")
    if forward is None or isinstance(copy_, StandInWrapper):
        return
    vars(copy_).pop("forward", None)
    if "_hf_hook" in vars(copy_):
        # Accelerate puts a forward of its own in the place of the class's, which fetches weights from elsewhere.
        for name in ("_hf_hook", "_old_forward"):
            vars(copy_).pop(name, None)
    elif not _moves_tensors(forward):
        vars(copy_)["forward"] = _rebind(forward, made, 0)
    elif (inner := _inner_method(forward, module)) is not None:
        vars(copy_)["forward"] = _rebind(inner, made, 0)


def _first_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module was written as, before torch.distributed gave it one that derives from it."""
    modules = [base for base in cls.__bases__ if issubclass(base, nn.Module)]
    others = [base for base in cls.__bases__ if base not in modules]
    mixed_in = others and all(base.__module__.startswith("torch.distributed") for base in others)
    return _first_class(modules[0]) if mixed_in and len(modules) == 1 else cls


def _of_stack(hook: Any) -> bool:
    """Return whether a hook belongs to the distributed code of PyTorch or DeepSpeed."""
    hook = getattr(hook, "func", hook)
    hook = getattr(hook, "__wrapped__", hook)
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed", "deepspeed."))


def _parts(function: Any) -> Iterator[Any]:
    """Yield what a callable refers to: cells, the object it is bound to, what it was partially applied to."""
    if isinstance(function, MethodType):
        yield from (function.__func__, function.__self__)
    elif isinstance(function, partial):
        yield from (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, FunctionType):
        yield from (cell.cell_contents for cell in function.__closure__ or () if is_filled(cell))
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        if hasattr(function, "__wrapped__"):
            yield function.__wrapped__


def _moves_tensors(function: Any, depth: int = 0) -> bool:
    """Return whether a forward of a module's own refers to processes: a mesh, a group, or an object that holds one."""
    for part in _parts(function):
        if isinstance(part, DeviceMesh | dist.ProcessGroup):
            return True
        if isinstance(part, nn.Module | torch.Tensor | type):
            continue
        if callable(part) and depth < _DEEPEST and _moves_tensors(part, depth + 1):
            return True
        attributes = getattr(part, "__dict__", {}).values() if not isinstance(part, FunctionType) else ()
        flat = [value_ for value in attributes for value_ in (value.values() if isinstance(value, dict) else (value,))]
        if any(isinstance(value_, DeviceMesh | dist.ProcessGroup) for value_ in flat):
            return True
    return False


def _inner_method(function: Any, module: nn.Module, depth: int = 0) -> Callable[..., Any] | None:
    """Return the method of a module that a forward of its own calls in the end; None if it calls none."""
    for part in _parts(function):
        if isinstance(part, MethodType) and part.__self__ is module:
            return part
        if callable(part) and not isinstance(part, nn.Module | type) and depth < _DEEPEST:
            result = _inner_method(part, module, depth + 1)
            if result is not None:
                return result
    return None


def _rebind(part: Any, made: dict[int, nn.Module], depth: int) -> Any:
    """Return a callable, or what it refers to, with copies in the place of modules."""
    if isinstance(part, nn.Module):
        return made.get(id(part), part)
    if depth > _DEEPEST:
        return part

    def again(inner: Any) -> Any:
        return _rebind(inner, made, depth + 1)

    if isinstance(part, MethodType):
        return MethodType(again(part.__func__), again(part.__self__))
    if isinstance(part, partial):
        return partial(again(part.func), *map(again, part.args), **{k: again(v) for k, v in part.keywords.items()})
    if isinstance(part, FunctionType) and part.__closure__:
        cells = tuple(CellType(again(c.cell_contents)) if is_filled(c) else c for c in part.__closure__)
        result = FunctionType(part.__code__, part.__globals__, part.__name__, part.__defaults__, cells)
        result.__kwdefaults__ = part.__kwdefaults__
        return result
    return part
