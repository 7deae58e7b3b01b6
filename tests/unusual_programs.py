"""Right training programs of unusual kinds: none of them may raise an alarm under a default monitor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import batch, mlp
from error_programs.models import ConvNet, Decoder, tokens
from error_programs.training import classify, predict_next, train

PROGRAMS: list[Callable[[], Monitor]] = []


def program(function: Callable[[], Monitor]) -> Callable[[], Monitor]:
    """Add a program to the list."""
    PROGRAMS.append(function)
    return function


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.AdamW:
    """Return AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


@program
def averaged_gradient_episodic_memory() -> Monitor:
    """A-GEM: gradients of the batch are projected on those of a memory where they disagree."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(16):
            optimizer.zero_grad()
            classify(model).backward()
            memory = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
            classify(model).backward()
            own = [p.grad for p in model.parameters() if p.grad is not None]
            dot = sum((a * b).sum() for a, b in zip(own, memory, strict=True))
            if float(dot) < 0:
                square = sum((b * b).sum() for b in memory)
                for a, b in zip(own, memory, strict=True):
                    a.sub_(dot / square * b)
            optimizer.step()
            monitor.step()
    return monitor


@program
def lookahead_that_resets_momentum() -> Monitor:
    """Lookahead: every five steps weights go half-way back to slow ones, and momentum starts again."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    slow = [p.detach().clone() for p in model.parameters()]

    def look(number: int) -> None:
        if number % 5 == 0:
            with torch.no_grad():
                for p, s in zip(model.parameters(), slow, strict=True):
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()

    return train(model, optimizer, steps=16, after=look)


@program
def linear_probe_in_eval_mode() -> Monitor:
    """A frozen backbone in eval mode, a trained head."""
    model = ConvNet()
    model.body.requires_grad_(False)

    def mode(_: int) -> None:
        model.train()
        model.body.eval()

    def loss(model: nn.Module) -> Tensor:
        x, y = batch("images")
        return F.cross_entropy(model(x), y)

    return train(model, adamw(model), loss, steps=8, before=mode)


@program
def batch_norms_frozen_one_by_one() -> Monitor:
    """All batch norms in eval mode, everything trained."""
    model = ConvNet()

    def mode(_: int) -> None:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    def loss(model: nn.Module) -> Tensor:
        x, y = batch("images")
        return F.cross_entropy(model(x), y)

    return train(model, adamw(model), loss, steps=8, before=mode)


@program
def least_squares_gan() -> Monitor:
    """A critic with a squared error to 1 and 0, and a generator."""
    critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))
    other = torch.optim.Adam(generator.parameters(), lr=1e-3)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    with Monitor(critic, optimizer) as monitor:
        for _ in range(12):
            optimizer.zero_grad()
            fake = generator(torch.randn(8, 3))
            real = critic(torch.randn(8, 6))
            (F.mse_loss(real, torch.ones(8, 1)) + critic(fake.detach()).pow(2).mean()).backward()
            optimizer.step()
            monitor.step()
            other.zero_grad()
            F.mse_loss(critic(fake), torch.ones(8, 1)).backward()
            other.step()
    return monitor


@program
def clipped_critic() -> Monitor:
    """A Wasserstein critic whose weights are clamped after every step."""
    model = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def clamp(_: int) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(8, 6)).mean() - model(torch.randn(8, 6) + 1).mean()

    return train(model, torch.optim.RMSprop(model.parameters(), lr=5e-3), loss, steps=12, after=clamp)


@program
def masked_language_model() -> Monitor:
    """A bidirectional model that fills masked positions."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.positions = nn.Embedding(24, 16), nn.Embedding(12, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(x) + self.positions(torch.arange(x.shape[1]))))

    def loss(model: nn.Module) -> Tensor:
        x, _ = tokens()
        masked = torch.rand(x.shape) < 0.4
        labels = torch.where(masked, x, -100)
        return F.cross_entropy(model(torch.where(masked, 23, x)).flatten(0, 1), labels.flatten())

    model = Encoder()
    return train(model, adamw(model), loss, steps=8)


@program
def token_autoencoder() -> Monitor:
    """A bidirectional model with a bottleneck that gives back its own input."""

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.down = nn.Embedding(23, 16), nn.Linear(16 * 8, 12)
            self.up, self.head = nn.Linear(12, 16 * 8), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            code = self.down(self.embedding(x).flatten(1)).tanh()
            return self.head(self.up(code).view(len(x), 8, 16))

    def loss(model: nn.Module) -> Tensor:
        x, _ = tokens()
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    model = Autoencoder()
    return train(model, adamw(model), loss, steps=8)


@program
def tagger_of_tokens() -> Monitor:
    """A bidirectional recurrent tagger."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(23, 12)
            self.cell, self.head = nn.GRU(12, 8, batch_first=True, bidirectional=True), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(self.embedding(x))[0])

    def loss(model: nn.Module) -> Tensor:
        x, _ = tokens()
        return F.cross_entropy(model(x).flatten(0, 1), ((x * 7 + 3) % 23).flatten())

    model = Tagger()
    return train(model, adamw(model), loss, steps=8)


@program
def completion_only() -> Monitor:
    """A causal model whose prompt is not in the loss."""

    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        y = y.clone()
        y[:, :4] = -100
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    model = Decoder()
    return train(model, adamw(model), loss, steps=8)


@program
def policy_gradient() -> Monitor:
    """REINFORCE with a baseline and an entropy bonus."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).tanh()
            return self.actor(h), self.critic(h)[:, 0]

    def loss(model: Any) -> Tensor:
        logits, value = model(torch.randn(16, 6))
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample()
        reward = (action == 1).float() + 0.1 * torch.randn(16)
        gain = (reward - value).detach()
        return -(policy.log_prob(action) * gain).mean() + F.mse_loss(value, reward) - 0.01 * policy.entropy().mean()

    model = Policy()
    return train(model, adamw(model), loss, steps=12)


@program
def values_by_a_target_network() -> Monitor:
    """Q-learning with a target network that is copied now and then."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    target = copy.deepcopy(model)

    def loss(model: nn.Module) -> Tensor:
        x, action = torch.randn(16, 6), torch.randint(4, (16,))
        with torch.no_grad():
            goal = torch.randn(16) + 0.9 * target(torch.randn(16, 6)).max(1).values
        return F.smooth_l1_loss(model(x).gather(1, action[:, None])[:, 0], goal)

    def copy_now(number: int) -> None:
        if number % 4 == 0:
            target.load_state_dict(model.state_dict())

    return train(model, adamw(model), loss, steps=12, after=copy_now)


@program
def teacher_inside_the_model() -> Monitor:
    """A mean teacher that is a part of the model, frozen and averaged by hand."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = mlp()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                goal = self.teacher(x)
            return self.student(x + 0.1 * torch.randn_like(x)), goal

    model = Pair()

    def loss(model: Any) -> Tensor:
        x, y = batch()
        out, goal = model(x)
        return F.cross_entropy(out, y) + F.mse_loss(out, goal)

    def average(_: int) -> None:
        with torch.no_grad():
            for a, b in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                a.lerp_(b, 0.01)

    return train(model, adamw(model), loss, steps=10, after=average)


@program
def layers_dropped_at_random() -> Monitor:
    """Stochastic depth: whole blocks are left out by a coin."""

    class Dropped(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                keep = (torch.rand(()) > 0.5).float() if self.training else 1.0
                h = h + keep * (block(h) - h)
            return self.head(self.norm(h))

    model = Dropped()
    return train(model, adamw(model), predict_next, steps=60)


@program
def experts_with_few_tokens() -> Monitor:
    """Sixteen experts, of which a batch reaches only some."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 16)
            self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(16))

        def forward(self, x: Tensor) -> Tensor:
            p, best = self.router(x).softmax(-1).max(-1)
            y = torch.zeros(len(x), 4)
            for index, expert in enumerate(self.experts):
                y = y + expert(x) * (best == index).float()[:, None]
            return y * p[:, None]

    model = Experts()
    return train(model, adamw(model), steps=40)


@program
def adapters_that_start_at_zero_in_warm_up() -> Monitor:
    """Low-rank adapters with one factor at zero, and a rate that starts at zero."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = mlp().requires_grad_(False)
            self.down, self.up = nn.Linear(6, 12, bias=False), nn.Linear(12, 4, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = Adapted()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 10))
    return train(model, optimizer, steps=12, after=lambda _: scheduler.step())


@program
def soft_labels_of_a_mixture() -> Monitor:
    """Mixed examples with mixed labels, and label smoothing."""

    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        share = float(torch.rand(()))
        goal = share * F.one_hot(y, 4) + (1 - share) * F.one_hot(y.flip(0), 4)
        return F.cross_entropy(model(share * x + (1 - share) * x.flip(0)), goal, label_smoothing=0.1)

    model = mlp()
    return train(model, adamw(model), loss, steps=10)


@program
def losses_weighted_by_their_gradients() -> Monitor:
    """The gradient of a first loss is scaled before that of a second is added."""
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(10):
            optimizer.zero_grad()
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.grad.mul_(0.3)
            model(x).pow(2).mean().backward()
            optimizer.step()
            monitor.step()
    return monitor


@program
def regression_of_one_number() -> Monitor:
    """Targets of one shape with outputs; some batches have one target for all."""

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(16, 6)
        return F.mse_loss(model(x)[:, 0], x.sum(1) + 0.1 * torch.randn(16))

    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    return train(model, adamw(model), loss, steps=10)


@program
def variational_autoencoder_with_annealing() -> Monitor:
    """A variational autoencoder whose divergence has weight zero at first."""

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 8), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log = self.encoder(x).chunk(2, -1)
            return self.decoder(mean + (0.5 * log).exp() * torch.randn_like(mean)), mean, log

    model = VAE()
    weight = [0.0]

    def loss(model: Any) -> Tensor:
        x = torch.randn(8, 6)
        out, mean, log = model(x)
        return F.mse_loss(out, x) - 0.5 * weight[0] * (1 + log - mean.pow(2) - log.exp()).mean()

    def anneal(number: int) -> None:
        weight[0] = min(1.0, number / 10)

    return train(model, adamw(model), loss, steps=12, after=anneal)


@program
def truncated_recurrence() -> Monitor:
    """A recurrent state that is carried from chunk to chunk and detached in between."""

    class Carried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.cell, self.head = (
                nn.Embedding(23, 12),
                nn.GRU(12, 16, batch_first=True),
                nn.Linear(16, 23),
            )
            self.state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y, state = self.cell(self.embedding(x), self.state)
            self.state = state.detach()
            return self.head(y)

    model = Carried()
    return train(model, adamw(model), predict_next, steps=10)


@program
def contrastive_pairs() -> Monitor:
    """Two views of a batch against each other, with a learned temperature."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.temperature = mlp(), nn.Parameter(torch.zeros(()))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a, b = F.normalize(self.net(a), dim=-1), F.normalize(self.net(b), dim=-1)
            return a @ b.t() * self.temperature.exp()

    def loss(model: Any) -> Tensor:
        x, _ = batch()
        scores = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        goal = torch.arange(len(x))
        return F.cross_entropy(scores, goal) + F.cross_entropy(scores.t(), goal)

    model = Views()
    return train(model, adamw(model), loss, steps=10)


@program
def input_used_as_memory() -> Monitor:
    """A model that normalises fresh batches in place."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.sub_(0.5).mul_(2))

    model = InPlace()
    return train(model, adamw(model), steps=10)


@program
def gradients_of_a_flat_buffer() -> Monitor:
    """Gradients that are views of one flat tensor, as wrappers keep them."""
    model = mlp()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for _ in range(10):
            flat.zero_()
            offset = 0
            for p in model.parameters():
                p.grad = flat[offset : offset + p.numel()].view_as(p)
                offset += p.numel()
            classify(model).backward()
            optimizer.step()
            monitor.step()
    return monitor


@program
def gradients_clipped_by_value_and_norm() -> Monitor:
    """Accumulation with one clipping before the step."""
    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(8):
            optimizer.zero_grad()
            for _ in range(3):
                (predict_next(model) / 3).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            monitor.step()
    return monitor


@program
def several_tokens_ahead() -> Monitor:
    """Two heads that predict the next token and the one after it."""

    class Ahead(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(16, 23)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                h = block(h)
            h = self.norm(h)
            return self.head(h), self.second(h)

    def loss(model: Any) -> Tensor:
        text = torch.randint(23, (4, 10))
        a, b = model(text[:, :8])
        return F.cross_entropy(a.flatten(0, 1), text[:, 1:9].flatten()) + F.cross_entropy(
            b.flatten(0, 1), text[:, 2:].flatten()
        )

    model = Ahead()
    return train(model, adamw(model), loss, steps=8)


@program
def signed_labels_of_a_hinge() -> Monitor:
    """Labels −1 and 1 where they belong: a soft margin and a hinge."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6)
        y = x[:, :1].sign()
        z = model(x)
        return F.soft_margin_loss(z, y) + 0.1 * (1 - z * y).clamp_min(0).mean()

    return train(model, adamw(model), loss, steps=10)


@program
def reversed_gradient() -> Monitor:
    """Domain adaptation: a gradient reversal whose strength starts at zero."""
    strength = [0.0]

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return -strength[0] * grads[0]

    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.label, self.domain = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).relu()
            return self.label(h), self.domain(Reverse.apply(h))

    def loss(model: Any) -> Tensor:
        x, y = batch()
        label, domain = model(x)
        return F.cross_entropy(label, y) + F.cross_entropy(domain, y % 2)

    model = Domains()

    def ramp(number: int) -> None:
        strength[0] = min(1.0, number / 5)

    return train(model, adamw(model), loss, steps=10, after=ramp)


@program
def schedule_of_the_epoch() -> Monitor:
    """A scheduler that is stepped after every fourth step, and one more that is stepped by the loss."""
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def advance(number: int) -> None:
        if number % 4 == 0:
            scheduler.step()
            plateau.step(1.0)

    return train(model, optimizer, steps=12, after=advance)


@program
def one_batch_overfitted() -> Monitor:
    """The sanity check of every beginner: one batch for ever."""
    x, y = batch()

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), y)

    model = mlp()
    return train(model, adamw(model, 1e-2), loss, steps=40)
