"""Audits of parameters in pieces that plain attributes describe, as Megatron Core writes them, over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import conserved
from conserved.layout import layout_of, replica_groups
from two_processes import WORLD, Scene, assert_played

pytestmark = pytest.mark.slow

WIDTH, NEURONS = 8, 12


class Copy(torch.autograd.Function):
    """The identity forwards, a sum over processes backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class Alone(Copy):
    """The same without its sum: the defect."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


class Reduce(torch.autograd.Function):
    """A sum over processes forwards, the identity backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class CutNetwork(nn.Module):
    """A norm and a gated network whose neurons are cut over processes; gate and up are one fused projection."""

    def __init__(self, rank: int, enter: type[torch.autograd.Function] = Copy) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        fused = torch.randn(2, NEURONS, WIDTH, generator=generator)
        down = torch.randn(WIDTH, NEURONS, generator=generator)
        mine = slice(rank * NEURONS // WORLD, (rank + 1) * NEURONS // WORLD)
        self.norm = nn.RMSNorm(WIDTH)
        self.fused = nn.Parameter(fused[:, mine].reshape(-1, WIDTH).clone())
        self.down = nn.Parameter(down[:, mine].clone())
        with torch.no_grad():
            self.norm.weight.add_(0.3 * torch.randn(WIDTH, generator=generator))
        for parameter, axis, stride in ((self.fused, 0, 2), (self.down, 1, 1)):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim, parameter.partition_stride = axis, stride  # type: ignore[attr-defined]
        self.enter = enter

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.enter.apply(self.norm(x))
        gate, up = nn.functional.linear(y, self.fused).chunk(2, -1)
        output: Any = Reduce.apply(nn.functional.linear(nn.functional.silu(gate) * up, self.down))
        return x + output


def data() -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(11))


def right_gradients(rank: int, folder: Path) -> None:
    model = CutNetwork(rank)
    laws = conserved.recognize(model, data())
    model(data()).sin().mean().backward()
    result = conserved.audit(model, laws)
    assert not result.failures, result.summary()
    assert result.ranks == WORLD
    assert any("summed over 2 processes" in index for row in result.rows for index in row.where)
    assert {"gain", "gated_neurons"} <= {row.family for row in result.rows if row.checked}
    # Three numbers for each of the gain's eight readers, and fingerprints: far less than any weight.
    assert 0 < result.moved_bytes < 1500


def sum_missing_backwards(rank: int, folder: Path) -> None:
    """Each process's own sums satisfy the gain's identity exactly; only the sum over processes does not."""
    model = CutNetwork(rank, Alone)
    laws = conserved.recognize(model, data())
    model(data()).sin().mean().backward()
    result = conserved.audit(model, laws)
    assert [row.family for row in result.failures] == ["gain"], result.summary()
    assert [item.name for item in result.disagreements] == ["norm.weight"]
    assert "rank 1" in result.disagreements[0].text()


def one_neuron_of_one_process(rank: int, folder: Path) -> None:
    """A law of this process alone: all processes hear of it, and of the rank it is on."""
    model = CutNetwork(rank)
    laws = conserved.recognize(model, data())
    model(data()).sin().mean().backward()
    assert model.down.grad is not None
    if rank == 1:
        model.down.grad[:, 0] *= 2
    result = conserved.audit(model, laws)
    assert [row.family for row in result.failures] == ["gated_neurons"], result.summary()
    assert any("rank 1" in text for text in result.failures[0].suggests)


def a_gain_scaled_everywhere(rank: int, folder: Path) -> None:
    """Replicas agree, and the gain is wrong against the sum of its readers."""
    model = CutNetwork(rank)
    laws = conserved.recognize(model, data())
    model(data()).sin().mean().backward()
    assert model.norm.weight.grad is not None
    model.norm.weight.grad *= WORLD
    result = conserved.audit(model, laws)
    assert [row.family for row in result.failures] == ["gain"], result.summary()
    assert not result.disagreements


def monitored(rank: int, folder: Path) -> None:
    """A default monitor is silent on right gradients and raises an alarm at the first step of the defect."""
    for enter, codes in ((Copy, set[str]()), (Alone, {"replicas"})):
        model = CutNetwork(rank, enter)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        monitor = conserved.Monitor(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(data()).sin().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        monitor.close()
        assert {alarm.code for alarm in monitor.alarms} == codes, monitor.alarms
        assert all(alarm.step == 1 for alarm in monitor.alarms)


def layout_by_hand(rank: int, folder: Path) -> None:
    model = CutNetwork(rank)
    for parameter in (model.fused, model.down):
        del parameter.tensor_model_parallel  # type: ignore[attr-defined]
    laws = conserved.recognize(model, data())
    model(data()).sin().mean().backward()
    result = conserved.audit(model, laws, layout={"fused": 0, "down": 1, "*": None})
    assert not result.failures, result.summary()
    assert result.ranks == WORLD


def table(rank: int, folder: Path) -> None:
    layout = layout_of(CutNetwork(rank))
    assert layout["fused"].cuts[0].stride == 2
    assert not layout["norm.weight"].cuts
    assert replica_groups(CutNetwork(rank)) == {(0, 1): ["norm.weight"]}


SCENES: list[Scene] = [
    right_gradients,
    sum_missing_backwards,
    one_neuron_of_one_process,
    a_gain_scaled_everywhere,
    monitored,
    layout_by_hand,
    table,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_over_two_processes(scene: Scene, two_processes: Path) -> None:
    assert_played(scene, two_processes)
