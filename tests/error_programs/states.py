"""Errors of kept state: checkpoints, resumes, averages, ties, buffers and weights that change behind the optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import backward, batch, case, mlp
from error_programs.models import ConvNet, Decoder, tokens


def _language(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    x, y = tokens()
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()


def _resumed(make: Callable[[nn.Module], Any], restore: Callable[..., None], *, schedule: bool = False) -> Monitor:
    """Train, save everything to memory, build all again, restore, go on."""

    def build() -> tuple[nn.Module, Any, Any]:
        model = Decoder(drop=0.1)
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n)) if schedule else None
        return model, optimizer, scheduler

    model, optimizer, scheduler = build()
    file = io.BytesIO()
    with Monitor(model, optimizer) as first:
        for _ in range(4):
            _language(model, optimizer)
            if scheduler is not None:
                scheduler.step()
            first.step()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": first.state_dict()}
        saved["scheduler"] = scheduler.state_dict() if scheduler is not None else None
        torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    model, optimizer, scheduler = build()
    restore(model, optimizer, scheduler, loaded)
    with Monitor(model, optimizer) as monitor:
        monitor.load_state_dict(loaded["monitor"])
        for _ in range(4):
            _language(model, optimizer)
            if scheduler is not None:
                scheduler.step()
            monitor.step()
    return monitor


def _adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@case("the scheduler starts again after a resume", "loop", words="rate|LambdaLR|schedul", at=5)
def schedule_not_restored(wrong: bool) -> Monitor:
    def restore(model: nn.Module, optimizer: Any, scheduler: Any, saved: Any) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if not wrong:
            scheduler.load_state_dict(saved["scheduler"])

    return _resumed(_adamw, restore, schedule=True)


@case("the optimizer's state is restored in another order", "loop", words="state of", at=5)
def state_in_another_order(wrong: bool) -> Monitor:
    made = []

    def make(model: nn.Module) -> Any:
        made.append(model)
        own = list(model.parameters())
        # The second time the two position-independent square matrices of the blocks change places.
        if wrong and len(made) > 1:
            named = dict(model.named_parameters())
            a, b = named["blocks.0.out.weight"], named["blocks.1.out.weight"]
            own = [b if p is a else a if p is b else p for p in own]
        return torch.optim.AdamW(own, lr=1e-2)

    def restore(model: nn.Module, optimizer: Any, scheduler: Any, saved: Any) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    return _resumed(make, restore)


@case("the best weights are loaded and momentum is kept", "loop", words="zero|momentum|buffers", at=5, how="intent",
      why="Loading weights in mid-run and keeping the optimizer is what some programs want.")  # fmt: skip
def weights_only_resume(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 4 and wrong:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("a checkpoint of a wrapped model is loaded without its prefix", "loop", words="load|prefix|key", at=1)
def prefix_mismatch(wrong: bool) -> Monitor:
    saved = {("module." if wrong else "") + key: value for key, value in ConvNet().state_dict().items()}
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        model.load_state_dict(saved, strict=False)
        for _ in range(4):
            optimizer.zero_grad()
            backward(model, "images")
            optimizer.step()
            monitor.step()
    return monitor


@case("loading a checkpoint by assignment leaves the optimizer with the old tensors", "loop",
      words="no optimizer steps", at=4)  # fmt: skip
def loaded_by_assignment(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3:
                state = {k: v.clone() for k, v in model.state_dict().items()}
                model.load_state_dict(state, assign=wrong)
            x, y = tokens()
            model.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("a hand-written average is averaged with itself", "loop", words="average", at=2)
def average_of_itself(wrong: bool) -> Monitor:
    model = ConvNet()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            backward(model, "images")
            optimizer.step()
            with torch.no_grad():
                for mean, p in zip(average.parameters(), (average if wrong else model).parameters(), strict=True):
                    mean.mul_(0.9).add_(p, alpha=0.1)
            monitor.step()
    return monitor


@case("an average in bfloat16 swallows its updates", "loop", "precision", words="average", at=2)
def average_swallowed(wrong: bool) -> Monitor:
    model = Decoder()
    average = copy.deepcopy(model).requires_grad_(False).to(torch.bfloat16 if wrong else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Monitor(model, optimizer) as monitor:
        for _ in range(8):
            _language(model, optimizer)
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p.to(mean.dtype), 1e-3)
            monitor.step()
    return monitor


@case("a tied head is untied by resizing the vocabulary", "loop", words="tie|no optimizer steps|two parameters", at=3)
def untied_by_resizing(wrong: bool) -> Monitor:
    model = Decoder(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(5):
            if number == 2:
                larger = nn.Embedding(25, 16)
                larger.weight.data[:23] = model.embedding.weight.data
                model.embedding = larger
                if not wrong:
                    model.head.weight = larger.weight
                    optimizer = optimizer
                    optimizer.param_groups[0]["params"] = list(model.parameters())
                else:
                    optimizer.add_param_group({"params": [larger.weight]})
            x, y = tokens()
            model.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("a bit of a buffer flips", "hardware", "update", "loop", words="buffer|bits", at=4)
def flipped_buffer(wrong: bool) -> Monitor:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.randn(6))
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x - self.get_buffer("mean"))

    model: Any = Normalised()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 4 and wrong:
                model.mean.data.view(torch.int32)[2] ^= 1 << 24
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("running statistics are reset after some steps", "loop", "update", words="statistic|buffer", at=5)
def statistics_reset(wrong: bool) -> Monitor:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for number in range(7):
            if number == 4 and wrong:
                for module in model.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.reset_running_stats()
            optimizer.zero_grad()
            backward(model, "images")
            optimizer.step()
            monitor.step()
    return monitor


@case("a bit of an optimizer's moment flips", "hardware", "update", words="state|moment|bits", at=5)
def flipped_moment(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(7):
            if number == 4 and wrong:
                optimizer.state[model[3].weight]["exp_avg"].data.view(torch.int32).view(-1)[5] ^= 1 << 28
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("the moments of one tensor are lost", "loop", words="state of", at=5)
def one_state_lost(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(7):
            if number == 4 and wrong:
                del optimizer.state[model[3].weight]
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("momentum is cleared between steps", "loop", words="state of", at=5)
def momentum_cleared(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for number in range(7):
            if number == 4 and wrong:
                for state in optimizer.state.values():
                    state["momentum_buffer"].zero_()
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("the model is trained on after its weights were exported in half precision", "precision", "update",
      words="half|float16|rounded|wrote", at=4)  # fmt: skip
def rounded_by_export(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3 and wrong:
                model.half()
                io.BytesIO().write(b"")
                model.float()
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("pruned weights are zeroed once and grow back", "update", "loop", words="wrote", at=4)
def pruned_once(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3 and wrong:
                with torch.no_grad():
                    model[3].weight.mul_(model[3].weight.abs() > 0.1)
            optimizer.zero_grad()
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
    return monitor
