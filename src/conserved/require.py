"""The one gate to optional packages: import it, or say which extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtra(ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


def require(package: str, why: str, *, extra: str | None = None) -> ModuleType:
    """The optional package, imported; `why` says what needs it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as problem:
        if problem.name is not None and problem.name.partition(".")[0] != package.partition(".")[0]:
            raise
        install = f'pip install "conserved[{extra}]"' if extra else f"pip install {package}"
        raise MissingExtra(f"{package} is not installed, and {why}. Install it with: {install}") from problem
