"""Two processes: data parallel, fully sharded and tensor parallel runs give the ledger of the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor, recognize
from conserved.tracking import RunStore
from told import told
from training import decoder, sentences
from two_processes import WORLD, Scene, assert_played

STEPS, WHEN = 4, 3
KEY = "layers.0.attention.k.weight"


def objective(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def built() -> nn.Module:
    torch.manual_seed(0)
    return decoder(kv_heads=2).double()


def alone(steps: int = STEPS) -> Monitor:
    """The same run in one process, on the whole batch."""
    model = built()
    return descend(model, model, lambda number: sentences(number), steps)


def descend(
    model: nn.Module,
    bare: nn.Module,
    rows: Callable[[int], Tensor],
    steps: int = STEPS,
    *,
    reduce: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> Monitor:
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01, weight_decay=0.1)
    monitor = Monitor(model, optimizer, every=1, **options)
    for number in range(steps):
        optimizer.zero_grad()
        objective(model, rows(number)).backward()
        reduce(number)
        optimizer.step()
        monitor.step()
    return monitor


def summary(monitor: Monitor) -> dict[str, Any]:
    monitor.close()
    return {
        "entries": [[e.step, e.law, e.observed, e.first_order, e.second_order] for e in monitor.ledger()],
        "residual": max(abs(entry.residual) for entry in monitor.ledger()),
        "alarms": sorted([alarm.step, law] for alarm in told(monitor) for law in (alarm.laws or (alarm.law,))),
        "errors": monitor.errors(),
    }


def share(rank: int) -> Callable[[int], Tensor]:
    return lambda number: sentences(number)[rank::WORLD]


def data_parallel(rank: int, model: nn.Module, folder: Path) -> Monitor:
    wrapped = DistributedDataParallel(model)
    return descend(wrapped, model, share(rank), sinks=folder / "runs.db", run="ddp")


def sharded(rank: int, model: nn.Module, folder: Path) -> Monitor:
    mesh = init_device_mesh("cpu", (WORLD,))
    laws = recognize(model)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Laws that were read off before sharding are bound to the sharded parameters by their names.
    return descend(model, model, share(rank), laws=laws, sinks=folder / "runs.db", run="fsdp")


def recognised_when_sharded(rank: int, model: nn.Module, folder: Path) -> Monitor:
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    return descend(model, model, share(rank))


def tensor_parallel(rank: int, model: nn.Module, folder: Path) -> Monitor:
    plan: dict[str, Any] = {}
    for layer in range(1):
        at = f"layers.{layer}.feedforward"
        plan |= {f"{at}.gate": ColwiseParallel(), f"{at}.up": ColwiseParallel(), f"{at}.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
    return descend(model, model, lambda number: sentences(number), sinks=folder / "runs.db", run="tp")


def not_reduced(rank: int, model: nn.Module, folder: Path) -> Monitor:
    def reduce(number: int) -> None:
        for name, parameter in model.named_parameters():
            if not (name == KEY and number + 1 == WHEN):
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD

    return descend(model, model, share(rank), reduce=reduce)


MODES = {
    "data parallel": data_parallel,
    "sharded": sharded,
    "recognised when sharded": recognised_when_sharded,
    "tensor parallel": tensor_parallel,
    "not reduced": not_reduced,
}


def tracked(rank: int, folder: Path) -> None:
    result = {mode: summary(run(rank, built(), folder)) for mode, run in MODES.items()}
    (folder / f"tracked {rank}.json").write_text(json.dumps(result))


SCENES: list[Scene] = [tracked]


def found_by(folder: Path) -> list[dict[str, Any]]:
    """What every process found, by mode."""
    assert_played(tracked, folder)
    return [json.loads((folder / f"tracked {rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_ledger_of_a_distributed_run_is_that_of_the_whole(two_processes: Path) -> None:
    modes = ["data parallel", "sharded", "recognised when sharded", "tensor parallel"]
    expected = summary(alone())
    for by_mode in found_by(two_processes):
        for mode in modes:
            result = by_mode[mode]
            assert result["residual"] < 1e-13, mode
            assert not result["alarms"], mode
            assert len(result["entries"]) == len(expected["entries"]), mode
            for ours, theirs in zip(result["entries"], expected["entries"], strict=True):
                assert ours[:2] == theirs[:2], mode
                assert ours[2:] == pytest.approx(theirs[2:], rel=1e-6, abs=1e-12), mode
            assert result["errors"] == pytest.approx(expected["errors"], rel=1e-6), mode
    with RunStore(two_processes / "runs.db") as store:
        assert sorted(store.runs()) == ["ddp", "fsdp", "tp"]
        assert all(store.steps(name) == [1, 2, 3, 4] for name in store.runs()), "one process writes"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_all_reduce_that_was_skipped_shows_in_its_laws_at_its_step(two_processes: Path) -> None:
    first, second = (result["not reduced"] for result in found_by(two_processes))
    laws = recognize(decoder(kv_heads=2))
    touched = {symmetry.name for symmetry in laws if KEY in symmetry.parameters}
    for result in (first, second):
        # The comparison of replicas names the tensor, once the other process has shown its own, and explains the laws.
        alarmed = {law for step, law in result["alarms"] if step == WHEN}
        assert alarmed == {KEY} or alarmed - {KEY} == touched
        assert not [step for step, _ in result["alarms"] if step < WHEN]
