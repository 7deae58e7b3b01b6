"""Modules with Triton kernels, imported without the type checks of the tests: Triton reads their source."""

from __future__ import annotations

import importlib
import sys

import interpreted_kernels


def import_as_written(module: str) -> None:
    """Import a module as users do."""
    # Its own finder, which leads from one path of a module to another, has to stay before those of the checks.
    importlib.import_module("conserved")
    finders = list(sys.meta_path)
    sys.meta_path[:] = [finder for finder in finders if not type(finder).__module__.startswith("jaxtyping")]
    try:
        importlib.import_module(module)
    finally:
        sys.meta_path[:] = finders
    interpreted_kernels.install()
