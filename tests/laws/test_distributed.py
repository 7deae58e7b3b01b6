"""Laws of parameters that are sharded over processes are those of the whole parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conserved import recognize
from two_processes import WORLD, Scene, assert_played
from zoo import named


def compare(rank: int, folder: Path) -> None:
    model = named("attention, biases").model()
    laws = recognize(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    placements = {"q": Shard(0), "k": Shard(0), "v": Shard(0), "o": Shard(1)}
    sharded: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        placement = placements[name[0]] if parameter.ndim > 1 or placements[name[0]] == Shard(0) else Replicate()
        sharded[name] = distribute_tensor(parameter.detach(), mesh, [placement])
    local, whole = laws.values(sharded), laws.values()
    assert all(torch.equal(local[name], whole[name]) for name in whole)
    symmetry = laws["query_key[1]"]
    g = symmetry.element(generator=torch.Generator().manual_seed(1))
    moved = symmetry.act(sharded, g)["q.weight"]
    assert isinstance(moved, DTensor)
    assert moved.placements == (Shard(0),)
    plain = symmetry.act({n: p.detach() for n, p in model.named_parameters()}, g)["q.weight"]
    assert torch.equal(moved.full_tensor(), plain)


SCENES: list[Scene] = [compare]


@pytest.mark.slow
def test_laws_of_sharded_parameters_are_those_of_whole_ones(two_processes: Path) -> None:
    assert_played(compare, two_processes)
