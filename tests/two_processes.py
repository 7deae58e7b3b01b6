"""Two processes that compute together, started once for all tests of computations over processes."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

WORLD = 2

MODULES = (
    "test_distributed",
    "test_audit_distributed",
    "test_transform_sharded",
    "test_track_distributed",
    "test_audit_pieces",
    "test_megatron_stacks",
    "test_hand_written_parallelism",
)
"""Where scenes are: every one has a list `SCENES` of them."""

IMPORTED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "conserved.auditing", "conserved.tracking")
"""What takes seconds to import: once, by the process that the two are forked from."""

Scene = Callable[[int, Path], None]
"""What each of the two processes does, given its rank and a folder for what it finds."""


def play(folder: Path) -> Path:
    """Play all scenes with one pair of processes; what was played before a failure counts."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))
    try:
        start_processes(_play, args=(folder,), nprocs=WORLD, start_method="forkserver")
    except Exception as problem:
        (folder / "problem").write_text(str(problem))
    return folder


def assert_played(scene: Scene, folder: Path) -> None:
    """Both processes came to the end of a scene."""
    problem = (folder / "problem").read_text()[-1500:] if (folder / "problem").exists() else ""
    assert all((folder / f"{_name(scene)}.{rank}").exists() for rank in range(WORLD)), problem


def _play(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    # They find each other by a file, since a port that was free a moment ago may not be now.
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD)
    for module in MODULES:
        for scene in importlib.import_module(module).SCENES:
            scene(rank, folder)
            (folder / f"{_name(scene)}.{rank}").write_text("played")
    dist.destroy_process_group()


def _name(scene: Scene) -> str:
    return f"{scene.__module__}.{scene.__name__}"
