"""Default monitors on parallelism by hand: values say which parameters are replicas, and which are pieces."""

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

import conserved
from two_processes import Scene, assert_played

WIDTH, HIDDEN, CLASSES = 12, 16, 7


class Exchange(torch.autograd.Function):
    """The identity or a sum over processes, in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: bool, sums_back: bool) -> Tensor:
        ctx.sums_back = sums_back
        x = x.clone()
        if sums:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].clone()
        if ctx.sums_back:
            dist.all_reduce(gradient)
        return gradient, None, None


class Layer(nn.Module):
    """A gated layer behind a norm; in pieces, each process has some hidden units."""

    def __init__(self, hidden: int, *, in_pieces: bool = False, reduces: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.in_pieces, self.reduces = in_pieces, reduces

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.in_pieces:
            h = Exchange.apply(h, False, self.reduces)
        out = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + (Exchange.apply(out, True, False) if self.in_pieces else out)


class Classifier(nn.Module):
    """Two layers between an embedding and a head that all processes have alike."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Linear(5, WIDTH, bias=False), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if options.get("in_pieces"):
            torch.manual_seed(1 + dist.get_rank())
        self.layers = nn.Sequential(*(Layer(HIDDEN, **options) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(x))))


def _batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(9, 5, generator=generator), torch.randint(0, CLASSES, (9,), generator=generator)


def _watch(model: nn.Module, optimizer: Any, step: Callable[[int], None], steps: int = 4) -> dict[str, Any]:
    monitor = conserved.Monitor(model, optimizer, audit=1)
    for number in range(steps):
        step(number)
        monitor.step()
        dist.barrier()
    audit = monitor.last_audit
    monitor.close()
    return {
        "coverage": 0.0 if audit is None else audit.coverage.parameters,
        "verdict": "" if audit is None else audit.verdict.status.value,
        "alarms": [(alarm.code, alarm.tensor, alarm.message) for alarm in monitor.alarms],
    }


def _tensor_parallel(rank: int, *, reduces: bool, norms: bool = True) -> dict[str, Any]:
    model = Classifier(in_pieces=True, reduces=reduces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        x, y = _batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if not norms and rank:
            for layer in model.layers:
                gradient = layer.get_parameter("norm.weight").grad
                assert gradient is not None
                gradient.mul_(0.5)
        optimizer.step()

    return _watch(model, optimizer, step)


def _sharded_optimizer(rank: int, *, reduces: bool = True) -> dict[str, Any]:
    model = Classifier()
    every = list(model.parameters())
    optimizer = torch.optim.AdamW(every[rank::2], lr=1e-2)

    def step(number: int) -> None:
        x, y = _batch(number, rank)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in every if reduces else []:
            dist.all_reduce(p.grad)
        optimizer.step()
        for index, p in enumerate(every):
            dist.broadcast(p.data, index % 2)

    return _watch(model, optimizer, step)


def _stages(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(HIDDEN), Layer(HIDDEN))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(number))
        if rank:
            dist.recv(x, 0)
            x.requires_grad_()
            model(x).square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, 0)
        else:
            out = model(x)
            dist.send(out.detach(), 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, 1)
            out.backward(gradient)
        optimizer.step()

    return _watch(model, optimizer, step)


class TiedStage(nn.Module):
    """The first or the last stage of a model whose head is its table."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(CLASSES, WIDTH)
        torch.manual_seed(3 + rank)
        self.layer = Layer(HIDDEN)
        self.norm = nn.LayerNorm(WIDTH) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return self.layer(self.table(x))
        return self.norm(self.layer(x)) @ self.table.weight.T


def _tied_stages(rank: int, *, sums: bool) -> dict[str, Any]:
    model = TiedStage(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        tokens = torch.randint(0, CLASSES, (10,), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        if rank:
            x = torch.empty(9, WIDTH)
            dist.recv(x, 0)
            x.requires_grad_()
            F.cross_entropy(model(x), tokens[1:]).backward()
            assert x.grad is not None
            dist.send(x.grad, 0)
        else:
            out = model(tokens[:-1])
            dist.send(out.detach(), 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, 1)
            out.backward(gradient)
        if sums:
            dist.all_reduce(model.table.weight.grad)
        optimizer.step()

    return _watch(model, optimizer, step)


def _steps_alone(rank: int, period: int | None) -> dict[str, Any]:
    """Local SGD: gradients are never reduced, and weights are averaged now and then."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        x, y = _batch(number, rank)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if period and number % period == period - 1:
            with torch.no_grad():
                for p in model.parameters():
                    dist.all_reduce(p)
                    p.div_(2)

    return _watch(model, optimizer, step, steps=8)


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "tensor parallel": lambda rank: _tensor_parallel(rank, reduces=True),
    "input gradients not reduced": lambda rank: _tensor_parallel(rank, reduces=False),
    "norm gradients not reduced": lambda rank: _tensor_parallel(rank, reduces=True, norms=False),
    "sharded optimizer": _sharded_optimizer,
    "sharded optimizer, gradients not reduced": lambda rank: _sharded_optimizer(rank, reduces=False),
    "stages of one seed": _stages,
    "tied stages": lambda rank: _tied_stages(rank, sums=True),
    "tied stages, gradient not summed": lambda rank: _tied_stages(rank, sums=False),
    "weights averaged every third step": lambda rank: _steps_alone(rank, 3),
    "nothing reduced": lambda rank: _steps_alone(rank, None),
}


def hand_written(rank: int, folder: Path) -> None:
    result = {name: case(rank) for name, case in CASES.items()}
    (folder / f"hand_written.{rank}.json").write_text(json.dumps(result))


SCENES: list[Scene] = [hand_written]


@pytest.fixture
def seen(two_processes: Path) -> list[dict[str, Any]]:
    assert_played(hand_written, two_processes)
    return [json.loads((two_processes / f"hand_written.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "name",
    [
        "tensor parallel",
        "sharded optimizer",
        "stages of one seed",
        "weights averaged every third step",
    ],
)
def test_correct_runs_are_silent_and_verified(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        assert rank[name]["alarms"] == []
        assert rank[name]["verdict"] == "verified"
        assert rank[name]["coverage"] > 0.8


def test_a_replica_whose_gradient_is_a_part_of_a_sum_is_named(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        alarms = rank["input gradients not reduced"]["alarms"]
        assert any(code == "replicas" and tensor == "embed.weight" for code, tensor, _ in alarms)


def test_a_sharded_optimizer_that_steps_with_gradients_of_its_own_batch_is_named(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        alarms = rank["sharded optimizer, gradients not reduced"]["alarms"]
        assert [code for code, _, _ in alarms] == ["replicas"]
        assert "the reduction before the step is missing" in alarms[0][2]


def test_a_table_that_two_stages_share_is_compared_and_no_law_of_one_stage(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["tied stages"]["alarms"] == []
        assert rank["tied stages"]["verdict"] == "verified"
        [(code, tensor, message)] = rank["tied stages, gradient not summed"]["alarms"]
        assert (code, tensor) == ("replicas", "table.weight")
        assert "added up" in message


def test_gradients_that_no_process_reduces_are_told_apart_from_local_steps(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        [(code, tensor, message)] = rank["nothing reduced"]["alarms"]
        assert (code, tensor) == ("replicas", "embed.weight")
        assert "not reduced" in message


def test_a_gain_of_ones_is_a_replica_where_its_space_is_exchanged(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        alarms = rank["norm gradients not reduced"]["alarms"]
        assert any(code == "replicas" and "norm.weight" in message for code, _, message in alarms)
