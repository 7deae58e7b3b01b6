"""Audits of models over two processes: identities are those of whole parameters, and a missing all-reduce is seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import conserved
from conserved import audit, blocks, recognize
from conserved.auditing import Audit
from conserved.cli.app import app
from two_processes import WORLD, Scene, assert_played

pytestmark = pytest.mark.slow


def block() -> nn.Module:
    torch.manual_seed(0)
    return blocks.TransformerBlock(blocks.Attention(8, 4, kv_heads=2), blocks.SwiGLU(8, 12), "rms")


def data(rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 + rank))


def residuals(result: Audit) -> dict[str, float]:
    return {row.name.removeprefix("module."): row.residual for row in result.rows}


def agree(values: list[float]) -> None:
    """Every process has the same numbers."""
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, values)
    assert gathered[0] == gathered[1]


def data_parallel(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(block())
    model(data(rank)).sin().mean().backward()
    result = audit(model)
    assert result.ok, result.summary()
    assert len(result.rows) == len(recognize(block()))
    assert conserved.check_replicas(model).ok
    agree([row.residual for row in result.rows])


def missing_all_reduce(rank: int, folder: Path) -> None:
    """Without the reduction each process's own gradient is right, so its identities hold; the replicas differ."""
    model = DistributedDataParallel(block())
    with model.no_sync():
        model(data(rank)).sin().mean().backward()
    assert audit(model).ok
    result = conserved.check_replicas(model)
    assert not result.ok
    assert {row.what for row in result.rows if row.spread > 0} == {"gradient"}
    assert "not reduced" in result.summary()
    assert result.ranks == WORLD


def different_parameters(rank: int, folder: Path) -> None:
    model = block()
    if rank:
        with torch.no_grad():
            next(iter(model.parameters()))[0] += 1e-6
    result = conserved.check_replicas(model)
    assert not result.ok
    assert result.rows[0].what == "parameter"
    assert conserved.check_replicas(model, tolerance=1e-3).ok


def fully_sharded(rank: int, folder: Path) -> None:
    plain = block()
    plain(data(0)).sin().mean().add(plain(data(1)).sin().mean()).div(2).backward()
    model = block()
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model.get_submodule("feedforward"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(data(rank)).sin().mean().backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    result = audit(model)
    assert result.ok, result.summary()
    assert result.ranks == WORLD
    assert len(result.rows) == len(recognize(plain))
    agree([row.residual for row in result.rows])
    # A defect in the shard of one process is seen by all of them.
    weight: Any = model.attention.k.weight  # type: ignore[union-attr]
    if rank == 1:
        weight.grad.to_local().mul_(2)
    broken = audit(model)
    assert not broken.ok
    assert any("query_key" in row.name for row in broken.failures)
    agree([row.residual for row in broken.rows])
    plain.attention.k.weight.grad[4 // WORLD :] *= 2  # type: ignore[union-attr, index, operator]
    expected = residuals(audit(plain))
    assert all(residuals(broken)[row.name] == pytest.approx(expected[row.name], rel=1e-3) for row in broken.failures)


def flat_parameters(rank: int, folder: Path, *, original: bool = True) -> None:
    """FSDP1 keeps a range of joined parameters: they are read under the names and shapes that they had before."""
    plain = block()
    plain(data(0)).sin().mean().add(plain(data(1)).sin().mean()).div(2).backward()
    model: Any = FullyShardedDataParallel(block(), use_orig_params=original, device_id=torch.device("cpu"))
    laws = recognize(model, data(rank))
    assert len(laws) == len(recognize(plain))
    model(data(rank)).sin().mean().backward()
    result = audit(model, laws)
    assert result.ok, result.summary()
    assert result.coverage.parameters == 1
    assert result.moved_bytes > 0
    agree([row.residual for row in result.rows])
    expected = residuals(audit(plain))
    assert {row.name for row in result.rows} == set(expected)
    # What one process holds of the gradients is lost.
    if rank == 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
    broken = audit(model, laws)
    assert not broken.ok
    agree([row.residual for row in broken.rows])


def dumped(rank: int, folder: Path) -> None:
    """The lines of the page that dump a sharded model, and the command that judges the files."""
    page = (Path(__file__).parents[2] / "docs/how-to/watch-a-parallel-run.md").read_text("utf-8")
    (code,) = re.findall(r"^```text\n(import os\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    page_code: dict[str, Any] = {}
    exec(code, page_code)
    recognize(block(), data(0)).save(folder / f"laws.{rank}.json")
    model: Any = block()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    model(data(rank)).sin().mean().backward()
    page_code["dump"](model, str(folder / "dumps" / "1"))
    weight: Any = model.attention.k.weight
    if rank == 1:
        weight.grad.to_local().zero_()
    page_code["dump"](model, str(folder / "dumps" / "2"))
    if rank == 0:
        for number, exit_code in (("1", 0), ("2", 1)):
            arguments = ["audit", "--gradients", str(folder / "dumps" / number), "--laws", str(folder / "laws.0.json")]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == exit_code, result.output


def flat_parameters_alone(rank: int, folder: Path) -> None:
    flat_parameters(rank, folder, original=False)


def tensor_parallel(rank: int, folder: Path, *, reduced: bool = True) -> None:
    """A gated network split by neurons behind a norm; its gain is replicated, and every process makes a part of dγ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(8), blocks.SwiGLU(8, 12))
    laws = _chain_laws(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {"1.gate": ColwiseParallel(), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    gain: Any = model[0].weight
    model[0].weight = nn.Parameter(DTensor.from_local(gain.detach().add(0.3), mesh, [Replicate()], run_check=False))
    x = DTensor.from_local(data(0), mesh, [Replicate()], run_check=False)
    output: Any = model(x)
    output.sin().mean().backward()
    grad: Any = model[0].weight.grad
    whole = grad.full_tensor()
    if not reduced:
        # What a norm outside the framework leaves: this process's part, labelled as if it were everything.
        whole = whole * (0.3 if rank else 0.7)
    model[0].weight.grad = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    result = audit(model, laws)
    assert result.ranks == WORLD
    assert result["gain"].ok is reduced, result.summary()
    assert result["1.gated_neurons"].ok
    assert conserved.check_replicas(model).ok is reduced
    agree([row.residual for row in result.rows])
    # Each process's own half of the neurons would satisfy the identity of the neurons but not that of the gain.
    assert model[1].up.weight.placements == (Shard(0),)  # type: ignore[union-attr]


def _chain_laws(model: nn.Module) -> conserved.LawSet:
    """The neurons' law, and the gain against the columns that read it."""
    laws = recognize(block())
    known = [s for s in laws if s.name in ("norm2.gain", "feedforward.gated_neurons")]
    text = [s.record() for s in known]
    for item in text:
        item["block"] = "1" if item["family"] == "gated_neurons" else ""
        for leg in item["legs"]:
            leg["parameter"] = leg["parameter"].replace("norm2", "0").replace("feedforward", "1")
    symmetries = tuple(conserved.Symmetry.from_dict(item) for item in text)
    return conserved.LawSet(symmetries=symmetries, parameters=dict(model.named_parameters()))


def gain_not_reduced(rank: int, folder: Path) -> None:
    tensor_parallel(rank, folder, reduced=False)


def low_rank_factor_not_reduced(rank: int, folder: Path) -> None:
    """A replicated LoRA factor that keeps its own process's gradient while the other one is summed."""
    torch.manual_seed(0)
    model = blocks.FeedForward(8, 2, "linear")
    model(data(rank)).sin().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        if parameter is not model.up.weight:
            dist.all_reduce(parameter.grad)
    result = audit(model)
    assert not result.ok
    assert result.failures[0].family == "linear_pair"
    disagreeing = [row.name for row in conserved.check_replicas(model).rows if row.spread > 0]
    assert disagreeing == ["up.weight"]


SCENES: list[Scene] = [
    data_parallel,
    missing_all_reduce,
    different_parameters,
    fully_sharded,
    flat_parameters,
    flat_parameters_alone,
    dumped,
    tensor_parallel,
    gain_not_reduced,
    low_rank_factor_not_reduced,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_over_two_processes(scene: Scene, two_processes: Path) -> None:
    assert_played(scene, two_processes)
