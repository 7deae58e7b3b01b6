"""Load names on first use: those of a package, and implementations that a layer registers for lower ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

_PROVIDED: dict[str, str] = {}


def provide(service: str, home: str) -> None:
    """Register the object that implements a service, as "module:name"; the module is loaded on first use."""
    _PROVIDED[service] = home


def provided(service: str) -> Any:
    """Return the object registered for a service, for a layer that may not import its implementation."""
    module, _, name = _PROVIDED[service].partition(":")
    return getattr(importlib.import_module(module), name)


def loaded_on_demand(package: str, parts: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its full name.
        parts: by module inside it, the names that module exports, separated by spaces; `new:old` for a name that
            is `old` there.

    Returns:
        A function that imports the module of a name and returns the name's value.
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
        result = getattr(importlib.import_module(module), inside)
        setattr(sys.modules[package], name, result)
        return result

    return find
