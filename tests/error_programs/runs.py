"""Errors over a run: schedules, optimizers made anew, averages, resumes, and rules that do something else."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conserved import Monitor
from error_programs.case import case, mlp
from error_programs.models import ConvNet, Decoder
from error_programs.training import classify, predict_next, train


def adamw(model: nn.Module, lr: float = 3e-3, **options: Any) -> torch.optim.AdamW:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


@case("the scheduler is stepped before the optimizer", "loop", words="schedul", at=1)
def scheduler_before_optimizer(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    return train(
        model,
        optimizer,
        between=lambda _: scheduler.step() if wrong else None,
        after=lambda _: None if wrong else scheduler.step(),
    )


@case("warm-up divides integers and the rate stays zero", "loop", "update", words="rate|lr|zero", at=1)
def integer_warm_up(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    rule = (lambda n: min(1, (n + 1) // 100)) if wrong else (lambda n: min(1, (n + 1) / 100))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rule)
    return train(model, optimizer, after=lambda _: scheduler.step())


@case("the optimizer is made anew in every epoch", "loop", "update", words="optimizer|state|moment", at=4)
def optimizer_made_anew(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        current = optimizer
        for number in range(1, 9):
            if number % 3 == 1 and number > 1 and wrong:
                current = adamw(model)
            current.zero_grad()
            classify(model).backward()
            current.step()
            monitor.step()
    return monitor


class Rebinding(torch.optim.Optimizer):
    """Gradient descent that may bind a name instead of writing to the weight."""

    def __init__(self, parameters: Any, lr: float, wrong: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.wrong = wrong

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if self.wrong:
                        p = p - group["lr"] * p.grad
                    else:
                        p -= group["lr"] * p.grad


@case("a hand-written optimizer binds new tensors and writes nothing", "update", "loop", words="land|change|did not",
      at=1)  # fmt: skip
def rebinding_optimizer(wrong: bool) -> Monitor:
    model = mlp()
    return train(model, Rebinding(model.parameters(), 0.05, wrong))


class Coupled(torch.optim.AdamW):
    """AdamW whose step adds the decay to the gradient, as Adam does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        decay = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad + group["weight_decay"] * p
            group["weight_decay"] = 0.0
        super().step(closure)
        for group, value in zip(self.param_groups, decay, strict=True):
            group["weight_decay"] = value


@case("an AdamW adds its decay to the gradient", "update", "loop", words="", at=1)
def coupled_decay(wrong: bool) -> Monitor:
    model = Decoder()
    make = Coupled if wrong else torch.optim.AdamW
    return train(model, make(model.parameters(), lr=3e-3, weight_decay=0.1), predict_next)


@case("the perturbation of sharpness-aware minimisation is not undone", "update", words="wrote|rule", at=1)
def perturbation_stays(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            classify(model).backward()
            moves = []
            with torch.no_grad():
                for p in model.parameters():
                    moves.append(0.05 * p.grad)
                    p += moves[-1]
            optimizer.zero_grad()
            classify(model).backward()
            if not wrong:
                with torch.no_grad():
                    for p, move in zip(model.parameters(), moves, strict=True):
                        p -= move
            optimizer.step()
            monitor.step()
    return monitor


@case("an average shares its memory with the model", "loop", words="average|memory|share", at=2, how="intent",
      why="A plain dictionary of a program is out of sight.")  # fmt: skip
def average_of_references(wrong: bool) -> Monitor:
    model = mlp()
    state = model.state_dict()
    average = state if wrong else {k: v.clone() for k, v in state.items()}

    def update(_: int) -> None:
        for key, value in model.state_dict().items():
            average[key].mul_(0.9).add_(value, alpha=0.1)

    return train(model, adamw(model), after=update)


@case("an averaged model is updated from another model", "loop", words="average", at=2)
def average_of_another(wrong: bool) -> Monitor:
    model, other = mlp(), mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return train(model, adamw(model), after=lambda _: average.update_parameters(other if wrong else model))


@case("an average is updated with weights of before the step only once", "loop", words="average", at=4)
def average_stops(wrong: bool) -> Monitor:
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return train(
        model,
        adamw(model),
        steps=8,
        after=lambda n: average.update_parameters(model) if n <= 3 or not wrong else None,
    )


def _resume(change: Any, *, scaler: bool = False) -> Monitor:
    """Train four steps, save, build all again, let `change` restore, train four more."""

    def build() -> tuple[Any, Any]:
        model = Decoder(drop=0.1)
        return model, adamw(model)

    model, optimizer = build()
    with Monitor(model, optimizer) as first:
        for _ in range(4):
            optimizer.zero_grad()
            predict_next(model).backward()
            optimizer.step()
            first.step()
        saved = copy.deepcopy(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": first.state_dict()}
        )
    model, optimizer = build()
    change(model, optimizer, saved)
    with Monitor(model, optimizer) as monitor:
        monitor.load_state_dict(saved["monitor"])
        for _ in range(4):
            optimizer.zero_grad()
            predict_next(model).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("a resume restores moments and not the step counts", "loop", words="count|step|state", at=5)
def step_counts_lost(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, saved: Any) -> None:
        model.load_state_dict(saved["model"])
        if wrong:
            for state in saved["optimizer"]["state"].values():
                state["step"] = torch.zeros_like(state["step"])
        optimizer.load_state_dict(saved["optimizer"])

    return _resume(restore)


@case("a resume restores the optimizer's options from the new program's defaults", "loop", words="decay|betas|option",
      at=5)  # fmt: skip
def options_changed(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, saved: Any) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if wrong:
            optimizer.param_groups[0]["betas"] = (0.0, 0.999)

    return _resume(restore)


@case("a resume loads the weights before the last save", "loop", "update", words="weights|parameter|checkpoint", at=5)
def older_weights(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, saved: Any) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if wrong:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.999)

    return _resume(restore)


@case("a resume casts the moments to half precision", "loop", "precision", words="half|float16|bfloat16|state", at=5)
def moments_in_half(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, saved: Any) -> None:
        model.load_state_dict(saved["model"])
        if wrong:
            for state in saved["optimizer"]["state"].values():
                state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
        optimizer.load_state_dict(saved["optimizer"])

    return _resume(restore)


@case("a warm restart leaves the rate of one group behind", "loop", words="rate|group|lr", at=4)
def group_left_behind(wrong: bool) -> Monitor:
    model = ConvNet()
    groups = [{"params": list(model.body.parameters())}, {"params": list(model.head.parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def restart(number: int) -> None:
        if number == 4:
            for group in optimizer.param_groups[: 1 if wrong else 2]:
                group["lr"] = 0.0 if wrong else 0.01

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(torch.randn(4, 1, 6, 6)), torch.randint(4, (4,)))

    return train(model, optimizer, loss, before=restart)


@case("maximize=True is left on", "loop", "update", words="maximi", at=1, how="intent",
      why="Rewards are maximized; the start-up line says so.", line="the loss is maximized")  # fmt: skip
def maximize_left_on(wrong: bool) -> Monitor:
    model = mlp()
    return train(model, adamw(model, maximize=wrong))


@case("weights are rounded to bfloat16 after every step", "update", "precision", words="wrote|bfloat16|rounded", at=1)
def rounded_after_steps(wrong: bool) -> Monitor:
    model = mlp()

    def save(_: int) -> None:
        for p in model.parameters():
            rounded = p.data.bfloat16()
            if wrong:
                p.data.copy_(rounded)

    return train(model, adamw(model), after=save)


@case("a callback moves a buffer of the model", "update", "loop", words="buffer", at=4)
def buffer_moved(wrong: bool) -> Monitor:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6))
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x * self.get_buffer("scale"))

    model = Shifted()

    def move(number: int) -> None:
        if number == 4 and wrong:
            model.get_buffer("scale").mul_(1.5)

    return train(model, adamw(model), before=move)
