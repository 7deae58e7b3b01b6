"""Errors between backward() and step(): gradients that are rescaled, clipped, copied or written at the wrong place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import backward, batch, case, mlp
from error_programs.models import ConvNet, Decoder, tokens
from error_programs.training import classify, predict_next, train


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.AdamW:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def _accumulate(after_backward: Any, before_step: Any) -> Monitor:
    """Accumulate over three micro-batches; call the first after each of them, the second before the step."""
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(18):
            (classify(model) / 3).backward()
            after_backward(model)
            if number % 3 == 2:
                before_step(model)
                optimizer.step()
                optimizer.zero_grad()
                monitor.step()
    return monitor


def _nothing(model: nn.Module) -> None:
    pass


@case("gradients are clipped after every micro-batch", "loop", words="micro-batch|between|accumul|clip", at=1)
def clipped_per_micro_batch(wrong: bool) -> Monitor:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return _accumulate(clip, _nothing) if wrong else _accumulate(_nothing, clip)


@case("gradients are divided after every micro-batch", "loop", words="micro-batch|between|accumul|written", at=1)
def divided_per_micro_batch(wrong: bool) -> Monitor:
    def divide(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad.div_(3)  # type: ignore[union-attr]

    return _accumulate(divide, _nothing) if wrong else _accumulate(_nothing, divide)


@case("the first of two losses is cleared before the second's backward", "loop", words="cleared|zero_grad|thrown", at=1)
def first_loss_cleared(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            if wrong:
                optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("step() comes before backward() and zero_grad() after it", "loop", words="gradient|backward", at=2)
def step_before_backward(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            if wrong:
                optimizer.step()
            classify(model).backward()
            if not wrong:
                optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    return monitor


@case("unscale_() divides gradients of a loss that was not scaled", "loop", "precision", words="scale", at=3)
def unscaled_without_scale(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 7):
            optimizer.zero_grad()
            loss = classify(model)
            (loss if wrong and number >= 3 else scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case("gradients come back from a flat buffer one entry off", "gradient", "hardware", words="", at=1)
def flat_buffer_off_by_one(wrong: bool) -> Monitor:
    model = Decoder()

    def through_a_buffer(_: int) -> None:
        parameters = list(model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
        if wrong:
            flat = flat.roll(1)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(part.view_as(p))  # type: ignore[union-attr]

    return train(model, adamw(model), predict_next, between=through_a_buffer)


@case("the gradient of a square weight is copied transposed", "gradient", "hardware", words="", at=1)
def gradient_transposed(wrong: bool) -> Monitor:
    model: Any = Decoder()
    weight = model.blocks[1].out.weight

    def transpose(_: int) -> None:
        weight.grad = weight.grad.t().contiguous() if wrong else weight.grad.clone()

    return train(model, adamw(model), predict_next, between=transpose)


@case("two parameters hold one gradient tensor", "loop", "gradient", words="share|same|one tensor", at=1)
def shared_gradient(wrong: bool) -> Monitor:
    model: Any = Decoder()
    a, b = model.blocks[0].norm1.weight, model.blocks[1].norm1.weight

    def share(_: int) -> None:
        b.grad = a.grad if wrong else b.grad.clone()

    return train(model, adamw(model), predict_next, between=share)


class Halved(torch.autograd.Function):
    """A linear layer whose backward averages the bias over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.wrong = wrong
        return x @ w.t() + b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x, g.mean(0) if ctx.wrong else g.sum(0), None


@case("a fused linear layer averages its bias gradient over the batch", "gradient", words="", at=1)
def bias_gradient_averaged(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Halved.apply(x, self.a.weight, self.a.bias, wrong).relu())

    model = Net()
    return train(model, adamw(model))


class Normed(torch.autograd.Function):
    """RMS norm whose backward may forget the projection."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, wrong: bool) -> Tensor:
        r = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, g, r)
        ctx.wrong = wrong
        return x * r * g

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (d,) = grads
        x, g, r = ctx.saved_tensors
        y = x * r
        dy = d * g
        dx = dy * r if ctx.wrong else r * (dy - y * (dy * y).mean(-1, keepdim=True))
        return dx, (d * y).flatten(0, -2).sum(0), None


@case("the backward of a fused RMS norm forgets the projection", "gradient", words="", at=1)
def norm_without_projection(wrong: bool) -> Monitor:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return Normed.apply(x, self.weight, wrong)

    model = Decoder()
    model.norm = Norm()  # type: ignore[assignment]
    return train(model, adamw(model), predict_next)


class Attended(torch.autograd.Function):
    """Softmax whose backward may forget the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: bool) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        ctx.wrong = wrong
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        (y,) = ctx.saved_tensors
        return (y * g if ctx.wrong else y * (g - (y * g).sum(-1, keepdim=True))), None


@case("the backward of a fused softmax forgets the sum over the row", "gradient", words="", at=1)
def softmax_without_sum(wrong: bool) -> Monitor:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(23, 16), nn.LayerNorm(16)
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=name == "k") for name in "qkvo")
            self.head = nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            n = self.norm(h)
            mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)
            p = Attended.apply(self.q(n) @ self.k(n).transpose(1, 2) / 4 + mask, wrong)
            return self.head(h + self.o(p @ self.v(n)))

    model = Attention()
    return train(model, adamw(model), predict_next)


@case("gradients are replaced by their signs in one tensor", "gradient", "hardware", "update", words="", at=3)
def signs_in_one_tensor(wrong: bool) -> Monitor:
    model: Any = Decoder()
    weight = model.blocks[0].down.weight

    def sign(number: int) -> None:
        if wrong and number >= 3:
            weight.grad.sign_()

    return train(model, adamw(model), predict_next, between=sign)


@case("a forward hook of an evaluation stays and zeroes a layer", "loop", "gradient", words="hook|zero|gradient", at=4)
def hook_stays_on(wrong: bool) -> Monitor:
    model = Decoder()

    def evaluate(number: int) -> None:
        if number == 4:
            handle = model.blocks[0].register_forward_hook(lambda module, args, out: out * 0 + args[0])
            model.eval()
            with torch.no_grad():
                model(tokens()[0])
            model.train()
            if not wrong:
                handle.remove()

    return train(model, adamw(model), predict_next, before=evaluate)


@case("fake quantisation rounds without a straight-through gradient", "loop", "gradient", words="gradient", at=1)
def rounding_without_gradient(wrong: bool) -> Monitor:
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            q = (h * 8).round() / 8
            return self.b(q if wrong else h + (q - h).detach())

    model = Rounded()
    return train(model, adamw(model))


@case("a layer's rectifiers are all dead", "loop", "gradient", words="gradient|zero", at=1)
def dead_rectifiers(wrong: bool) -> Monitor:
    model = mlp()
    if wrong:
        nn.init.constant_(model[0].bias, -50.0)
    return train(model, adamw(model))


@case("the encoder's noise is drawn by sample() instead of rsample()", "loop", "gradient", words="gradient", at=1)
def sample_without_gradient(wrong: bool) -> Monitor:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.scale, self.decoder = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 6)

        def forward(self, x: Tensor) -> Tensor:
            normal = torch.distributions.Normal(self.mean(x), F.softplus(self.scale(x)))
            return self.decoder(normal.sample() if wrong else normal.rsample())

    def loss(model: nn.Module) -> Tensor:
        x, _ = batch()
        return F.mse_loss(model(x), x)

    model = VAE()
    return train(model, adamw(model), loss)


@case("clipping is given a generator that the optimizer has used up", "loop", words="clip", at=1, how="intent",
      why="A run that does not clip is a right run too; nothing is left that says it was meant to.")  # fmt: skip
def clip_of_used_generator(wrong: bool) -> Monitor:
    model = ConvNet()
    parameters = model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.05)

    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            backward(model, "images")
            nn.utils.clip_grad_norm_(parameters if wrong else model.parameters(), 0.1)
            optimizer.step()
            monitor.step()
    return monitor
