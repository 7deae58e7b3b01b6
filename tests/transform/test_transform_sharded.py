"""Parameters that are sharded over processes move as whole ones, and stay sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from conserved.transform import equalize, mappings, move, symmetries_of
from two_processes import WORLD, Scene, assert_played


def moved_when_sharded(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(4, 5)
    laws = symmetries_of(model, x)
    mesh = init_device_mesh("cpu", (WORLD,))
    plain = dict(model.state_dict())
    state: dict[str, Tensor] = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in plain.items()}
    element = torch.linspace(0.5, 2, 7)
    result = move(state, {"neurons": element}, laws=laws).state
    wanted = move(plain, {"neurons": element}, laws=laws).state
    for name, tensor in result.items():
        assert isinstance(tensor, DTensor)
        assert tensor.placements == (Shard(0),)
        assert torch.equal(tensor.full_tensor(), wanted[name])
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="Expected a model that is not sharded"):
        mappings(model, x, laws=laws)
    equalize(model, laws=laws)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), equalize(plain, laws=laws).state[name])


SCENES: list[Scene] = [moved_when_sharded]


@pytest.mark.slow
def test_sharded_parameters_move_as_whole_ones_and_stay_sharded(two_processes: Path) -> None:
    assert_played(moved_when_sharded, two_processes)
