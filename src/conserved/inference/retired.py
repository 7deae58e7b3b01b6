"""Names of the time when each architecture needed a recogniser; they do nothing any more and will go with the next
release.
"""

from __future__ import annotations

import warnings
from typing import Any

from conserved.inference.infer import recognize as recognize

_ADVICE = (
    "has no effect any more and will be removed: laws are read off what a model computes, whatever its class. "
    'To make an operator known that has no rule yet, use conserved.register_operator("package::operator"); '
    "docs/how-to/add-my-architecture.md has an example."
)


class Component:
    """A recogniser for a class of modules, of the first release; it has no effect any more."""

    def __init__(self, **given: Any) -> None:
        warnings.warn(f"conserved.{type(self).__name__} {_ADVICE}", DeprecationWarning, stacklevel=2)
        vars(self).update(given)


class Site(Component):
    """The module that a recogniser was given, with its place in the model; it has no effect any more."""


class Linear(Component):
    """A linear map in the words of a recogniser; it has no effect any more."""


class Unreadable(ValueError):
    """Raised by a recogniser for a module that it could not read; recognisers are gone."""


def components() -> tuple[Component, ...]:
    """All recognisers: there are none."""
    return ()


def component_of(module: Any) -> None:
    """The recogniser of a module: there is none."""


def reads(*_: Any, **__: Any) -> Any:
    """Refused: recognisers are gone."""
    raise Unreadable(f"conserved.recognize.reads {_ADVICE}")


def writes(*_: Any, **__: Any) -> Any:
    """Refused: recognisers are gone."""
    raise Unreadable(f"conserved.recognize.writes {_ADVICE}")


def register(component: Any) -> Any:
    """Deprecated and without effect: laws are read off the operations a model runs.

    Args:
        component: anything.

    Returns:
        The component, unchanged.
    """
    warnings.warn(f"conserved.register {_ADVICE}", DeprecationWarning, stacklevel=2)
    return component
