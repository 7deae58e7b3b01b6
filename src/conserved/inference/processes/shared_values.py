"""Which parameters several processes hold alike: what stacks by hand leave no other trace of.

Parameters that are in pieces have other values on every process. A parameter whose entries differ among each other and
which is the same on all processes is replicated. Of a tensor of equal entries, as a gain of ones, values say nothing.
A tensor that all processes gather together, as those of FSDP2, is whole on each of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conserved._torch_compat import default_store

Holding = Literal["replica", "piece", "constant"]
"""How processes hold a parameter: all alike, each its own, or alike without saying anything."""

WAIT = 5.0
"""Seconds to wait for what other processes say: all of them are in the same forward pass."""

_SERIAL = itertools.count()


def holdings(model: nn.Module) -> dict[str, Holding] | None:
    """Return how all processes hold each parameter of a model, compared through the store they met by.

    Args:
        model: a model whose forward pass all processes are in.

    Returns:
        By name; None in a run of one process, if a process does not answer, has other names or shapes, or if some
        processes hold a parameter alike and others do not, as in several kinds of parallelism at once.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    if dist.get_backend() == "fake":
        # Of other processes there are only stand-ins, with no store between them.
        return None
    named = dict(model.named_parameters())
    gathered = {name for name, p in named.items() if _is_gathered_by_all(p)}
    if any(type(p.data) is not Tensor or p.is_meta for name, p in named.items() if name not in gathered):
        return None
    store: Any = default_store()
    key = f"conserved/holdings/{next(_SERIAL)}"
    own = [
        (name, [*p.shape], "gathered", True) if name in gathered else (name, [*p.shape], _digest(p), _varies(p))
        for name, p in named.items()
    ]
    store.set(f"{key}/{dist.get_rank()}", json.dumps(own))
    others = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    until = time.monotonic() + WAIT
    while not store.check(others):
        if time.monotonic() > until:
            return None
        time.sleep(0.005)
    every = [json.loads(store.get(other)) for other in others]
    if any([row[:2] for row in rows] != [row[:2] for row in every[0]] for rows in every):
        return None
    result: dict[str, Holding] = {}
    for name, *rows in zip(named, *every, strict=True):
        digests = {row[2] for row in rows}
        if len(digests) == 1:
            result[name] = "replica" if rows[0][3] else "constant"
        elif len(digests) == len(rows):
            result[name] = "piece"
        else:
            return None
    return result


def _is_gathered_by_all(tensor: Any) -> bool:
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and mesh.size() == dist.get_world_size()


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()


def _varies(tensor: Tensor) -> bool:
    flat = tensor.detach().flatten()
    return bool((flat != flat[:1]).any())
