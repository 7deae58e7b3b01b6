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
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
from torch.compiler import is_dynamo_compiling

TESTS = int(os.environ.get("CONSERVED_TYPED_TESTS", "15"))
"""In so many tests of a process the first call of a function is checked."""

_always = jaxtyping.jaxtyped


def begin_test() -> None:
    """The next call of every function is its first."""
    for calls in _called:
        calls.due = calls.left > 0
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
    """A function with some calls checked; the checks are made when they are first needed.

    What is defined anew inside a function every time that runs is one function here."""
    checked: Callable[..., Any] | None = None
    calls = _calls.setdefault(function.__code__, _Calls())

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        __tracebackhide__ = True
        if not calls.due or is_dynamo_compiling():
            return function(*args, **kwargs)
        calls.due = False
        calls.left -= 1
        _called.append(calls)
        if checked is None:
            checked = _always(function, typechecker=typechecker)
        return checked(*args, **kwargs)

    return called


class _Calls:
    """Of a function: whether its next call is to be checked, and in how many more tests one will be."""

    __slots__ = ("due", "left")

    def __init__(self) -> None:
        self.due, self.left = True, TESTS


_calls: dict[CodeType, _Calls] = {}

_called: list[_Calls] = []
"""Functions with a call that was checked in the test that runs."""
