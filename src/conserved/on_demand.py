"""Names that are loaded when they are first asked for: those of a package, and what a layer provides for lower ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

_PROVIDED: dict[str, str] = {}


def provide(service: str, home: str) -> None:
    """Say that whoever asks for a service is given an object, as "module:name"; the module is loaded then."""
    _PROVIDED[service] = home


def provided(service: str) -> Any:
    """What is provided for a service, for a layer that may not know who does."""
    module, _, name = _PROVIDED[service].partition(":")
    return getattr(importlib.import_module(module), name)


def loaded_on_demand(package: str, parts: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: its full name.
        parts: by module inside it, the names that are had from there, separated by spaces; `new:old` for one that
            is `old` there.
    """
    homes = {}
    for module, names in parts.items():
        for name in names.split():
            own, _, inside = name.partition(":")
            homes[own] = (f"{package}.{module}", inside or own)

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, inside = homes[name]
        found = getattr(importlib.import_module(module), inside)
        setattr(sys.modules[package], name, found)
        return found

    return find
