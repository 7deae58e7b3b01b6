"""The one boundary between this library and a user's run: what fails inside is stated, and the run goes on.

Every function that a monitor puts on a model, an optimizer or a tensor is a `Hook`, and every call that a training loop
makes goes through `Boundary.attempt`. An exception inside turns one stage of the monitor off. It becomes one log line
and one `Condition`, and it reaches the training loop only if the boundary is strict.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from conserved._torch_compat import in_function_transform

LOGGER = logging.getLogger("conserved")

T = TypeVar("T")

_LONGEST = 240
"""Characters of an exception's message that are shown; the log has the traceback at level DEBUG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A part of a monitor that is off, since when and why."""

    stage: str
    step: int
    """The step in which it was turned off; 0 before the first."""
    reason: str
    off: bool = True
    """Whether the part stays off; False if it goes on and something was left out."""

    def __str__(self) -> str:
        if self.stage == LAWS and self.off:
            return f"not watched: {self.reason}"
        return f"{self.stage} {'off ' if self.off else ''}since step {self.step}: {self.reason}"


LAWS = "laws"
"""The stage that reads the laws; without it there is nothing to account for and little to audit."""


class _Depth(threading.local):
    """The number of calls into the library that are running in a thread."""

    def __init__(self) -> None:
        self.entries = 0


class Boundary:
    """Runs the stages of a monitor, states what fails, and measures the time spent inside.

    Args:
        strict: whether exceptions are raised as well as stated.
        passing: exceptions that always reach the training loop, because the user asked for them.
        logs: whether this process writes to the log.
    """

    def __init__(self, *, strict: bool = False, passing: tuple[type[Exception], ...] = (), logs: bool = True) -> None:
        self.strict, self.step, self.seconds, self.processor_seconds = strict, 0, 0.0, 0.0
        """`processor_seconds` is time of the calling thread: other work on the machine does not count."""
        self._passing, self._logs = passing, logs
        self._on_failure: weakref.WeakMethod[Callable[[str], None]] | None = None
        self._conditions: dict[str, Condition] = {}
        self._off: set[str] = set()
        self._depth = _Depth()

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The parts that are off or left something out, in the order in which that happened."""
        return tuple(self._conditions.values())

    def when_failed(self, method: Callable[[str], None]) -> None:
        """Call a bound method with the name of every stage that an exception turns off.

        Weak reference: hooks of tensors hold this boundary, and Python does not see the cycle through the model.
        """
        self._on_failure = weakref.WeakMethod(method)

    def off(self, stage: str) -> Condition | None:
        """Return the condition of a stage that is off, None while it runs."""
        return self._conditions.get(stage) if stage in self._off else None

    def turn_off(self, stage: str, reason: str, *, silent: bool = False) -> None:
        """Stop a stage here; a stage that is off keeps its first reason.

        Args:
            stage: the part of the monitor to stop.
            reason: why, in words.
            silent: whether to leave out the line in the log, because another line says it.
        """
        if stage not in self._off:
            self._off.add(stage)
            self._state(Condition(stage=stage, step=self.step, reason=reason), silent=silent)

    def remark(self, stage: str, reason: str) -> None:
        """Log once that a stage left something out and goes on."""
        if stage not in self._conditions:
            self._state(Condition(stage=stage, step=self.step, reason=reason, off=False))

    def turn_on(self, stage: str) -> None:
        """Forget that a stage is off, because what it depends on was replaced."""
        self._off.discard(stage)
        self._conditions.pop(stage, None)

    def _state(self, condition: Condition, *, silent: bool = False) -> None:
        self._conditions[condition.stage] = condition
        if self._logs and not silent:
            LOGGER.warning("conserved: %s. Training goes on.", str(condition).rstrip("."))

    def attempt(self, stage: str, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T | None:
        """Call a function of a stage.

        Args:
            stage: the part of the monitor that is turned off if the function raises.
            function: the function to call.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Returns:
            The result. None if the stage is off, or is turned off by an exception of this call.
        """
        if stage in self._off:
            return None
        if self._depth.entries and _ACTIVE.boundary is self:
            # Nearly all calls of a step are within others, which time them.
            try:
                return function(*args, **kwargs)
            except self._passing:
                raise
            except Exception as problem:
                self._fail(stage, problem)
                if self.strict:
                    raise
                return None
        outermost = self._depth.entries == 0
        began, computed = (time.perf_counter(), time.thread_time()) if outermost else (0.0, 0.0)
        former, _ACTIVE.boundary = _ACTIVE.boundary, self
        caches = outermost and torch.is_autocast_cache_enabled()
        if former is None:
            _ACTIVE.caches = caches
        if caches:
            # A cast of a weight that is made here must not be used by the pass of the run: it would change the order in
            # which its gradient is summed, and outlive a step.
            torch.set_autocast_cache_enabled(False)
        self._depth.entries += 1
        try:
            return function(*args, **kwargs)
        except self._passing:
            raise
        except Exception as problem:
            # User programs may raise anything; this is where it becomes a stated condition.
            self._fail(stage, problem)
            if self.strict:
                raise
            return None
        finally:
            _ACTIVE.boundary = former
            self._depth.entries -= 1
            if caches:
                torch.set_autocast_cache_enabled(True)
            if outermost:
                self.seconds += time.perf_counter() - began
                self.processor_seconds += time.thread_time() - computed

    def _fail(self, stage: str, problem: Exception) -> None:
        LOGGER.debug("conserved: %s failed in step %d.", stage, self.step, exc_info=True)
        self.turn_off(stage, described(problem))
        failed = None if self._on_failure is None else self._on_failure()
        if failed is not None:
            failed(stage)

    def hook(self, stage: str, function: Callable[..., Any]) -> Hook:
        """Return the function as a hook that can be put on a module, a tensor or an optimizer."""
        return Hook(self, stage, function)


class Hook:
    """A function on someone else's object that raises nothing there, is not compiled, and is not copied.

    torch.compile traces hooks. It finds a constant here, so that the compiled program has nothing of it and
    `fullgraph=True` holds. A copy of a model, or a file it is saved in, gets a function of the standard library that
    does nothing: it loads where this package is not installed.
    """

    __slots__ = ("_boundary", "_function", "_stage")

    def __init__(self, boundary: Boundary, stage: str, function: Callable[..., Any]) -> None:
        self._boundary, self._stage, self._function = boundary, stage, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or in_function_transform():
            return None
        return self._boundary.attempt(self._stage, self._function, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return functools.partial(sys.audit, _IDLE)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, _IDLE)


_IDLE = "conserved.hook"
"""The event that a copied hook reports: `sys.audit` accepts any arguments, returns None and pickles by its name."""


class _Active(threading.local):
    """The boundary that hooks are bound to when they are made in this thread."""

    def __init__(self) -> None:
        self.boundary: Boundary | None = None
        self.caches = False
        """Whether the program keeps casts of autocast; inside a boundary none are kept."""


_ACTIVE = _Active()


def program_caches_casts() -> bool:
    """Return whether the program that called into a boundary keeps casts of weights in the cache of autocast."""
    return _ACTIVE.caches


def guarded(function: Callable[..., Any], *, stage: str = "listening") -> Hook:
    """Return a hook bound to the active boundary; outside of any, exceptions are raised where they happen.

    Args:
        function: the function of the hook.
        stage: the part of a monitor that it belongs to.

    Returns:
        The hook.
    """
    return Hook(_ACTIVE.boundary or _TRANSPARENT, stage, function)


class _Transparent(Boundary):
    """A boundary for tools that a user calls by hand: their errors are the user's to see."""

    def attempt(self, stage: str, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs)


_TRANSPARENT = _Transparent()


def described(problem: BaseException) -> str:
    """Return one line about an exception: its type and the first line of its message."""
    text = " ".join(str(problem).split())
    short = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return f"{type(problem).__name__}: {short}" if short else type(problem).__name__
