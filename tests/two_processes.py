"""Two processes that compute together."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 2


def join(rank: int, folder: str | Path) -> None:
    """Become one of them. They find each other by a file, since a port that was free a moment ago may not be now."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meeting'}", rank=rank, world_size=WORLD)
