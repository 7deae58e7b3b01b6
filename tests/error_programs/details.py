"""Errors in details of training programs: shapes, masks, copies, counts, options, and code between the steps."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import batch, case, mlp
from error_programs.habits import ANY, adamw
from error_programs.models import ConvNet, Decoder, Recurrent, tokens
from error_programs.peers import model_of, reduce_all
from error_programs.training import classify, predict_next, train


@case("the loss of the last step is differentiated, not that of this one", *ANY, words="gradient|pass|backward", at=2)
def loss_of_last_step(wrong: bool) -> Monitor:
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved: list[Tensor] = []
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            saved.append(classify(model))
            # Sums of losses are kept for a report, and the sum is differentiated.
            (sum(saved) if wrong else saved[-1]).backward(retain_graph=wrong)  # type: ignore[union-attr]
            optimizer.step()
            monitor.step()
    return monitor


@case("a clipped loss has no gradient for the worst examples", *ANY, words="zero|gradient|clamp")
def clamped_loss(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        each = F.cross_entropy(model(x), y, reduction="none")
        return (each.clamp(max=0.5) if wrong else each).mean()

    model = mlp()
    return train(model, adamw(model), loss)


@case("argmax is taken before the loss of a distillation", *ANY, words="gradient")
def distilled_argmax(wrong: bool) -> Monitor:
    teacher = mlp().requires_grad_(False)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = mlp(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.body(x)
            h = F.one_hot(z.argmax(-1), 4).float() if wrong else z.softmax(-1)
            return z.detach() if wrong else z, self.scale(h)

    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        z, h = model(x)
        return F.cross_entropy(h, y) + F.mse_loss(z, teacher(x))

    model = Student()
    return train(model, adamw(model), loss)


@case("a bias is added to a buffer that the step count multiplies away", *ANY, words="gradient|zero|decay", at=2)
def gate_closes(wrong: bool) -> Monitor:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 4)
            self.weight = 1.0

        def forward(self, x: Tensor) -> Tensor:
            y = self.c(self.a(x).relu() + self.weight * self.b(x).relu())
            self.weight = 0.0 if wrong else self.weight * 0.99
            return y

    model = Annealed()
    return train(model, adamw(model), steps=18)


@case("embeddings of new tokens are written over after the optimizer was resumed", *ANY, words="wrote|changed", at=3)
def new_tokens_written(wrong: bool) -> Monitor:
    model = Decoder()

    def before(number: int) -> None:
        if wrong and number == 3:
            model.embedding.weight.data[20:] = model.embedding.weight.data[:20].mean(0)

    return train(model, adamw(model), predict_next, before=before)


@case("pixels are left as integers of 0 to 255", *ANY, words="input|range|scale")
def unscaled_pixels(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randint(256, (4, 1, 6, 6)).float()
        return F.cross_entropy(model(x if wrong else x / 255 - 0.5), torch.randint(4, (4,)))

    model = ConvNet()
    return train(model, adamw(model), loss)


@case("a dictionary keeps gradients of one batch for all", *ANY, words="gradient", at=2)
def cached_gradient(wrong: bool) -> Monitor:
    model = Decoder()
    cache: dict[str, Tensor] = {}

    def between(_: int) -> None:
        p = model.get_parameter("blocks.0.qkv.weight")
        assert p.grad is not None
        saved = cache.setdefault("qkv", p.grad.clone())
        if wrong:
            p.grad.copy_(saved)

    return train(model, adamw(model), predict_next, between=between)


@case("one layer's gradient is copied to another of the same shape", *ANY, words="gradient")
def gradient_of_neighbour(wrong: bool) -> Monitor:
    model = Decoder()

    def between(_: int) -> None:
        a, b = (model.get_parameter(f"blocks.{i}.out.weight").grad for i in (0, 1))
        assert a is not None
        assert b is not None
        if wrong:
            a.copy_(b)

    return train(model, adamw(model), predict_next, between=between)


@case("dead code recomputes the head from a stale copy of its weight", *ANY, words="gradient|no optimizer|register")
def stale_head(wrong: bool) -> Monitor:
    class Stale(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.cached = self.head.weight.detach().clone()

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            for block in self.blocks:
                h = block(h)
            return F.linear(self.norm(h), self.cached if wrong else self.head.weight)

    model = Stale()
    return train(model, adamw(model), predict_next)


@case("weights are quantised in place for an evaluation and stay so", *ANY, words="wrote|rounded|changed", at=3)
def quantised_in_place(wrong: bool) -> Monitor:
    model = Decoder()

    def after(number: int) -> None:
        if number == 3:
            used = model if wrong else copy.deepcopy(model)
            with torch.no_grad():
                for p in used.parameters():
                    step = p.abs().max() / 7
                    p.copy_((p / step).round() * step)

    return train(model, adamw(model), predict_next, after=after)


@case("a state dict that is averaged shares its tensors with the model", *ANY, words="wrote|changed", at=2)
def shared_state_dict(wrong: bool) -> Monitor:
    model = mlp()
    state = model.state_dict() if wrong else copy.deepcopy(model.state_dict())
    other = copy.deepcopy(mlp().state_dict())

    def after(number: int) -> None:
        if number == 2:
            for key, value in state.items():
                value.lerp_(other[key], 0.5)

    return train(model, adamw(model), after=after)


@case("the rate of a resumed run is that of the command line", *ANY, words="rate|lr", at=4)
def rate_of_command_line(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)

    def run(monitor: Monitor) -> None:
        for _ in range(4):
            optimizer.zero_grad()
            classify(model).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            monitor.step()

    with Monitor(model, optimizer) as first:
        run(first)
        state = first.state_dict()
    if wrong:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3
    with Monitor(model, optimizer) as monitor:
        monitor.load_state_dict(state)
        run(monitor)
    return monitor


@case("the optimizer is deep-copied with the model for a retry, and the old one steps", "loop", words="optimizer", at=3)
def retried_with_old_optimizer(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)

    def before(number: int) -> None:
        if number == 3:
            for name in ("head", "norm"):
                setattr(model, name, copy.deepcopy(getattr(model, name)))
            if not wrong:
                optimizer.param_groups[0]["params"] = list(model.parameters())

    return train(model, optimizer, predict_next, before=before)


@case("a gradient is divided by its norm where it should be by the number of tokens", *ANY, words="gradient|scale")
def divided_by_norm(wrong: bool) -> Monitor:
    model = Decoder()

    def between(_: int) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(p.grad.norm() if wrong else 1.0)

    return train(model, adamw(model), predict_next, between=between)


@case("a recurrent model gets its sequence time first", *ANY, words="time|batch|sees")
def time_first(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        z = model(x.t()).transpose(0, 1) if wrong else model(x)
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    model = Recurrent()
    return train(model, adamw(model), loss)


@case("masked labels are filled with class 0", *ANY, words="label|pad|mask")
def masked_as_zero(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        mask = torch.rand(y.shape) < 0.6
        target = y.masked_fill(mask, 0 if wrong else -100)
        return F.cross_entropy(model(x).flatten(0, 1), target.flatten())

    model = Decoder()
    return train(model, adamw(model), loss)


class Swish(torch.autograd.Function):
    """Swish whose backward may use the output in place of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: bool) -> Tensor:
        y = x * x.sigmoid()
        ctx.save_for_backward(y if wrong else x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grads[0] * s * (1 + x * (1 - s)), None


@case("a backward saves the output where it needs the input", "gradient", words="")
def swish_of_output(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(Swish.apply(self.b(Swish.apply(self.a(x), wrong)), wrong))

    model = Net()
    return train(model, adamw(model))


class Mean(torch.autograd.Function):
    """The mean over tokens whose backward may forget to divide."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: bool) -> Tensor:
        ctx.length, ctx.wrong = x.shape[1], wrong
        return x.mean(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        g = grads[0][:, None].expand(-1, ctx.length, -1)
        return (g if ctx.wrong else g / ctx.length), None


@case("the backward of a mean over tokens forgets to divide", "gradient", words="", how="call")
def mean_undivided(wrong: bool) -> Monitor:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.a, self.norm = nn.Embedding(23, 16), nn.Linear(16, 16), nn.LayerNorm(16)
            self.b = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(Mean.apply(self.a(self.embedding(x)).relu(), wrong)))

    def loss(model: nn.Module) -> Tensor:
        x, _ = tokens()
        return F.cross_entropy(model(x), torch.randint(4, (4,)))

    model = Pooled()
    return train(model, adamw(model), loss)


@case("a head of attention is left out of the backward", "gradient", words="")
def head_left_out(wrong: bool) -> Monitor:
    model = Decoder()

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: torch.cat((torch.zeros_like(g[..., :8]), g[..., 8:]), -1))

    if wrong:
        model.get_submodule("blocks.0.qkv").register_forward_hook(hook)
    return train(model, adamw(model), predict_next)


@case("the pass of an evaluation is used for the gradient", "loop", words="eval", at=4)
def evaluation_differentiated(wrong: bool) -> Monitor:
    model = Decoder(drop=0.1)
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            optimizer.zero_grad()
            loss = predict_next(model)
            if number == 4:
                model.eval()
                evaluation = predict_next(model)
                model.train()
                loss = evaluation if wrong else loss
            loss.backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("a frozen backbone is in train mode, and its dropout is on", *ANY, words="dropout|mode|frozen", how="default")
def frozen_with_dropout(wrong: bool) -> Monitor:
    backbone = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.BatchNorm1d(12), nn.Dropout(0.3)).requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(12, 4))

    def before(_: int) -> None:
        if not wrong:
            backbone.eval()

    optimizer = torch.optim.AdamW(model[1].parameters(), lr=3e-3)
    return train(model, optimizer, before=before)


@case("a scaler is made anew in every epoch and unscales by another number", *ANY, words="scale", at=4)
def scaler_anew(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    first = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            if number == 4 and wrong:
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            optimizer.zero_grad()
            first.scale(classify(model)).backward()
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case("one layer of a deep stack is skipped by an index", *ANY, words="gradient|optimizer|never")
def layer_skipped(wrong: bool) -> Monitor:
    class Skipping(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks[: -1 if wrong else None]:
                h = block(h)
            return self.head(self.norm(h))

    model = Skipping()
    return train(model, adamw(model), predict_next)


@case("gradients of unused experts keep those of their last use", "loop", words="zero_grad|gradient", at=3)
def unused_keep_gradient(wrong: bool) -> Monitor:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.experts[which](x)

    model = Turns()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(8):
            used = model.experts[number % 2]
            for p in (used if wrong else model).parameters():
                p.grad = None
            x, y = batch()
            F.cross_entropy(model(x, number % 2), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("weights are averaged over processes before the step and not after", *ANY, words="differ", processes=2)
def averaged_before_step(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)

    def share(_: int) -> None:
        if not wrong:
            reduce_all(model)
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data.div_(2)

    return train(model, adamw(model), between=share)


@case("one rank decays its rate at its own validation loss", *ANY, words="differ|rate", at=4, processes=2)
def own_validation(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)
    optimizer = adamw(model)

    def after(number: int) -> None:
        if number == 3 and (rank == 1 or not wrong):
            optimizer.param_groups[0]["lr"] *= 0.1

    return train(model, optimizer, between=lambda _: reduce_all(model), after=after)


@case("gradients of one rank are reduced a step late", *ANY, words="gradient|differ", at=1, processes=2)
def reduced_late(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)
    last: list[Tensor] = []

    def share(_: int) -> None:
        for index, p in enumerate(model.parameters()):
            assert p.grad is not None
            sent = p.grad.clone()
            if wrong and rank == 1:
                old = last[index] if len(last) > index else torch.zeros_like(sent)
                last[index : index + 1] = [sent.clone()]
                sent = old
            dist.all_reduce(sent)
            p.grad.copy_((sent + (p.grad if wrong and rank == 1 else 0)) / 2)

    return train(model, adamw(model), between=share)
