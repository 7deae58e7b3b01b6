"""Names of the time when each architecture needed a recogniser; they do nothing any more and will go with the next
release.
"""

from __future__ import annotations

import warnings
from typing import Any

_ADVICE = (
    "has no effect any more and will be removed: laws are read off what a model computes, whatever its class. "
    'To make an operator known that has no rule yet, use conserved.register_operator("package::operator"); '
    "docs/how-to/add-my-architecture.md has an example."
)


class Component:
    """What a recogniser for a class of modules was; it has no effect."""

    def __init__(self, **given: Any) -> None:
        warnings.warn(f"conserved.Component {_ADVICE}", DeprecationWarning, stacklevel=2)
        vars(self).update(given)


def register(component: Any) -> Any:
    """What made a recogniser known; it returns what it is given and has no other effect."""
    warnings.warn(f"conserved.register {_ADVICE}", DeprecationWarning, stacklevel=2)
    return component
