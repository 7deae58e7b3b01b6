"""Errors of loops, optimizers and checkpoints that patches to public training code removed, one program each."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conserved import Monitor
from error_programs.case import batch, case, mlp
from error_programs.models import Decoder, tokens
from error_programs.training import classify, predict_next, train

ANY = ("loop", "gradient", "update", "replica", "precision", "hardware")
"""Kinds of alarms, where more than one would name the cause."""


def adamw(model: nn.Module, lr: float = 3e-3, **options: Any) -> torch.optim.AdamW:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 12).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 12, bias=False)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.base(x) + self.up(self.down(x))))


@case("saving a checkpoint freezes the adapter that is trained", *ANY, words="requires_grad|frozen|froze|gradient",
      at=4, source="ms-swift 9452")  # fmt: skip
def frozen_by_saving(wrong: bool) -> Monitor:
    model = Adapted()
    adapters = [*model.down.parameters(), *model.up.parameters()]

    def save(number: int) -> None:
        if number == 3:
            for p in adapters:
                p.requires_grad_(not wrong)

    return train(model, adamw(model), steps=8, after=save)


@case("a step fused into the backward runs in every micro-batch", *ANY, words="step|backward|accumulat",
      source="torchtune, optimizer in backward")  # fmt: skip
def fused_step_per_micro_batch(wrong: bool) -> Monitor:
    model = mlp()
    optimizers = {p: torch.optim.AdamW([p], lr=3e-3) for p in model.parameters()}
    last = [False]

    def hook(p: Tensor) -> None:
        if wrong or last[0]:
            optimizers[p].step()
            optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    with Monitor(model, list(optimizers.values())) as monitor:
        for _ in range(6):
            for micro in range(2):
                last[0] = micro == 1
                (classify(model) / 2).backward()
            monitor.step()
    return monitor


@case("the rest of an epoch's micro-batches is added to the next epoch", *ANY, words="micro|accumul|gradient", at=3,
      source="accelerate, transformers examples")  # fmt: skip
def rest_of_epoch(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(3):
            for number in range(5):
                (predict_next(model) / 2).backward()
                if number % 2 == 1 or (number == 4 and not wrong):
                    optimizer.step()
                    optimizer.zero_grad()
                    monitor.step()
    return monitor


@case("gradients are divided by the loss scale of the next step", *ANY, words="scale|gradient", at=3,
      source="DeepSpeed 8588")  # fmt: skip
def divided_by_next_scale(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)
    scale = 4.0
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            optimizer.zero_grad()
            used = scale
            (predict_next(model) * scale).backward()
            if number % 3 == 0:
                scale *= 2
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.div_(scale if wrong else used)
            optimizer.step()
            monitor.step()
    return monitor


@case("weight decay in bfloat16 is below the spacing of every weight", "precision", "update", words="decay",
      source="OneTrainer 996")  # fmt: skip
def swallowed_decay(wrong: bool) -> Monitor:
    model = mlp().to(torch.bfloat16 if wrong else torch.float32)

    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)

    return train(model, adamw(model, lr=2e-2, weight_decay=0.05), loss)


class Lion(torch.optim.Optimizer):
    """Lion, whose weight decay may go through the sign."""

    def __init__(self, params: Any, *, lr: float = 1e-3, weight_decay: float = 0.1, coupled: bool) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.coupled = coupled

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                g = p.grad + group["weight_decay"] * p if self.coupled else p.grad
                if not self.coupled:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (0.9 * average + 0.1 * g).sign())
                average.lerp_(g, 0.01)


@case("weight decay of Lion goes through the sign", "update", words="decay|rule", source="bitsandbytes 1992")
def coupled_lion(wrong: bool) -> Monitor:
    model = Decoder()
    return train(model, Lion(model.parameters(), coupled=wrong), predict_next)


class Orthogonal(torch.optim.Optimizer):
    """Steps along normalised gradients; its decay may be computed and dropped."""

    def __init__(self, params: Any, *, lr: float = 1e-2, weight_decay: float = 0.1, dropped: bool) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dropped = dropped

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                decayed = p * (1 - group["lr"] * group["weight_decay"])
                old = p.clone() if self.dropped else decayed
                p.copy_(old - group["lr"] * p.grad / (p.grad.norm() + 1e-8))


@case("weight decay is computed and its result is not used", "update", "loop", words="decay",
      source="tinygrad 17708")  # fmt: skip
def dropped_decay(wrong: bool) -> Monitor:
    model = mlp()
    return train(model, Orthogonal(model.parameters(), dropped=wrong))


@case("clipping divides by the square of the norm", *ANY, words="clip|norm", source="entrenar 311")
def clipped_by_square(wrong: bool) -> Monitor:
    model = Decoder()

    def clip(_: int) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        norm = norm**2 if wrong else norm
        for g in gradients:
            g.mul_(min(1.0, float(0.5 / norm)))

    return train(model, adamw(model), lambda m: 4 * predict_next(m), between=clip)


@case("the count of an average is set back in every step, so that it is a copy", *ANY, words="[Aa]verage",
      source="torchvision 4544")  # fmt: skip
def average_without_memory(wrong: bool) -> Monitor:
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def after(_: int) -> None:
        average.update_parameters(model)
        if wrong:
            average.n_averaged.zero_()

    return train(model, adamw(model), steps=10, after=after)


@case(
    "an average is updated after every micro-batch", *ANY, words="[Aa]verage", source="diffusers, EMA in accumulation"
)
def average_per_micro_batch(wrong: bool) -> Monitor:
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            for micro in range(4):
                (classify(model) / 4).backward()
                if micro == 3:
                    optimizer.step()
                    optimizer.zero_grad()
                if wrong or micro == 3:
                    average.update_parameters(model)
            monitor.step()
    return monitor


def _resumed(restore: Callable[[Any, Any, Any], None]) -> Monitor:
    """Train, save, build a model and an optimizer again, restore them and go on."""

    def run(model: Any, optimizer: Any, monitor: Monitor) -> None:
        for _ in range(4):
            optimizer.zero_grad()
            predict_next(model).backward()
            optimizer.step()
            monitor.step()

    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as first:
        run(model, optimizer, first)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), first.state_dict()])
    model = Decoder()
    optimizer = adamw(model)
    restore(model, optimizer, saved)
    with Monitor(model, optimizer) as monitor:
        monitor.load_state_dict(saved[2])
        run(model, optimizer, monitor)
    return monitor


@case("groups of the optimizer are restored and its moments are not", "loop", words="state|moment|restored", at=5,
      source="KempnerForge 115")  # fmt: skip
def groups_without_moments(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, saved: Any) -> None:
        model.load_state_dict(saved[0])
        state = saved[1] if not wrong else {"state": {}, "param_groups": saved[1]["param_groups"]}
        optimizer.load_state_dict(state)

    return _resumed(restore)


@case("moments pass through bfloat16 in a checkpoint", *ANY, words="state|moment|exp_avg|restored", at=5,
      source="torchao, low-bit checkpoints")  # fmt: skip
def moments_rounded(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, saved: Any) -> None:
        model.load_state_dict(saved[0])
        for state in saved[1]["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].bfloat16().float() if wrong else state[key]
        optimizer.load_state_dict(saved[1])

    return _resumed(restore)


@case("the graph compiled with a frozen layer is used when it is thawed", *ANY, words="gradient|no optimizer", at=1,
      source="dingo 407")  # fmt: skip
def thawed_after_compiling(wrong: bool) -> Monitor:
    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 4)
            self.frozen = True

        def forward(self, x: Tensor) -> Tensor:
            # What a graph does that was traced while the layer was frozen.
            own = (self.first.weight, self.first.bias)
            weight, bias = (p.detach() for p in own) if self.frozen else own
            return self.second(F.linear(x, weight, bias).relu())

    model = Staged()
    model.first.requires_grad_(True)
    model.frozen = wrong
    return train(model, adamw(model))


@case("gradients of the other network stay switched off", *ANY, words="gradient|never|frozen|requires_grad",
      source="Lightning, toggle_optimizer")  # fmt: skip
def toggled_off(wrong: bool) -> Monitor:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = nn.Linear(3, 6), mlp()

    model = Pair()
    makers, judges = adamw(model.maker), adamw(model.judge)
    with Monitor(model, [makers, judges]) as monitor:
        for _ in range(8):
            model.judge.requires_grad_(False)
            makers.zero_grad()
            fake = model.maker(torch.randn(8, 3))
            if fake.requires_grad:
                F.cross_entropy(model.judge(fake), torch.zeros(8, dtype=torch.long)).backward()
            makers.step()
            model.judge.requires_grad_(True)
            model.maker.requires_grad_(False)
            judges.zero_grad()
            x, y = batch()
            (F.cross_entropy(model.judge(x), y)
             + F.cross_entropy(model.judge(fake.detach()), torch.ones(8, dtype=torch.long))).backward()  # fmt: skip
            judges.step()
            if not wrong:
                model.maker.requires_grad_(True)
            monitor.step()
    return monitor


@case("the first rate is the tensor that the schedule writes to", *ANY, words="rate", at=3,
      source="PyTorch, tensor rates in schedulers")  # fmt: skip
def aliased_rate(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2))
    group = optimizer.param_groups[0]
    base = group["lr"] if wrong else group["lr"].clone()

    def before(number: int) -> None:
        group["lr"].copy_(base * (1 - number / 20))

    return train(model, optimizer, steps=10, before=before)


@case("the second optimizer steps past the scaler", "loop", "gradient", "precision", words="scale",
      source="PyTorch AMP examples, several optimizers")  # fmt: skip
def second_past_scaler(wrong: bool) -> Monitor:
    model = mlp()
    first = torch.optim.SGD(model[:4].parameters(), lr=1e-2)
    second = torch.optim.SGD(model[4:].parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Monitor(model, [first, second]) as monitor:
        for _ in range(6):
            first.zero_grad()
            second.zero_grad()
            scaler.scale(classify(model)).backward()
            scaler.step(first)
            if wrong:
                second.step()
            else:
                scaler.step(second)
            scaler.update()
            monitor.step()
    return monitor


@case("noise is added to gradients that are still scaled", "loop", "gradient", words="scale|unscale",
      source="RETURNN 1595")  # fmt: skip
def noise_on_scaled(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def noise() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(torch.randn_like(p), alpha=0.01)

    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(classify(model)).backward()
            if wrong:
                noise()
            scaler.unscale_(optimizer)
            if not wrong:
                noise()
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case("buffers that no checkpoint has are empty after a model was made on no device", *ANY, words="buffer|zero",
      source="LlamaFactory 10820")  # fmt: skip
def empty_frequencies(wrong: bool) -> Monitor:
    class Rotary(Decoder):
        frequencies: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", 100.0 ** -(torch.arange(8) / 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            angles = torch.arange(x.shape[1])[:, None] * self.frequencies
            a, b = h.chunk(2, -1)
            h = torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))

    model = Rotary()
    if wrong:
        state = copy.deepcopy(model.state_dict())
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.frequencies.zero_()  # memory that was never written to
        model.load_state_dict(state)
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "positions" not in n], lr=3e-3)
    return train(model, optimizer, predict_next)


@case("the vector of the padding token is drawn at random after it was set to zero", *ANY, words="padding",
      source="transformers, _init_weights")  # fmt: skip
def random_padding(wrong: bool) -> Monitor:
    model = Decoder()
    model.embedding = nn.Embedding(23, 16, padding_idx=0)
    nn.init.normal_(model.embedding.weight)
    if not wrong:
        with torch.no_grad():
            model.embedding.weight[0].zero_()
    return train(model, adamw(model), predict_next)


@case("labels are mixed with another permutation than inputs", *ANY, words="label", source="mixup in forks of timm")
def mixed_apart(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        order = torch.randperm(8)
        z = model(0.7 * x + 0.3 * x[order])
        other = y[torch.randperm(8)] if wrong else y[order]
        return 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, other)

    model = mlp()
    return train(model, adamw(model), loss)


@case("a learned scale is registered as a buffer", "loop", words="buffer|optimizer|parameter",
      source="PyTorch forum")  # fmt: skip
def scale_as_buffer(wrong: bool) -> Monitor:
    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            if wrong:
                self.register_buffer("scale", torch.ones(4, requires_grad=True))
            else:
                self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.scale

    model = Scaled()
    return train(model, adamw(model))


@case(
    "the teacher of a distillation is in train mode", *ANY, words="mode|dropout|teacher", source="distillation scripts"
)
def teacher_in_train_mode(wrong: bool) -> Monitor:
    teacher = mlp(drop=0.3).requires_grad_(False).train(wrong)

    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        with torch.no_grad():
            target = teacher(x)
        z = model(x)
        return F.cross_entropy(z, y) + F.mse_loss(z, target)

    model = mlp()
    return train(model, adamw(model), loss)


@case("the reference of a preference loss is the trained model itself", *ANY, words="itself|reference|same",
      source="preference training without a copy")  # fmt: skip
def own_reference(wrong: bool) -> Monitor:
    model = Decoder()
    reference = model if wrong else copy.deepcopy(model).requires_grad_(False)

    def score(of: nn.Module, x: Tensor) -> Tensor:
        return of(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None]).sum((1, 2))

    def loss(model: nn.Module) -> Tensor:
        good, bad = tokens()[0], tokens()[0]
        with torch.no_grad():
            a, b = score(reference, good), score(reference, bad)
        return -F.logsigmoid(0.1 * (score(model, good) - a - score(model, bad) + b)).mean()

    return train(model, adamw(model), loss)
