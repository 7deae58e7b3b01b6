"""Correct loops that look like errors: none of them raises an alarm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import batch, mlp
from error_programs.models import ConvNet, Decoder, tokens

LOOPS: list[Callable[[], Monitor]] = []


def loop(program: Callable[[], Monitor]) -> Callable[[], Monitor]:
    LOOPS.append(program)
    return program


def _train(
    model: nn.Module,
    optimizer: Any,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    *,
    steps: int = 6,
    kind: str = "vectors",
    after: Callable[[int], None] = lambda number: None,
) -> Monitor:
    with Monitor(model, optimizer) as monitor:
        for number in range(1, steps + 1):
            x, y = batch(kind)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            after(number)
            monitor.step()
    return monitor


class WithPooler(nn.Module):
    """Has a head that runs and whose output the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler, self.head = mlp(24), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.head(y), torch.tanh(self.pooler(y))


@loop
def an_unused_head() -> Monitor:
    model = WithPooler()
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), lambda out, y: F.cross_entropy(out[0], y))


class Sampling(nn.Module):
    """Draws random numbers in eval mode as well, as variational autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.a(x).chunk(2, -1)
        return self.b(mean + spread.exp() * torch.randn_like(mean))


def _evaluate(model: nn.Module, number: int, *, sampled: bool = False) -> None:
    if number == 3:
        model.eval()
        for module in model.modules():
            if sampled and isinstance(module, nn.Dropout):
                module.train()
        with torch.no_grad():
            for _ in range(3):
                model(batch()[0])
        model.train()


@loop
def sampling_in_evaluations() -> Monitor:
    model = Sampling()
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), after=lambda n: _evaluate(model, n))


@loop
def dropout_that_is_left_on_to_sample() -> Monitor:
    model = mlp(drop=0.2)
    return _train(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), after=lambda n: _evaluate(model, n, sampled=True)
    )


@loop
def brier_score_of_probabilities() -> Monitor:
    model = nn.Sequential(mlp(), nn.Softmax(-1))
    return _train(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda p, y: F.mse_loss(p, F.one_hot(y, 4).float())
    )


@loop
def likelihood_of_probabilities() -> Monitor:
    model = nn.Sequential(mlp(), nn.Softmax(-1))
    return _train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda p, y: F.nll_loss(p.log(), y))


@loop
def binary_cross_entropy_of_probabilities() -> Monitor:
    model = nn.Sequential(mlp(), nn.Sigmoid())
    return _train(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda p, y: F.binary_cross_entropy(p, F.one_hot(y, 4).float()),
    )


@loop
def warm_up_from_zero() -> Monitor:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 3))
    return _train(model, optimizer, after=lambda n: scheduler.step())


@loop
def schedulers_in_a_row() -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kinds = torch.optim.lr_scheduler
    parts: list[Any] = [kinds.LinearLR(optimizer, 0.1, total_iters=3), kinds.CosineAnnealingLR(optimizer, 10)]
    scheduler = kinds.SequentialLR(optimizer, parts, [3])
    return _train(model, optimizer, steps=8, after=lambda n: scheduler.step())


@loop
def gradients_combined_by_hand() -> Monitor:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            saved = []
            for _ in range(3):
                x, y = batch()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                saved.append([p.grad.clone() for p in model.parameters()])
            sizes = [float(torch.cat([g.flatten() for g in gradients]).norm()) for gradients in saved]
            for p, *gradients in zip(model.parameters(), *saved, strict=True):
                p.grad = sum(g / size for g, size in zip(gradients, sizes, strict=True))
            optimizer.step()
            monitor.step()
    return monitor


@loop
def a_generator_and_a_critic() -> Monitor:
    generator: Any = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))
    critic: Any = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    first, second = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in (critic, generator))
    with Monitor(model, [first, second]) as monitor:
        for _ in range(6):
            for _ in range(2):
                first.zero_grad()
                fake = generator(torch.randn(8, 4)).detach()
                (F.softplus(-critic(torch.randn(8, 6))) + F.softplus(critic(fake))).mean().backward()
                first.step()
            second.zero_grad()
            F.softplus(-critic(generator(torch.randn(8, 4)))).mean().backward()
            second.step()
            monitor.step()
    return monitor


@loop
def a_target_network() -> Monitor:
    model = mlp()
    target = copy.deepcopy(model).requires_grad_(False)

    def follow(number: int) -> None:
        with torch.no_grad():
            for a, b in zip(target.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.005)
            if number % 3 == 0:
                target.load_state_dict(model.state_dict())

    return _train(model, torch.optim.Adam(model.parameters(), lr=1e-3), steps=8, after=follow)


@loop
def a_slow_average() -> Monitor:
    model = Decoder()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9999)
    )
    mirror = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(10):
            x, y = tokens()
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                for a, b in zip(mirror.parameters(), model.parameters(), strict=True):
                    a.mul_(0.9999).add_(b, alpha=1e-4)
            monitor.step()
    return monitor


class Experts(nn.Module):
    """Routes every example to one of many experts, most of which get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 16)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.router(x).softmax(-1).max(-1)
        y = torch.zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (index == number).nonzero().flatten()
            y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return y


@loop
def idle_experts() -> Monitor:
    model = Experts()
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), steps=8)


class Gated(nn.Module):
    """Starts every branch at zero, as zero-initialised residuals do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.gain = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + F.gelu(self.b(F.gelu(self.a(x)))) + self.gain * torch.sin(x))


@loop
def branches_that_start_at_zero() -> Monitor:
    model = Gated()
    return _train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), steps=8)


@loop
def batch_norms_frozen_in_mid_run() -> Monitor:
    model = ConvNet()
    model.dropout = nn.Dropout(0.1)

    def freeze(number: int) -> None:
        if number == 3:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

    return _train(model, torch.optim.SGD(model.parameters(), lr=0.05), kind="images", after=freeze)


@loop
def a_backbone_with_a_new_head_is_loaded() -> Monitor:
    state = {key: value for key, value in mlp().state_dict().items() if not key.startswith("5.")}
    state["classifier.weight"] = torch.randn(7, 12)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, optimizer)
    model.load_state_dict(state, strict=False)
    monitor.close()
    return _train(model, optimizer)


@loop
def a_margin_that_all_examples_keep_for_a_while() -> Monitor:
    model = mlp()
    margins = iter((9.0, 9.0, 0.0, 0.0, 9.0, 9.0))

    def hinge(out: Tensor, y: Tensor) -> Tensor:
        return (next(margins) - out.square().sum(-1)).clamp_min(0).mean()

    return _train(model, torch.optim.SGD(model.parameters(), lr=0.01), hinge)


class Own(torch.optim.Optimizer):
    """A hand-written optimizer that keeps its rate as an attribute as well."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.lr = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.sub_(mean.sign() * group["lr"])


@loop
def a_hand_written_optimizer_with_a_schedule() -> Monitor:
    model = mlp()
    optimizer = Own(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return _train(model, optimizer, steps=8, after=lambda n: scheduler.step())


@loop
def hidden_references_to_modules() -> Monitor:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = mlp()
            self.teachers = [mlp()]

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                hint = self.teachers[0](x)
            return self.student(x) + 0.1 * hint

    model = Distilled()
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@loop
def a_policy_that_is_updated_in_every_other_step() -> Monitor:
    model = nn.ModuleDict({"policy": nn.Linear(6, 2), "critic": nn.Linear(8, 1)})
    critic = torch.optim.Adam(model["critic"].parameters(), lr=1e-3)
    policy = torch.optim.Adam(model["policy"].parameters(), lr=1e-3)
    with Monitor(model, [policy, critic]) as monitor:
        for number in range(12):
            s, a = torch.randn(8, 6), torch.randn(8, 2)
            critic.zero_grad()
            model["critic"](torch.cat([s, a], 1)).square().mean().backward()
            critic.step()
            if number % 2:
                policy.zero_grad()
                (-model["critic"](torch.cat([s, model["policy"](s)], 1))).mean().backward()
                policy.step()
            monitor.step()
    return monitor


@loop
def gradients_of_a_generator_are_accumulated_over_steps_of_the_critic() -> Monitor:
    model = nn.ModuleDict({"generator": nn.Linear(4, 6), "critic": mlp()})
    critic = torch.optim.Adam(model["critic"].parameters(), lr=1e-3)
    generator = torch.optim.Adam(model["generator"].parameters(), lr=1e-3)
    with Monitor(model, [critic, generator]) as monitor:
        for number in range(12):
            critic.zero_grad()
            model["critic"](model["generator"](torch.randn(8, 4)).detach()).square().mean().backward()
            critic.step()
            model["critic"].requires_grad_(False)
            (model["critic"](model["generator"](torch.randn(8, 4))).mean() / 4).backward()
            model["critic"].requires_grad_(True)
            if number % 4 == 3:
                generator.step()
                generator.zero_grad()
            monitor.step()
    return monitor


@loop
def a_second_head_is_trained_in_the_first_steps_only() -> Monitor:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = mlp(), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            return torch.stack([self.first(h), self.second(h)])

    model, steps = Heads(), iter(range(20))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        first = F.cross_entropy(out[0], y)
        return first + F.cross_entropy(out[1], y) if next(steps) < 4 else first

    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, steps=10)


@loop
def a_rate_of_a_tenth_that_decays_by_ten() -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10) * 0.1 ** (n // 10))
    return _train(model, optimizer, steps=16, after=lambda n: scheduler.step())


@loop
def a_checkpoint_with_some_tensors_is_loaded_over_the_rest() -> Monitor:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _train(model, optimizer)
    state = model.state_dict()
    state["5.bias"] = torch.zeros(4)
    model.load_state_dict(state)
    return _train(model, optimizer)


@loop
def an_average_that_begins_as_a_copy_and_is_reset_before_it() -> Monitor:
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def follow(number: int) -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 1.0 if number < 4 else 0.1)

    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), steps=9, after=follow)


@loop
def options_of_groups_for_the_program_itself() -> Monitor:
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "name": "first", "lr_scale": 0.5, "wd_mult": 0.0, "decay": 0.1},
        {"params": [*model[3].parameters(), *model[5].parameters()], "name": "rest", "lr_scale": 1.0},
    ]
    return _train(model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.95, 0.9)))


@loop
def random_numbers_that_are_the_same_in_every_step() -> Monitor:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return self.body(x + 0.1 * torch.randn_like(x))

    model = Noisy()
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@loop
def one_row_of_an_embedding_is_trained_and_the_others_are_put_back() -> Monitor:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            x, y = tokens()
            saved = model.embedding.weight.detach().clone()
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            with torch.no_grad():
                model.embedding.weight[1:] = saved[1:]
            monitor.step()
    return monitor


@loop
def a_step_that_makes_the_loss_worse_is_taken_back() -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    with Monitor(model, optimizer) as monitor:
        for _ in range(8):
            x, y = batch("vectors")
            saved = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                if float(F.cross_entropy(model(x), y)) > float(loss):
                    for name, p in model.named_parameters():
                        p.copy_(saved[name])
            monitor.step()
    return monitor


class Stateful(nn.Module):
    """A language model that keeps its hidden state from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(11, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, 11)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = self.state if self.state is not None and self.state.shape[1] == len(x) else None
        out, state = self.cell(self.embedding(x), state)
        self.state = state.detach()
        return self.head(out)


@loop
def a_recurrent_state_that_lasts_over_batches() -> Monitor:
    model = Stateful()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            text = torch.randint(11, (4, 9))
            optimizer.zero_grad()
            F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            monitor.step()
    return monitor


@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
def test_a_right_loop_raises_no_alarm(program: Callable[[], Monitor]) -> None:
    torch.manual_seed(0)
    assert [str(alarm) for alarm in program().alarms] == []
