"""Packages whose names are loaded when they are first asked for, so that one of them does not wait for the others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


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
