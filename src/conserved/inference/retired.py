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
    """What a recogniser for a class of modules was; it has no effect."""

    def __init__(self, **given: Any) -> None:
        warnings.warn(f"conserved.{type(self).__name__} {_ADVICE}", DeprecationWarning, stacklevel=2)
        vars(self).update(given)


class Site(Component):
    """What a recogniser was given: a module, and where it is."""


class Linear(Component):
    """What a recogniser said of a linear map."""


class Unreadable(ValueError):
    """What a recogniser raised for a module that it could not read; nothing raises it any more."""


def components() -> tuple[Component, ...]:
    """All recognisers: there are none."""
    return ()


def component_of(module: Any) -> None:
    """The recogniser of a module: there is none."""


def reads(*_: Any, **__: Any) -> Any:
    """What a recogniser read; refused."""
    raise Unreadable(f"conserved.recognize.reads {_ADVICE}")


def writes(*_: Any, **__: Any) -> Any:
    """What a recogniser wrote; refused."""
    raise Unreadable(f"conserved.recognize.writes {_ADVICE}")


def register(component: Any) -> Any:
    """What made a recogniser known; it returns what it is given and has no other effect."""
    warnings.warn(f"conserved.register {_ADVICE}", DeprecationWarning, stacklevel=2)
    return component
