"""Modules of the first release under the paths they had; they go with the next one."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "conserved.kind": "conserved.symmetry",
    "conserved.view": "conserved.symmetry.view",
    "conserved.batch": "conserved.moment",
}
"""Where names that others may import are now."""


class _Former(MetaPathFinder, Loader):
    """Finds a module under its former path."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Only for paths that have moved."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module where it is now, every public name of it."""
        now = importlib.import_module(MOVED[spec.name])
        message = f"{spec.name} goes with the next release: import from {MOVED[spec.name]}."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        former = ModuleType(spec.name, now.__doc__)
        vars(former).update({name: value for name, value in vars(now).items() if not name.startswith("_")})
        return former

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def install() -> None:
    """Let former paths be imported."""
    if not any(isinstance(finder, _Former) for finder in sys.meta_path):
        sys.meta_path.append(_Former())
