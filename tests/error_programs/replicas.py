"""Errors between processes: each program runs on two processes that share a gloo group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor
from error_programs.case import Program, backward, case, mlp

Act = Callable[[Any, Any, int], None]


def _nothing(model: Any, optimizer: Any, number: int) -> None:
    """Leave everything as it is."""


def _train(
    model: nn.Module, optimizer: Any, *, before: Act = _nothing, after: Act = _nothing, call: Any = None
) -> Monitor:
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 6):
            optimizer.zero_grad()
            backward(call or model)
            before(model, optimizer, number)
            optimizer.step()
            monitor.step()
            after(model, optimizer, number)
    return monitor


def _wrapped(rank: int, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(), **options)
    torch.manual_seed(1 + rank)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _reduce(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


def two(name: str, words: str, at: int = 1, **options: Any) -> Callable[[Program], Program]:
    return case(name, "replica", words=words, at=at, processes=2, **options)


@two("a reduced gradient arrives as zeros on one rank", "gradient", 3, source="TrainCheck: pytorch-84803")
def zeros_on_one_rank(wrong: bool, rank: int) -> Monitor:
    def lose(model: Any, optimizer: Any, number: int) -> None:
        if wrong and rank == 1 and number >= 3:
            model.module[3].weight.grad.zero_()

    model, optimizer = _wrapped(rank)
    return _train(model, optimizer, before=lose)


@two("parameters arrive as zeros on one rank", "parameter", 1, source="TrainCheck: baichuan2-86")
def parameters_lost(wrong: bool, rank: int) -> Monitor:
    model, optimizer = _wrapped(rank)
    if wrong and rank == 1:
        model.module[3].bias.data.zero_()
    return _train(model, optimizer)


@two("some entries are lost in transfer", "gradient", 2, source="TrainCheck: pytorch-96600")
def entries_lost(wrong: bool, rank: int) -> Monitor:
    def lose(model: Any, optimizer: Any, number: int) -> None:
        if wrong and rank == 1 and number == 2:
            model.module[0].weight.grad[1].zero_()

    model, optimizer = _wrapped(rank)
    return _train(model, optimizer, before=lose)


@two("gradients are clipped on one rank only", "gradient", 2, source="TrainCheck: deepspeed-1801")
def clipped_on_one_rank(wrong: bool, rank: int) -> Monitor:
    def clip(model: Any, optimizer: Any, number: int) -> None:
        if number >= 2 and (rank == 0 or not wrong):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    model, optimizer = _wrapped(rank)
    return _train(model, optimizer, before=clip)


@two("hooks of the wrapper are lost when the model is moved", "gradient", 1, source="TrainCheck: pytorch-104336")
def hooks_lost(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    inner = mlp()
    if not wrong:
        inner.double().float()
    model = DistributedDataParallel(inner)
    if wrong:
        model.double().float()
    torch.manual_seed(1 + rank)
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@two("the module inside the wrapper is called", "gradient", 1, source="TrainCheck: x-jxmnop-ddp-out-of-sync")
def raw_module(wrong: bool, rank: int) -> Monitor:
    model, optimizer = _wrapped(rank)
    return _train(model, optimizer, call=model.module if wrong else model)


@two("no_sync() is left on", "no_sync", 3)
def no_sync(wrong: bool, rank: int) -> Monitor:
    model, optimizer = _wrapped(rank)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 6):
            optimizer.zero_grad()
            with model.no_sync() if wrong and number >= 3 else nullcontext():
                backward(model)
                optimizer.step()
                monitor.step()
    return monitor


def _manual(rank: int, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = mlp()
    torch.manual_seed(1 + rank)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


@two("a loop forgets the all-reduce", "gradient", 1)
def no_reduction(wrong: bool, rank: int) -> Monitor:
    model, optimizer = _manual(rank)
    return _train(model, optimizer, before=lambda m, o, n: None if wrong else _reduce(m))


@two("an all-reduce leaves one tensor out", "gradient", 3)
def one_tensor_left_out(wrong: bool, rank: int) -> Monitor:
    def reduce(model: Any, optimizer: Any, number: int) -> None:
        last = list(model.parameters())[-1]
        saved = last.grad.clone()
        _reduce(model)
        if wrong and number >= 3:
            last.grad.copy_(saved)

    model, optimizer = _manual(rank)
    return _train(model, optimizer, before=reduce)


@two("ranks step at different rates", "parameter", 2)
def other_rate(wrong: bool, rank: int) -> Monitor:
    def change(model: Any, optimizer: Any, number: int) -> None:
        if wrong and rank == 1 and number == 1:
            optimizer.param_groups[0]["lr"] *= 0.5

    model, optimizer = _wrapped(rank)
    return _train(model, optimizer, after=change)


@two("a checkpoint is loaded on one rank only", "parameter", 3)
def loaded_on_one_rank(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(5)
    saved = mlp().state_dict()

    def load(model: Any, optimizer: Any, number: int) -> None:
        if number == 2 and (rank == 0 or not wrong):
            model.module.load_state_dict(saved)

    model, optimizer = _wrapped(rank)
    return _train(model, optimizer, after=load)


@two("one rank writes to a weight", "parameter|wrote", 3)
def written_on_one_rank(wrong: bool, rank: int) -> Monitor:
    def write(model: Any, optimizer: Any, number: int) -> None:
        if wrong and rank == 1 and number == 3:
            model.module[3].weight.data.view(torch.int32)[0, 0] ^= 1 << 3

    model, optimizer = _wrapped(rank)
    return _train(model, optimizer, after=write)


@two("batch norm statistics differ by rank", "", 1, how="call")
def statistics_differ(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    model = DistributedDataParallel(inner, broadcast_buffers=not wrong)
    torch.manual_seed(1 + rank)
    F.relu(torch.zeros(1))
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
