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

TESTS = int(os.environ.get("CONSERVED_TYPED_TESTS", "40"))
"""In so many tests of a process the first call of a function is checked."""

_always = jaxtyping.jaxtyped


class _Test:
    """The number of the test that runs."""

    number = 0


def begin_test() -> None:
    """The next call of every function is its first."""
    _Test.number += 1


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
    calls = _calls.setdefault(function.__code__, [0, TESTS])

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        __tracebackhide__ = True
        if is_dynamo_compiling() or calls[0] == _Test.number or not calls[1]:
            return function(*args, **kwargs)
        calls[0] = _Test.number
        calls[1] -= 1
        if checked is None:
            checked = _always(function, typechecker=typechecker)
        return checked(*args, **kwargs)

    return called


_calls: dict[CodeType, list[int]] = {}
"""Of every function: the test in which a call was last checked, and in how many more tests one will be."""
