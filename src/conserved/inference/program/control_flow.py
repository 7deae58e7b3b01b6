"""Control flow that PyTorch has as operators (`torch.cond`, `while_loop`, `scan`, `map`), run as Python.

Such an operator takes functions, and compiles them itself unless a compiler already calls it. A mode that watches
operations sees nothing of what happens inside. So these operators are replaced, for the duration of a block, by the
loops and branches they stand for, and compiled functions run eagerly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conserved._torch_compat import HigherOrderOperator, tree_map

Result = TypeVar("Result")
Function = Callable[..., Any]


def _cond(condition: Any, if_true: Function, if_false: Function, operands: Sequence[Any] = ()) -> Any:
    return (if_true if condition else if_false)(*operands)


def _while_loop(condition: Function, body: Function, state: Sequence[Any], fixed: Sequence[Any] = ()) -> Any:
    state = tuple(state)
    while condition(*state, *fixed):
        state = tuple(body(*state, *fixed))
    return state


def _rows(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.unbind() for tensor in tensors), strict=True)


def _scan(combine: Function, state: Sequence[Any], inputs: Sequence[Tensor], fixed: Sequence[Any] = ()) -> Any:
    carried, outputs = list(state), []
    for row in _rows(inputs):
        result = list(combine(*carried, *row, *fixed))
        carried = result[: len(carried)]
        outputs.append(result[len(carried) :])
    return [*carried, *map(torch.stack, zip(*outputs, strict=True))]


def _map(function: Function, inputs: Sequence[Tensor], fixed: Sequence[Any] = ()) -> Any:
    results = [function(*row, *fixed) for row in _rows(inputs)]
    return tree_map(lambda *column: torch.stack(column), results[0], *results[1:])


_AS_PYTHON: dict[str, Function] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan, "map_impl": _map}
"""The Python functions that operators of control flow stand for, by name."""


def python_of(function: Any) -> Function | None:
    """Return the Python that an operator stands for, if it is one of control flow."""
    return _AS_PYTHON.get(function.name()) if isinstance(function, HigherOrderOperator) else None


class _ControlFlow(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (plain := python_of(func)) is not None:
            with self:
                # Branches may branch again.
                return plain(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_compiler_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def without_compiler() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly within the context.

    Asking for it imports the compiler, which takes seconds; where nobody has imported it, nothing is compiled yet. See
    `run_again_if_compiler_loads`.
    """
    known = _is_compiler_loaded() and hasattr(torch.compiler, "set_stance")
    return torch.compiler.set_stance("force_eager") if known else nullcontext()


@contextmanager
def control_flow_as_python() -> Iterator[None]:
    """Run control flow, and whatever is compiled, as Python."""
    with without_compiler(), _ControlFlow() if _is_compiler_loaded() else nullcontext():
        yield


def run_again_if_compiler_loads(run: Callable[[], Result]) -> Result:
    """Call a function that runs a program, and once more if that imported the compiler: parts were then compiled.

    Args:
        run: calls the program within `control_flow_as_python` or `without_compiler`, each time from the beginning.
    """
    loaded = _is_compiler_loaded()
    try:
        result = run()
    except Exception:
        # A program that is compiled while modes watch it fails in many ways.
        if loaded or not _is_compiler_loaded():
            raise
    else:
        if loaded or not _is_compiler_loaded():
            return result
    return run()
