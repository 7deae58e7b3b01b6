"""A pass of a model under FSDP2 that is run again: the gradients of the run stay, those of the replay are its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from conserved import Monitor
from conserved.auditing.reference_form import wide_forms
from conserved.auditing.replay import RecordedPass, ReplayError


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(middle: nn.Module | None = None) -> nn.Sequential:
    """A network whose first and last layers belong to the outermost unit, which is not resharded after forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), middle or nn.ReLU(), nn.Linear(8, 3))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def recorded(model: nn.Module) -> RecordedPass:
    replay = RecordedPass(model)
    replay.record()
    model(torch.randn(5, 6)).square().sum().backward()
    replay.stop()
    return replay


def local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def test_a_replay_leaves_every_gradient_of_the_run_as_it_is() -> None:
    model = sharded()
    replay = recorded(model)
    parameters = dict(model.named_parameters())
    before = {name: local(p.grad).clone() for name, p in parameters.items()}
    for scale in (1.0, 1.37):
        again = replay.gradients(parameters, scale=scale)
        for name, parameter in parameters.items():
            assert torch.equal(local(parameter.grad), before[name]), name
            torch.testing.assert_close(local(again[name]), before[name], rtol=1e-5, atol=1e-6)


def test_a_pass_is_not_replayed_wider_because_that_ends_the_process() -> None:
    model = sharded()
    replay = recorded(model)
    with pytest.raises(ReplayError, match="higher precision"):
        replay.gradients(dict(model.named_parameters()), form=wide_forms(torch.float32)[0])


class Halved(torch.autograd.Function):
    """ReLU with half of its gradient where the input exceeds one."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0] * (x > 0) * torch.where(x > 1, 0.5, 1.0)


class WrongReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Halved.apply(4 * x)
        return out


@pytest.mark.parametrize(("middle", "wrong"), [(nn.ReLU(), False), (WrongReLU(), True)])
def test_a_wrong_backward_is_named_and_a_right_one_is_not(middle: nn.Module, wrong: bool) -> None:
    model = sharded(middle)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        monitor.step()
    monitor.close()
    assert bool(monitor.alarms) == wrong
    assert any("4.weight" in alarm.message for alarm in monitor.alarms) == wrong
