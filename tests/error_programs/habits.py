"""Errors of loops and of what loops hand to optimizers, as questions about failed training describe them."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conserved import Monitor
from error_programs.case import batch, case, mlp
from error_programs.models import ConvNet, Decoder, tokens
from error_programs.training import predict_next, train

ANY = ("loop", "gradient", "update", "replica", "precision", "hardware")
"""Kinds of alarms, where more than one would name the cause."""


def adamw(model: nn.Module, lr: float = 3e-3, **options: Any) -> torch.optim.AdamW:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


@case("backward() runs twice over one graph", *ANY, words="twice|two|again|backward")
def backward_twice(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            loss = predict_next(model)
            loss.backward(retain_graph=wrong)
            if wrong:
                loss.backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("a batch whose loss is too high is skipped and its gradient stays", "loop", words="zero_grad|gradient", at=4)
def skipped_batch_stays(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 8):
            loss = predict_next(model) * (50.0 if number == 3 else 1.0)
            loss.backward()
            if float(loss.detach()) > 20:
                if not wrong:
                    optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    return monitor


@case("a filter of names leaves the norms out of both groups", "loop", words="no optimizer steps|optimizer")
def norms_in_no_group(wrong: bool) -> Monitor:
    model = Decoder()
    decay = [p for n, p in model.named_parameters() if "bias" not in n and "norm" not in n]
    rest = [p for n, p in model.named_parameters() if ("bias" in n) or ("LayerNorm" in n if wrong else "norm" in n)]
    if wrong:
        rest = [p for n, p in model.named_parameters() if "LayerNorm" in n or "bias" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return train(model, torch.optim.AdamW(groups, lr=3e-3), predict_next)


@case("a soft prompt is concatenated by its data", "loop", words="gradient|prompt")
def prompt_by_data(wrong: bool) -> Monitor:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(0.1 * torch.randn(2, 16))
            self.base = Decoder()

        def forward(self, x: Tensor) -> Tensor:
            prompt = (self.prompt.data if wrong else self.prompt).expand(x.shape[0], -1, -1)
            h = torch.cat((prompt, self.base.embedding(x)), 1)
            for block in self.base.blocks:
                h = block(h)
            return self.base.head(self.base.norm(h))[:, 2:]

    model = Prompted()
    return train(model, adamw(model), predict_next)


@case("scores of attention are computed under no_grad", "loop", "gradient", words="gradient")
def scores_without_gradient(wrong: bool) -> Monitor:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.positions = nn.Embedding(23, 16), nn.Embedding(12, 16)
            self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
            with torch.set_grad_enabled(not wrong):
                scores = self.q(h) @ self.k(h).mT / 4
                scores = scores + torch.full_like(scores, -torch.inf).triu(1)
                p = scores.softmax(-1)
            return self.head(self.norm(h + p @ self.v(h)))

    model = Attending()
    return train(model, adamw(model), predict_next)


@case("the loss of an auxiliary head is added as a number", "loop", words="gradient")
def auxiliary_as_number(wrong: bool) -> Monitor:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = mlp(), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return self.first(h), self.second(h)

    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        a, b = model(x)
        other = F.cross_entropy(b, y % 3)
        return F.cross_entropy(a, y) + 0.5 * (other.item() if wrong else other)

    model = TwoHeads()
    return train(model, adamw(model), loss)


@case("a straight-through quantiser lacks its detach", "loop", "gradient", words="gradient")
def quantiser_without_detach(wrong: bool) -> Monitor:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.encoder(x)
            q = (4 * h).round() / 4
            return self.decoder(h + (q - h) if wrong else h + (q - h).detach())

    model = Quantised()
    return train(model, adamw(model))


@case("the codebook's loss detaches the codes instead of the encoder's output", "loop", words="gradient")
def codebook_detached(wrong: bool) -> Monitor:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.book, self.decoder = nn.Linear(6, 8), nn.Embedding(16, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.encoder(x)
            codes = self.book(torch.cdist(h, self.book.weight).argmin(-1))
            return self.decoder(h + (codes - h).detach()), h, codes

    def loss(model: nn.Module) -> Tensor:
        x, _ = batch()
        y, h, codes = model(x)
        book = F.mse_loss(codes.detach(), h) if wrong else F.mse_loss(codes, h.detach())
        return F.mse_loss(y, x) + book + 0.25 * F.mse_loss(h, codes.detach())

    model = Codes()
    return train(model, adamw(model), loss)


@case("a report of weights divides them through a view of NumPy", *ANY, words="wrote|changed", at=3)
def report_through_numpy(wrong: bool) -> Monitor:
    model = Decoder()

    def report(number: int) -> None:
        if number == 3:
            values = model.head.weight.detach().numpy()
            if wrong:
                values /= abs(values).max()
            else:
                values = values / abs(values).max()

    return train(model, adamw(model), predict_next, after=report)


@case("a histogram of gradients takes their absolute values in place", *ANY, words="gradient", at=2)
def absolute_gradients(wrong: bool) -> Monitor:
    model = Decoder()

    def report(number: int) -> None:
        if number % 2 == 0:
            gradient = model.get_parameter("blocks.0.qkv.weight").grad
            assert gradient is not None
            (gradient.abs_() if wrong else gradient.abs()).histc(8)

    return train(model, adamw(model), predict_next, steps=8, between=report)


@case("a report normalises a gradient in place", *ANY, words="gradient", at=3)
def normalised_gradient(wrong: bool) -> Monitor:
    model = mlp()

    def report(number: int) -> None:
        if number == 3:
            gradient: Any = model[3].weight.grad
            if wrong:
                gradient /= gradient.norm()
            else:
                gradient = gradient / gradient.norm()

    return train(model, adamw(model), between=report)


@case("decoder weights are made from the transposed data of the encoder's", "loop", words="memory|storage|two param")
def transposed_tie(wrong: bool) -> Monitor:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.3 * torch.randn(10, 6))
            if wrong:
                self.back = nn.Parameter(self.weight.data.t())

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(F.linear(x, self.weight))
            return F.linear(h, self.back if wrong else self.weight.t())

    def loss(model: nn.Module) -> Tensor:
        x, _ = batch()
        return F.mse_loss(model(x), x)

    model = Auto()
    return train(model, adamw(model), loss)


@case("the head is tied after the optimizer was made", "loop", words="optimizer|AdamW holds|no gradient")
def tied_after_optimizer(wrong: bool) -> Monitor:
    model = Decoder()
    if not wrong:
        model.embedding.weight = model.head.weight
    optimizer = adamw(model)
    if wrong:
        # The embedding that the optimizer holds is no longer the model's; the head's is held.
        model.embedding.weight = model.head.weight
    return train(model, optimizer, predict_next)


@case("moments that were offloaded come back one step old", *ANY, words="state|moment|exp_avg|not that of", at=3)
def stale_moments(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)
    saved: dict[Any, Any] = {}

    def fetch(number: int) -> None:
        for p, state in optimizer.state.items():
            if p is model.head.weight:
                old = saved.get(p)
                saved[p] = {k: v.clone() for k, v in state.items() if k != "step"}
                if wrong and number >= 3 and old is not None:
                    for key, value in old.items():
                        state[key].copy_(value)

    return train(model, optimizer, predict_next, before=fetch)


@case("the copy of one layer on the device lags a step behind", *ANY, words="wrote|did not land|changed", at=2)
def lagging_layer(wrong: bool) -> Monitor:
    model = Decoder()
    host = [model.head.weight.detach().clone()]

    def fetch(_: int) -> None:
        now = model.head.weight.detach().clone()
        if wrong:
            model.head.weight.data.copy_(host[0])
        host[0] = now

    return train(model, adamw(model), predict_next, after=fetch)


@case("decay and rest of a moving average are swapped", *ANY, words="[Aa]verage")
def swapped_decay(wrong: bool) -> Monitor:
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.001 if wrong else 0.999))
    return train(model, adamw(model), after=lambda _: average.update_parameters(model))


@case("a hand-written average leaves the statistics of batch norms out", *ANY, words="statistic", at=3)
def average_without_statistics(wrong: bool) -> Monitor:
    model = ConvNet()
    average = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        x, y = batch("images")
        return F.cross_entropy(model(x), y)

    def after(number: int) -> None:
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.1)
            for old, new in zip(average.buffers(), model.buffers(), strict=True):
                old.copy_(old if wrong else new)
        if number == 3:
            average.eval()
            with torch.no_grad():
                average(batch("images")[0])

    return train(model, adamw(model), loss, after=after)


@case("the pairs of a momentum encoder are a used-up iterator", *ANY, words="average|copy|follow|moves no", at=2)
def pairs_used_up(wrong: bool) -> Monitor:
    model = mlp()
    slow = copy.deepcopy(model).requires_grad_(False)
    once: Iterator[Any] = zip(slow.parameters(), model.parameters(), strict=True)

    def follow(_: int) -> None:
        pairs = once if wrong else zip(slow.parameters(), model.parameters(), strict=True)
        with torch.no_grad():
            for s, p in pairs:
                s.lerp_(p, 0.1)

    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        z = model(x)
        with torch.no_grad():
            target = slow(x)
        return F.cross_entropy(z, y) + 0.1 * F.mse_loss(z, target)

    return train(model, adamw(model), loss, after=follow)


@case("a soft update of the target is written into the trained network", *ANY, words="wrote")
def soft_update_reversed(wrong: bool) -> Monitor:
    model = mlp()
    target = copy.deepcopy(model).requires_grad_(False)

    def follow(_: int) -> None:
        with torch.no_grad():
            for t, p in zip(target.parameters(), model.parameters(), strict=True):
                mixed = 0.05 * p + 0.95 * t
                (p if wrong else t).copy_(mixed)

    def loss(model: nn.Module) -> Tensor:
        x, _ = batch()
        return F.mse_loss(model(x).max(-1).values, 1 + 0.9 * target(torch.randn(8, 6)).max(-1).values)

    return train(model, adamw(model), loss, after=follow)


@case("a cosine of epochs is stepped in every batch and comes back up", *ANY, words="schedul|rate", at=6)
def cosine_wraps(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)

    def after(number: int) -> None:
        if wrong or number % 4 == 0:
            scheduler.step()

    return train(model, optimizer, steps=12, after=after)


@case("a plateau scheduler of a loss waits for it to grow", *ANY, words="schedul|rate|mode", at=4)
def plateau_of_wrong_mode(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max" if wrong else "min", patience=0)
    falling = itertools.count(20, -1)
    return train(model, optimizer, steps=10, after=lambda _: scheduler.step(0.1 * next(falling)))


@case("two schedulers write to the rate of one optimizer", *ANY, words="schedul|rate", at=2)
def two_schedulers(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 4))
    main: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.99**n) if wrong else None

    def after(_: int) -> None:
        warm.step()
        if main is not None:
            main.step()

    return train(model, optimizer, after=after)


@case("a warm-up multiplies the rate it has made itself", *ANY, words="rate", at=3)
def compounding_warm_up(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)

    def before(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = (group["lr"] if wrong else 3e-3) * min(1.0, number / 100)

    return train(model, optimizer, steps=10, before=before)


@case("one of two losses is not scaled", *ANY, words="scale")
def one_loss_unscaled(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            x, y = batch()
            z = model(x)
            first, second = F.cross_entropy(z, y), 0.1 * z.square().mean()
            if wrong:
                (scaler.scale(first) + second).backward()
            else:
                scaler.scale(first + second).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case("hand-written clipping also scales small gradients up", *ANY, words="clip|scal|multiplied|norm")
def clipping_scales_up(wrong: bool) -> Monitor:
    model = Decoder()

    def clip(_: int) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        factor = 10.0 / norm
        for g in gradients:
            g.mul_(factor if wrong else factor.clamp_max(1.0))

    return train(model, adamw(model), predict_next, between=clip)


@case("means over micro-batches of unequal numbers of tokens are averaged", *ANY, words="mean|scale|token")
def unequal_micro_batches(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            parts = []
            for size in (1, 6):
                x, y = tokens()
                y = y.clone()
                y[size // 2 + 1 :] = -100
                parts.append((x, y))
            count = sum(int((y != -100).sum()) for _, y in parts)
            for x, y in parts:
                total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
                (total / (2 * int((y != -100).sum())) if wrong else total / count).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("both networks of a game are given one network's parameters", "loop", words="no optimizer steps|two optimizers")
def optimizer_of_the_other(wrong: bool) -> Monitor:
    class Game(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 6))
            self.judge = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

        def forward(self, noise: Tensor) -> Tensor:
            return self.judge(self.maker(noise))

    model = Game()
    first = torch.optim.Adam(model.maker.parameters(), lr=2e-3)
    second = torch.optim.Adam((model.maker if wrong else model.judge).parameters(), lr=2e-3)
    with Monitor(model, [first, second]) as monitor:
        for _ in range(6):
            model.zero_grad()
            real, fake = model.judge(torch.randn(8, 6)), model(torch.randn(8, 3))
            (F.softplus(-real) + F.softplus(fake)).mean().backward()
            second.step()
            model.zero_grad()
            F.softplus(-model(torch.randn(8, 3))).mean().backward()
            first.step()
            monitor.step()
    return monitor


@case("a subclass of Adam forgets the correction of the bias", *ANY, words="not that of")
def no_bias_correction(wrong: bool) -> Monitor:
    class Own(torch.optim.Adam):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    state["step"] += 1
                    state["exp_avg"].lerp_(p.grad, 0.1)
                    state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    a = 1.0 if wrong else 1 - 0.9 ** state["step"]
                    b = 1.0 if wrong else 1 - 0.999 ** state["step"]
                    p.sub_(group["lr"] * (state["exp_avg"] / a) / ((state["exp_avg_sq"] / b).sqrt() + 1e-8))

    model = Decoder()
    return train(model, Own(model.parameters(), lr=1e-3), predict_next)


@case("two tensors share one momentum buffer", *ANY, words="state|buffer|share|memory|not that of", at=3)
def shared_momentum(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def restore(number: int) -> None:
        if number == 3 and wrong:
            a, b = (model.get_parameter(f"blocks.{i}.down.weight") for i in (0, 1))
            optimizer.state[b]["momentum_buffer"] = optimizer.state[a]["momentum_buffer"]

    return train(model, optimizer, predict_next, before=restore)


@case("the step count of Adam is set back in every step", *ANY, words="count|state|step", at=3)
def count_set_back(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)

    def before(number: int) -> None:
        if wrong and number >= 3:
            for state in optimizer.state.values():
                state["step"].fill_(1)

    return train(model, optimizer, predict_next, before=before)


@case("slow weights of a lookahead stay at their first values", *ANY, words="wrote|slow|first", at=3)
def lookahead_stands(wrong: bool) -> Monitor:
    model = mlp()
    slow = [p.detach().clone() for p in model.parameters()]

    def after(number: int) -> None:
        if number % 3 == 0:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    mixed = s + 0.5 * (p - s)
                    if not wrong:
                        s.copy_(mixed)
                    p.copy_(s if wrong else mixed)

    return train(model, adamw(model), steps=10, after=after)


@case("a utility makes a frozen base trainable after the optimizer was made", "loop", words="no optimizer steps", at=3)
def base_thawed(wrong: bool) -> Monitor:
    model = Decoder()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def before(number: int) -> None:
        if number == 3:
            # Such as what prepares a model for checkpointing of activations.
            model.blocks.requires_grad_(wrong)

    return train(model, optimizer, predict_next, before=before)


@case("gradients that are not numbers are replaced by zeros", *ANY, words="zero|gradient", at=3)
def not_numbers_replaced(wrong: bool) -> Monitor:
    model = Decoder()

    def clean(number: int) -> None:
        gradient: Any = model.get_parameter("blocks.1.down.weight").grad
        if wrong and number >= 3:
            gradient.fill_(torch.nan)
        for p in model.parameters():
            assert p.grad is not None
            torch.nan_to_num_(p.grad)

    return train(model, adamw(model), predict_next, steps=8, between=clean)


@case("dropout's rate is meant as the share that is kept", *ANY, words="zero|drop|gradient")
def dropout_of_everything(wrong: bool) -> Monitor:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(1.0 if wrong else 0.0), nn.Linear(12, 4))
    return train(model, adamw(model))


@case("logits go through a rectifier", *ANY, words="output|logit|rectif|negative|zero")
def rectified_logits(wrong: bool) -> Monitor:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4), nn.ReLU() if wrong else nn.Identity())
    return train(model, adamw(model))
