"""Errors of updates, weights, precision and gradients: what moved, by how much, and what should not have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conserved import Monitor
from error_programs.case import TinyLM, backward, batch, case, mlp
from error_programs.loops import adamw

Act = Callable[[Any, Any, int], None]


def nothing(model: nn.Module, optimizer: Any, number: int) -> None:
    """Leave everything as it is."""


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    before: Act = nothing,
    after: Act = nothing,
    steps: int = 6,
    kind: str = "vectors",
) -> Monitor:
    """Train with something that happens between backward and step, or after `monitor.step()`."""
    with Monitor(model, optimizer) as monitor:
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            backward(model, kind)
            before(model, optimizer, number)
            optimizer.step()
            monitor.step()
            after(model, optimizer, number)
    return monitor


def only(number: int, act: Callable[[Any], None]) -> Act:
    """Act in one step only."""
    return lambda model, optimizer, now: act(model) if now == number else None


class WritesToCopies(torch.optim.AdamW):
    """Steps non-contiguous parameters in a contiguous copy that it forgets, as a backend did."""

    lose = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        saved = [(p, p.detach().clone()) for g in self.param_groups for p in g["params"] if not p.is_contiguous()]
        super().step(closure)
        for p, value in saved if self.lose else ():
            p.copy_(value)


@case("updates of non-contiguous weights are lost", "update", words="did not land", at=2,
      source="TrainCheck, later: the MPS backend's addcdiv_")  # fmt: skip
def non_contiguous(wrong: bool) -> Monitor:
    model = mlp()
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    optimizer = WritesToCopies(model.parameters(), lr=1e-2)
    optimizer.lose = wrong
    return train(model, optimizer)


class StuckAfterNone(torch.optim.Adam):
    """Does nothing after a step without gradients, as a compiled step did."""

    stuck, broken = False, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if all(p.grad is None for g in self.param_groups for p in g["params"]):
            self.stuck = self.broken
        elif not self.stuck:
            super().step(closure)


@case("a compiled step does nothing after gradients were None", "update", words="did not land", at=3,
      source="TrainCheck: pytorch-115607")  # fmt: skip
def compiled_step(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = StuckAfterNone(model.parameters(), lr=1e-2)
    optimizer.broken = wrong
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 7):
            optimizer.zero_grad()
            if number != 2:
                backward(model)
            optimizer.step()
            monitor.step()
    return monitor


class ThreeTimes(torch.optim.SGD):
    """Uses three times the rate for its first tensor from the third step on."""

    broken, count = False, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        first = self.param_groups[0]["params"][0]
        before = first.detach().clone()
        super().step(closure)
        if self.broken and self.count > 2:
            first.add_(2 * (first - before))


@case("one tensor is stepped at three times its rate", "update", words="not that of.*3 times", at=3)
def wrong_rate(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = ThreeTimes(model.parameters(), lr=0.05)
    optimizer.broken = wrong
    return train(model, optimizer)


@case("a hook of the optimizer writes to weights after its step", "update", words="not that of AdamW|wrote", at=1)
def step_hook_writes(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)

    def shrink(one: Any, args: Any, kwargs: Any) -> None:
        if wrong:
            model[0].weight.data.mul_(0.99)

    optimizer.register_step_post_hook(shrink)
    return train(model, optimizer)


@case("weight decay a second time by hand", "update", words="wrote.*multiplied", at=1)
def decayed_twice(wrong: bool) -> Monitor:
    def decay(model: nn.Module, optimizer: Any, number: int) -> None:
        with torch.no_grad():
            for p in model.parameters() if wrong else ():
                p.mul_(0.999)

    model = mlp()
    return train(model, adamw(model), after=decay)


@case("averaged weights are not swapped back after an evaluation", "update", words="wrote", at=3)
def not_swapped_back(wrong: bool) -> Monitor:
    model = mlp()
    average = copy.deepcopy(model)

    def evaluate(model: nn.Module, optimizer: Any, number: int) -> None:
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
            if number == 3:
                saved = [p.detach().clone() for p in model.parameters()]
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    p.copy_(mean)
                for value, p in zip(saved, model.parameters(), strict=True) if not wrong else ():
                    p.copy_(value)

    return train(model, adamw(model), after=evaluate)


@case("a callback initialises a layer again", "update", words="wrote", at=3)
def initialised_again(wrong: bool) -> Monitor:
    model = mlp()
    act = only(3, lambda m: m[3].reset_parameters()) if wrong else nothing
    return train(model, adamw(model), after=act)


@case("one weight is overwritten between two steps", "update", words="wrote.*one entry", at=3)
def nudged(wrong: bool) -> Monitor:
    def nudge(model: Any) -> None:
        model[3].weight.data[2, 3] += 0.01

    model = mlp()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.05), after=only(3, nudge) if wrong else nothing)


def _flip(tensor: Tensor, index: int, bit: int) -> None:
    tensor.detach().view(torch.int32).view(-1)[index] ^= 1 << bit


@case("a bit of a weight flips between two steps", "hardware", "update", words="wrote|bits", at=3)
def flipped_weight(wrong: bool) -> Monitor:
    model = mlp()
    act = only(3, lambda m: _flip(m[0].weight.data, 7, 18)) if wrong else nothing
    return train(model, adamw(model), after=act)


@case("a low bit of a weight flips between two steps", "hardware", words="bits", at=3)
def flipped_low_bit(wrong: bool) -> Monitor:
    model = mlp()
    act = only(3, lambda m: _flip(m[0].weight.data, 7, 1)) if wrong else nothing
    return train(model, adamw(model), after=act)


@case("a bit of a gradient flips", "gradient", "hardware", words="gradient", at=14)
def flipped_gradient(wrong: bool) -> Monitor:
    model = mlp()

    def flip(model: Any, optimizer: Any, number: int) -> None:
        if number == 14 and wrong:
            _flip(model[3].weight.grad, 5, 30)

    return train(model, torch.optim.SGD(model.parameters(), lr=0.01), before=flip, steps=15)


@case("a frozen layer is moved by momentum", "update", words="frozen", at=3)
def frozen_by_name(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 6):
            if number == 3:
                model[0].requires_grad_(False)
            optimizer.zero_grad(set_to_none=not wrong)
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("a frozen layer is written to", "update", words="requires_grad=False", at=3)
def frozen_written(wrong: bool) -> Monitor:
    model = mlp()
    model[0].requires_grad_(False)

    def write(m: Any) -> None:
        m[0].weight.data.add_(0.01)

    trained = [p for p in model.parameters() if p.requires_grad]
    return train(model, torch.optim.AdamW(trained, lr=1e-2), after=only(3, write) if wrong else nothing)


@case("weights in bfloat16 swallow the updates", "precision", words="did not land", at=1)
def swallowed(wrong: bool) -> Monitor:
    model: Any = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    model.to(torch.bfloat16 if wrong else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with Monitor(model, optimizer) as monitor:
        for _ in range(8):
            optimizer.zero_grad()
            x, y = batch()
            F.cross_entropy(model(x.to(model[1].weight.dtype)).float(), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("TF32 is switched on in mid-run", "precision", words="precision", at=4)
def switched(wrong: bool) -> Monitor:
    model = mlp()

    def switch(model: Any) -> None:
        torch.set_float32_matmul_precision("high")

    try:
        return train(model, adamw(model), after=only(3, switch) if wrong else nothing)
    finally:
        torch.set_float32_matmul_precision("highest")


class Uncast(torch.autograd.Function):
    """A product that autocast does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch.autocast("cpu", enabled=False):
            return x.float() @ w.t() + b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].t() @ x.float(), grads[0].sum(0)


def _uncast(module: Any, x: Tensor) -> Any:
    return Uncast.apply(x, module.weight, module.bias)


@case("autocast has no effect", "precision", words="no effect", source="TrainCheck: lightning-thunder-725")
def autocast_without_effect(wrong: bool) -> Monitor:
    model = mlp()
    if wrong:
        for module in model:
            if isinstance(module, nn.Linear):
                module.__dict__["forward"] = partial(_uncast, module)
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            x, y = batch()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            monitor.step()
    return monitor


class Pair(nn.Module):
    """Two linear layers with a function between them, whose gradient a law ties together."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(6, 8), nn.Linear(8, 4), between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


class HalfReLU(torch.autograd.Function):
    """A ReLU whose backward loses a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 0.5 * grads[0] * (x > 0)


@case("a kernel's backward loses a factor", "gradient", words="gradient identity", at=1)
def wrong_backward(wrong: bool) -> Monitor:
    model = Pair(HalfReLU.apply if wrong else F.relu)
    return train(model, adamw(model))


@case("the gradient of one tensor is halved by a hook", "gradient", words="gradient identity", at=1)
def halved_gradient(wrong: bool) -> Monitor:
    model = Pair(F.relu)
    if wrong:
        model.a.weight.register_hook(lambda g: 0.5 * g)
    return train(model, adamw(model))


@case("the gradient of one tensor arrives as zeros", "gradient", words="gradient", at=3)
def zeroed_gradient(wrong: bool) -> Monitor:
    model = Pair(F.relu)

    def zero(model: Any, optimizer: Any, number: int) -> None:
        if number >= 3 and wrong:
            model.b.weight.grad.zero_()

    return train(model, adamw(model), before=zero)


@case("gradients are infinite", "gradient", "hardware", words="not finite", at=3)
def infinite(wrong: bool) -> Monitor:
    model = Pair(F.relu)

    def spoil(model: Any, optimizer: Any, number: int) -> None:
        if number == 3 and wrong:
            model.b.weight.grad[0, 0] = float("inf")

    return train(model, adamw(model), before=spoil)


@case("checkpointing draws another dropout mask in the backward", "gradient", words="gradient|differ", at=1)
def other_mask(wrong: bool) -> Monitor:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 4)

        def block(self, x: Tensor) -> Tensor:
            return self.b(F.dropout(F.relu(self.a(x)), 0.5, self.training))

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return self.head(checkpoint(self.block, x, use_reentrant=True, preserve_rng_state=not wrong))

    model = Checkpointed()
    return train(model, adamw(model))


@case("a part of the model is run without gradients", "gradient", "loop", words="gradient", at=1)
def detached(wrong: bool) -> Monitor:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad() if wrong else nullcontext():
                x = F.relu(self.a(x))
            return self.b(x)

    model = Branch()
    return train(model, adamw(model))


@case("weights become half precision in mid-run", "precision", words="bfloat16", at=4)
def converted(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 7):
            if number == 4 and wrong:
                model.to(torch.bfloat16)
            optimizer.zero_grad()
            x, y = batch()
            F.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("weights are normalised inside the forward pass", "update", words="wrote", at=1)
def normalised_in_forward(wrong: bool) -> Monitor:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            if wrong:
                self.a.weight.data.mul_(0.98)
            return self.b(F.gelu(self.a(x)))

    model = Scaled()
    return train(model, adamw(model))


@case("the loss is summed over accumulated batches", how="call", words="", at=1)
def accumulated_without_mean(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(4):
                x, y = batch()
                loss = F.cross_entropy(model(x), y)
                (loss if wrong else loss / 4).backward()
            optimizer.step()
            monitor.step()
    return monitor


def _outside(name: str, why: str, source: str) -> None:
    def program(wrong: bool) -> Monitor:
        model = TinyLM()
        return train(model, adamw(model), kind="tokens")

    case(name, how="outside", why=why, source=source)(program)


_outside("all workers draw the same augmentation", "Batches are data; every weight, gradient and update is right.",
         "TrainCheck: stackoverflow-67180955")  # fmt: skip
_outside("weights are initialised several times", "It happens before the first step, and costs time only.",
         "TrainCheck: transformers-17877")  # fmt: skip
_outside("max_new_tokens is not kept", "It is generation: there is no step.", "TrainCheck: transformers-23723")
_outside("a processor returns one row of a batch", "It is the shape of the data.", "TrainCheck: transformers-34204")
_outside("experts wait for each other in all_to_all", "The run hangs; nothing is silently wrong.",
         "TrainCheck: deepspeed-5794")  # fmt: skip
_outside("stages that should be frozen are trained", "What should be frozen is intent; the start-up line says how many "
         "tensors are trained.", "TrainCheck: mmpretrain-702")  # fmt: skip
_outside("a bias is initialised to ones", "It happens before the first step.", "TrainCheck, later: Mamba-2's time step")
