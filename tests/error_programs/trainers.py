"""Errors of training programs as people write them: trainers in classes, accumulation, averages, adapters, resumes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from conserved import Monitor
from error_programs.case import case
from error_programs.habits import ANY
from error_programs.models import Decoder


def vectors(count: int = 96, features: int = 10, classes: int = 5) -> TensorDataset:
    """Return vectors with labels that a linear map decides."""
    x = torch.randn(count, features)
    return TensorDataset(x, (x @ torch.randn(features, classes)).argmax(1))


def text(count: int = 48, length: int = 9, vocabulary: int = 23) -> TensorDataset:
    """Return sequences in which a token depends on the one before."""
    rows = [torch.randint(vocabulary, (count,))]
    for _ in range(length - 1):
        noise = torch.randint(3, (count,))
        rows.append((rows[-1] * 5 + 1 + noise) % vocabulary)
    return TensorDataset(torch.stack(rows, 1))


class Net(nn.Module):
    """A classifier with an encoder, a norm, dropout and a head."""

    def __init__(self, width: int = 16, drop: float = 0.1) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width))
        self.drop, self.head = nn.Dropout(drop), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.gelu(self.encoder(x))))


class Trainer:
    """A small trainer: epochs, accumulation, clipping, evaluation."""

    def __init__(
        self, model: nn.Module, data: TensorDataset, optimizer: torch.optim.Optimizer, accumulate: int
    ) -> None:
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.loader = DataLoader(data, batch_size=8, shuffle=True)
        self.monitor = Monitor(model, optimizer)
        self.steps = 0

    def fit(self, epochs: int) -> Monitor:
        """Train for some epochs."""
        with self.monitor:
            for epoch in range(epochs):
                self.model.train()
                self.epoch(epoch)
                self.evaluate()
        return self.monitor

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def epoch(self, epoch: int) -> None:
        """Train on all batches once."""
        for index, batch in enumerate(self.loader):
            (self.loss(batch) / self.accumulate).backward()
            if (index + 1) % self.accumulate == 0:
                self.step()

    def step(self) -> None:
        """Make one step of the optimizer."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.monitor.step()

    def evaluate(self) -> None:
        """Evaluate on the first batches."""
        self.model.eval()
        with torch.no_grad():
            for batch in itertools.islice(self.loader, 2):
                self.loss(batch)


@case(
    "the last micro-batches of an epoch are not stepped and stay in the gradient", "loop", "gradient",
    words="left|stay|earlier|zero_grad|evaluat|micro", at=3, source="accumulation loops without a last step",
)  # fmt: skip
def remainder_of_epoch(wrong: bool) -> Monitor:
    class Accumulating(Trainer):
        def epoch(self, epoch: int) -> None:
            super().epoch(epoch)
            if not wrong and len(self.loader) % self.accumulate:
                self.step()

    model = Net()
    return Accumulating(model, vectors(88), torch.optim.AdamW(model.parameters(), 3e-3), 4).fit(3)


@case(
    "accumulation steps after the first micro-batch because the count starts at zero", "loop",
    words="micro|accumul|backward", source="OneVision-Encoder 82",
)  # fmt: skip
def steps_at_first(wrong: bool) -> Monitor:
    class Accumulating(Trainer):
        def epoch(self, epoch: int) -> None:
            for index, batch in enumerate(self.loader):
                (self.loss(batch) / self.accumulate).backward()
                if (index if wrong else index + 1) % self.accumulate == 0:
                    self.step()
            self.optimizer.zero_grad()

    model = Net()
    return Accumulating(model, vectors(64), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 4).fit(3)


@case(
    "gradients are clipped in training_step, before backward() has made them", "loop", words="clip",
    source="nano-world-model 22, FAMO 4",
)  # fmt: skip
def clipped_before_backward(wrong: bool) -> Monitor:
    class Clipping(Trainer):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            if wrong and self.model.training:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            return loss

        def step(self) -> None:
            if not wrong:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.step()

    model = Net()
    return Clipping(model, vectors(64), torch.optim.SGD(model.parameters(), 0.1), 1).fit(2)


@case(
    "only the first parameter group is clipped", "loop", "gradient", words="clip",
    source="loops that clip optimizer.param_groups[0]",
)  # fmt: skip
def first_group_clipped(wrong: bool) -> Monitor:
    class Clipping(Trainer):
        def step(self) -> None:
            groups = self.optimizer.param_groups[: 1 if wrong else None]
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 0.05)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.step()

    model = Net()
    groups = [{"params": model.encoder.parameters(), "lr": 1e-3}, {"params": model.head.parameters(), "lr": 1e-2}]
    return Clipping(model, vectors(64), torch.optim.AdamW(groups), 1).fit(2)


@case(
    "an evaluation of two parts leaves one of them in eval mode", "loop", words="eval", at=9,
    source="vsepp 4",
)  # fmt: skip
def one_part_left_in_eval(wrong: bool) -> Monitor:
    class Parts(Trainer):
        model: Net

        def fit(self, epochs: int) -> Monitor:
            with self.monitor:
                for epoch in range(epochs):
                    self.epoch(epoch)
                    self.evaluate()
                    self.model.encoder.train()
                    if not wrong:
                        self.model.drop.train()
            return self.monitor

        def evaluate(self) -> None:
            self.model.encoder.eval()
            self.model.drop.eval()
            with torch.no_grad():
                self.loss(next(iter(self.loader)))

    model = Net(drop=0.3)
    return Parts(model, vectors(64), torch.optim.AdamW(model.parameters(), 1e-3), 1).fit(3)


@case(
    "early stopping keeps the best weights by reference", *ANY, words="own|same|itself|copy|best", at=24,
    source="checkpointing by best = model.state_dict()",
)  # fmt: skip
def best_by_reference(wrong: bool) -> Monitor:
    class Early(Trainer):
        best: dict[str, Tensor]

        def fit(self, epochs: int) -> Monitor:
            with self.monitor:
                for epoch in range(epochs):
                    self.model.train()
                    self.epoch(epoch)
                    self.evaluate()
                    if epoch == 0:
                        state = self.model.state_dict()
                        self.best = state if wrong else copy.deepcopy(state)
                self.model.load_state_dict(self.best)
            return self.monitor

    model = Net()
    return Early(model, vectors(64), torch.optim.AdamW(model.parameters(), 1e-3), 1).fit(3)


@case(
    "a finder of learning rates leaves the weights that it has trained", *ANY, words="wrote|written|another|moved",
    source="fastai-style finders",
)  # fmt: skip
def finder_trains(wrong: bool) -> Monitor:
    data, model = vectors(64), Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    trainer = Trainer(model, data, optimizer, 1)
    trial = model if wrong else copy.deepcopy(model)
    other = torch.optim.SGD(trial.parameters(), 1e-6)
    x, y = data.tensors
    for number in range(8):
        other.param_groups[0]["lr"] = 1e-6 * 4**number
        other.zero_grad()
        F.cross_entropy(trial(x), y).backward()
        other.step()
    optimizer.zero_grad()
    return trainer.fit(1)


@case(
    "a filter of names asks whether the name is in the list of endings", *ANY, words="decay", how="intent",
    source="mt-dnn 37", why="Which tensors decay is a choice; the start-up line names them.",
)  # fmt: skip
def name_not_in_list(wrong: bool) -> Monitor:
    model, endings = Net(), ["bias", "encoder.3.weight"]
    spared = [n for n, _ in model.named_parameters() if (n in endings if wrong else any(e in n for e in endings))]
    spared = [n for n in spared if n != "encoder.3.weight"] if wrong else spared
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n not in spared], "weight_decay": 0.05},
        {"params": [named[n] for n in spared], "weight_decay": 0.0},
    ]
    return Trainer(model, vectors(64), torch.optim.AdamW(groups, 1e-3), 1).fit(2)


@case(
    "an option of a group is misspelt and the optimizer does not know it", "loop", words="option|know|effect",
    source="mt-dnn 37",
)  # fmt: skip
def unknown_option(wrong: bool) -> Monitor:
    model = Net()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    key = "weight_decay_rate" if wrong else "weight_decay"
    groups: list[dict[str, Any]] = [{"params": matrices, key: 0.1}, {"params": others, key: 0.0}]
    return Trainer(model, vectors(64), torch.optim.AdamW(groups, 1e-3), 1).fit(2)


@case(
    "the rate of a thawed group is an integer division", "loop", "update", words="rate|lr|zero|not land", at=9,
    source="discriminative learning rates",
)  # fmt: skip
def rate_divided_to_zero(wrong: bool) -> Monitor:
    class Thawing(Trainer):
        model: Net

        def epoch(self, epoch: int) -> None:
            if epoch == 1:
                self.model.encoder.requires_grad_(True)
                rate = 1 // 100 if wrong else 1 / 100
                self.optimizer.add_param_group({"params": self.model.encoder.parameters(), "lr": rate})
            super().epoch(epoch)

    model = Net()
    model.encoder.requires_grad_(False)
    return Thawing(model, vectors(64), torch.optim.SGD(model.head.parameters(), 0.1), 1).fit(2)


@case(
    "a lambda of a schedule returns the rate where it should return a factor", "loop", words="rate|factor|lambda",
    source="PyTorch forum: LambdaLR",
)  # fmt: skip
def rate_squared(wrong: bool) -> Monitor:
    model, rate = Net(), 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def warm(step: int) -> float:
        factor = min(1.0, (step + 1) / 4)
        return rate * factor if wrong else factor

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm)

    class Scheduled(Trainer):
        def step(self) -> None:
            super().step()
            schedule.step()

    return Scheduled(model, vectors(64), optimizer, 1).fit(2)


@case(
    "the betas of Adam are swapped", "loop", words="beta", source="betas=(0.999, 0.9)",
)  # fmt: skip
def swapped_betas(wrong: bool) -> Monitor:
    model = Net()
    betas = (0.999, 0.9) if wrong else (0.9, 0.999)
    return Trainer(model, vectors(64), torch.optim.AdamW(model.parameters(), 1e-3, betas=betas), 1).fit(2)


@case(
    "an optimizer returns inside of the loop over its groups", "update", "loop", words="not land|did not|skip|not step",
    source="an indentation error",
)  # fmt: skip
def returns_after_first_group(wrong: bool) -> Monitor:
    class Momentum(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(p.grad)
                    p.add_(buffer, alpha=-group["lr"])
                if wrong:
                    return

    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": model.encoder.parameters()},
        {"params": model.head.parameters(), "lr": 0.05},
    ]
    return Trainer(model, vectors(64), Momentum(groups, lr=0.02, momentum=0.9), 1).fit(2)


@case(
    "an average subtracts where it should add and runs away from the weights", *ANY, words="average|copy", at=3,
    source="ai-toolkit 1034",
)  # fmt: skip
def average_runs_away(wrong: bool) -> Monitor:
    model = Net()
    shadow = copy.deepcopy(model).requires_grad_(False).eval()

    class Averaging(Trainer):
        def step(self) -> None:
            super().step()
            with torch.no_grad():
                for s, p in zip(shadow.parameters(), self.model.parameters(), strict=True):
                    gap = s - p
                    if wrong:
                        s.add_(gap * 0.05)
                    else:
                        s.sub_(gap * 0.05)

        def evaluate(self) -> None:
            with torch.no_grad():
                shadow(next(iter(self.loader))[0])

    return Averaging(model, vectors(64), torch.optim.AdamW(model.parameters(), 3e-3), 1).fit(3)


@case(
    "an average is overwritten by the model at the end of every epoch", *ANY, words="average|copy|overwr", at=8,
    source="yolov5 8979",
)  # fmt: skip
def average_overwritten(wrong: bool) -> Monitor:
    model = Net()
    shadow = copy.deepcopy(model).requires_grad_(False).eval()

    class Averaging(Trainer):
        def step(self) -> None:
            super().step()
            with torch.no_grad():
                for s, p in zip(shadow.parameters(), self.model.parameters(), strict=True):
                    s.lerp_(p, 0.02)

        def evaluate(self) -> None:
            if wrong:
                shadow.load_state_dict(self.model.state_dict())
            with torch.no_grad():
                shadow(next(iter(self.loader))[0])

    return Averaging(model, vectors(64), torch.optim.AdamW(model.parameters(), 3e-3), 1).fit(4)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


def adapted(scale: float) -> Net:
    """Return a classifier with adapters in its encoder."""
    model = Net()
    model.requires_grad_(False)
    model.encoder[0] = Adapted(model.encoder[0], 4, scale)  # type: ignore[arg-type]
    model.encoder[2] = Adapted(model.encoder[2], 4, scale)  # type: ignore[arg-type]
    return model


@case(
    "the scale of an adapter is an integer division and zero", "gradient", "loop", words="zero|no gradient|scale",
    source="alpha // rank",
)  # fmt: skip
def adapter_scaled_to_zero(wrong: bool) -> Monitor:
    model = adapted(2 // 4 if wrong else 2 / 4)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    return Trainer(model, vectors(64), optimizer, 1).fit(2)


@case(
    "a new head is frozen together with the base", "loop", words="frozen|head", how="intent",
    source="PEFT without modules_to_save", why="Which tensors are frozen is a choice; the start-up line counts them.",
)  # fmt: skip
def head_frozen(wrong: bool) -> Monitor:
    model = adapted(0.5)
    model.head = nn.Linear(16, 5)
    if wrong:
        model.head.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    return Trainer(model, vectors(64), optimizer, 1).fit(2)


@case(
    "modules that were thawed are frozen again by a resume", "loop", words="frozen|requires_grad|trained", at=9,
    source="Lightning 21901",
)  # fmt: skip
def frozen_by_resume(wrong: bool) -> Monitor:
    data = vectors(64)
    x, y = data.tensors

    def build() -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        model.encoder.requires_grad_(False)
        return model, torch.optim.AdamW(model.head.parameters(), 1e-3)

    def thaw(model: Net, optimizer: torch.optim.Optimizer, *, flags: bool = True) -> None:
        if flags:
            model.encoder.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.encoder.parameters()), "lr": 1e-4})

    def steps(model: Net, optimizer: torch.optim.Optimizer, monitor: Monitor, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()

    model, optimizer = build()
    with Monitor(model, optimizer) as first:
        steps(model, optimizer, first, 3)
        thaw(model, optimizer)
        steps(model, optimizer, first, 5)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        side = first.state_dict()
    model, optimizer = build()
    thaw(model, optimizer, flags=not wrong)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with Monitor(model, optimizer) as monitor:
        monitor.load_state_dict(side)
        steps(model, optimizer, monitor, 4)
    return monitor


@case(
    "running means of features are plain attributes and a resume has not got them", *ANY,
    words="not restored|not what|register|buffer|attribute", at=1, source="normalisers without register_buffer",
)  # fmt: skip
def plain_statistics(wrong: bool) -> Monitor:
    class Normalising(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            if wrong:
                self.mean = torch.zeros(10)
            else:
                self.register_buffer("mean", torch.zeros(10))
            self.net = Net(drop=0.0)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0), 0.2)
            return self.net(x - self.mean)

    data = vectors(64)
    loader = DataLoader(data, batch_size=8)
    side: Any = None
    saved: Any = None
    for _ in range(2):
        model = Normalising()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        with Monitor(model, optimizer) as monitor:
            if side is not None:
                monitor.load_state_dict(side)
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x + 1), y).backward()
                optimizer.step()
                monitor.step()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            side = monitor.state_dict()
    return monitor


@case(
    "every step begins with the same seed", "loop", words="random|seed", source="seed_everything() in training_step",
)  # fmt: skip
def seeded_every_step(wrong: bool) -> Monitor:
    class Seeded(Trainer):
        def loss(self, batch: Any) -> Tensor:
            if wrong or self.steps == 0:
                torch.manual_seed(42)
            return super().loss(batch)

    model = Net(drop=0.3)
    return Seeded(model, vectors(64), torch.optim.AdamW(model.parameters(), 1e-3), 1).fit(2)


@case(
    "hand-written clipping by value has zero for its lower end", *ANY, words="negative|sign|positive|clamp|clip",
    source="p.grad.clamp_(0, 1)",
)  # fmt: skip
def clamped_from_zero(wrong: bool) -> Monitor:
    class Clamping(Trainer):
        def step(self) -> None:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.clamp_(0.0 if wrong else -1.0, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.step()

    model = Net()
    return Clamping(model, vectors(64), torch.optim.SGD(model.parameters(), 0.1), 1).fit(2)


@case(
    "gradients that were turned for an adversary are stepped by the model's optimizer", *ANY,
    words="sign|turned|uphill|negat|against|opposite|-1|not the gradient|code between",
    source="p.grad.neg_() in a shared loop",
)  # fmt: skip
def turned_gradients(wrong: bool) -> Monitor:
    class Turning(Trainer):
        def step(self) -> None:
            if wrong:
                for p in self.model.parameters():
                    assert p.grad is not None
                    p.grad.neg_()
            super().step()

    model = Net()
    return Turning(model, vectors(64), torch.optim.AdamW(model.parameters(), 1e-3), 1).fit(2)


@case(
    "the gradient of an adversarial attack stays in that of the step", *ANY, words="zero_grad|pass|attack|two|left",
    source="FGSM loops that clear gradients before the attack",
)  # fmt: skip
def attack_stays(wrong: bool) -> Monitor:
    data, model = vectors(96), Net(drop=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for x, y in DataLoader(data, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            x = x.requires_grad_()
            F.cross_entropy(model(x), y).backward()
            assert x.grad is not None
            changed = (x + 0.1 * x.grad.sign()).detach()
            if not wrong:
                optimizer.zero_grad()
            F.cross_entropy(model(changed), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "hooks of guided backpropagation stay on the rectifiers", *ANY, words="gradient|hook",
    source="saliency maps made in mid-run", at=3,
)  # fmt: skip
def guided_hooks_stay(wrong: bool) -> Monitor:
    data, model = vectors(96), Net(drop=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def positive(module: nn.Module, given: Any, coming: Any) -> tuple[Tensor, ...]:
        return (given[0].clamp(min=0),)

    with Monitor(model, optimizer) as monitor:
        for number, (x, y) in enumerate(DataLoader(data, batch_size=12, shuffle=True), 1):
            if number == 3:
                handles = [m.register_full_backward_hook(positive) for m in model.modules() if isinstance(m, nn.ReLU)]
                model.eval()
                torch.autograd.grad(model(x.requires_grad_()).sum(), x)
                model.train()
                if not wrong:
                    for handle in handles:
                        handle.remove()
            optimizer.zero_grad()
            F.cross_entropy(model(x.detach()), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "a hook that keeps features returns them detached", *ANY, words="gradient|detach", at=3,
    source="feature extraction by forward hooks",
)  # fmt: skip
def hook_returns_detached(wrong: bool) -> Monitor:
    data, model, saved = vectors(96), Net(drop=0.0), []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def keep(module: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        saved.append(output.detach())
        return saved[-1] if wrong else None

    with Monitor(model, optimizer) as monitor:
        for number, (x, y) in enumerate(DataLoader(data, batch_size=12, shuffle=True), 1):
            if number == 3:
                model.encoder.register_forward_hook(keep)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "weight norm is put on after the optimizer was made", "loop", words="no optimizer|hold", source="PyTorch forum",
)  # fmt: skip
def weight_norm_late(wrong: bool) -> Monitor:
    model = Net()
    make = lambda: torch.optim.AdamW(model.parameters(), 1e-3)  # noqa: E731
    optimizer = make() if wrong else None
    nn.utils.parametrizations.weight_norm(model.head)
    return Trainer(model, vectors(64), optimizer or make(), 1).fit(2)


@case(
    "a compiled loop clears gradients of the wrong object", "loop", words="zero_grad", at=2,
    source="torch.compile and a second optimizer",
)  # fmt: skip
def compiled_not_cleared(wrong: bool) -> Monitor:
    model = Net(drop=0.0)
    compiled: Any = torch.compile(model, backend="aot_eager")
    old = torch.optim.SGD(copy.deepcopy(model).parameters(), 0.05)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with Monitor(model, optimizer) as monitor:
        for x, y in DataLoader(vectors(64), batch_size=8):
            (old if wrong else optimizer).zero_grad()
            F.cross_entropy(compiled(x), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "a language model in autocast clips by a maximum that is divided by the micro-batches", "loop",
    words="clip", how="intent", why="A maximum is a number that somebody chose.", source="",
)  # fmt: skip
def clipped_too_much(wrong: bool) -> Monitor:
    model, (rows,) = Decoder(), text().tensors
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            for part in rows[torch.randperm(48)[:8]].chunk(2):
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(part[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten()) / 2
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1 / 2000 if wrong else 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    return monitor


@case(
    "an infinite iterator of a loader is made anew in every step and gives its first batch", "loop",
    words="batch", how="default", source="next(iter(loader))",
)  # fmt: skip
def iterator_made_anew(wrong: bool) -> Monitor:
    model, loader = Net(), DataLoader(vectors(64), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()
    with Monitor(model, optimizer) as monitor:
        for _ in range(12):
            x, y = next(iter(loader)) if wrong else next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "noise of gradients is added after the norm was clipped, and grows", *ANY, words="gradient|noise", how="intent",
    why="Noise on gradients is a method.", source="",
)  # fmt: skip
def noise_after_clipping(wrong: bool) -> Monitor:
    class Noisy(Trainer):
        def step(self) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for p in self.model.parameters():
                assert p.grad is not None
                p.grad.add_(torch.randn_like(p.grad), alpha=1e-3 * (50**self.steps if wrong else 1))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            self.monitor.step()

    model = Net()
    return Noisy(model, vectors(64), torch.optim.SGD(model.parameters(), 0.05), 1).fit(1)


@case(
    "a callback puts one weight back after every step", "update", words="does not last|not land", at=1,
    source="TrainCheck's later list: MPS",
)  # fmt: skip
def weight_put_back(wrong: bool) -> Monitor:
    class Restoring(Trainer):
        model: Net

        def step(self) -> None:
            saved = self.model.head.weight.detach().clone()
            self.optimizer.step()
            if wrong:
                self.model.head.weight.data.copy_(saved)
            self.optimizer.zero_grad()
            self.monitor.step()

    model = Net()
    return Restoring(model, vectors(64), torch.optim.AdamW(model.parameters(), 1e-3), 1).fit(1)
