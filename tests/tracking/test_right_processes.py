"""The default monitor over two processes: right programs pass in silence, and no failing process stops another."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor
from conserved.tracking import run_audits
from two_processes import IMPORTED

WORLD, WIDTH, STEPS, SECONDS = 2, 16, 4, 120.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH))


def sharded() -> nn.Module:
    model = network()
    fully_shard(model[1])  # type: ignore[index]
    fully_shard(model)
    return model


def tensor_parallel() -> nn.Module:
    plan: dict[str, Any] = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    return parallelize_module(network(), init_device_mesh("cpu", (WORLD,)), plan)


def wrapped() -> nn.Module:
    return DistributedDataParallel(network())


def train(
    model: nn.Module,
    rank: int,
    *,
    watched: bool = True,
    change: Callable[[int], None] = lambda step: None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Return the losses of a run, and what its monitor says."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer) if watched else None
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        change(step)
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step()
    if monitor is None:
        return {"losses": losses}
    monitor.close()
    return {
        "losses": losses,
        "alarms": [[alarm.code, alarm.law, alarm.message] for alarm in monitor.alarms],
        "state": [str(condition) for condition in monitor._boundary.conditions],
        "audits": len(monitor._audits.series) if monitor._audits is not None else 0,
    }


class OwnExpert(nn.Module):
    """Hidden units of which a process has its own; every process computes with its own and all tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(100 + dist.get_rank())
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        every = differentiable.all_gather(self.norm(x).contiguous())
        parts = self.down(F.relu(self.up(torch.cat(every))))
        return x + differentiable.all_reduce(parts).chunk(WORLD)[dist.get_rank()]


def with_own_expert() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, OwnExpert(), last)


OWN = ("1.up.weight", "1.up.bias", "1.down.weight")


def sharded_beside_an_expert() -> nn.Module:
    """The whole loss is the mean over processes, so that gradients of experts, which are sums, are divided."""
    model = with_own_expert()
    own = {p for name, p in model.named_parameters() if name in OWN}
    fully_shard(model, ignored_params=own)
    for parameter in own:
        parameter.register_hook(lambda gradient: gradient / WORLD)
    return model


def wrapped_around_an_expert() -> nn.Module:
    model = with_own_expert()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(OWN))
    for name, parameter in model.named_parameters():
        if name in OWN:
            parameter.register_hook(lambda gradient: gradient / WORLD)
    return DistributedDataParallel(model)


RIGHT = {
    "data parallel": wrapped,
    "sharded": sharded,
    "tensor parallel": tensor_parallel,
    "sharded beside an expert": sharded_beside_an_expert,
    "data parallel around an expert": wrapped_around_an_expert,
}


def run_right(rank: int) -> dict[str, Any]:
    results = {}
    for name, make in RIGHT.items():
        data = 0 if name == "tensor parallel" else rank
        results[name] = train(make(), data) | {"alone": train(make(), data, watched=False)["losses"]}
    return results


def run_failing(rank: int) -> dict[str, Any]:
    """One process fails inside its second audit, another in its second step."""
    results = {}
    for name, owner, function in (("audit", run_audits, "audit"), ("step", Monitor, "_step")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(owner, function, failing_at(2, getattr(owner, function)))
            results[name] = train(sharded(), rank)
    return results


def failing_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(1, 1000))

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= number:
            raise RuntimeError("made to fail")
        return function(*args, **kwargs)

    return fail


def run_defective(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(network())
    scaled = model.module[2].weight

    def scale(step: int) -> None:
        if rank == 1:
            assert scaled.grad is not None
            scaled.grad *= 1.5

    ignored = network()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, ["1.down.weight"])
    return {
        "scaled": train(model, rank, change=scale),
        "ignored": train(DistributedDataParallel(ignored), rank),
    }


def run_alone(rank: int) -> dict[str, Any]:
    """Only the first process has a monitor; the last scene, because later monitors would not match by their order."""
    return {"sharded": train(sharded(), rank, watched=rank == 0)}


SCENES = (run_right, run_failing, run_defective, run_alone)


def play(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD)
    for scene in SCENES:
        (folder / f"{scene.__name__} {rank}").write_text(json.dumps(scene(rank)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What every process found in a scene; processes that wait for ever are ended."""
    folder = tmp_path_factory.mktemp("processes")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    processes = [context.Process(target=play, args=(rank, folder)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    return lambda scene: [json.loads((folder / f"{scene} {rank}").read_text()) for rank in range(WORLD)]


Results = Callable[[str], list[dict[str, Any]]]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_keeps_its_losses_and_raises_no_alarm(results: Results, name: str) -> None:
    for result in results("run_right"):
        assert result[name]["losses"] == result[name]["alone"]
        assert not result[name]["alarms"]
        assert not result[name]["state"]
        assert result[name]["audits"] > 0


@pytest.mark.parametrize("where", ["audit", "step"])
def test_a_process_that_fails_does_not_let_the_others_wait(results: Results, where: str) -> None:
    result = results("run_failing")
    assert "made to fail" in " ".join(result[1][where]["state"])
    assert "not all of the ranks 0, 1 take part" in " ".join(result[0][where]["state"])
    assert all(len(of_rank[where]["losses"]) == STEPS and not of_rank[where]["alarms"] for of_rank in result)


def test_a_monitor_on_one_process_of_a_sharded_run_goes_on_without_laws(results: Results) -> None:
    first, second = results("run_alone")
    assert "not all of the ranks 0, 1 take part" in " ".join(first["sharded"]["state"])
    assert len(first["sharded"]["losses"]) == len(second["sharded"]["losses"]) == STEPS


@pytest.mark.parametrize(("defect", "tensor"), [("scaled", "2.weight"), ("ignored", "1.down.weight")])
def test_gradients_that_differ_are_named_with_their_ranks(results: Results, defect: str, tensor: str) -> None:
    for result in results("run_defective"):
        messages = [message for code, law, message in result[defect]["alarms"] if code == "replicas" and law == tensor]
        assert len(messages) == 1
        assert "between ranks 0 and 1" in messages[0]
