"""Correct training programs of many kinds, in any precision, for a monitor to leave alone.

A program builds everything from the current seed and returns what it trains and a function that makes one step and
returns its loss, so that it can be run twice, with a monitor and without, and its losses compared bit for bit.
"""
# Programs are named after what they run.

from __future__ import annotations

import copy
import io
import math
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

IN, OUT, BATCH = 6, 5, 8


@dataclass(slots=True)
class Training:
    """What a program trains, and one step of it."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    step: Callable[[], Tensor]
    resources: list[Any] = field(default_factory=list)
    """What has to live as long as the program."""


Program = Callable[[torch.dtype], Training]
PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    """Register a program under the name of its function."""
    PROGRAMS[build.__name__.replace("_", " ")] = build
    return build


def mlp(dtype: torch.dtype, width: int = 12, out: int = OUT) -> nn.Sequential:
    layers = (nn.Linear(IN, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(width, out)).to(dtype)


def vectors(dtype: torch.dtype, count: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(count, IN).to(dtype), torch.randint(OUT, (count,))


def classify(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def usual(
    model: nn.Module, optimizer: Optimizer, loss: Callable[[], Tensor], after: Callable[[], None] = lambda: None
) -> Training:
    """Build the loop of zero_grad, backward and step, with something after it."""

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        after()
        return value.detach()

    return Training(model, [optimizer], step)


def simple(
    dtype: torch.dtype, make: Callable[[Any], Optimizer], after: Callable[[nn.Module], None] | None = None
) -> Training:
    """Build a classifier with an optimizer of a kind."""
    model = mlp(dtype)
    return usual(
        model,
        make(model.parameters()),
        lambda: classify(model, *vectors(dtype)),
        (lambda: None) if after is None else (lambda: after(model)),
    )


# Several optimizers


@program
def two_optimizers_for_parts(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    body, head = SGD(model[:5].parameters(), lr=0.05, momentum=0.9), AdamW(model[5].parameters(), lr=3e-3)

    def step() -> Tensor:
        for one in (body, head):
            one.zero_grad()
        loss = classify(model, *vectors(dtype))
        loss.backward()
        body.step()
        head.step()
        return loss.detach()

    return Training(model, [body, head], step)


@program
def matrices_by_muon_and_the_rest_by_adam(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=1e-2)
    adam = AdamW([p for p in model.parameters() if p.ndim < 2], lr=3e-3)

    def step() -> Tensor:
        loss = classify(model, *vectors(dtype))
        loss.backward()
        for one in (muon, adam):
            one.step()
            one.zero_grad()
        return loss.detach()

    return Training(model, [muon, adam], step)


@program
def sparse_and_dense_parameters(dtype: torch.dtype) -> Training:
    model = nn.ModuleDict({"table": nn.Embedding(20, IN, sparse=True), "body": mlp(dtype)}).to(dtype)
    sparse, dense = torch.optim.SparseAdam(model["table"].parameters(), lr=1e-2), AdamW(model["body"].parameters())

    def step() -> Tensor:
        sparse.zero_grad()
        dense.zero_grad()
        loss = classify(lambda t: model["body"](model["table"](t)), torch.randint(20, (BATCH,)), vectors(dtype)[1])
        loss.backward()
        sparse.step()
        dense.step()
        return loss.detach()

    return Training(model, [sparse, dense], step)


class Adversaries(nn.Module):
    """A generator and a discriminator with spectral norms."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, IN)).to(dtype)
        self.discriminator = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(IN, 12)), nn.LeakyReLU(0.2), nn.Linear(12, 1)
        ).to(dtype)

    def forward(self, z: Tensor) -> Tensor:
        return self.discriminator(self.generator(z))


@program
def adversarial_pair_with_spectral_norms(dtype: torch.dtype) -> Training:
    model = Adversaries(dtype)
    first, second = Adam(model.generator.parameters(), lr=1e-3), Adam(model.discriminator.parameters(), lr=1e-3)

    def step() -> Tensor:
        second.zero_grad()
        fake = model.generator(torch.randn(BATCH, 4).to(dtype)).detach()
        loss = F.softplus(model.discriminator(fake)).mean() + F.softplus(-model.discriminator(vectors(dtype)[0])).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        own = F.softplus(-model(torch.randn(BATCH, 4).to(dtype))).mean()
        own.backward()
        first.step()
        return (loss + own).detach()

    return Training(model, [first, second], step)


@program
def critic_with_clamped_weights(dtype: torch.dtype) -> Training:
    generator = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, IN)).to(dtype)
    critic = mlp(dtype, out=1)
    first, second = (
        torch.optim.RMSprop(generator.parameters(), lr=1e-3),
        torch.optim.RMSprop(critic.parameters(), lr=1e-3),
    )

    def step() -> Tensor:
        for _ in range(2):
            second.zero_grad()
            fake = generator(torch.randn(BATCH, 4).to(dtype)).detach()
            loss = critic(fake).mean() - critic(vectors(dtype)[0]).mean()
            loss.backward()
            second.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.3, 0.3)
        first.zero_grad()
        (-critic(generator(torch.randn(BATCH, 4).to(dtype))).mean()).backward()
        first.step()
        return loss.detach()

    return Training(critic, [second], step, [generator, first])


@program
def actor_and_critic_with_soft_targets(dtype: torch.dtype) -> Training:
    model = nn.ModuleDict(
        {"actor": mlp(dtype, out=2), "critic": nn.Sequential(nn.Linear(IN + 2, 12), nn.ReLU(), nn.Linear(12, 1))}
    )
    model.to(dtype)
    target = copy.deepcopy(model["critic"])
    first, second = Adam(model["actor"].parameters(), lr=1e-3), Adam(model["critic"].parameters(), lr=1e-3)

    def step() -> Tensor:
        x, after = vectors(dtype)[0], vectors(dtype)[0]
        action = torch.tanh(model["actor"](x)).detach()
        with torch.no_grad():
            goal = action.sum(1, keepdim=True) + 0.9 * target(torch.cat((after, torch.tanh(model["actor"](after))), 1))
        second.zero_grad()
        loss = F.mse_loss(model["critic"](torch.cat((x, action), 1)), goal)
        loss.backward()
        second.step()
        first.zero_grad()
        (-model["critic"](torch.cat((x, torch.tanh(model["actor"](x))), 1)).mean()).backward()
        first.step()
        with torch.no_grad():
            for slow, p in zip(target.parameters(), model["critic"].parameters(), strict=True):
                slow.lerp_(p, 0.05)
        return loss.detach()

    return Training(model, [first, second], step)


# Experts, accumulation, averages


class Experts(nn.Module):
    """A layer of experts of limited capacity: tokens beyond it are dropped."""

    def __init__(self, width: int = 8, experts: int = 4, capacity: int = 3) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(width, experts), capacity
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = x
        for index, expert in enumerate(self.experts):
            indices = (chosen == index).nonzero()[: self.capacity, 0]
            if len(indices):
                out = out.index_add(0, indices, weights[indices, None] * expert(x[indices]))
        return out


@program
def experts_that_drop_tokens(dtype: torch.dtype) -> Training:
    model = nn.Sequential(nn.Linear(IN, 8), Experts(), nn.LayerNorm(8), nn.Linear(8, OUT)).to(dtype)
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype, 16)))


@program
def accumulation_over_uneven_batches(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = AdamW(model.parameters(), lr=3e-3)

    def step() -> Tensor:
        sizes = [int(n) for n in torch.randint(1, 9, (int(torch.randint(1, 5, ())),))]
        total = torch.zeros(())
        for size in sizes:
            loss = F.cross_entropy(model((data := vectors(dtype, size))[0]).float(), data[1], reduction="sum") / sum(
                sizes
            )
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Training(model, [optimizer], step)


@program
def exponential_average_by_hand(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    average = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    def update() -> None:
        for name, p in model.named_parameters():
            average[name].mul_(0.9).add_(p.detach().float(), alpha=0.1)

    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)), update)


@program
def average_swapped_in_for_evaluation(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    average = [p.detach().clone() for p in model.parameters()]

    def swap() -> None:
        with torch.no_grad():
            for slow, p in zip(average, model.parameters(), strict=True):
                slow.lerp_(p, 0.1)
            saved = [p.detach().clone() for p in model.parameters()]
            for slow, p in zip(average, model.parameters(), strict=True):
                p.copy_(slow)
            model.eval()
            model(vectors(dtype)[0])
            model.train()
            for old, p in zip(saved, model.parameters(), strict=True):
                p.copy_(old)

    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)), swap)


@program
def stochastic_weight_averaging(dtype: torch.dtype) -> Training:
    model = nn.Sequential(nn.Linear(IN, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, OUT)).to(dtype)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    average, schedule, count = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=3), [0]

    def update() -> None:
        count[0] += 1
        if count[0] > 10 and count[0] % 2:
            average.update_parameters(model)
            schedule.step()
        if count[0] % 15 == 0:
            torch.optim.swa_utils.update_bn([vectors(dtype)[0] for _ in range(3)], average)

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), update)


# Adapters, other optimizers


class Adapted(nn.Module):
    """A frozen linear map with trained factors of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


@program
def adapters_of_low_rank(dtype: torch.dtype) -> Training:
    model = nn.Sequential(Adapted(nn.Linear(IN, 12)), nn.GELU(), Adapted(nn.Linear(12, OUT))).to(dtype)
    return usual(
        model,
        AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        lambda: classify(model, *vectors(dtype)),
    )


@program
def adapters_merged_now_and_then(dtype: torch.dtype) -> Training:
    layers = (Adapted(nn.Linear(IN, 12)), Adapted(nn.Linear(12, OUT)))
    model = nn.Sequential(layers[0], nn.GELU(), layers[1]).to(dtype)
    count = [0]

    def merge() -> None:
        count[0] += 1
        if count[0] % 10 == 0:
            with torch.no_grad():
                for layer in layers:
                    layer.base.weight += 2.0 * layer.up.weight @ layer.down.weight
                    nn.init.kaiming_uniform_(layer.down.weight, a=math.sqrt(5))
                    layer.up.weight.zero_()

    trained = [p for p in model.parameters() if p.requires_grad]
    return usual(model, AdamW(trained, lr=1e-2), lambda: classify(model, *vectors(dtype)), merge)


class Lion(Optimizer):
    """Steps by the sign of an interpolated momentum."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((momentum * group["betas"][0] + p.grad * (1 - group["betas"][0])).sign(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - group["betas"][1])


class ScheduleFree(Optimizer):
    """Gradient descent whose evaluation point is an average of its iterates; gradients are taken in between."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                x = self.state[p].setdefault("x", p.detach().clone())
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / self.count)
                p.copy_(z.lerp(x, group["beta"]))


class Lookahead:
    """Slow weights that follow the fast ones every few steps; the momentum begins again then."""

    def __init__(self, optimizer: Optimizer, every: int = 5, *, reset: bool = False) -> None:
        self.optimizer, self.every, self.reset, self.count = optimizer, every, reset, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.every == 0:
            for group, slow in zip(self.optimizer.param_groups, self.slow, strict=True):
                for p, old in zip(group["params"], slow, strict=True):
                    old.lerp_(p, 0.5)
                    p.copy_(old)
            if self.reset:
                for state in self.optimizer.state.values():
                    for key, value in state.items():
                        if key != "step" and isinstance(value, Tensor):
                            value.zero_()


def looking_ahead(dtype: torch.dtype, *, reset: bool) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    ahead = Lookahead(optimizer, reset=reset)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, *vectors(dtype))
        loss.backward()
        ahead.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def lookahead(dtype: torch.dtype) -> Training:
    return looking_ahead(dtype, reset=False)


@program
def lookahead_that_resets_momentum(dtype: torch.dtype) -> Training:
    return looking_ahead(dtype, reset=True)


@program
def lion_of_its_own(dtype: torch.dtype) -> Training:
    return simple(dtype, lambda p: Lion(p, lr=1e-3))


@program
def schedule_free_of_its_own(dtype: torch.dtype) -> Training:
    return simple(dtype, lambda p: ScheduleFree(p))


@program
def adafactor(dtype: torch.dtype) -> Training:
    return simple(dtype, lambda p: torch.optim.Adafactor(p, lr=1e-2))


@program
def line_search_of_lbfgs(dtype: torch.dtype) -> Training:
    model = mlp(torch.float32)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        data = vectors(torch.float32, 32)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = classify(model, *data)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Training(model, [optimizer], step)


@program
def sharpness_aware(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step() -> Tensor:
        data = vectors(dtype)
        classify(model, *data).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm() + 1e-6
            moves = [(p, 0.05 * p.grad / norm) for p in model.parameters() if p.grad is not None]
            for p, move in moves:
                p.add_(move)
        optimizer.zero_grad()
        loss = classify(model, *data)
        loss.backward()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def langevin_noise_after_steps(dtype: torch.dtype) -> Training:
    def shake(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-3 * torch.randn_like(p))

    return simple(dtype, lambda p: SGD(p, lr=0.02), shake)


@program
def decay_by_hand(dtype: torch.dtype) -> Training:
    def decay(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.mul_(1 - 1e-2)

    return simple(dtype, lambda p: SGD(p, lr=0.05), decay)


@program
def projection_onto_a_ball(dtype: torch.dtype) -> Training:
    def project(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                norm = p.norm()
                if norm > 1.5:
                    p.mul_(1.5 / norm)

    return simple(dtype, lambda p: SGD(p, lr=0.05, momentum=0.9), project)


@program
def rows_of_unit_norm(dtype: torch.dtype) -> Training:
    def normalise(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True))  # type: ignore[index]

    return simple(dtype, lambda p: AdamW(p, lr=3e-3), normalise)


# Functional training, compilers


@program
def functional_gradients(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    parameters = dict(model.named_parameters())

    def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)).float(), y)

    def step() -> Tensor:
        values = {name: p.detach() for name, p in parameters.items()}
        gradients, loss = torch.func.grad_and_value(loss_of)(values, *vectors(dtype))
        for name, p in parameters.items():
            p.grad = gradients[name]
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def ensemble_by_vmap(dtype: torch.dtype) -> Training:
    models = [mlp(dtype) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(models)
    base, holder = copy.deepcopy(models[0]).to("meta"), nn.ParameterDict()
    for name, value in stacked.items():
        holder[name.replace(".", "/")] = nn.Parameter(value.detach())
    optimizer = AdamW(holder.parameters(), lr=3e-3)

    def step() -> Tensor:
        x, y = vectors(dtype)
        optimizer.zero_grad()
        values = {name.replace("/", "."): p for name, p in holder.items()}
        out = torch.func.vmap(lambda v: torch.func.functional_call(base, v, (x,)))(values)
        loss = F.cross_entropy(out.flatten(0, 1).float(), y.repeat(3))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(holder, [optimizer], step)


@program
def private_gradients(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05)
    parameters = dict(model.named_parameters())

    def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x[None],)).float(), y[None])

    def step() -> Tensor:
        x, y = vectors(dtype)
        values = {name: p.detach() for name, p in parameters.items()}
        each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(values, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factors = (1.0 / norms).clamp_max(1.0)
        for name, p in parameters.items():
            total = torch.einsum("n,n...->...", factors.to(dtype), each[name])
            p.grad = (total + 0.1 * torch.randn_like(total)) / len(x)
        optimizer.step()
        return classify(model, x, y).detach()

    return Training(model, [optimizer], step)


@program
def scripted_module(dtype: torch.dtype) -> Training:
    model = torch.jit.script(mlp(dtype))
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))


@program
def traced_module(dtype: torch.dtype) -> Training:
    model = torch.jit.trace(mlp(dtype), vectors(dtype)[0])
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))


@program
def compiled_model(dtype: torch.dtype) -> Training:
    plain = mlp(dtype)
    model = torch.compile(plain, backend="aot_eager")
    return usual(model, AdamW(plain.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))  # type: ignore[arg-type]


@program
def compiled_whole_step(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05)

    @torch.compile(backend="eager")
    def step_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, [optimizer], lambda: step_of(*vectors(dtype)))


# Data, checkpoints, structure that changes


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set of random rows."""

    def __init__(self, count: int = 512) -> None:
        self.x, self.y = torch.randn(count, IN), torch.randint(OUT, (count,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


@program
def loader_with_forked_workers(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    batches = endless(DataLoader(Rows(64), BATCH, num_workers=1, multiprocessing_context="fork"))

    def loss() -> Tensor:
        x, y = next(batches)
        return classify(model, x.to(dtype), y)

    return usual(model, AdamW(model.parameters(), lr=3e-3), loss)


@program
def child_process_in_the_loop(dtype: torch.dtype) -> Training:
    def fork(model: nn.Module) -> None:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)

    return simple(dtype, lambda p: AdamW(p, lr=3e-3), fork)


@program
def checkpoints_saved_and_loaded(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    count, saved = [0], io.BytesIO()

    def keep() -> None:
        count[0] += 1
        if count[0] == 10:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        if count[0] == 20:
            saved.seek(0)
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), keep)


@program
def rewound_to_early_weights(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    early, count = copy.deepcopy(model.state_dict()), [0]

    def rewind() -> None:
        count[0] += 1
        if count[0] == 15:
            model.load_state_dict(early)
            optimizer.state.clear()

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), rewind)


@program
def layers_unfrozen_one_by_one(dtype: torch.dtype) -> Training:
    model = mlp(dtype).requires_grad_(False)
    order, count = [5, 3, 2, 0], [0]
    model[5].requires_grad_(True)
    optimizer = AdamW(model.parameters(), lr=3e-3)

    def unfreeze() -> None:
        count[0] += 1
        if count[0] % 8 == 0 and count[0] // 8 < len(order):
            model[order[count[0] // 8]].requires_grad_(True)

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), unfreeze)


@program
def groups_added_when_unfrozen(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    model[:5].requires_grad_(False)
    optimizer, count = AdamW(model[5].parameters(), lr=3e-3), [0]

    def unfreeze() -> None:
        count[0] += 1
        if count[0] == 12:
            model[:5].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[:5].parameters()), "lr": 1e-3})

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), unfreeze)


class Growing(nn.Module):
    """A network that gets further layers while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(IN, 12)]), nn.Linear(12, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


@program
def network_that_grows(dtype: torch.dtype) -> Training:
    model = Growing().to(dtype)
    optimizer, count = AdamW(model.parameters(), lr=3e-3), [0]

    def grow() -> None:
        count[0] += 1
        if count[0] % 12 == 0:
            layer = nn.Linear(12, 12).to(dtype)
            with torch.no_grad():
                layer.weight.copy_(torch.eye(12))
                layer.bias.zero_()
            model.layers.append(layer)
            optimizer.add_param_group({"params": list(layer.parameters())})

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), grow)


@program
def pruned_step_by_step(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer, count = SGD(model.parameters(), lr=0.05, momentum=0.9), [0]
    prune.l1_unstructured(model[0], "weight", 0.2)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)

    def shrink() -> None:
        count[0] += 1
        if count[0] % 10 == 0:
            prune.l1_unstructured(model[0], "weight", 0.2)

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), shrink)


@program
def masks_held_by_hand(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    masks = {id(p): (torch.rand(p.shape) > 0.3).to(dtype) for p in model.parameters() if p.ndim > 1}
    with torch.no_grad():
        for p in model.parameters():
            if id(p) in masks:
                p.mul_(masks[id(p)])

    def mask() -> None:
        with torch.no_grad():
            for p in model.parameters():
                if id(p) in masks:
                    p.mul_(masks[id(p)])

    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)), mask)


class Quantise(torch.autograd.Function):
    """Rounds to a grid and passes the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.detach().abs().max() / 7
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class QuantisedLinear(nn.Linear):
    """A linear map whose weights are rounded in every pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Quantise.apply(self.weight), self.bias)


@program
def quantisation_aware(dtype: torch.dtype) -> Training:
    model = nn.Sequential(QuantisedLinear(IN, 12), nn.ReLU(), QuantisedLinear(12, OUT)).to(dtype)
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))


@program
def binary_weights_by_detaching(dtype: torch.dtype) -> Training:
    class Binary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight + (self.weight.sign() - self.weight).detach()
            return F.linear(x, weight, self.bias)

    model = nn.Sequential(Binary(IN, 12), nn.Hardtanh(), Binary(12, OUT)).to(dtype)
    return usual(model, Adam(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))


@program
def weight_norms(dtype: torch.dtype) -> Training:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(IN, 12)), nn.ReLU(), nn.Linear(12, OUT)).to(dtype)
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))


@program
def orthogonal_weights(dtype: torch.dtype) -> Training:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(IN, IN)), nn.ReLU(), nn.Linear(IN, OUT))
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(torch.float32)))


class WeightStandardised(nn.Conv1d):
    """A convolution whose weights have mean zero and variance one."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2), keepdim=True)
        weight = weight / (weight.std((1, 2), keepdim=True) + 1e-5)
        return F.conv1d(x, weight, self.bias, padding=1)


@program
def standardised_convolutions(dtype: torch.dtype) -> Training:
    model = nn.Sequential(
        WeightStandardised(1, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * IN, OUT)
    ).to(dtype)
    return usual(
        model, AdamW(model.parameters(), lr=3e-3), lambda: classify(lambda x: model(x[:, None]), *vectors(dtype))
    )


# Other forward passes


class Equilibrium(nn.Module):
    """A fixed point whose gradient comes from another fixed point, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.input, self.head = nn.Linear(8, 8), nn.Linear(IN, 8), nn.Linear(8, OUT)
        with torch.no_grad():
            self.inside.weight.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        fed = self.input(x)
        with torch.no_grad():
            z = torch.zeros_like(fed)
            for _ in range(15):
                z = torch.tanh(self.inside(z) + fed)
        z = torch.tanh(self.inside(z) + fed)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            again = torch.tanh(self.inside(start) + fed)

            def solve(gradient: Tensor) -> Tensor:
                total = gradient
                for _ in range(15):
                    total = torch.autograd.grad(again, start, total, retain_graph=True)[0] + gradient
                return total

            z.register_hook(solve)
        return self.head(z)


@program
def deep_equilibrium(dtype: torch.dtype) -> Training:
    model = Equilibrium().to(dtype)
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))


@program
def stochastic_depth(dtype: torch.dtype) -> Training:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(IN, 8), nn.Linear(8, OUT)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                if not self.training or float(torch.rand(())) < 0.6:
                    x = x + block(x)
            return self.head(x)

    model = Deep().to(dtype)
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))


@program
def hypernetwork(dtype: torch.dtype) -> Training:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.make = nn.Parameter(torch.randn(4)), nn.Linear(4, IN * OUT + OUT)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.make(self.code)
            return F.linear(x, weights[: IN * OUT].view(OUT, IN), weights[IN * OUT :])

    model = Hyper().to(dtype)
    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)))


@program
def tied_autoencoder(dtype: torch.dtype) -> Training:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(0.3 * torch.randn(4, IN)), nn.Parameter(torch.zeros(IN))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.relu(F.linear(x, self.weight)), self.weight.t(), self.bias)

    model = Tied().to(dtype)

    def loss() -> Tensor:
        x = vectors(dtype)[0]
        return F.mse_loss(model(x), x)

    return usual(model, Adam(model.parameters(), lr=3e-3), loss)


@program
def variational_autoencoder(dtype: torch.dtype) -> Training:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(IN, 8), nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, IN))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log = self.encoder(x).chunk(2, -1)
            return self.decoder(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log

    model = Variational().to(dtype)

    def loss() -> Tensor:
        x = vectors(dtype)[0]
        out, mean, log = model(x)
        return F.mse_loss(out, x) + 0.1 * (mean.square() + log.exp() - 1 - log).mean()

    return usual(model, Adam(model.parameters(), lr=3e-3), loss)


@program
def coupling_flow(dtype: torch.dtype) -> Training:
    class Coupling(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.net, self.flip = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 6)), flip

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
            scale, shift = self.net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            return torch.cat((a, b * scale.exp() + shift), 1), scale.sum(1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Coupling(bool(i % 2)) for i in range(4))

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(len(x), dtype=x.dtype)
            for part in self.parts:
                x, log = part(x)
                total = total + log
            return x.square().sum(1) / 2 - total

    model = Flow().to(dtype)
    return usual(model, Adam(model.parameters(), lr=1e-3), lambda: model(vectors(dtype)[0]).mean())


@program
def diffusion_with_an_average(dtype: torch.dtype) -> Training:
    model = nn.Sequential(nn.Linear(IN + 1, 24), nn.SiLU(), nn.Linear(24, IN)).to(dtype)
    average = copy.deepcopy(model).requires_grad_(False)

    def loss() -> Tensor:
        x, time = vectors(dtype)[0], torch.rand(BATCH, 1).to(dtype)
        noise = torch.randn_like(x)
        return F.mse_loss(model(torch.cat(((1 - time) * x + time * noise, time), 1)), noise - x)

    def update() -> None:
        with torch.no_grad():
            for slow, p in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(p, 0.2)

    return usual(model, AdamW(model.parameters(), lr=3e-3), loss, update)


@program
def truncated_backpropagation_through_time(dtype: torch.dtype) -> Training:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.cell, self.head = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 11)

        def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
            out, state = self.cell(self.table(tokens), state)
            return self.head(out), state

    model = Words().to(dtype)
    state: list[Any] = [None]

    def loss() -> Tensor:
        tokens = torch.randint(11, (4, 7))
        saved = None if state[0] is None else tuple(one.detach() for one in state[0])
        out, state[0] = model(tokens[:, :-1], saved)
        return F.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return usual(model, SGD(model.parameters(), lr=0.1), loss)


@program
def ordinary_differential_equation(dtype: torch.dtype) -> Training:
    model = nn.ModuleDict(
        {"field": nn.Sequential(nn.Linear(IN, 12), nn.Tanh(), nn.Linear(12, IN)), "head": nn.Linear(IN, OUT)}
    ).to(dtype)

    def run(x: Tensor) -> Tensor:
        for _ in range(6):
            x = x + checkpoint(model["field"], x, use_reentrant=False) / 6
        return model["head"](x)

    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(run, *vectors(dtype)))


@program
def batches_of_changing_length(dtype: torch.dtype) -> Training:
    model = nn.ModuleDict(
        {"table": nn.Embedding(11, 8, padding_idx=0), "cell": nn.GRU(8, 8, batch_first=True), "head": nn.Linear(8, OUT)}
    ).to(dtype)

    def loss() -> Tensor:
        length = int(torch.randint(2, 9, ()))
        tokens = torch.randint(0, 11, (BATCH, length))
        return F.cross_entropy(
            model["head"](model["cell"](model["table"](tokens))[0].mean(1)).float(), vectors(dtype)[1]
        )

    return usual(model, Adam(model.parameters(), lr=3e-3), loss)


# Reinforcement learning


@program
def policy_gradient(dtype: torch.dtype) -> Training:
    model = mlp(dtype)

    def loss() -> Tensor:
        x = vectors(dtype)[0]
        actions = torch.distributions.Categorical(logits=model(x).float())
        chosen = actions.sample()
        reward = (chosen == 1).float() - 0.2
        return -(actions.log_prob(chosen) * (reward - reward.mean())).mean() - 0.01 * actions.entropy().mean()

    return usual(model, Adam(model.parameters(), lr=3e-3), loss)


@program
def proximal_policy_with_epochs(dtype: torch.dtype) -> Training:
    model = mlp(dtype, out=OUT + 1)
    optimizer = Adam(model.parameters(), lr=1e-3)
    rollout: deque[Any] = deque()

    def step() -> Tensor:
        if not rollout:
            with torch.no_grad():
                x = vectors(dtype, 32)[0]
                policy = torch.distributions.Categorical(logits=model(x)[:, :OUT].float())
                actions = policy.sample()
                rollout.extend([(x, actions, policy.log_prob(actions), (actions == 1).float())] * 4)
        x, actions, old, reward = rollout.popleft()
        out = model(x).float()
        policy = torch.distributions.Categorical(logits=out[:, :OUT])
        ratio = (policy.log_prob(actions) - old).exp()
        gain = reward - out[:, OUT].detach()
        loss = (
            -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + (out[:, OUT] - reward).square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def value_learning_with_a_hard_target(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    target, count = copy.deepcopy(model), [0]

    def loss() -> Tensor:
        x, after = vectors(dtype)[0], vectors(dtype)[0]
        actions = torch.randint(OUT, (BATCH, 1))
        with torch.no_grad():
            goal = (actions == 1).to(dtype) + 0.9 * target(after).max(1, keepdim=True).values
        return F.smooth_l1_loss(model(x).gather(1, actions), goal)

    def copy_over() -> None:
        count[0] += 1
        if count[0] % 7 == 0:
            target.load_state_dict(model.state_dict())

    return usual(model, Adam(model.parameters(), lr=1e-3), loss, copy_over)


# Losses that know more


@program
def distillation(dtype: torch.dtype) -> Training:
    teacher, model = mlp(dtype, 24).eval(), mlp(dtype)

    def loss() -> Tensor:
        x, y = vectors(dtype)
        with torch.no_grad():
            soft = teacher(x).float().softmax(-1)
        out = model(x).float()
        return F.cross_entropy(out, y) + F.kl_div(out.log_softmax(-1), soft, reduction="batchmean")

    return usual(model, AdamW(model.parameters(), lr=3e-3), loss)


@program
def contrast_with_a_momentum_encoder(dtype: torch.dtype) -> Training:
    model = mlp(dtype, out=8)
    slow = copy.deepcopy(model).requires_grad_(False)
    queue = F.normalize(torch.randn(32, 8), dim=1)

    def loss() -> Tensor:
        nonlocal queue
        x = vectors(dtype)[0]
        a = F.normalize(model(x + 0.1 * torch.randn_like(x)).float(), dim=1)
        with torch.no_grad():
            for s, p in zip(slow.parameters(), model.parameters(), strict=True):
                s.lerp_(p, 0.1)
            b = F.normalize(slow(x + 0.1 * torch.randn_like(x)).float(), dim=1)
        logits = torch.cat(((a * b).sum(1, keepdim=True), a @ queue.t()), 1) / 0.2
        queue = torch.cat((queue, b))[-32:]
        return F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))

    return usual(model, SGD(model.parameters(), lr=0.05, momentum=0.9), loss)


@program
def triplets(dtype: torch.dtype) -> Training:
    model = mlp(dtype, out=8)
    loss = nn.TripletMarginLoss(margin=0.5)
    return usual(model, Adam(model.parameters(), lr=1e-3), lambda: loss(*(model(vectors(dtype)[0]) for _ in range(3))))


@program
def averaged_gradient_of_episodes(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory = vectors(dtype, 32)

    def step() -> Tensor:
        optimizer.zero_grad()
        classify(model, *memory).backward()
        old = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        loss = classify(model, *vectors(dtype))
        loss.backward()
        product = sum((p.grad * g).sum() for p, g in zip(model.parameters(), old, strict=True) if p.grad is not None)
        if product < 0:
            square = sum(g.square().sum() for g in old)
            for p, g in zip(model.parameters(), old, strict=True):
                assert p.grad is not None
                p.grad -= product / square * g
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def conflicting_gradients_projected(dtype: torch.dtype) -> Training:
    model = mlp(dtype, out=2 * OUT)
    optimizer = Adam(model.parameters(), lr=3e-3)

    def step() -> Tensor:
        x, y = vectors(dtype)
        out = model(x).float()
        losses = [F.cross_entropy(part, y) for part in out.chunk(2, 1)]
        both = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        a, b = (torch.cat([g.flatten() for g in one]) for one in both)
        if a @ b < 0:
            a, b = a - (a @ b) / (b @ b) * b, b - (a @ b) / (a @ a) * a
        total, start = a + b, 0
        for p in model.parameters():
            p.grad = total[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        optimizer.step()
        return torch.stack(losses).sum().detach()

    return Training(model, [optimizer], step)


@program
def uncertainty_weights_of_losses(dtype: torch.dtype) -> Training:
    model = nn.ModuleDict({"body": mlp(dtype, out=2 * OUT)})
    model.register_parameter("logs", nn.Parameter(torch.zeros(2)))

    def loss() -> Tensor:
        x, y = vectors(dtype)
        parts = torch.stack([F.cross_entropy(part.float(), y) for part in model["body"](x).chunk(2, 1)])
        logs: Any = model.logs
        return (parts * (-logs).exp() + logs).sum()

    return usual(model, Adam(model.parameters(), lr=3e-3), loss)


@program
def penalty_on_input_gradients(dtype: torch.dtype) -> Training:
    model = nn.Sequential(nn.Linear(IN, 12), nn.Softplus(), nn.Linear(12, 1)).to(dtype)

    def loss() -> Tensor:
        x = vectors(dtype)[0].requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.softplus(-out).mean() + grad.square().sum(1).mean()

    return usual(model, Adam(model.parameters(), lr=3e-3), loss)


@program
def adversarial_examples_of_several_steps(dtype: torch.dtype) -> Training:
    model = mlp(dtype)

    def loss() -> Tensor:
        x, y = vectors(dtype)
        moved = x.clone()
        for _ in range(3):
            moved = moved.detach().requires_grad_()
            (grad,) = torch.autograd.grad(classify(model, moved, y), moved)
            moved = moved + 0.05 * grad.sign()
        return classify(model, moved.detach(), y)

    return usual(model, SGD(model.parameters(), lr=0.05, momentum=0.9), loss)


@program
def first_order_meta_learning(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = Adam(model.parameters(), lr=3e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(2):
            fast = copy.deepcopy(model)
            inner = SGD(fast.parameters(), lr=0.05)
            for _ in range(2):
                inner.zero_grad()
                classify(fast, *vectors(dtype)).backward()
                inner.step()
            inner.zero_grad()
            loss = classify(fast, *vectors(dtype))
            loss.backward()
            for p, q in zip(model.parameters(), fast.parameters(), strict=True):
                p.grad = q.grad.clone() if p.grad is None and q.grad is not None else p.grad + q.grad  # type: ignore[operator]
            total = total + loss.detach()
        optimizer.step()
        return total

    return Training(model, [optimizer], step)


@program
def second_order_meta_learning(dtype: torch.dtype) -> Training:
    model = mlp(dtype)

    def loss() -> Tensor:
        values: dict[str, Tensor] = dict(model.named_parameters())
        inner = F.cross_entropy(
            torch.func.functional_call(model, values, (vectors(dtype)[0],)).float(), vectors(dtype)[1]
        )
        grads = torch.autograd.grad(inner, list(values.values()), create_graph=True)
        moved = {name: p - 0.05 * g for (name, p), g in zip(values.items(), grads, strict=True)}
        return F.cross_entropy(
            torch.func.functional_call(model, moved, (vectors(dtype)[0],)).float(), vectors(dtype)[1]
        )

    return usual(model, Adam(model.parameters(), lr=3e-3), loss)


@program
def federated_averaging(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=1.0)
    clients = [copy.deepcopy(model) for _ in range(2)]

    def step() -> Tensor:
        total = torch.zeros(())
        optimizer.zero_grad()
        for client in clients:
            client.load_state_dict(model.state_dict())
            local = SGD(client.parameters(), lr=0.05)
            for _ in range(2):
                local.zero_grad()
                loss = classify(client, *vectors(dtype))
                loss.backward()
                local.step()
            total = total + loss.detach()
        for p, *others in zip(model.parameters(), *(client.parameters() for client in clients), strict=True):
            p.grad = (p - torch.stack(others).mean(0)).detach()
        optimizer.step()
        return total

    return Training(model, [optimizer], step)


@program
def two_copies_trained_side_by_side(dtype: torch.dtype) -> Training:
    model, other = mlp(dtype), mlp(dtype)
    first, second = AdamW(model.parameters(), lr=3e-3), AdamW(other.parameters(), lr=3e-3)

    def step() -> Tensor:
        data = vectors(dtype)
        for net, optimizer in ((model, first), (other, second)):
            optimizer.zero_grad()
            loss = classify(net, *data)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return Training(model, [first], step, [other, second])


# Gradients and rates that are changed on purpose


@program
def scaler_that_skips_steps(dtype: torch.dtype) -> Training:
    model = mlp(torch.float32)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scaler, count = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5), [0]

    def step() -> Tensor:
        count[0] += 1
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = classify(model, *vectors(torch.float32))
        scaler.scale(loss * (math.inf if count[0] in (9, 23) else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def schedule_stepped_by_micro_batch(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 100))

    def step() -> Tensor:
        for _ in range(4):
            loss = classify(model, *vectors(dtype)) / 4
            loss.backward()
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def warm_up_from_zero_and_cosine_to_zero(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: n / 5 if n < 5 else 0.5 * (1 + math.cos(math.pi * min((n - 5) / 34, 1)))
    )
    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), schedule.step)


@program
def one_cycle_with_momentum(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), schedule.step)


@program
def warm_restarts_that_clear_the_state(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer, count = AdamW(model.parameters(), lr=3e-3), [0]
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 12)

    def after() -> None:
        count[0] += 1
        schedule.step()
        if count[0] % 12 == 0:
            optimizer.state.clear()

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), after)


@program
def noise_added_to_gradients(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, *vectors(dtype))
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad += 0.01 * torch.randn_like(p.grad)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def centred_gradients(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, *vectors(dtype))
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and p.ndim > 1:
                p.grad -= p.grad.mean(1, keepdim=True)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def clipping_by_unit(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer = SGD(model.parameters(), lr=0.05)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, *vectors(dtype))
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and p.ndim > 1:
                most = 0.02 * p.detach().norm(dim=1, keepdim=True).clamp_min(1e-3)
                p.grad *= (most / p.grad.norm(dim=1, keepdim=True).clamp_min(1e-6)).clamp_max(1.0)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def gradient_reversal(dtype: torch.dtype) -> Training:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return -0.3 * gradients[0]

    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.label, self.domain = nn.Linear(IN, 12), nn.Linear(12, OUT), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = F.relu(self.body(x))
            return self.label(hidden), self.domain(Reverse.apply(hidden))

    model = Domains().to(dtype)

    def loss() -> Tensor:
        x, y = vectors(dtype)
        label, domain = model(x)
        return F.cross_entropy(label.float(), y) + F.cross_entropy(domain.float(), y % 2)

    return usual(model, SGD(model.parameters(), lr=0.05, momentum=0.9), loss)


@program
def signs_with_error_feedback(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    errors = [torch.zeros_like(p) for p in model.parameters()]
    optimizer = SGD(model.parameters(), lr=1.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, *vectors(dtype))
        loss.backward()
        for p, error in zip(model.parameters(), errors, strict=True):
            assert p.grad is not None
            wanted = 0.05 * p.grad + error
            sent = wanted.abs().mean() * wanted.sign()
            error.copy_(wanted - sent)
            p.grad = sent
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def master_weights_in_single_precision(dtype: torch.dtype) -> Training:
    model = mlp(torch.bfloat16)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = AdamW(masters, lr=3e-3)

    def step() -> Tensor:
        model.zero_grad()
        loss = classify(model, *vectors(torch.bfloat16))
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        return loss.detach()

    return Training(model, [optimizer], step, masters)


@program
def optimizer_inside_the_backward_pass(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizers = {p: SGD([p], lr=0.05) for p in model.parameters()}

    def apply(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)

    def step() -> Tensor:
        loss = classify(model, *vectors(dtype))
        loss.backward()
        return loss.detach()

    return Training(model, list(optimizers.values()), step)


@program
def samples_of_dropout_in_training(dtype: torch.dtype) -> Training:
    model = nn.Sequential(nn.Linear(IN, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, OUT)).to(dtype)

    def look() -> None:
        with torch.no_grad():
            torch.stack([model(vectors(dtype)[0]) for _ in range(3)]).var(0)

    return usual(model, AdamW(model.parameters(), lr=3e-3), lambda: classify(model, *vectors(dtype)), look)


@program
def noisy_student_with_new_teachers(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    teacher, count = [mlp(dtype)], [0]

    def loss() -> Tensor:
        x = vectors(dtype)[0]
        with torch.no_grad():
            labels = teacher[0](x).argmax(1)
        return classify(model, x + 0.1 * torch.randn_like(x), labels)

    def replace() -> None:
        count[0] += 1
        if count[0] % 13 == 0:
            teacher[0] = copy.deepcopy(model)

    return usual(model, SGD(model.parameters(), lr=0.05, momentum=0.9), loss, replace)


@program
def shrunk_and_perturbed(dtype: torch.dtype) -> Training:
    count = [0]

    def restart(model: nn.Module) -> None:
        count[0] += 1
        if count[0] % 15 == 0:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5).add_(0.02 * torch.randn_like(p))

    return simple(dtype, lambda p: AdamW(p, lr=3e-3), restart)


@program
def dormant_units_drawn_again(dtype: torch.dtype) -> Training:
    count = [0]

    def draw(model: Any) -> None:
        count[0] += 1
        if count[0] % 10 == 0:
            with torch.no_grad():
                model[0].weight[:2] = 0.3 * torch.randn_like(model[0].weight[:2])
                model[2].weight[:, :2] = 0

    return simple(dtype, lambda p: Adam(p, lr=3e-3), draw)


@program
def saved_whole_at_every_step(dtype: torch.dtype) -> Training:
    def save(model: nn.Module) -> None:
        with tempfile.TemporaryFile() as file:
            torch.save(model.state_dict(), file)

    return simple(dtype, lambda p: AdamW(p, lr=3e-3), save)


@program
def weights_drawn_for_every_pass(dtype: torch.dtype) -> Training:
    class Bayesian(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.mean, self.log = nn.Parameter(0.3 * torch.randn(b, a)), nn.Parameter(torch.full((b, a), -3.0))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.mean + self.log.exp() * torch.randn_like(self.mean))

    model = nn.Sequential(Bayesian(IN, 12), nn.ReLU(), Bayesian(12, OUT)).to(dtype)

    def loss() -> Tensor:
        divergence = sum(
            (m.mean.square() + (2 * m.log).exp() - 2 * m.log).sum() for m in model if isinstance(m, Bayesian)
        )
        return classify(model, *vectors(dtype)) + 1e-3 * divergence

    return usual(model, Adam(model.parameters(), lr=3e-3), loss)


@program
def several_losses_backward_one_by_one(dtype: torch.dtype) -> Training:
    model = mlp(dtype, out=2 * OUT)
    optimizer = AdamW(model.parameters(), lr=3e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        x, y = vectors(dtype)
        a, b = model(x).float().chunk(2, 1)
        first, second = F.cross_entropy(a, y), F.cross_entropy(b, y)
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return (first + second).detach()

    return Training(model, [optimizer], step)


@program
def optimizer_made_anew_in_phases(dtype: torch.dtype) -> Training:
    model = mlp(dtype)
    optimizer, count = SGD(model.parameters(), lr=0.05, momentum=0.9), [0]

    def change() -> None:
        count[0] += 1
        if count[0] == 20:
            for group in optimizer.param_groups:
                group["lr"], group["momentum"] = 0.005, 0.5

    return usual(model, optimizer, lambda: classify(model, *vectors(dtype)), change)
