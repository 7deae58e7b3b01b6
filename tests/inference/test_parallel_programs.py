"""Programs of one process among several have the laws of the whole program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from conserved import recognize
from conserved.inference.processes.local_laws import laws_of_one_process
from conserved.inference.program.collectives import UnfollowedCollectiveError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

WORLD = 2
WIDTH, HIDDEN = 8, 16


@pytest.fixture
def two() -> Iterator[None]:
    """A group of two processes, of which only this one exists: whatever communicates gets nothing back."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def everybody() -> Any:
    """The group of all processes."""
    return dist.group.WORLD


class CopyToPieces(torch.autograd.Function):
    """Megatron's f: nothing forward, a sum of gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOfPieces(torch.autograd.Function):
    """Megatron's g: a sum forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient


def whole(x: Tensor) -> Tensor:
    return x


def functional_sum(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", everybody())


def scattered_and_gathered(x: Tensor) -> Tensor:
    """Sequence parallelism: tokens are dealt out after a sum and gathered again."""
    tokens = functional.reduce_scatter_tensor(x, "sum", 0, everybody())
    return functional.all_gather_tensor(tokens, 0, everybody())


def exchanged_and_returned(x: Tensor) -> Tensor:
    """Expert parallelism: tokens go to other processes and come back."""
    there = functional.all_to_all_single(x, None, None, everybody())
    return functional.all_to_all_single(there, None, None, everybody())


def from_neighbour(x: Tensor) -> Tensor:
    """Context parallelism in a ring: every process goes on with what its neighbour has."""
    out = torch.empty_like(x)
    messages = [dist.P2POp(dist.irecv, out, 1), dist.P2POp(dist.isend, x.contiguous(), 1)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return out


class Neighbour(torch.autograd.Function):
    """What the neighbour has; gradients go back to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return from_neighbour(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return from_neighbour(gradients[0])


class ListedExchange(torch.autograd.Function):
    """Tokens go to other processes as a list of tensors, and come back summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for part in x.chunk(WORLD)]
        dist.all_to_all(parts, [*x.chunk(WORLD)])
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts)
        return torch.cat([out] * WORLD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Gated(nn.Module):
    """A gated feed-forward layer of which a process holds a part of the hidden units."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], pieces: int) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN // pieces, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN // pieces, bias=False)
        self.down = nn.Linear(HIDDEN // pieces, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(self.norm(x))
        return x + self.after(self.down(F.silu(self.gate(y)) * self.up(y)))


def network(before: Any = whole, after: Any = whole) -> Any:
    pieces = 1 if after is whole else WORLD
    blocks = [Gated(before, after, pieces) for _ in range(2)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CopyToPieces.apply, SumOfPieces.apply),
        (whole, functional_sum),
        (whole, scattered_and_gathered),
        (exchanged_and_returned, functional_sum),
        (Neighbour.apply, functional_sum),
        (ListedExchange.apply, functional_sum),
    ],
    ids=["autograd functions", "functional", "sequence parallel", "exchange", "ring", "lists"],
)
def test_collectives_keep_the_laws_of_the_whole_program(two: None, before: Any, after: Any) -> None:
    x = torch.randn(6, WIDTH)
    laws = recognize(network(before, after), x)
    assert laws.names == recognize(network(), x).names
    assert not laws.unknown


class SendsOnly(nn.Module):
    """A stage of a pipeline that sends its result within its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        dist.send(out.detach(), 1)
        return out


def test_a_program_that_only_sends_is_not_followed(two: None) -> None:
    with pytest.raises(UnfollowedCollectiveError, match="gets none from"):
        recognize(SendsOnly(), torch.randn(6, WIDTH))


class DistributedByHand(nn.Module):
    """Its parameter is a DTensor, and its forward computes with DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (WORLD,))
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, WIDTH), self.mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        whole: Any = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return (whole @ self.weight.T).to_local()


def test_parameters_that_a_loop_distributed_stay_as_they_are(two: None) -> None:
    model = DistributedByHand()
    before = model.weight
    with pytest.raises(RuntimeError, match="DTensor"):
        recognize(model, torch.randn(6, WIDTH))
    assert model.weight is before


class Mixed(nn.Module):
    """Deals out what laws tell apart: every process gets other hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        units = functional.all_to_all_single(torch.relu(self.up(x)).T.contiguous(), None, None, everybody())
        return self.down(units.T)


def test_an_exchange_of_what_laws_tell_apart_leaves_no_law(two: None) -> None:
    assert not len(recognize(Mixed(), torch.randn(6, WIDTH)))


class OwnPositions(nn.Module):
    """Every process adds its own slice of a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, WIDTH), nn.Parameter(torch.randn(6, WIDTH))
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[:3]
        return self.head(functional.all_gather_tensor(x, 0, everybody()))


def test_nothing_is_said_of_a_table_that_a_process_reads_in_part(two: None) -> None:
    laws = recognize(OwnPositions(), torch.tensor([1, 2, 3]))
    assert all("positions" not in symmetry.parameters for symmetry in laws)
    assert any(item.name == "positions" for item in laws.dropped)


def redistributing(module: Any, mesh: Any) -> None:
    """Put a forward in the module that refers to a mesh, as libraries do that parallelise by configuration."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        return inner(x).redistribute(mesh)

    module.forward = forward


def sharded(change: Callable[[Any, Any], None]) -> Any:
    torch.manual_seed(0)
    model, mesh = network(), init_device_mesh("cpu", (WORLD,))
    change(model, mesh)
    for layer in model[1:3]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def compile_in_place(model: Any, mesh: Any) -> None:
    model[1].compile(backend="eager")


def compile_child(model: Any, mesh: Any) -> None:
    model[1].up = torch.compile(model[1].up, backend="eager")


def wrap_in_checkpoints(model: Any, mesh: Any) -> None:
    model[1] = checkpoint_wrapper(model[1])


def checkpoint_by_forward(model: Any, mesh: Any) -> None:
    model[1].forward = partial(checkpoint, model[1].forward, use_reentrant=False)


def redistribute_in_forward(model: Any, mesh: Any) -> None:
    redistributing(model[1], mesh)


@pytest.mark.parametrize(
    "change",
    [compile_in_place, compile_child, wrap_in_checkpoints, checkpoint_by_forward, redistribute_in_forward],
)
def test_wrapped_layers_of_a_sharded_model_are_followed_as_one_process_runs_them(two: None, change: Any) -> None:
    x = torch.randn(6, WIDTH)
    laws = recognize(sharded(change), x)
    expected = recognize(network(), x)
    assert [len(one.parameters) for one in laws] == [len(one.parameters) for one in expected]
    assert laws.coverage == expected.coverage


def test_a_process_tests_alone_only_the_laws_of_what_it_holds_alone(two: None) -> None:
    model = network(CopyToPieces.apply, SumOfPieces.apply)
    laws = recognize(model, torch.randn(6, WIDTH))
    assert laws_of_one_process(laws, model)[0].names == ("1.gated_neurons", "2.gated_neurons")
    for parameter in model.parameters():
        parameter.tensor_model_parallel = False
    assert laws_of_one_process(laws, model)[0].names == laws.names
