"""Functions of other packages whose calls are told to listeners, and which get their places back afterwards."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Replaced(NamedTuple):
    """A function of others in whose place one of ours stands."""

    holder: Any
    attribute: str
    original: Any
    ours: Any


class _Under(threading.local):
    """How many calls of the functions are under way in a thread."""

    def __init__(self) -> None:
        self.calls = 0


class Listeners(Generic[T]):
    """Who listens to some functions now, and the functions of ours that stand in their places meanwhile.

    Listeners are held weakly. What stands in a module of PyTorch lasts as long as the process, and would keep a model
    whose monitor was dropped without being closed, with all its memory.
    """

    def __init__(self) -> None:
        self._listeners: list[weakref.ref[T]] = []
        self._replaced: list[_Replaced] = []
        self._under = _Under()

    def now(self) -> list[T]:
        """Everyone who is to be told of a call now: nobody inside of one, which is told by the outermost function.

        There may be several of ours: others may have kept one and put it back after its time.
        """
        if self._under.calls:
            return []
        return [one for kept in self._listeners if (one := kept()) is not None]

    def begin(self, listener: T) -> None:
        """Tell a listener of calls from now on; it must be held by whoever will end this."""
        self._listeners.append(weakref.ref(listener))

    def end(self, listener: T) -> None:
        """Stop telling it. Functions get their places back after the last one; what others have put there stays."""
        self._listeners = [kept for kept in self._listeners if kept() not in (None, listener)]
        while self._replaced and not self._listeners:
            one = self._replaced.pop()
            if vars(one.holder).get(one.attribute) is one.ours:
                setattr(one.holder, one.attribute, one.original)

    def replace(self, holder: Any, attribute: str, through: Callable[[Any], Any]) -> None:
        """Put ours in the place of a function, unless it is there already; one layer, however many listen.

        Args:
            holder: the module or class that the function is looked up in.
            attribute: its name there.
            through: given the function, makes ours, which calls it.
        """
        original = getattr(holder, attribute)
        if any(one.ours is original for one in self._replaced):
            return
        ours = through(self._told_once(original))
        setattr(holder, attribute, ours)
        self._replaced.append(_Replaced(holder, attribute, original, ours))

    def _told_once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            self._under.calls += 1
            try:
                return original(*args, **options)
            finally:
                self._under.calls -= 1

        return call
