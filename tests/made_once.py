"""Expensive things that several tests read, made by the first worker that needs them and read by all."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

Made = TypeVar("Made")


def made_once(name: str, factory: pytest.TempPathFactory, make: Callable[[Path], Made]) -> Made:
    """What `make` returns when it is given an empty folder; other workers of the same run wait for it.

    Args:
        name: What it is, unique among all that is made like this.
        factory: pytest's.
        make: Returns something that can be pickled: paths, or records of them.
    """
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    saved = shared / f"{name}.pickle"
    with (shared / f"{name}.lock").open("w") as lock:
        # Released when the process ends, however that happens.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not saved.exists():
            folder = shared / f"{name}-made"
            folder.mkdir()
            saved.write_bytes(pickle.dumps(make(folder)))
        result: Made = pickle.loads(saved.read_bytes())
    return result
