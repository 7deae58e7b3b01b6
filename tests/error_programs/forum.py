"""Errors as forum posts and issues describe them, each a short loop of its own: accumulation, groups, modes, casts."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conserved import Monitor
from error_programs.case import case
from error_programs.models import Decoder, tokens
from error_programs.training import train

ANY = ("loop", "gradient", "update", "replica", "precision", "hardware")


class Mlp(nn.Module):
    """A body of two layers and a head."""

    def __init__(self, inputs: int = 10, width: int = 16, outputs: int = 5, drop: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x)))


class Digits(nn.Module):
    """A convolutional classifier with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 9, 5)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).flatten(1))


def images(size: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1, 8, 8), torch.randint(5, (size,))


def rows(size: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 10), torch.randint(5, (size,))


def loss_of(model: nn.Module) -> Tensor:
    x, y = rows()
    return F.cross_entropy(model(x), y)


def pictures_loss(model: nn.Module) -> Tensor:
    x, y = images()
    return F.cross_entropy(model(x), y)


def text_loss(model: nn.Module) -> Tensor:
    x, y = tokens()
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@case(
    "zero_grad() comes after the first of four micro-batches",
    *ANY,
    words="cleared|thrown|counts|zero_grad",
    source="PyTorch forum, gradient accumulation with an off-by-one",
)
def cleared_after_first(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for number in range(24):
            (loss_of(model) / 4).backward()
            if (number + 1) % 4 == 0:
                optimizer.step()
                if not wrong:
                    optimizer.zero_grad()
                monitor.step()
            if wrong and number % 4 == 0:
                optimizer.zero_grad()
    return monitor


@case(
    "a running sum of losses is differentiated in every micro-batch",
    *ANY,
    words="backward|twice|several|graph",
    source="PyTorch forum, total_loss += loss with retain_graph",
)
def running_sum(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            total: Any = 0.0
            for _ in range(3):
                loss = loss_of(model) / 3
                total = total + loss
                (total if wrong else loss).backward(retain_graph=True)
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "parameters of the encoder are listed twice and those of the decoder are left out",
    *ANY,
    words="no optimizer|not held|holds|twice",
    source="copy and paste in optimizer groups",
)
def listed_twice(wrong: bool) -> Monitor:
    model = nn.Sequential(Mlp(10, 16, 8), nn.ReLU(), Mlp(8, 16, 5))
    second = model[0] if wrong else model[2]
    optimizer = torch.optim.SGD([*model[0].parameters(), *second.parameters()], 0.05)
    return train(model, optimizer, loss_of)


@case("a decay of rates by depth is zero for the lowest layers", *ANY, words="rate", source="layer-wise decay")
def layerwise_rate(wrong: bool) -> Monitor:
    model = Mlp()
    groups = [
        {"params": model.body[0].parameters(), "lr": 1e-3 * (0 if wrong else 0.5) ** 2},
        {"params": model.body[2].parameters(), "lr": 1e-3 * 0.5},
        {"params": model.head.parameters(), "lr": 1e-3},
    ]
    return train(model, torch.optim.AdamW(groups), loss_of)


@case(
    "one loss, two optimizers, and one of them is never stepped",
    *ANY,
    words="step",
    source="sparse and dense optimizers in recommenders",
)
def second_never_stepped(wrong: bool) -> Monitor:
    model = Decoder()
    table = torch.optim.SGD(model.embedding.parameters(), 0.1)
    rest = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("embedding")], 1e-3)
    with Monitor(model, [rest, table]) as monitor:
        for _ in range(6):
            rest.zero_grad()
            table.zero_grad()
            text_loss(model).backward()
            rest.step()
            if not wrong:
                table.step()
            monitor.step()
    return monitor


@case(
    "requires_grad_ is assigned instead of called",
    *ANY,
    words="requires_grad|effect|trained",
    source="p.requires_grad_ = False",
)
def assigned_method(wrong: bool) -> Monitor:
    model = Mlp()
    for p in model.body.parameters():
        if wrong:
            p.requires_grad_ = False  # type: ignore[assignment,method-assign]
        else:
            p.requires_grad_(False)
    return train(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3), loss_of)


@case(
    "the loss is not scaled and scaler.step() divides by the scale", *ANY, words="scale", source="torch.amp forum posts"
)
def unscaled_loss(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x, y = rows()
                loss = F.cross_entropy(model(x).float(), y)
            (loss if wrong else scaler.scale(loss)).backward()
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case(
    "two optimizers share a scaler and only one is unscaled before clipping",
    *ANY,
    words="scale",
    source="PyTorch forum, GAN with GradScaler",
)
def one_unscaled(wrong: bool) -> Monitor:
    model = nn.ModuleDict({"a": Mlp(), "b": Mlp()})
    first, second = (torch.optim.SGD(model[k].parameters(), 0.05) for k in "ab")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Monitor(model, [first, second]) as monitor:
        for _ in range(6):
            first.zero_grad()
            second.zero_grad()
            scaler.scale(loss_of(model["a"]) + loss_of(model["b"])).backward()
            for optimizer in (first,) if wrong else (first, second):
                scaler.unscale_(optimizer)
            for key in "ab":
                torch.nn.utils.clip_grad_norm_(model[key].parameters(), 1.0)
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            monitor.step()
    return monitor


@case(
    "gradients are clipped by value while they are scaled",
    *ANY,
    words="scale",
    source="clip_grad_value_ before unscale_",
)
def value_clipped_scaled(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if not wrong:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case(
    "the optimizer holds the average and not the model",
    *ANY,
    words="holds|held|no optimizer",
    source="ema = deepcopy(model); AdamW(ema.parameters())",
)
def optimizer_of_average(wrong: bool) -> Monitor:
    model = Mlp()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW((average if wrong else model).parameters(), 1e-3)

    def follow(_: int) -> None:
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.01)

    return train(model, optimizer, loss_of, after=follow)


@case(
    "an average begins at another initialisation", *ANY, words="average|copy", source="ema = Net(); no load_state_dict"
)
def average_of_another(wrong: bool) -> Monitor:
    model = Mlp()
    average = Mlp()
    if not wrong:
        average.load_state_dict(model.state_dict())
    average.requires_grad_(False)

    def follow(_: int) -> None:
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.01)

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of, after=follow)


@case(
    "a state dict of a compiled model is loaded without its prefix",
    *ANY,
    words="load|checkpoint|missing|key",
    source="_orig_mod. in checkpoints, strict=False",
    at=4,
)
def orig_mod_prefix(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    saved = {("_orig_mod." if wrong else "") + k: v.clone() for k, v in Mlp().state_dict().items()}
    with Monitor(model, optimizer) as monitor:
        model.load_state_dict(saved, strict=False)
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "checkpointed batch norms average every batch twice",
    *ANY,
    words="statistic|batch norm|twice|checkpoint",
    source="torch.utils.checkpoint and BatchNorm",
)
def norms_twice(wrong: bool) -> Monitor:
    model = Digits()

    def loss(model: Any) -> Tensor:
        x, y = images()
        h = checkpoint(model.features, x, use_reentrant=False) if wrong else model.features(x)
        return F.cross_entropy(model.fc(h.flatten(1)), y)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(model.features, x, use_reentrant=False) if wrong else model.features(x)
            return model.fc(h.flatten(1))

    net = Net()
    return train(net, torch.optim.AdamW(net.parameters(), 1e-3), pictures_loss)


@case(
    "moving the model replaces its parameters after the optimizer was made",
    *ANY,
    words="holds|held|no optimizer",
    source="torch.__future__ overwrite on conversion; optimizer before .to()",
)
def replaced_by_moving(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if wrong:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        model.double()
        model.float()
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    return train(model, optimizer, loss_of)


@case(
    "layers that are kept in a list are not put into eval mode",
    *ANY,
    words="drop|random|mode|list",
    source="model.eval() and Python lists",
    at=4,
)
def list_not_in_eval(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 5)
            drops = [nn.Dropout(0.2), nn.Dropout(0.2)]
            self.drops = drops if wrong else nn.ModuleList(drops)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.drops[1](F.relu(self.first(self.drops[0](x)))))

    model = Net()

    def evaluate(number: int) -> None:
        if number == 3:
            model.eval()
            with torch.no_grad():
                model(rows()[0])
            model.train()

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of, after=evaluate)


@case("a causal convolution pads both sides", *ANY, words="next|later|sees|depend", source="WaveNet and TCN ports")
def padded_both_sides(wrong: bool) -> Monitor:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.conv = nn.Embedding(23, 16), nn.Conv1d(16, 16, 3)
            self.head = nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            h = F.pad(self.embedding(x).transpose(1, 2), (1, 1) if wrong else (2, 0))
            return self.head(F.gelu(self.conv(h)).transpose(1, 2))

    model = Wave()
    return train(model, torch.optim.AdamW(model.parameters(), 3e-3), text_loss)


@case(
    "a norm over time leaks the tokens to come",
    *ANY,
    words="next|later|sees|depend",
    source="GroupNorm in language models",
)
def norm_over_time(wrong: bool) -> Monitor:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.conv = nn.Embedding(23, 16), nn.Conv1d(16, 16, 3)
            self.norm, self.head = nn.GroupNorm(4, 16) if wrong else nn.LayerNorm(16), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.conv(F.pad(self.embedding(x).transpose(1, 2), (2, 0))))
            h = self.norm(h).transpose(1, 2) if wrong else self.norm(h.transpose(1, 2))
            return self.head(h)

    model = Wave()
    return train(model, torch.optim.AdamW(model.parameters(), 3e-3), text_loss)


@case(
    "a language model runs its recurrence in both directions",
    *ANY,
    words="next|later|sees|depend",
    source="bidirectional=True in language models",
)
def both_directions(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(23, 12)
            self.cell = nn.GRU(12, 8 if wrong else 16, batch_first=True, bidirectional=wrong)
            self.head = nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(self.embedding(x))[0])

    model = Net()
    return train(model, torch.optim.Adam(model.parameters(), 3e-3), text_loss)


@case(
    "labels are the tokens before and not the next ones",
    *ANY,
    words="label|previous|before|token",
    source="labels shifted the wrong way",
)
def labels_before(wrong: bool) -> Monitor:
    model = Decoder()

    def loss(model: nn.Module) -> Tensor:
        text = torch.randint(23, (4, 10))
        x, y = (text[:, 1:], text[:, :-1]) if wrong else (text[:, :-1], text[:, 1:])
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss)


@case(
    "the sign of a log-likelihood is lost and the loss is maximised",
    *ANY,
    words="maxim|sign|away|uphill",
    source="loss = log_prob.mean()",
)
def sign_lost(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = rows()
        chosen = F.log_softmax(model(x), -1).gather(1, y[:, None]).mean()
        return chosen if wrong else -chosen

    model = Mlp()
    return train(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


@case(
    "a mask is multiplied in place under no_grad",
    *ANY,
    words="no_grad|gradient|in place|identity|mask",
    source="in-place operations on activations under no_grad",
)
def masked_under_no_grad(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.first(x))
            mask = (torch.arange(16) % 3 > 0).float() * 2
            if wrong:
                with torch.no_grad():
                    h.mul_(mask)
            else:
                h = h * mask
            return self.last(h)

    model = Net()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)


@case(
    "activations are normalised through .data", *ANY, words="data|gradient|identity", source="x.data /= x.data.norm()"
)
def normalised_data(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if wrong:
                h.data /= h.data.norm(dim=-1, keepdim=True)
            else:
                h = h / h.norm(dim=-1, keepdim=True)
            return self.last(F.relu(h) * 3)

    model = Net()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)


@case(
    "the whole loop runs in one autocast region and uses cached weights",
    *ANY,
    words="cache|autocast|weights",
    at=2,
    source="autocast around the training loop",
)
def loop_inside_autocast(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=wrong):
        for _ in range(6):
            optimizer.zero_grad()
            x, y = rows()
            F.cross_entropy(model(x).float(), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "master weights are taken from the bfloat16 model in every step",
    *ANY,
    words="bfloat16|master|did not|land|spacing",
    source="hand-written mixed precision",
    at=2,
)
def master_from_model(wrong: bool) -> Monitor:
    model = Decoder().to(torch.bfloat16)
    master = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, 1e-4)
    for m in master:
        m.requires_grad_(True)
    with Monitor(model, optimizer) as monitor:
        for _ in range(8):
            model.zero_grad()
            x, y = tokens()
            F.cross_entropy(model(x).float().flatten(0, 1), y.flatten()).backward()
            with torch.no_grad():
                for m, p in zip(master, model.parameters(), strict=True):
                    if wrong:
                        m.copy_(p)
                    m.grad = p.grad.float() if p.grad is not None else None
            optimizer.step()
            with torch.no_grad():
                for m, p in zip(master, model.parameters(), strict=True):
                    p.copy_(m)
            monitor.step()
    return monitor


@case(
    "an optimizer of one's own writes to a reshaped copy of transposed weights",
    *ANY,
    words="land|not change|did not",
    source="p.data.reshape(-1).sub_() on non-contiguous weights",
)
def reshaped_copy(wrong: bool) -> Monitor:
    class Flat(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data.reshape(-1).sub_(group["lr"] * p.grad.reshape(-1))

    model = Mlp()
    if wrong:
        layer: Any = model.body[2]
        layer.weight = nn.Parameter(layer.weight.detach().t())
    return train(model, Flat(model.parameters(), {"lr": 0.05}), loss_of)


@case(
    "a loader that does not shuffle gives batches of one class",
    *ANY,
    words="class|label|sorted|one",
    source="PyTorch forum, sorted data without shuffle",
)
def sorted_classes(wrong: bool) -> Monitor:
    x = torch.randn(96, 10)
    y = torch.arange(96) * 5 // 96
    order = torch.arange(96) if wrong else torch.randperm(96)
    place = [0]

    def loss(model: nn.Module) -> Tensor:
        index = order[place[0] : place[0] + 12]
        place[0] = (place[0] + 12) % 96
        return F.cross_entropy(model(x[index]), y[index])

    model = Mlp()
    return train(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


@case("advantages (n, 1) multiply log-probabilities (n)", *ANY, words="broadcast|shape", source="policy gradient ports")
def advantages_broadcast(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = rows()
        chosen = F.log_softmax(model(x), -1).gather(1, y[:, None])[:, 0]
        gain = torch.randn(12, 1)
        return -(chosen * (gain if wrong else gain[:, 0])).mean()

    model = Mlp()
    return train(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


@case(
    "weights of examples (n, 1) multiply losses (n)",
    *ANY,
    words="broadcast|shape",
    source="PyTorch forum, sample weights",
)
def weights_broadcast(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = rows()
        weight = torch.rand(12, 1)
        return (F.cross_entropy(model(x), y, reduction="none") * (weight if wrong else weight[:, 0])).mean()

    model = Mlp()
    return train(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


@case("a block's output is detached in the residual sum", *ANY, words="gradient|detach", source="x + block(x).detach()")
def detached_residual(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(10, 16), Mlp(16, 16, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.block(h)
            return self.last(h + (y.detach() if wrong else y))

    model = Net()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)


@case(
    "a target network is loaded with assign=True and is the network itself",
    *ANY,
    words="memory|share|same|copy",
    source="load_state_dict(assign=True)",
)
def assigned_target(wrong: bool) -> Monitor:
    model, target = Mlp(), Mlp()
    target.load_state_dict(model.state_dict(), assign=wrong)
    target.requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        x, _ = rows()
        with torch.no_grad():
            goal = 0.9 * target(x + 0.1).amax(-1) + torch.randn(12)
        return F.mse_loss(model(x)[:, 0], goal)

    for p in model.parameters():
        p.requires_grad_(True)
    return train(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


@case(
    "a backward hook of a module leaves gradients divided by two",
    *ANY,
    words="hook|gradient|identity",
    source="register_full_backward_hook left from an experiment",
)
def hook_halves(wrong: bool) -> Monitor:
    model = Mlp()
    if wrong:
        layer: Any = model.body[3]
        layer.register_full_backward_hook(lambda m, gi, go: (gi[0] / 2,))
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)


@case(
    "gradients of a layer are zeroed by a hook that should zero only padding rows",
    *ANY,
    words="zero|gradient",
    source="padding_idx by hand",
)
def padding_hook(wrong: bool) -> Monitor:
    model = Decoder()

    def keep(g: Tensor) -> Tensor:
        g = g.clone()
        g[0:] = 0 if wrong else g[0:]
        g[0] = 0
        return g

    model.embedding.weight.register_hook(keep)
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), text_loss)


@case(
    "the scheduler is made and never stepped",
    *ANY,
    words="schedul|rate",
    source="PyTorch forum, missing scheduler.step()",
)
def never_scheduled(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    def after(_: int) -> None:
        if not wrong:
            scheduler.step()

    return train(model, optimizer, loss_of, steps=12, after=after)


@case(
    "a scheduler overwrites the rate that the loop warms up",
    *ANY,
    words="rate|schedul",
    source="manual warm-up beside a scheduler",
    at=2,
)
def rate_overwritten(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if wrong else min(1.0, (n + 1) / 8))
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            if wrong:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3 * number / 8
            optimizer.zero_grad()
            loss_of(model).backward()
            if wrong:
                scheduler.step()
                optimizer.step()
            else:
                optimizer.step()
                scheduler.step()
            monitor.step()
    return monitor


@case(
    "an optimizer is made inside the loop",
    *ANY,
    words="new|made|state|optimizer|average",
    at=2,
    source="PyTorch forum, Adam in the training loop",
)
def optimizer_in_loop(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            if wrong:
                optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "the state of Adam is reset by loading an empty state dict every step",
    *ANY,
    words="state|lost|step count",
    at=2,
    source="optimizer.load_state_dict(initial) in a loop",
)
def empty_state_loaded(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    first = copy.deepcopy(optimizer.state_dict())

    def before(number: int) -> None:
        if wrong and number > 1:
            optimizer.load_state_dict(copy.deepcopy(first))

    return train(model, optimizer, loss_of, before=before)


@case(
    "an image model gets its channels last without a permute",
    *ANY,
    words="x",
    how="outside",
    why="Data are what they are.",
    source="H, W, C given as C, H, W",
)
def channels(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = images()
        return F.cross_entropy(model(x.transpose(2, 3) if wrong else x), y)

    model = Digits()
    return train(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


@case(
    "the head is reset in every epoch by a constructor in the loop",
    *ANY,
    words="head|no optimizer|not held|parameter",
    at=4,
    source="model.fc = nn.Linear() in the epoch loop",
)
def head_replaced(wrong: bool) -> Monitor:
    model = Mlp()

    def after(number: int) -> None:
        if wrong and number == 3:
            model.head = nn.Linear(16, 5)

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of, steps=8, after=after)


@case(
    "weights are clipped to [-0.01, 0.01] in place of gradients",
    *ANY,
    words="wrote|weights|clamp|clip",
    source="clip over model.parameters() .data instead of .grad",
)
def clipped_weights(wrong: bool) -> Monitor:
    model = Mlp()

    def between(_: int) -> None:
        for p in model.parameters():
            if p.grad is not None:
                (p.data if wrong else p.grad).clamp_(-0.01, 0.01)

    return train(model, torch.optim.SGD(model.parameters(), 0.05), loss_of, between=between)


@case(
    "weight noise for regularisation is never taken back",
    *ANY,
    words="wrote|weights|written",
    at=1,
    source="noise injection without restore",
)
def noise_kept(wrong: bool) -> Monitor:
    model = Mlp()
    saved: list[Tensor] = []

    def before(_: int) -> None:
        saved[:] = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)

    def between(_: int) -> None:
        if not wrong:
            with torch.no_grad():
                for p, old in zip(model.parameters(), saved, strict=True):
                    p.copy_(old)

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of, before=before, between=between)


@case(
    "a layer of half precision is trained by an optimizer that swallows its updates",
    *ANY,
    words="bfloat16|spacing|land|not change",
    source="mixed dtypes in one model",
)
def half_layer(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid, self.last = nn.Linear(10, 32), nn.Linear(32, 32), nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x))
            h = F.relu(self.mid(h.to(self.mid.weight.dtype))).float()
            return self.last(h)

    model = Net()
    if wrong:
        model.mid.to(torch.bfloat16)
        with torch.no_grad():
            model.mid.weight.mul_(8)
    return train(model, torch.optim.AdamW(model.parameters(), 1e-4), loss_of, steps=12)


@case(
    "gradients are averaged over micro-batches twice",
    *ANY,
    words="scale|divided|factor",
    how="call",
    source="loss / n and gradients / n",
)
def averaged_twice(wrong: bool) -> Monitor:
    model = Mlp()

    def between(_: int) -> None:
        for p in model.parameters():
            if wrong and p.grad is not None:
                p.grad /= 4

    def loss(model: nn.Module) -> Tensor:
        return sum((loss_of(model) for _ in range(4)), torch.zeros(())) / 4

    return train(model, torch.optim.SGD(model.parameters(), 0.05), loss, between=between)


@case("softmax over heads instead of keys", *ANY, words="softmax|attention|head|sees", source="dim=1 in attention")
def softmax_over_heads(wrong: bool) -> Monitor:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.qkv, self.head = nn.Embedding(23, 16), nn.Linear(16, 48), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.embedding(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) / math.sqrt(8)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            a = scores.masked_fill(~mask, -1e9).softmax(1 if wrong else -1)
            return self.head((a @ v).transpose(1, 2).flatten(2))

    model = Attention()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), text_loss)


@case("the mask lets a query see one token ahead", *ANY, words="next|later|sees|depend", source="tril(diagonal=1)")
def one_ahead(wrong: bool) -> Monitor:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.positions = nn.Embedding(23, 16), nn.Embedding(12, 16)
            self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x) + self.positions.weight[: x.shape[1]]
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2 if wrong else 1)
            return self.head(h + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0])

    model = Attention()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), text_loss)


@case(
    "the sequence's mean is added to every position of a language model",
    *ANY,
    words="next|later|sees|depend",
    source="mean pooling in causal models",
)
def mean_pooled(wrong: bool) -> Monitor:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.mix, self.head = nn.Embedding(23, 16), nn.Linear(16, 16), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            n = torch.arange(1, x.shape[1] + 1)[:, None]
            return self.head(F.gelu(self.mix(h)) + (h.mean(1, keepdim=True) if wrong else h.cumsum(1) / n))

    model = Pooled()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), text_loss)


@case(
    "the last batch of an evaluation is trained on",
    *ANY,
    words="eval|gradient|validation|zero_grad",
    at=4,
    source="loss.backward() outside of the train branch",
)
def trained_on_evaluation(wrong: bool) -> Monitor:
    model = Mlp(drop=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if number % 3 == 0:
                model.eval()
                if wrong:
                    optimizer.zero_grad()
                    loss_of(model).backward()
                    optimizer.step()
                else:
                    with torch.no_grad():
                        loss_of(model)
                model.train()
            monitor.step()
    return monitor


@case(
    "momentum of SGD is restored from another run of the same shapes",
    *ANY,
    words="state|moment|restore|written",
    at=4,
    source="resume from the wrong folder",
)
def other_momentum(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def after(number: int) -> None:
        if wrong and number == 3:
            for p in model.parameters():
                optimizer.state[p]["momentum_buffer"] = torch.randn_like(p)

    return train(model, optimizer, loss_of, steps=8, after=after)


@case(
    "in-place ReLU overwrites the skip connection",
    *ANY,
    words="x",
    how="outside",
    why="The model is another function than was meant, and it is differentiated rightly.",
    source="ResNet ports",
)
def inplace_skip(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.block(F.relu(h, inplace=wrong))
            return self.last(F.relu(h + y))

    model = Net()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)


@case(
    "deepcopy of a wrapped optimizer leaves the loop stepping the copy",
    *ANY,
    words="step|no optimizer|held|moved",
    source="copy.deepcopy(optimizer)",
    at=1,
)
def copied_optimizer(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    used = copy.deepcopy(optimizer) if wrong else optimizer
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(model).backward()
            used.step()
            monitor.step()
    return monitor


@case(
    "the model that is trained is a copy of the one that is saved and watched",
    *ANY,
    words="step|gradient|ran|optimizer",
    source="trained = copy.deepcopy(model)",
)
def trained_copy(wrong: bool) -> Monitor:
    model = Mlp()
    used = copy.deepcopy(model) if wrong else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(used).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "quantiser scales are divided by zero rows and gradients are not numbers",
    *ANY,
    words="finite|NaN|nan|not a number",
    source="0/0 in a masked mean",
    at=3,
)
def nan_rows(wrong: bool) -> Monitor:
    number = [0]

    def loss(model: nn.Module) -> Tensor:
        number[0] += 1
        x, y = rows()
        mask = torch.zeros(12) if number[0] == 3 else torch.ones(12)
        total = F.cross_entropy(model(x), y, reduction="none") * mask
        return total.sum() / (mask.sum() if wrong else mask.sum().clamp_min(1))

    model = Mlp()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss)


@case(
    "dropout masks of a recurrent layer are drawn once and kept for the run",
    *ANY,
    words="x",
    how="outside",
    why="A mask that is fixed is a network with fewer units.",
    source="variational dropout ports",
)
def fixed_mask(wrong: bool) -> Monitor:
    class Net(Mlp):
        mask: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None or not wrong:
                self.mask = torch.bernoulli(torch.full((1, 16), 0.8)) / 0.8
            return self.head(self.body(x) * self.mask)

    model = Net()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)
