"""The state of an unfinished run in a file: written whole or not at all, read without running code from it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch

from conserved.errors import ConservedError


class ForeignError(ConservedError, ValueError):
    """A checkpoint that is damaged or was made by another run."""


def save(state: Mapping[str, object], path: Path) -> None:
    """Write tensors and plain data; an interrupted write leaves the former file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        torch.save(dict(state), draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def restore(path: Path, *, like: Mapping[str, object], keys: Sequence[str]) -> dict[str, Any]:
    """Read what `saved` wrote; under `keys` it must hold what `like` holds."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, BadZipFile, pickle.UnpicklingError) as problem:
        raise ForeignError(
            f"The checkpoint {path} is damaged ({problem}). Delete it to begin that run anew."
        ) from problem
    for key in keys:
        if state.get(key) != like[key]:
            raise ForeignError(
                f"The checkpoint {path} belongs to another run: its {key} is {state.get(key)}, and {like[key]} was "
                "expected. Delete it, or name another store."
            )
    return state
