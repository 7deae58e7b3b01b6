"""Stacks that keep Megatron's attributes, buffers and groups: a stand-in of its state, over two processes."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import conserved
from conserved.layout import layout_of
from test_audit_pieces import Reduce
from two_processes import WORLD, Scene, assert_played

pytestmark = pytest.mark.slow

WIDTH, VOCABULARY = 8, 12


@contextmanager
def megatron_state(*, stages: int) -> Iterator[None]:
    """Stand for `megatron.core.parallel_state`: two stages of a pipeline, or two data-parallel processes."""
    state: Any = types.ModuleType("megatron.core.parallel_state")
    alone = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
    everyone, pipeline = dist.group.WORLD, stages > 1
    state.model_parallel_is_initialized = lambda: True
    state.get_tensor_model_parallel_group = lambda: alone
    state.get_data_parallel_group = lambda with_context_parallel=False: alone if pipeline else everyone
    state.get_pipeline_model_parallel_world_size = lambda: stages
    state.get_embedding_group = lambda check_initialized=True: everyone if pipeline else alone
    state.get_expert_model_parallel_group = lambda check_initialized=True: None
    state.get_expert_tensor_parallel_group = lambda check_initialized=True: alone
    state.get_expert_data_parallel_group = lambda check_initialized=True: everyone
    sys.modules[state.__name__] = state
    try:
        yield
    finally:
        del sys.modules[state.__name__]


class Stage(nn.Module):
    """The first or the last stage of a language model whose table is shared."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.table.shared_embedding = True  # type: ignore[attr-defined]
        self.table.allreduce = True  # type: ignore[attr-defined]
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.first = rank == 0

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.hidden(nn.functional.embedding(x, self.table)).tanh()
        return nn.functional.linear(self.hidden(x), self.table)


def _train_stages(rank: int, *, sums: bool) -> conserved.Monitor:
    model = Stage(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = conserved.Monitor(model, optimizer)
    for number in range(3):
        tokens = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(number))
        hidden = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(100 + number))
        optimizer.zero_grad()
        model(tokens if rank == 0 else hidden).square().mean().backward()
        if sums:
            dist.all_reduce(model.table.grad)
        optimizer.step()
        dist.barrier()
        monitor.step()
        dist.barrier()
    monitor.close()
    return monitor


def stages_that_share_a_table(rank: int, folder: Path) -> None:
    with megatron_state(stages=2):
        assert not _train_stages(rank, sums=True).alarms


def a_table_whose_gradient_is_not_summed(rank: int, folder: Path) -> None:
    with megatron_state(stages=2):
        alarms = _train_stages(rank, sums=False).alarms
    assert [(alarm.step, alarm.code, alarm.law) for alarm in alarms] == [(1, "replicas", "table")]
    assert "share this table" in alarms[0].message


class Buffered(nn.Module):
    """A data-parallel wrapper that moves gradients into buffers, as Megatron's does."""

    def __init__(self, module: nn.Module, *, reduces: bool = True) -> None:
        super().__init__()
        self.module, self.reduces = module, reduces
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
            parameter.allreduce = True  # type: ignore[attr-defined]
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_hook(self._move(parameter))  # type: ignore[union-attr]
            parameter.accumulator = node  # type: ignore[attr-defined]

    @staticmethod
    def _move(parameter: Any) -> Any:
        def hook(*_: Any) -> None:
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def finish(self) -> None:
        """Average the gradients and hand them to the optimizer."""
        for parameter in self.module.parameters():
            saved: Any = parameter.main_grad  # type: ignore[attr-defined]
            if self.reduces:
                dist.all_reduce(saved)
                saved.div_(WORLD)
            parameter.grad = saved

    def clear(self) -> None:
        """Set the buffers to zero."""
        for parameter in self.module.parameters():
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
            parameter.grad = None


class SmallStream(nn.Module):
    """A stream so small that a norm's ε is seen in its law."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(self.enter.weight, std=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x)))


def a_law_up_to_epsilon_over_data_parallelism(rank: int, folder: Path) -> None:
    """What ε leaves is added up over the batches of all processes and of several passes, and the law is decided."""
    with megatron_state(stages=1):
        model = SmallStream()
        wrapper = Buffered(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        monitor = conserved.Monitor(wrapper, optimizer)
        for number in range(3):
            wrapper.clear()
            for part in range(2):
                generator = torch.Generator().manual_seed(10 * number + 2 * part + rank)
                loss = wrapper(torch.randn(16, WIDTH, generator=generator)).square().mean()
                (loss / 2).backward()
            wrapper.finish()
            optimizer.step()
            monitor.step()
        assert not monitor.alarms
        assert {entry.status for entry in monitor.audits} == {"verified"}
        monitor.close()


def experts_that_are_replicas(rank: int, folder: Path) -> None:
    """A module that calls itself an expert is laid out by the groups of experts, whatever its parameters say."""
    with megatron_state(stages=1):
        model = nn.Linear(WIDTH, WIDTH)
        model.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        groups = [dist.new_group([number]) for number in range(WORLD)]
        vars(model).update(is_expert=True, tp_group=groups[rank])
        layout = layout_of(model)["weight"]
        assert not layout.cuts
        assert [group.ranks for group in layout.replicated] == [(0, 1)]


class Gather(torch.autograd.Function):
    """The tensors of all processes side by side; the gradient of a process's own part is summed over all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total.chunk(WORLD, -1)[dist.get_rank()].contiguous()


class SharedValues(nn.Module):
    """Values that are cut over processes and gathered: every process reads all of them with heads of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(20 + rank)
        self.values = nn.Parameter(torch.randn(2, WIDTH))
        self.out = nn.Parameter(torch.randn(WIDTH, 2 * WORLD))
        for parameter, axis in ((self.values, 0), (self.out, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim = True, axis  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        gathered: Any = Gather.apply(nn.functional.linear(x, self.values))
        output: Any = Reduce.apply(nn.functional.linear(gathered, self.out))
        return output


def rows_that_are_gathered(rank: int, folder: Path) -> None:
    """A law of gathered rows is not one of this process: it is left out, and nothing is refuted."""
    model = SharedValues(rank)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(11))
    laws = conserved.recognize(model, x)
    model(x).sin().mean().backward()
    result = conserved.audit(model, laws)
    assert not result.failures, result.summary()
    assert any("gathered" in item.reason for item in laws.dropped)


def _train_replicated_shards(rank: int, *, sums: bool) -> conserved.Monitor:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = conserved.Monitor(model, optimizer)
    for number in range(2):
        optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).square().mean().backward()
        if not sums:
            for parameter in model.parameters():
                parameter.grad.to_local().mul_(1 + rank)
        optimizer.step()
        monitor.step()
    monitor.close()
    return monitor


def replicas_of_shards(rank: int, folder: Path) -> None:
    assert not _train_replicated_shards(rank, sums=True).alarms


def replicas_of_shards_that_differ(rank: int, folder: Path) -> None:
    """Each replica's gradients satisfy every identity; that they differ is what shows."""
    alarms = _train_replicated_shards(rank, sums=False).alarms
    assert {(alarm.step, alarm.code) for alarm in alarms} == {(1, "replicas")}
    assert "replicate group of 2" in alarms[0].message


class WithoutRule(nn.Module):
    """A program with an operation that no rule is known of, so that it is probed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.enter(x).unflatten(-1, (-1, 2))) * 1j
        return self.leave(torch.view_as_real(turned).flatten(-2))


def data_parallelism_that_sets_itself_up_in_the_first_call(rank: int, folder: Path) -> None:
    """Reading laws does not call the hooks of composable data parallelism, which would reduce nothing afterwards."""
    model = WithoutRule()
    replicate(model)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    conserved.recognize(model, x)
    model(x).square().mean().backward()
    assert model.enter.weight.grad is not None
    parts = [torch.empty_like(model.enter.weight) for _ in range(WORLD)]
    dist.all_gather(parts, model.enter.weight.grad)
    assert torch.equal(*parts)


SCENES: list[Scene] = [
    data_parallelism_that_sets_itself_up_in_the_first_call,
    rows_that_are_gathered,
    replicas_of_shards,
    replicas_of_shards_that_differ,
    stages_that_share_a_table,
    a_table_whose_gradient_is_not_summed,
    a_law_up_to_epsilon_over_data_parallelism,
    experts_that_are_replicas,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_over_two_processes(scene: Scene, two_processes: Path) -> None:
    assert_played(scene, two_processes)
