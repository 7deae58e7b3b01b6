"""Errors between two processes as issues of parallel programs describe them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor
from error_programs.case import Program, case
from error_programs.forum import ANY, Digits, Mlp, images, loss_of, rows, text_loss
from error_programs.models import Decoder


def reduce(model: nn.Module, group: Any = None, divide: int = 2) -> None:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= divide


def same(model: nn.Module) -> None:
    for t in model.state_dict().values():
        dist.broadcast(t, 0)


def start(rank: int, make: Any = Mlp) -> Any:
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(7 + rank)
    return model


def run(
    model: Any, optimizer: Any, loss: Any = loss_of, between: Any = None, steps: int = 5, after: Any = None
) -> Monitor:
    with Monitor(model, optimizer) as monitor:
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            loss(model).backward()
            if between is not None:
                between(number)
            optimizer.step()
            if after is not None:
                after(number)
            monitor.step()
    return monitor


def pair(name: str, words: str, **options: Any) -> Callable[[Program], Program]:
    return case(name, *ANY, words=words, processes=2, **options)


@pair(
    "the wrapper averages gradients and the loop divides by the number of processes again",
    "divided|scale|factor|twice",
    source="manual average beside DDP",
)
def divided_again(wrong: bool, rank: int) -> Monitor:
    model = DistributedDataParallel(start(rank))

    def between(_: int) -> None:
        for p in model.parameters():
            if wrong and p.grad is not None:
                p.grad /= 2

    return run(model, torch.optim.SGD(model.parameters(), 0.1), between=between)


@pair(
    "the loss is reduced over the processes and gradients are not",
    "differ|reduc|gradient",
    source="dist.all_reduce(loss) before backward",
)
def loss_reduced(wrong: bool, rank: int) -> Monitor:
    model = start(rank)

    def loss(model: nn.Module) -> Tensor:
        value = loss_of(model)
        dist.all_reduce(value.data)
        return value / 2

    def between(_: int) -> None:
        if not wrong:
            reduce(model)

    return run(model, torch.optim.SGD(model.parameters(), 0.1), loss, between)


@pair(
    "asynchronous reductions are waited for after the step",
    "differ|reduc|gradient",
    source="async_op=True without wait()",
)
def waited_late(wrong: bool, rank: int) -> Monitor:
    model = start(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model).backward()
            kept = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
            work = [dist.all_reduce(g, async_op=True) for g in kept.values()]
            if not wrong:
                [w.wait() for w in work]
                for p, g in kept.items():
                    p.grad = g / 2
            optimizer.step()
            if wrong:
                [w.wait() for w in work]
            monitor.step()
    return monitor


@pair(
    "only parameters with two dimensions are reduced",
    "differ|reduc|gradient",
    source="filters in hand-written reductions",
)
def matrices_only(wrong: bool, rank: int) -> Monitor:
    model = start(rank)

    def between(_: int) -> None:
        for p in model.parameters():
            if p.grad is not None and (p.ndim > 1 or not wrong):
                dist.all_reduce(p.grad)
                p.grad /= 2

    return run(model, torch.optim.AdamW(model.parameters(), 1e-2), between=between)


@pair(
    "gradients are reduced in every second step only",
    "differ|reduc|gradient",
    source="if step % k in hand-written loops",
    at=1,
)
def every_second(wrong: bool, rank: int) -> Monitor:
    model = start(rank)

    def between(number: int) -> None:
        if number % 2 == 0 or not wrong:
            reduce(model)

    return run(model, torch.optim.SGD(model.parameters(), 0.1), between=between)


@pair(
    "gradients are averaged with process 0 twice by a broadcast",
    "differ|reduc|gradient|sum|one process",
    source="broadcast instead of all_reduce",
)
def broadcast_instead(wrong: bool, rank: int) -> Monitor:
    model = start(rank)

    def between(_: int) -> None:
        for p in model.parameters():
            if p.grad is not None:
                if wrong:
                    dist.broadcast(p.grad, 0)
                else:
                    dist.all_reduce(p.grad)
                    p.grad /= 2

    return run(model, torch.optim.SGD(model.parameters(), 0.1), between=between)


@pair(
    "the largest gradient of the processes is taken by ReduceOp.MAX",
    "differ|reduc|gradient|sum",
    source="wrong ReduceOp",
)
def maximum(wrong: bool, rank: int) -> Monitor:
    model = start(rank)

    def between(_: int) -> None:
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, op=dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM)
                p.grad /= 1 if wrong else 2

    return run(model, torch.optim.SGD(model.parameters(), 0.1), between=between)


class ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, on: bool) -> Tensor:
        ctx.on = on
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        g = g.contiguous()
        if ctx.on:
            dist.all_reduce(g)
        return g, None


class RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@pair(
    "the gradient into a column-parallel layer is not reduced",
    "differ|reduc|gradient",
    source="Megatron's f operator by hand",
)
def column_parallel(wrong: bool, rank: int) -> Monitor:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(10, 16), nn.Linear(16, 5)
            self.up, self.down = nn.Linear(16, 12, bias=False), nn.Linear(12, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.stem(x))
            y = self.down(F.gelu(self.up(ColumnParallel.apply(h, not wrong))))
            return self.head(h + RowParallel.apply(y))

    torch.manual_seed(0)
    model = Split()
    torch.manual_seed(20 + rank)
    nn.init.normal_(model.up.weight, std=0.3)
    nn.init.normal_(model.down.weight, std=0.3)
    torch.manual_seed(3)
    return run(model, torch.optim.SGD(model.parameters(), 0.05))


@pair(
    "gradients of norms are not reduced under sequence parallelism",
    "differs|reduced",
    source="Megatron-LM sequence parallel norms",
)
def sequence_parallel(wrong: bool, rank: int) -> Monitor:
    model = start(rank, Decoder)

    def between(_: int) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None and ("norm" not in name or not wrong):
                dist.all_reduce(p.grad)
                p.grad /= 2

    return run(model, torch.optim.AdamW(model.parameters(), 1e-2), text_loss, between)


@pair(
    "each process clips its shards of gradients by their own norm",
    "own norm|clipped",
    source="ZeRO by hand without a reduced norm",
)
def clipped_by_shard(wrong: bool, rank: int) -> Monitor:
    model = start(rank)
    fully_shard(model)

    def between(_: int) -> None:
        grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        square = sum(g.square().sum() for g in grads)
        if not wrong:
            dist.all_reduce(square)
        factor = min(1.0, 0.1 / float(square.sqrt()))
        for g in grads:
            g.mul_(factor)

    return run(model, torch.optim.AdamW(model.parameters(), 1e-2), between=between)


@pair(
    "fully sharded gradients are not reduced because their synchronisation is off",
    "sync",
    source="set_requires_gradient_sync(False) left on",
)
def sync_off(wrong: bool, rank: int) -> Monitor:
    model = start(rank)
    fully_shard(model)
    model.set_requires_gradient_sync(not wrong)
    return run(model, torch.optim.AdamW(model.parameters(), 1e-2))


@pair(
    "statistics of batch norms are those of each process and no wrapper sends them",
    "statistic|buffer|differ",
    source="broadcast_buffers=False, evaluation on rank 0",
)
def own_statistics(wrong: bool, rank: int) -> Monitor:
    model = DistributedDataParallel(start(rank, Digits), broadcast_buffers=not wrong)

    def loss(model: nn.Module) -> Tensor:
        x, y = images()
        return F.cross_entropy(model(x + rank), y)

    return run(model, torch.optim.SGD(model.parameters(), 0.05), loss)


@pair(
    "the moving codebook of a quantiser is averaged on each process alone",
    "codebook|buffer|differ",
    source="vector-quantize without all_reduce",
    at=2,
)
def codebook_alone(wrong: bool, rank: int) -> Monitor:
    class Quantiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(10, 4), nn.Linear(4, 5)
            self.register_buffer("codebook", torch.randn(6, 4))
            self.codebook: Tensor

        def forward(self, x: Tensor) -> Tensor:
            z = self.encode(x)
            index = torch.cdist(z, self.codebook).argmin(-1)
            if self.training:
                hot = F.one_hot(index, 6).float()
                total, count = hot.t() @ z.detach(), hot.sum(0)
                if not wrong:
                    dist.all_reduce(total)
                    dist.all_reduce(count)
                self.codebook.lerp_(
                    torch.where(count[:, None] > 0, total / count.clamp_min(1)[:, None], self.codebook), 0.1
                )
            q = self.codebook[index]
            return self.decode(z + (q - z).detach())

    model = DistributedDataParallel(start(rank, Quantiser), broadcast_buffers=False)
    return run(model, torch.optim.SGD(model.parameters(), 0.05))


@pair(
    "one process scales its loss by its own number of tokens",
    "differ|scale|reduc|gradient",
    how="outside",
    why="A mean of means is another loss.",
    source="token counts of one process",
)
def own_counts(wrong: bool, rank: int) -> Monitor:
    model = DistributedDataParallel(start(rank))

    def loss(model: nn.Module) -> Tensor:
        x, y = rows(8 + 4 * rank)
        value = F.cross_entropy(model(x), y, reduction="sum")
        return value / (len(x) if wrong else 10)

    return run(model, torch.optim.SGD(model.parameters(), 0.05), loss)


@pair(
    "a process without data in the last steps steps alone",
    "differ|gradient|parameter|replica",
    at=4,
    source="uneven inputs in hand-written loops",
)
def uneven(wrong: bool, rank: int) -> Monitor:
    model = start(rank)

    def between(number: int) -> None:
        if number < 4 or not wrong:
            reduce(model)

    return run(model, torch.optim.SGD(model.parameters(), 0.1), between=between, steps=6)


@pair(
    "the model is made after the processes were seeded apart and wrapped without a broadcast",
    "differ|parameter|start",
    source="init_sync=False",
)
def init_sync_off(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(rank)
    model = DistributedDataParallel(Mlp(), init_sync=not wrong)
    return run(model, torch.optim.AdamW(model.parameters(), 1e-2))


@pair(
    "every micro-batch but the first is outside of the reduction",
    "sync|differ|reduc|gradient",
    source="nanoGPT, require_backward_grad_sync",
)
def first_only(wrong: bool, rank: int) -> Monitor:
    model = DistributedDataParallel(start(rank))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            for micro in range(3):
                model.require_backward_grad_sync = micro == (0 if wrong else 2)
                (loss_of(model) / 3).backward()
            optimizer.step()
            monitor.step()
    return monitor
