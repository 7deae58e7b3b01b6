"""Errors of runs that are saved and resumed."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conserved import Monitor
from error_programs.case import case
from error_programs.habits import ANY, adamw
from error_programs.models import ConvNet

Restore = Callable[[Any, Any, Any, dict[str, Any]], Any]


class Data:
    """A data set that is read in order, from a position."""

    def __init__(self) -> None:
        self.position = 0
        self.images = torch.randn(64, 4, 1, 6, 6, generator=torch.Generator().manual_seed(7))

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next batch."""
        self.position += 1
        x = self.images[self.position % 64]
        return x, x.flatten(1)[:, :4].argmax(-1)


class Dropping(ConvNet):
    """A convolutional network with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x).mean((2, 3)), 0.2, self.training))


def resume(restore: Restore, *, saved_late: bool = False) -> Monitor:
    """Train, save, build everything again, let `restore` load it, and go on."""

    def build() -> tuple[Any, Any, Any, Data]:
        model = Dropping()
        optimizer = adamw(model)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), Data()

    def step(model: Any, optimizer: Any, scheduler: Any, data: Data, monitor: Monitor) -> None:
        x, y = data.next()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        monitor.step()

    parts = build()
    with Monitor(parts[0], parts[1]) as first:
        for _ in range(4):
            step(*parts, first)
        saved: dict[str, Any] = {
            "model": parts[0].state_dict(), "optimizer": copy.deepcopy(parts[1].state_dict()),
            "scheduler": copy.deepcopy(parts[2].state_dict()), "position": parts[3].position,
            "random": torch.get_rng_state(), "monitor": first.state_dict(),
        }  # fmt: skip
        if saved_late:
            # The weights are written while the next step runs.
            step(*parts, first)
        saved["model"] = copy.deepcopy(saved["model"])
    torch.manual_seed(1)
    parts = build()
    model, optimizer, scheduler, data = parts
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])
    data.position = saved["position"]
    restore(model, optimizer, scheduler, saved | {"data": data})
    with Monitor(model, optimizer) as monitor:
        monitor.load_state_dict(saved["monitor"])
        for _ in range(4):
            step(*parts, monitor)
    return monitor


@case("a resume does not restore the state of random numbers", *ANY, words="random|seed", at=5)
def random_not_restored(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, scheduler: Any, saved: Any) -> None:
        if wrong:
            torch.manual_seed(0)

    return resume(restore)


@case("a resume begins the data anew", *ANY, words="data|batch|same", at=5)
def data_anew(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, scheduler: Any, saved: Any) -> None:
        if wrong:
            saved["data"].position = 0

    return resume(restore)


@case("weights pass through bfloat16 in a checkpoint", *ANY, words="not what the checkpoint|restored|bfloat16", at=5)
def weights_through_bfloat16(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, scheduler: Any, saved: Any) -> None:
        if wrong:
            model.load_state_dict({k: v.bfloat16().to(v.dtype) for k, v in saved["model"].items()})

    return resume(restore)


@case("a resume restores the scheduler and winds it forward as well", *ANY, words="schedul|rate|LR", at=5)
def scheduler_twice(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, scheduler: Any, saved: Any) -> None:
        if wrong:
            for _ in range(4):
                scheduler.step()

    return resume(restore)


@case("a checkpoint has parameters and no buffers", *ANY, words="running|buffer|not what the checkpoint|restored", at=5)
def buffers_missing(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, scheduler: Any, saved: Any) -> None:
        if wrong:
            for name, b in model.named_buffers():
                b.fill_(1) if "var" in name else b.zero_()

    return resume(restore)


@case("a checkpoint is written while the next step runs", *ANY, words="not what the checkpoint|restored", at=5)
def written_late(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, scheduler: Any, saved: Any) -> None: ...

    return resume(restore, saved_late=wrong)


@case("two halves of a weight are swapped when shards are merged", *ANY, words="not what the checkpoint|restored", at=5)
def halves_swapped(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, scheduler: Any, saved: Any) -> None:
        if wrong:
            weight = model.body[3].weight
            weight.data.copy_(torch.cat(weight.data.chunk(2)[::-1]))

    return resume(restore)


@case("moments are restored in the order of names", *ANY, words="state|moment|order", at=5)
def moments_by_name(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, scheduler: Any, saved: Any) -> None:
        if wrong:
            # Two tensors of one shape change places: gains and biases of the norms.
            a, b = model.body[1].weight, model.body[1].bias
            optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]

    return resume(restore)
