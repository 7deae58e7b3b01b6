"""Puts back what a program keeps beside its tensors after a pass that is none of training: counters, lists, caches.

A forward pass may append to a list, count its calls or keep features, in attributes of modules or in the closures of
hooks. Reading laws runs such a pass. Without this, a loss that takes `features[0]` would take that of the wrong pass.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from conserved._torch_compat import buffers_of, hooks_of, preserve_version_counter
from conserved.boundary import Hook
from conserved.inference.program.undone_writes import writes_undone
from conserved.rank_agreement import several_processes

CHECKING: ContextVar[bool] = ContextVar("conserved_program_check", default=False)
"""Whether the forward pass that runs now is one that tests laws or the program, and not one of training."""

_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, modules and hooks."""

_INITIALISES = nn.modules.lazy.LazyModuleMixin
"""Modules that become others at their first call: they keep what they have become."""

_CONTAINERS = (list, dict, set)


REWRITTEN: Any = WeakTensorKeyDictionary()
"""Parameters that the forward pass of a model was seen to write to: a teacher that follows its student there."""


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Restore parameters that a forward pass gives other data, or is known to write to."""
    if several_processes():
        # Sharded parameters get other data in every pass, and lose it afterwards.
        yield
        return
    saved = [(p, p.data) for p in model.parameters() if type(p) is nn.Parameter and not p.is_meta]
    copies = [(p, p.detach().clone()) for p, _ in saved if p in REWRITTEN]
    try:
        yield
    finally:
        for parameter, data in saved:
            if parameter.data.data_ptr() != data.data_ptr():
                parameter.data = data
        for parameter, value in copies:
            with preserve_version_counter(parameter):
                parameter.data.copy_(value)


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore the plain attributes, containers and bound buffers of a model after calls of it.

    Args:
        model: the model whose modules and hooks are looked at.
    """
    attributes = [
        (module, {name: value for name, value in vars(module).items() if name not in _OWN})
        for module in model.modules()
        if not isinstance(module, _INITIALISES)
    ]
    buffers = [(module, dict(buffers_of(module))) for module, _ in attributes]
    hooks = _with_called(hook for module in model.modules() for hook in hooks_of(module))
    contents = [(item, _copy(item)) for item in _containers(hooks, attributes)]
    cells = [(cell, cell.cell_contents) for hook in hooks for cell in _cells(hook)]
    numbers = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        with _parameters_kept(model), writes_undone():
            yield
    finally:
        random.setstate(numbers)
        if drawn is not None:
            numpy.random.set_state(drawn)
        for container, content in contents:
            _fill(container, content)
        for cell, content in cells:
            # A hook may count its calls in a variable of the function around it.
            cell.cell_contents = content
        for module, before in attributes:
            now = vars(module)
            for name in [name for name in now if name not in _OWN and name not in before]:
                del now[name]
            now.update(before)
        for module, owned in buffers:
            # A forward may bind another tensor to the name of a buffer.
            buffers_of(module).update(owned)


_DEPTH = 3
"""Containers inside containers that are looked into."""

_LARGEST = 10_000
"""Items of a container beyond which only the container itself is looked at."""


def _containers(hooks: list[Callable[..., Any]], attributes: list[tuple[nn.Module, dict[str, Any]]]) -> list[Any]:
    """Return lists, dictionaries and sets that modules hold and that hooks can reach, and those inside them."""
    values = [value for _, own in attributes for value in own.values()]
    for hook in hooks:
        values += _reach(hook)
    found: dict[int, Any] = {}
    for _ in range(_DEPTH):
        new = {id(item): item for item in values if type(item) in _CONTAINERS and id(item) not in found}
        found |= new
        values = [value for item in new.values() if len(item) <= _LARGEST for value in _items(item)]
    return list(found.values())


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _with_called(hooks: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return functions of a program and those that they have from the functions around them."""
    found: dict[int, Callable[..., Any]] = {}
    new = [hook for hook in hooks if not isinstance(hook, Hook)]
    while new:
        found |= {id(hook): hook for hook in new}
        contents = (cell.cell_contents for hook in new for cell in _cells(hook))
        new = [item for item in contents if isinstance(item, FunctionType | MethodType) and id(item) not in found]
    return list(found.values())


def _cells(hook: Callable[..., Any]) -> list[Any]:
    """Return the variables of surrounding functions that a function may bind to something else."""
    if isinstance(hook, partial):
        return _cells(hook.func)
    function = getattr(hook, "__func__", hook)
    return [cell for cell in getattr(function, "__closure__", None) or () if is_filled(cell)]


def _reach(hook: Callable[..., Any]) -> list[Any]:
    """Return objects that a function can write to.

    These are its closure, its arguments, the object it is bound to, and the globals that it names.
    """
    if isinstance(hook, partial):
        return [*hook.args, *hook.keywords.values(), *_reach(hook.func)]
    owner = getattr(hook, "__self__", None)
    objects = [owner, *vars(owner).values()] if hasattr(owner, "__dict__") else [owner]
    function = getattr(hook, "__func__", hook)
    objects += [cell.cell_contents for cell in _cells(function)]
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    return objects + [names[name] for name in getattr(code, "co_names", ()) if name in names]


def is_filled(cell: CellType) -> bool:
    """Return whether the variable of a closure has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _copy(container: Any) -> Any:
    return container.copy()


def _fill(container: Any, content: Any) -> None:
    """Give a container its former content, if that has changed."""
    if len(container) == len(content) and all(map(_is, container, content)) and not isinstance(container, dict):
        return
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def _is(first: Any, second: Any) -> bool:
    return first is second
