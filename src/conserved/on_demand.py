"""Load the names of a package on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def load_on_demand(package: str, parts: Mapping[str, str]) -> Callable[[str], Any]:
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
