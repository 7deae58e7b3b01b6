"""Further errors between two processes: data, starts, buffers and parameters that a wrapper does not know."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor
from error_programs.case import backward, batch, case, mlp
from error_programs.models import Decoder, tokens


def _reduce(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


@case("all processes read the same batches", "replica", "loop", words="same (batch|data)", at=1, processes=2)
def same_batches(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp())
    torch.manual_seed(1 + (0 if wrong else rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("replicas start from different weights and reduce gradients", "replica", words="parameter", at=1, processes=2)
def different_starts(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(rank if wrong else 0)
    model = Decoder()
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            x, y = tokens()
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            _reduce(model)
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "a layer is added after the model was wrapped",
    "replica",
    "loop",
    words="gradient|parameter|no optimizer",
    at=1,
    processes=2,
)
def added_after_wrapping(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    inner = mlp()
    if not wrong:
        inner.append(nn.Linear(4, 4))
    model = DistributedDataParallel(inner)
    if wrong:
        inner.append(nn.Linear(4, 4))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("a buffer differs on one process", "replica", words="buffer", at=3, processes=2)
def buffer_differs(wrong: bool, rank: int) -> Monitor:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x - self.get_buffer("mean"))

    torch.manual_seed(0)
    inner: Any = Shifted()
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 6):
            if number == 3 and (rank == 1 or not wrong):
                inner.mean.fill_(0.3)
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("gradients are reduced before the last micro-batch", "replica", words="gradient", at=1, processes=2)
def reduced_too_early(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = Decoder()
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            for part in range(2):
                x, y = tokens()
                (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2).backward()
                if part == (0 if wrong else 1):
                    _reduce(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("one process skips a step", "replica", words="parameter|gradient|step", at=3, processes=2)
def step_skipped(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp())
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 6):
            optimizer.zero_grad()
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            if not (wrong and rank == 1 and number == 3):
                optimizer.step()
            monitor.step()
    return monitor
