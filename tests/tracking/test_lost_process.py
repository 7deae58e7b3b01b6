"""A process is killed, or audits other steps than its peer: the other ends, or goes on, as without a monitor."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor, check_replicas
from two_processes import IMPORTED

WORLD, WIDTH, STEPS, KILLED, SECONDS = 2, 12, 6, 3, 240.0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def sharded() -> nn.Module:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "data parallel": lambda: DistributedDataParallel(network()),
    "sharded": sharded,
}


def train(model: nn.Module, rank: int, *, killed: bool = False, **options: Any) -> dict[str, Any]:
    """Train; return the losses, how the run ended, and what the monitor says. `options` of a monitor make one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, **options) if options else None
    losses: list[float] = []
    problem = ""
    try:
        for step in range(STEPS):
            if killed and rank == 1 and step == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if monitor is not None:
                monitor.step()
    except Exception as error:
        problem = type(error).__name__
    if monitor is not None:
        monitor.close()
    alarms = [] if monitor is None else [str(alarm) for alarm in monitor.alarms]
    state = "" if monitor is None else monitor.state
    return {"losses": losses, "problem": problem, "alarms": alarms, "state": state}


def run_killed(rank: int, name: str, watched: str) -> dict[str, Any]:
    options = {"audit": 1, "every": 1} if watched else {}
    return train(MODELS[name](), rank, killed=True, **options)


def run_apart(rank: int, name: str, watched: str) -> dict[str, Any]:
    """Both processes audit and account for steps of their own."""
    options: dict[str, Any] = {"audit": 1 + 2 * rank, "every": 2 - rank}
    return train(MODELS[name](), rank, **(options if watched else {}))


def run_unlike(rank: int, name: str, watched: str) -> dict[str, Any]:
    """One process audits, the other does not."""
    options: dict[str, Any] = {"audit": None if rank else "auto", "budget": 0.5 if rank else 0.001}
    return train(MODELS[name](), rank, **(options if watched else {}))


def run_unequal(rank: int, name: str, watched: str) -> dict[str, Any]:
    """Compare replicas of processes that hold different tensors: stages of a pipeline, and a branch that one skips."""
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(4, 4), *(nn.Linear(4, 4) for _ in range(rank)))
    torch.manual_seed(0)
    branches = nn.ModuleDict({"both": nn.Linear(4, 4), "one": nn.Linear(4, 4)})
    torch.stack([next(branch.parameters()).sum() for branch in list(branches.values())[: 2 - rank]]).sum().backward()
    stages, skipped = check_replicas(stage), check_replicas(branches)
    apart = [row.name for row in skipped.rows if row.spread > 0]
    return {"stages": [row.name for row in stages.rows], "apart": apart, "ok": stages.ok}


SCENES = {one.__name__: one for one in (run_killed, run_apart, run_unlike, run_unequal)}


def play(rank: int, folder: Path, scene: str, name: str, watched: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD)
    (folder / str(rank)).write_text(json.dumps(SCENES[scene](rank, name, watched)))
    # A group whose other half is dead is not left in an orderly way.
    os._exit(0)


def played(folder: Path, scene: str, name: str, watched: str) -> list[dict[str, Any] | None]:
    """Run two processes; return what each wrote, None of one that was killed or had to be."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    processes = [context.Process(target=play, args=(rank, folder, scene, name, watched)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    files = [folder / str(rank) for rank in range(WORLD)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_whose_peer_is_killed_ends_as_without_a_monitor(tmp_path: Path, name: str) -> None:
    plain, watched = (played(tmp_path / f"killed{w}", "run_killed", name, w) for w in ("", "watched"))
    assert plain[1] is watched[1] is None
    assert plain[0] is not None
    assert watched[0] is not None
    assert len(plain[0]["losses"]) == KILLED
    assert plain[0]["problem"]
    assert (watched[0]["losses"], watched[0]["problem"]) == (plain[0]["losses"], plain[0]["problem"])
    assert not watched[0]["alarms"]


@pytest.mark.parametrize("scene", ["run_apart", "run_unlike"])
@pytest.mark.parametrize("name", MODELS)
def test_processes_that_look_at_other_steps_do_not_wait_for_each_other(tmp_path: Path, name: str, scene: str) -> None:
    plain, watched = (played(tmp_path / f"{scene}{w}", scene, name, w) for w in ("", "watched"))
    for before, after in zip(plain, watched, strict=True):
        assert before is not None
        assert after is not None
        assert after["losses"] == before["losses"]
        assert len(after["losses"]) == STEPS
        assert not after["alarms"]
        assert not after["problem"]


def test_replicas_of_processes_that_hold_other_tensors_are_compared_where_both_have_them(tmp_path: Path) -> None:
    for result in played(tmp_path / "unequal", "run_unequal", "", ""):
        assert result == {"stages": ["0.weight", "0.bias"], "apart": ["one.weight"], "ok": True}
