"""Temporarily wrap functions of other packages so that listeners see their calls."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from conserved.boundary import described

LOGGER = logging.getLogger("conserved")

T = TypeVar("T")


class _Replaced(NamedTuple):
    """A function of others in whose place one of ours stands."""

    holder: Any
    attribute: str
    original: Any
    ours: Any


@dataclass(slots=True)
class _Outcome:
    """The outcome of the wrapped function in one call: its result, or the exception that is the user's own."""

    done: bool = False
    result: Any = None
    raised: BaseException | None = None


class _Under(threading.local):
    """The number of calls that are running in a thread, and the results of the calls that are ours."""

    def __init__(self) -> None:
        self.calls = 0
        self.outcomes: list[_Outcome] = []


class Listeners(Generic[T]):
    """The listeners of some functions, and the wrappers that replace these functions meanwhile.

    Listeners are held weakly. What stands in a module of PyTorch lasts as long as the process, and would keep a model
    whose monitor was dropped without being closed, with all its memory.
    """

    def __init__(self) -> None:
        self._listeners: list[weakref.ref[T]] = []
        self._replaced: list[_Replaced] = []
        self._under = _Under()

    def now(self) -> list[T]:
        """Return the listeners of a call now: none inside another call, which the outermost function reports.

        There may be several of ours: others may have kept one and put it back after its time.
        """
        if self._under.calls:
            return []
        return [listener for reference in self._listeners if (listener := reference()) is not None]

    def begin(self, listener: T) -> None:
        """Report calls to a listener from now on; the caller must hold a reference to it."""
        self._listeners.append(weakref.ref(listener, self._put_back))

    def end(self, listener: T) -> None:
        """Stop telling it. Functions get their places back after the last one; what others have put there stays."""
        self._listeners = [reference for reference in self._listeners if reference() not in (None, listener)]
        self._put_back()

    def _put_back(self, gone: object = None) -> None:
        """Give functions their places back if nobody listens any more, also when the last listener was collected."""
        if any(reference() is not None for reference in self._listeners):
            return
        while self._replaced:
            replacement = self._replaced.pop()
            if vars(replacement.holder).get(replacement.attribute) is replacement.ours:
                setattr(replacement.holder, replacement.attribute, replacement.original)

    def replace(
        self,
        holder: Any,
        attribute: str,
        through: Callable[[Any], Any],
        *,
        reach: Callable[[Any], Callable[..., Any]] | None = None,
    ) -> None:
        """Put ours in the place of a function, unless it is there already; one layer, however many listen.

        Args:
            holder: the module or class that the function is looked up in.
            attribute: its name there.
            through: given the function, makes ours, which calls it.
            reach: given the function, makes what is called for it; the function itself by default. For functions that
                arguments recognise by where they are looked up, which is where ours now stands.
        """
        original = getattr(holder, attribute)
        if any(replacement.ours is original for replacement in self._replaced):
            return
        reached = original if reach is None else reach(original)
        ours = self.guarded(reached, through(self._call_once(reached)))
        setattr(holder, attribute, ours)
        self._replaced.append(_Replaced(holder, attribute, original, ours))

    def _call_once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            self._under.calls += 1
            outcome = self._under.outcomes[-1] if self._under.outcomes else _Outcome()
            try:
                outcome.result = original(*args, **options)
            except BaseException as problem:
                outcome.raised = problem
                raise
            finally:
                self._under.calls -= 1
            outcome.done = True
            return outcome.result

        return call

    def guarded(self, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `ours`, and where that fails by itself gives what the original gave.

        Args:
            original: the function of the other package.
            ours: the function that tells listeners and calls `original`.

        Returns:
            A function that raises only what `original` raises. After a failure of ours nobody listens any more.
        """

        @wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or not self._listeners:
                return original(*args, **options)
            outcome = _Outcome()
            self._under.outcomes.append(outcome)
            try:
                return ours(*args, **options)
            except Exception as problem:
                if problem is outcome.raised:
                    raise
                LOGGER.warning("conserved: listening stopped: %s. Training goes on.", described(problem))
                self._listeners = []
                return outcome.result if outcome.done else original(*args, **options)
            finally:
                self._under.outcomes.pop()

        return call
