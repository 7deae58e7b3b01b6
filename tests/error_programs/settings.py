"""Errors of settings: switches without effect, modes, schedules and precision that are not what they seem."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import backward, batch, case, mlp
from error_programs.models import ConvNet, Decoder, Recurrent, tokens


def _plain(model: nn.Module, optimizer: Any, steps: int = 5, kind: str = "vectors", after: Any = None) -> Monitor:
    with Monitor(model, optimizer) as monitor:
        for number in range(steps):
            optimizer.zero_grad()
            backward(model, kind)
            optimizer.step()
            monitor.step()
            if after is not None:
                after(number)
    return monitor


@case("requires_grad = False is set on a module", "loop", words="requires_grad", at=1)
def frozen_module_attribute(wrong: bool) -> Monitor:
    model = ConvNet()
    for layer in model.body:
        if wrong:
            layer.requires_grad = False  # type: ignore[assignment]
        else:
            layer.requires_grad_(False)
    return _plain(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), kind="images")


@case("require_grad instead of requires_grad", "loop", words="require_grad", at=1)
def misspelt_requires_grad(wrong: bool) -> Monitor:
    model = mlp()
    for p in model[0].parameters():
        if wrong:
            p.require_grad = False
        else:
            p.requires_grad = False
    return _plain(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05))


@case("the rate is set on the optimizer and not on its groups", "loop", words="optimizer.lr|\\.lr", at=3)
def rate_as_attribute(wrong: bool) -> Monitor:
    model = mlp()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)

    def after(number: int) -> None:
        if number == 1:
            if wrong:
                optimizer.lr = 1e-3
            else:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3

    return _plain(model, optimizer, after=after)


@case("the rate is set in optimizer.defaults", "loop", words="defaults", at=3)
def rate_in_defaults(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)

    def after(number: int) -> None:
        if number == 1:
            (optimizer.defaults if wrong else optimizer.param_groups[0])["lr"] = 1e-3

    return _plain(model, optimizer, after=after)


@case("model.training = False leaves the layers in train mode", "loop", words="mode|training", at=4)
def training_attribute(wrong: bool) -> Monitor:
    model = Decoder(drop=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3:
                if wrong:
                    model.training = False
                else:
                    model.eval()
                with torch.no_grad():
                    model(tokens()[0])
                model.train()
            x, y = tokens()
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            monitor.step()
    return monitor


class AlwaysDrops(nn.Module):
    """An attention that does not switch its dropout off in eval mode."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.qkv, self.head = nn.Linear(6, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 1, 3, 8).unbind(2)
        drop = 0.3 if self.training or self.wrong else 0.0
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], dropout_p=drop)
        return self.head(F.dropout(F.gelu(y[0, :, 0]), drop, training=drop > 0))


@case("dropout stays on in eval mode", "loop", words="eval mode|dropout", at=4, source="TrainCheck: transformers-33844")
def dropout_in_eval(wrong: bool) -> Monitor:
    model = AlwaysDrops(wrong=wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3:
                model.eval()
                with torch.no_grad():
                    for _ in range(3):
                        model(batch()[0])
                model.train()
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("warm-up starts at zero and the scheduler is never stepped", "loop", words="rate.*zero", at=1)
def schedule_never_stepped(wrong: bool) -> Monitor:
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 3))
    with Monitor(model, optimizer) as monitor:
        for _ in range(8):
            x, y = tokens()
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            if not wrong:
                scheduler.step()
            monitor.step()
    return monitor


@case("the scheduler is stepped for every micro-batch", "loop", words="[Ss]chedul|LR", at=1)
def schedule_too_fast(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    with Monitor(model, optimizer) as monitor:
        for number in range(20):
            x, y = tokens()
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 4).backward()
            if wrong:
                scheduler.step()
            if (number + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                if not wrong:
                    scheduler.step()
                monitor.step()
    return monitor


@case("the scheduler is stepped twice in every step", "loop", words="[Ss]chedul|LR", at=1)
def schedule_twice(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            for _ in range(1 + wrong):
                scheduler.step()
            monitor.step()
    return monitor


@case("passes run in float16 without a scaler and underflow", "precision", words="float16|underflow", at=1)
def underflow(wrong: bool) -> Monitor:
    model = Decoder(width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=not wrong, init_scale=2.0**16)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            x, y = tokens(size=16)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = 1e-4 * F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case("autocast covers only the steps up to an evaluation", "precision", words="autocast", at=4)
def autocast_lost(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            x, y = tokens()
            optimizer.zero_grad()
            with nullcontext() if wrong and number >= 3 else torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            loss.backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("master weights are not copied back", "loop", "update", words="no optimizer steps|did not land", at=1)
def master_not_copied(wrong: bool) -> Monitor:
    model = Decoder().to(torch.bfloat16)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            x, y = tokens()
            model.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = None if p.grad is None else p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, model.parameters(), strict=True):
                    if not wrong:
                        p.copy_(master)
            monitor.step()
    return monitor


@case("one layer of the model stays in float16 after a conversion", "precision", words="float16|half", at=4)
def one_layer_converted(wrong: bool) -> Monitor:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = F.silu(self.a(x))
            return self.c(F.silu(self.b(y.to(self.b.weight.dtype)).float()))

    model = Cast()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def after(number: int) -> None:
        if number == 2 and wrong:
            model.b.half()

    return _plain(model, optimizer, 6, after=after)


class Ascent(torch.optim.Optimizer):
    """A hand-written optimizer that may have its sign wrong."""

    def __init__(self, params: Any, lr: float, sign: float) -> None:
        super().__init__(params, {"lr": lr})
        self.sign = sign

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=self.sign * group["lr"])


@case("a hand-written optimizer goes uphill", "update", words="uphill|along the gradient", at=1)
def uphill(wrong: bool) -> Monitor:
    model = mlp()
    return _plain(model, Ascent(model.parameters(), 1e-3, 1.0 if wrong else -1.0))


class Halved(torch.optim.Optimizer):
    """A hand-written momentum that skips every second tensor."""

    def __init__(self, params: Any, lr: float, skip: int) -> None:
        super().__init__(params, {"lr": lr})
        self.skip = skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if self.skip and index % 2:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.add_(buffer, alpha=-group["lr"])


@case("a hand-written optimizer skips tensors", "update", words="did not land", at=1)
def skipping_optimizer(wrong: bool) -> Monitor:
    model = mlp()
    return _plain(model, Halved(model.parameters(), 0.05, 1 if wrong else 0))


@case("a group of the optimizer has a list exhausted by another", "loop", words="no optimizer steps", at=1)
def exhausted_generator(wrong: bool) -> Monitor:
    model = Decoder()
    rest: Iterator[Tensor] = (p for name, p in model.named_parameters() if "norm" not in name)
    if wrong:
        sum(p.numel() for p in rest if p.ndim == 2 and p.shape[0] == 23)
        rest = iter([model.head.weight])
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    groups: list[dict[str, Any]] = [{"params": list(rest)}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            x, y = tokens()
            optimizer.zero_grad() if not wrong else model.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            monitor.step()
    return monitor
