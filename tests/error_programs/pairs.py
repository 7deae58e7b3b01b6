"""Errors between two processes in programs of other kinds: accumulation, games, contrasts, noise, starts, averages."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor
from error_programs.case import case
from error_programs.habits import ANY
from error_programs.tasks import Game, layers
from error_programs.trainers import Net, vectors


def share(module: nn.Module) -> None:
    """Average gradients over the processes in one flat buffer."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g) / 2)


@case(
    "noise on gradients is drawn after the reduction with the seed of every process", "replica",
    words="gradient|parameter|differ", source="gradient noise under DDP", processes=2,
)  # fmt: skip
def noise_by_rank(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(drop=0.0))
    torch.manual_seed(5 + rank)
    noise = torch.Generator().manual_seed(rank if wrong else 11)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x, y = vectors(64).tensors
    with Monitor(model, optimizer) as monitor:
        for number in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x[number : number + 12]), y[number : number + 12]).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.add_(torch.randn(p.shape, generator=noise), alpha=1e-3)
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "gradients of the generator are reduced and those of the critic are not", "replica", words="gradient|parameter",
    source="hand-written parallel games", processes=2,
)  # fmt: skip
def critic_not_reduced(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    game = Game()
    torch.manual_seed(5 + rank)
    first = torch.optim.Adam(game.critic.parameters(), 1e-3)
    second = torch.optim.Adam(game.generator.parameters(), 1e-3)
    with Monitor(game, [first, second]) as monitor:
        for _ in range(5):
            first.zero_grad()
            game.critic_loss(torch.randn(12, 6) + 1).backward()
            if not wrong:
                share(game.critic)
            first.step()
            second.zero_grad()
            game.generator_loss(12).backward()
            share(game.generator)
            second.step()
            monitor.step()
    return monitor


@case(
    "buffers are not broadcast at the start", "replica", words="buffer|differ", source="hand-written parallel starts",
    processes=2,
)  # fmt: skip
def buffers_not_sent(wrong: bool, rank: int) -> Monitor:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("projection", torch.randn(10, 10) / 3)
            self.net = Net(drop=0.0)
            self.projection: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x @ self.projection)

    torch.manual_seed(rank)
    model = Projected()
    for tensor in model.parameters() if wrong else model.state_dict().values():
        dist.broadcast(tensor.data, 0)
    torch.manual_seed(5 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = vectors(64).tensors
    with Monitor(model, optimizer) as monitor:
        for number in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x[number : number + 12]), y[number : number + 12]).backward()
            share(model)
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "features of a contrast are gathered without their gradient", *ANY, words="gather|gradient",
    source="SLIP 31, vissl 123", processes=2,
)  # fmt: skip
def gathered_without_gradient(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = DistributedDataParallel(layers(10, 16, 8, act=nn.GELU))
    torch.manual_seed(5 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            x = torch.randn(8, 10)
            z = F.normalize(model(torch.cat([x, x + 0.1 * torch.randn_like(x)])))
            a, b = z.chunk(2)
            every = [torch.empty_like(b) for _ in range(2)]
            dist.all_gather(every, b.detach())
            if not wrong:
                every[rank] = b
            logits = a @ torch.cat(every).T / 0.2
            optimizer.zero_grad()
            F.cross_entropy(logits, torch.arange(8) + 8 * rank).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "one process restores the best weights and the others go on", "replica", words="parameter|differ|gradient", at=4,
    source="early stopping on rank 0", processes=2,
)  # fmt: skip
def restored_on_one_rank(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(drop=0.0))
    torch.manual_seed(5 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    x, y = vectors(64).tensors
    best: Any = None
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 7):
            if number == 2:
                best = copy.deepcopy(model.state_dict())
            if number == 4 and wrong and rank == 0:
                model.load_state_dict(best)
            optimizer.zero_grad()
            F.cross_entropy(model(x[number : number + 12]), y[number : number + 12]).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "the optimizer of a sharded state gathers one weight from the wrong owner", "replica", "update",
    words="parameter|differ|not land|wrote|did not", source="hand-written ZeRO-1", processes=2,
)  # fmt: skip
def gathered_from_wrong_owner(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = Net(drop=0.0)
    torch.manual_seed(5 + rank)
    everything = list(model.parameters())
    owner = {id(p): i % 2 for i, p in enumerate(everything)}
    optimizer = torch.optim.AdamW([p for p in everything if owner[id(p)] == rank], 2e-3)
    x, y = vectors(64).tensors
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 7):
            model.zero_grad()
            F.cross_entropy(model(x[number : number + 12]), y[number : number + 12]).backward()
            share(model)
            optimizer.step()
            for index, p in enumerate(everything):
                dist.broadcast(p.data, 0 if wrong and index == 3 else owner[id(p)])
            monitor.step()
    return monitor
