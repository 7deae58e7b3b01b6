"""Types and shapes are checked in some calls of every function, not in all of them.

jaxtyping's import hook decorates every function of the package with `jaxtyping.jaxtyped`, which took half of the time
of tests and more. Checked are the first call of a function in a test, in the first tests of a process that call it: a
function that breaks its annotations does so in its first call with such arguments, and a test that is run alone has all
of its functions checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, partial, update_wrapper, wraps
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
from torch.compiler import is_dynamo_compiling

# As part of the library: what these count is none of the state of a program that is followed.
__name__ = "conserved.tests.typed_calls"

TESTS = int(os.environ.get("CONSERVED_TYPED_TESTS", "15"))
"""In so many tests of a process the first call of a function is checked."""

_UNCHECKED = ("conserved.inference.program.hidden_inputs",)
"""Modules whose functions are called for every call of a program that is followed, by the interpreter itself."""

_always = jaxtyping.jaxtyped


def begin_test() -> None:
    """The next call of every function is its first."""
    for calls in _called:
        calls.begin()
    _called.clear()


def install() -> None:
    """Modules that are imported from now on are checked like this."""
    setattr(jaxtyping, "jaxtyped", jaxtyped)  # noqa: B010


def jaxtyped(thing: Any = None, *, typechecker: Any = None) -> Any:
    """Take the place of the decorator of the same name."""
    if thing is None:
        return partial(jaxtyped, typechecker=typechecker)
    if isinstance(thing, type):
        if is_dataclass(thing) and isinstance(own := vars(thing).get("__init__"), FunctionType):
            setattr(thing, "__init__", _first_calls(own, typechecker))  # noqa: B010
        return thing
    return _first_calls(thing, typechecker)


def _first_calls(function: FunctionType, typechecker: Any) -> Callable[..., Any]:
    """A function with some calls checked."""
    if function.__module__ in _UNCHECKED:
        return function
    if "<locals>" not in function.__qualname__:
        return _exchanged(function, typechecker)
    # What is defined anew inside a function every time that runs is one function here.
    calls = _calls.setdefault(function.__code__, _Calls())
    return _checking(function, typechecker, calls) if calls.left > 0 else function


def _checking(function: FunctionType, typechecker: Any, calls: _Calls) -> Callable[..., Any]:
    """Calls of a function, checked when they are due; the checks are made when they are first needed."""
    checked: Callable[..., Any] | None = None

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        __tracebackhide__ = True
        if not calls.due or is_dynamo_compiling():
            return function(*args, **kwargs)
        calls.made()
        if checked is None:
            checked = _always(function, typechecker=typechecker)
        return checked(*args, **kwargs)

    return called


def _exchanged(function: FunctionType, typechecker: Any) -> Callable[..., Any]:
    """The function itself, whose code is another while a call is due: all other calls cost what they always cost."""
    written = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    update_wrapper(written, function)
    del written.__wrapped__  # type: ignore[attr-defined]
    written.__kwdefaults__ = function.__kwdefaults__
    calls = _Calls(function)
    # A name that the module does not have otherwise: PyTorch's compiler follows calls of what is global.
    name = f"__checking_{function.__qualname__.replace('.', '_')}_{id(calls)}"
    checking = function.__globals__[name] = _checking(written, typechecker, calls)
    # Whoever lists what a module defines does not list this.
    checking.__module__ = __name__
    calls.checking = _calling(len(function.__code__.co_freevars)).replace(co_names=(name,))
    calls.begin()
    function.__wrapped__ = written  # type: ignore[attr-defined]
    return function


@cache
def _calling(free: int) -> CodeType:
    """Code that hands its arguments to the one global name in it, for functions with so many variables of others.

    The interpreter wants as many as the closure of a function has."""
    names = [f"_{number}" for number in range(free)]
    made: dict[str, Any] = {}
    exec(
        f"def around({', '.join(names)}):\n"
        "    def calling(*args, **kwargs):\n"
        "        return named(*args, **kwargs)\n"
        f"        {', '.join(names) or 'pass'}\n"
        "    return calling\n",
        made,
    )
    code_type: CodeType = made["around"](*names).__code__
    return code_type


class _Calls:
    """Of a function: whether its next call is to be checked, and in how many more tests one will be."""

    __slots__ = ("checking", "due", "function", "left", "written")

    def __init__(self, function: FunctionType | None = None) -> None:
        self.due, self.left = True, TESTS
        self.function = function
        """With code that is exchanged, if any."""
        self.written = function.__code__ if function else None
        self.checking: CodeType | None = None

    def begin(self) -> None:
        """The next call is a first one."""
        self.due = self.left > 0
        if self.due and self.function and self.checking:
            self.function.__code__ = self.checking

    def made(self) -> None:
        """A call is being checked."""
        self.due = False
        self.left -= 1
        _called.append(self)
        if self.function and self.written:
            self.function.__code__ = self.written


_calls: dict[CodeType, _Calls] = {}

_called: list[_Calls] = []
"""Functions with a call that was checked in the test that runs."""
