"""Sixty-nine further correct training programs of other kinds, written before the monitor was tried on any of them."""
# Programs are named after what they run.

from __future__ import annotations

import copy
import math
import random
from collections import deque
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, PolynomialLR

from blind_programs import Cast, Program, dense, digits, simple_loop, small_cnn
from everyday_programs import Training

PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    PROGRAMS[build.__name__.replace("_", " ")] = build
    return build


def batch(count: int = 16, inputs: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    y = torch.randint(classes, (count,))
    return torch.randn(count, inputs) + y[:, None] / 4, y


def classified(model: Any) -> Tensor:
    x, y = batch()
    return F.cross_entropy(model(x), y)


def stepped(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Lm(nn.Module):
    """A small causal language model; `tied` shares the embedding with the head."""

    def __init__(self, tied: bool = True, dropout: float = 0.0, vocab: int = 17) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocab, 16), nn.Embedding(12, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, vocab, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def features(self, t: Tensor) -> Tensor:
        length = t.shape[1]
        x = self.table(t) + self.places(torch.arange(length))
        mask = torch.full((length, length), -math.inf).triu(1)
        return self.norm(self.block(x, src_mask=mask))

    def forward(self, t: Tensor) -> Tensor:
        return self.head(self.features(t))


def sequences(count: int = 4, length: int = 10, vocab: int = 17) -> Tensor:
    start = torch.randint(vocab, (count, 1))
    return (start + torch.arange(length) * torch.randint(1, 4, (count, 1))) % vocab


def token_log_probs(model: nn.Module, t: Tensor) -> Tensor:
    return torch.log_softmax(model(t[:, :-1]).float(), -1).gather(-1, t[:, 1:, None])[..., 0]


# Language models trained by preferences and rewards


@program
def group_relative_policy_with_reference_and_two_epochs(amp: Cast) -> Training:
    policy = Lm()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = AdamW(policy.parameters(), 1e-3, weight_decay=0.0)
    cache: list[Any] = []

    def step() -> Tensor:
        if not cache:
            with torch.no_grad():
                t = sequences(8, 3)
                for _ in range(5):
                    with amp():
                        logits = policy(t)[:, -1].float()
                    t = torch.cat([t, torch.multinomial(logits.softmax(-1), 1)], 1)
                reward = (t[:, 3:] % 2 == 0).float().mean(1).view(2, 4)
                advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
                with amp():
                    old, ref = token_log_probs(policy, t)[:, 2:], token_log_probs(reference, t)[:, 2:]
            cache.extend([(t, advantage, old, ref)] * 2)
        t, advantage, old, ref = cache.pop()
        with amp():
            new = token_log_probs(policy, t)[:, 2:]
        ratio = (new - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = (ref - new).exp() - (ref - new) - 1
        loss = -(gain - 0.04 * kl).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return Training(policy, [optimizer], step)


@program
def proximal_policy_on_a_language_model_with_value_head(amp: Cast) -> Training:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm, self.value = Lm(tied=False), nn.Linear(16, 1)
            nn.init.zeros_(self.value.weight)

        def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
            h = self.lm.features(t)
            return self.lm.head(h), self.value(h).squeeze(-1)

    model = Both()
    optimizer = Adam(model.parameters(), 5e-4)

    def step() -> Tensor:
        with torch.no_grad():
            t = sequences(6, 9)
            with amp():
                logits, values = model(t[:, :-1])
            old = torch.log_softmax(logits.float(), -1).gather(-1, t[:, 1:, None])[..., 0]
            reward = (t[:, 1:] > 8).float()
            returns = reward.flip(1).cumsum(1).flip(1)
            advantage = returns - values.float()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        total = torch.zeros(())
        for _ in range(2):
            with amp():
                logits, values = model(t[:, :-1])
            new = torch.log_softmax(logits.float(), -1).gather(-1, t[:, 1:, None])[..., 0]
            ratio = (new - old).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = loss + 0.5 * F.mse_loss(values.float(), returns)
            stepped(optimizer, loss)
            total = loss.detach()
        return total

    return Training(model, [optimizer], step)


@program
def reward_model_of_pairs(amp: Cast) -> Training:
    class Reward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm, self.score = Lm(tied=False), nn.Linear(16, 1, bias=False)

        def forward(self, t: Tensor) -> Tensor:
            return self.score(self.lm.features(t)[:, -1]).squeeze(-1)

    model = Reward()
    optimizer = AdamW([p for n, p in model.named_parameters() if "head" not in n], 1e-3)

    def loss() -> Tensor:
        good, bad = sequences(6), torch.randint(17, (6, 10))
        both = model(torch.cat([good, bad]))
        return -F.logsigmoid(both[:6] - both[6:]).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def odds_ratio_preference_without_reference(amp: Cast) -> Training:
    model = Lm(dropout=0.1)
    optimizer = AdamW(model.parameters(), 1e-3)

    def loss() -> Tensor:
        good, bad = (
            token_log_probs(model, sequences()).mean(1),
            token_log_probs(model, torch.randint(17, (4, 10))).mean(1),
        )
        odds = (good - bad) - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
        return -good.mean() - 0.1 * F.logsigmoid(odds).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def masked_diffusion_language_model(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.places = nn.Embedding(18, 16), nn.Parameter(torch.zeros(10, 16))
            self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 17)

        def forward(self, t: Tensor) -> Tensor:
            return self.head(self.block(self.table(t) + self.places))

    model = Net()
    optimizer = AdamW(model.parameters(), 2e-3, betas=(0.9, 0.98))

    def loss() -> Tensor:
        t = sequences(8)
        rate = torch.rand(8, 1).clamp(0.1)
        mask = torch.rand(8, 10) < rate
        out = model(torch.where(mask, 17, t))
        return (F.cross_entropy(out.float().mT, t, reduction="none") * mask / rate).sum() / t.numel()

    return simple_loop(model, optimizer, amp, loss)


@program
def token_weighted_accumulation_divided_before_the_step(amp: Cast) -> Training:
    model = Lm()
    optimizer = AdamW(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        tokens, total = 0, torch.zeros(())
        for _ in range(random.randint(1, 4)):
            t = sequences(random.randint(1, 5), random.randint(4, 10))
            with amp():
                out = model(t[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1).float(), t[:, 1:].flatten(), reduction="sum")
            loss.backward()
            tokens += t[:, 1:].numel()
            total += loss.detach()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(tokens)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total / tokens

    return Training(model, [optimizer], step)


@program
def pretraining_with_two_heads_and_a_decoder_bias(amp: Cast) -> Training:
    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.kinds = nn.Embedding(18, 16, padding_idx=0), nn.Embedding(2, 16)
            self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
            self.dense, self.bias, self.next = nn.Linear(16, 16), nn.Parameter(torch.zeros(18)), nn.Linear(16, 2)

        def forward(self, t: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
            h = self.block(self.table(t) + self.kinds(kinds), src_key_padding_mask=t == 0)
            return F.linear(self.dense(h).tanh(), self.table.weight, self.bias), self.next(h[:, 0])

    model = Bert()
    plain = [p for p in model.parameters() if p.ndim > 1]
    optimizer = AdamW(
        [
            {"params": plain, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        1e-3,
    )
    schedule = LambdaLR(optimizer, lambda k: min((k + 1) / 10, max(0.0, (60 - k) / 50)))

    def loss() -> Tensor:
        t = sequences(6) + 1
        t[:, 8:] *= torch.randint(2, (6, 1))
        labels = torch.where((torch.rand(6, 10) < 0.3) & (t > 0), t, -100)
        labels[0, 0] = t[0, 0]
        out, pair = model(torch.where(labels >= 0, 1, t), (torch.arange(10) > 4).long().expand(6, 10))
        return F.cross_entropy(out.flatten(0, 1), labels.flatten()) + F.cross_entropy(pair, t[:, 0] % 2)

    return simple_loop(model, optimizer, amp, loss, schedule)


# Adversarial networks and diffusion


@program
def autoencoder_with_adaptive_adversarial_weight(amp: Cast) -> Training:
    coder, critic = dense(12, 32, 4), dense(12, 24, 1, act=lambda: nn.LeakyReLU(0.2))
    decoder = dense(4, 32, 12)
    opt_g = Adam([*coder.parameters(), *decoder.parameters()], 1e-3, betas=(0.5, 0.9))
    opt_d = Adam(critic.parameters(), 1e-3, betas=(0.5, 0.9))
    last: Any = decoder[-1]
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x = torch.randn(16, 12).cumsum(1) / 3
        with amp():
            made = decoder(coder(x))
            near = (made - x).abs().mean()
            fooled = -critic(made).mean()
        a = torch.autograd.grad(near, last.weight, retain_graph=True)[0].norm()
        b = torch.autograd.grad(fooled, last.weight, retain_graph=True)[0].norm()
        weight = (a / (b + 1e-4)).clamp(0, 1e4).detach() * (0.8 if count > 12 else 0.0)
        loss = near + weight * fooled
        stepped(opt_g, loss)
        if count > 12:
            with amp():
                loss_d = F.relu(1 - critic(x)).mean() + F.relu(1 + critic(made.detach())).mean()
            stepped(opt_d, loss_d)
        return loss.detach()

    return Training(nn.ModuleList([coder, decoder, critic]), [opt_g, opt_d], step)


@program
def path_length_penalty_every_four_steps(amp: Cast) -> Training:
    class Generator(nn.Module):
        mean_path: Any

        def __init__(self) -> None:
            super().__init__()
            self.mapping, self.synthesis = dense(6, 16, 16), dense(16, 32, 12)
            self.register_buffer("mean_path", torch.zeros(()))

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            w = self.mapping(z)
            return self.synthesis(w), w

    generator, critic = Generator(), dense(12, 24, 1)
    opt_g, opt_d = Adam(generator.parameters(), 1e-3, (0.0, 0.99)), Adam(critic.parameters(), 1e-3, (0.0, 0.99))
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        with amp():
            fake, _ = generator(torch.randn(8, 6))
            loss_d = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(torch.randn(8, 12) + 1)).mean()
        stepped(opt_d, loss_d)
        with amp():
            fake, _ = generator(torch.randn(8, 6))
            loss_g = F.softplus(-critic(fake)).mean()
        stepped(opt_g, loss_g)
        if count % 4 == 0:
            fake, w = generator(torch.randn(8, 6))
            (pull,) = torch.autograd.grad((fake * torch.randn_like(fake)).sum(), w, create_graph=True)
            length = pull.square().sum(1).sqrt()
            mean = generator.mean_path + 0.01 * (length.mean() - generator.mean_path)
            stepped(opt_g, (length - mean).square().mean() * 8)
            generator.mean_path.copy_(mean.detach())
        return (loss_g + loss_d).detach()

    return Training(nn.ModuleDict({"g": generator, "d": critic}), [opt_g, opt_d], step)


@program
def orthogonal_regularisation_added_to_gradients(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = Adam(model.parameters(), 1e-3, betas=(0.0, 0.999))

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim < 2:
                    continue
                w = p.view(p.shape[0], -1)
                extra = 2 * (w @ w.t() * (1 - torch.eye(len(w)))) @ w
                assert p.grad is not None
                p.grad += 1e-3 * extra.view_as(p)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def information_maximising_gan_with_three_optimizers(amp: Cast) -> Training:
    generator, front, real, code = dense(10, 24, 8), dense(8, 24, 16), nn.Linear(16, 1), nn.Linear(16, 3)
    opt_g = Adam(generator.parameters(), 1e-3, (0.5, 0.99))
    opt_d = Adam([*front.parameters(), *real.parameters()], 2e-4, (0.5, 0.99))
    opt_i = Adam([*generator.parameters(), *front.parameters(), *code.parameters()], 2e-4, (0.5, 0.99))

    def drawn() -> tuple[Tensor, Tensor]:
        c = torch.randint(3, (16,))
        return torch.cat([torch.randn(16, 7), F.one_hot(c, 3).float()], 1), c

    def step() -> Tensor:
        z, c = drawn()
        opt_g.zero_grad()
        with amp():
            fake = generator(z)
            loss_g = F.binary_cross_entropy_with_logits(real(front(fake)), torch.ones(16, 1))
        loss_g.backward()
        opt_g.step()
        opt_d.zero_grad()
        with amp():
            loss_d = F.binary_cross_entropy_with_logits(real(front(torch.randn(16, 8) + 1)), torch.ones(16, 1))
            loss_d = loss_d + F.binary_cross_entropy_with_logits(real(front(fake.detach())), torch.zeros(16, 1))
        loss_d.backward()
        opt_d.step()
        opt_i.zero_grad()
        z, c = drawn()
        with amp():
            loss_i = F.cross_entropy(code(front(generator(z))), c)
        loss_i.backward()
        opt_i.step()
        return (loss_g + loss_d + loss_i).detach()

    return Training(nn.ModuleList([generator, front, real, code]), [opt_g, opt_d, opt_i], step)


@program
def latent_diffusion_over_a_frozen_autoencoder(amp: Cast) -> Training:
    class Latent(nn.Module):
        alphas: Any

        def __init__(self) -> None:
            super().__init__()
            self.coder = dense(12, 16, 4).requires_grad_(False).eval()
            self.net = dense(5, 32, 32, 4, act=nn.SiLU)
            self.register_buffer("alphas", torch.linspace(0.999, 0.9, 20).cumprod(0))

        def train(self, mode: bool = True) -> Latent:
            super().train(mode)
            self.coder.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = self.coder(x)
            k = torch.randint(20, (len(x),))
            a, noise = self.alphas[k, None], torch.randn_like(z)
            out = self.net(torch.cat([a.sqrt() * z + (1 - a).sqrt() * noise, k[:, None] / 20], 1))
            return (out - noise).square().mean()

    model = Latent()
    optimizer = AdamW(model.net.parameters(), 1e-3)
    return simple_loop(model, optimizer, amp, lambda: model(torch.randn(16, 12)))


@program
def preconditioned_diffusion_with_power_averages(amp: Cast) -> Training:
    net = dense(9, 32, 32, 8, act=nn.SiLU)
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer, count = Adam(net.parameters(), 1e-3, betas=(0.9, 0.99)), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(count / 10, 1) / math.sqrt(max(count / 30, 1))
        x = torch.randn(16, 8) * 0.5
        sigma = (torch.randn(16, 1) * 1.2 - 1.2).exp()
        noised = x + sigma * torch.randn_like(x)
        skip, out, scale = (
            0.25 / (sigma**2 + 0.25),
            sigma * 0.5 / (sigma**2 + 0.25).sqrt(),
            1 / (sigma**2 + 0.25).sqrt(),
        )
        with amp():
            made = skip * noised + out * net(torch.cat([scale * noised, sigma.log() / 4], 1))
        loss = ((sigma**2 + 0.25) / (sigma * 0.5) ** 2 * (made - x).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            assert p.grad is not None
            torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
        optimizer.step()
        with torch.no_grad():
            beta = (1 - 1 / count) ** 7.94
            for a, p in zip(average.parameters(), net.parameters(), strict=True):
                a.lerp_(p, 1 - beta)
        return loss.detach()

    return Training(net, [optimizer], step)


# Representations


@program
def swapped_assignments_with_prototypes_frozen_at_first(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.prototypes = dense(8, 24, 8), nn.Linear(8, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.prototypes(F.normalize(self.body(x), dim=1))

    model = Net()
    optimizer, count = SGD(model.parameters(), 0.1, momentum=0.9), 0

    def assigned(scores: Tensor) -> Tensor:
        q = (scores.float() / 0.05).exp().t()
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / len(q)
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        return (q * q.shape[1]).t()

    def step() -> Tensor:
        nonlocal count
        count += 1
        with torch.no_grad():
            model.prototypes.weight.copy_(F.normalize(model.prototypes.weight, dim=1))
        x = torch.randn(16, 8)
        with amp():
            a, b = model(torch.cat([x, x + 0.2 * torch.randn_like(x)])).chunk(2)
        with torch.no_grad():
            qa, qb = assigned(a), assigned(b)
        loss = -(qa * F.log_softmax(b / 0.1, 1)).sum(1).mean() - (qb * F.log_softmax(a / 0.1, 1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        if count < 10:
            for p in model.prototypes.parameters():
                p.grad = None
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def variance_invariance_covariance(amp: Cast) -> Training:
    model = nn.Sequential(dense(8, 24, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 16))
    optimizer = SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)

    def loss() -> Tensor:
        x = torch.randn(24, 8)
        a, b = model(x + 0.1 * torch.randn_like(x)).float(), model(x + 0.1 * torch.randn_like(x)).float()
        value = 25 * F.mse_loss(a, b)
        for z in (a, b):
            value = value + 25 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
            c = z - z.mean(0)
            cov = c.t() @ c / 23
            value = value + (cov.square().sum() - cov.diagonal().square().sum()) / 16
        return value

    return simple_loop(model, optimizer, amp, loss)


@program
def targets_of_upper_layers_by_an_inner_average(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(dense(8, 16, 8) for _ in range(3))
            self.head = nn.Linear(8, 8)
            self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

        @torch.no_grad()
        def follow(self) -> None:
            for a, p in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                a.mul_(0.99).add_(p, alpha=0.01)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y, tops = x, []
                for layer in self.teacher:
                    y = y + layer(y)
                    tops.append(F.layer_norm(y, (8,)))
                target = torch.stack(tops[-2:]).mean(0)
            h = x * (torch.rand_like(x) > 0.3)
            for layer in self.layers:
                h = h + layer(h)
            return F.smooth_l1_loss(self.head(h), target)

    model = Net()
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 1e-3)

    def step() -> Tensor:
        with amp():
            loss = model(torch.randn(16, 8))
        stepped(optimizer, loss)
        model.follow()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def speech_units_by_gumbel_quantiser(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Sequential(nn.Conv1d(1, 8, 4, 2), nn.GELU(), nn.Conv1d(8, 16, 4, 2), nn.GELU())
            self.norm, self.mask = nn.LayerNorm(16), nn.Parameter(torch.rand(16))
            self.context = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.scores, self.codes = nn.Linear(16, 2 * 6), nn.Parameter(torch.rand(2, 6, 4))
            self.out, self.target = nn.Linear(16, 8), nn.Linear(8, 8)
            self.temperature = 2.0

        def forward(self, x: Tensor) -> Tensor:
            z = self.norm(self.front(x).mT)
            n, length, _ = z.shape
            q = F.gumbel_softmax(self.scores(z).float().view(n, length, 2, 6), self.temperature, hard=True)
            q = self.target(torch.einsum("ntgv,gvd->ntgd", q, self.codes).flatten(2))
            hidden = torch.rand(n, length) < 0.4
            hidden[:, 0] = True
            c = self.out(self.context(torch.where(hidden[..., None], self.mask.to(z.dtype), z)))
            c, q = c[hidden], q[hidden]
            scores = F.cosine_similarity(c[:, None], q[None], dim=-1) / 0.1
            return F.cross_entropy(scores, torch.arange(len(c)))

    model = Net()
    optimizer = AdamW(model.parameters(), 1e-3)

    def loss() -> Tensor:
        model.temperature = max(model.temperature * 0.98, 0.5)
        return model(torch.randn(3, 1, 48))

    return simple_loop(model, optimizer, amp, loss)


@program
def instance_discrimination_with_memory_bank(amp: Cast) -> Training:
    class Net(nn.Module):
        bank: Any

        def __init__(self) -> None:
            super().__init__()
            self.body = dense(8, 24, 8)
            self.register_buffer("bank", F.normalize(torch.randn(40, 8), dim=1))

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            f = F.normalize(self.body(x).float(), dim=1)
            scores = f @ self.bank.clone().t() / 0.1
            with torch.no_grad():
                self.bank[index] = F.normalize(0.5 * self.bank[index] + 0.5 * f, dim=1)
            return scores

    model, data = Net(), torch.randn(40, 8)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)

    def loss() -> Tensor:
        index = torch.randperm(40)[:12]
        return F.cross_entropy(model(data[index] + 0.1 * torch.randn(12, 8), index), index)

    return simple_loop(model, optimizer, amp, loss)


@program
def center_loss_with_rescaled_center_gradients(amp: Cast) -> Training:
    body, head, centers = dense(8, 24, 6), nn.Linear(6, 4), nn.Embedding(4, 6)
    opt_model = SGD([*body.parameters(), *head.parameters()], 0.05, momentum=0.9)
    opt_centers = SGD(centers.parameters(), 0.5)

    def step() -> Tensor:
        x, y = batch()
        with amp():
            f = body(x)
            loss = F.cross_entropy(head(f), y) + 0.01 * (f - centers(y)).square().sum(1).mean()
        opt_model.zero_grad()
        opt_centers.zero_grad()
        loss.backward()
        opt_model.step()
        for p in centers.parameters():
            assert p.grad is not None
            p.grad.data *= 1 / 0.01
        opt_centers.step()
        return loss.detach()

    return Training(nn.ModuleList([body, head, centers]), [opt_model, opt_centers], step)


@program
def sparse_autoencoder_with_unit_decoder_and_resampling(amp: Cast) -> Training:
    class Sae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(12, 36), nn.Linear(36, 12)
            self.decode.weight.data = F.normalize(self.decode.weight.data, dim=0)
            self.encode.weight.data = self.decode.weight.data.t().clone()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            f = F.relu(self.encode(x - self.decode.bias))
            return self.decode(f), f

    source, model = dense(8, 24, 12).requires_grad_(False), Sae()
    optimizer, count = Adam(model.parameters(), 2e-3, betas=(0.0, 0.999)), 0
    fired = torch.zeros(36)

    def step() -> Tensor:
        nonlocal count
        count += 1
        with torch.no_grad():
            x = source(torch.randn(32, 8))
        with amp():
            out, f = model(x)
            loss = (out - x).square().sum(1).mean() + 0.05 * min(count / 10, 1) * f.abs().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        w = model.decode.weight
        with torch.no_grad():
            assert w.grad is not None
            unit = F.normalize(w, dim=0)
            w.grad -= (w.grad * unit).sum(0) * unit
        optimizer.step()
        with torch.no_grad():
            w.copy_(F.normalize(w, dim=0))
            fired.add_((f > 0).sum(0))
            if count % 15 == 0:
                dead = (fired < 20).nonzero()[:, 0]
                for i in dead.tolist():
                    new = F.normalize(x[i % 32] - out[i % 32].float(), dim=0)
                    w[:, i] = new
                    model.encode.weight[i] = 0.2 * new
                    model.encode.bias[i] = 0
                    for p, where in ((w, (slice(None), i)), (model.encode.weight, i), (model.encode.bias, i)):
                        for key in ("exp_avg", "exp_avg_sq"):
                            optimizer.state[p][key][where] = 0
                fired.zero_()
        return loss.detach()

    return Training(model, [optimizer], step)


# Reinforcement


@program
def recurrent_values_with_burn_in(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 3)

        def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
            h, state = self.lstm(x, state)
            return self.head(h), state

    model = Net()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer, count = Adam(model.parameters(), 1e-3, eps=1e-3), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, a = torch.randn(6, 12, 4), torch.randint(3, (6, 8, 1))
        with amp(), torch.no_grad():
            _, state = model(x[:, :4])
            _, other = target(x[:, :4])
            following = target(x[:, 4:], other)[0].amax(-1)
        with amp():
            q = model(x[:, 4:], state)[0].gather(-1, a)[..., 0]
            loss = F.smooth_l1_loss(q[:, :-1].float(), x[:, 4:-1, 0] + 0.9 * following[:, 1:].float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 40.0)
        optimizer.step()
        if count % 10 == 0:
            target.load_state_dict(model.state_dict())
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def unrolled_model_with_halved_gradients(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.represent, self.dynamics = dense(6, 24, 12), dense(14, 24, 12)
            self.policy, self.value, self.reward = nn.Linear(12, 2), nn.Linear(12, 1), nn.Linear(12, 1)

        def forward(self, x: Tensor, actions: Tensor) -> list[Tensor]:
            h, out = self.represent(x), []
            for k in range(3):
                out.append(torch.cat([self.policy(h), self.value(h), self.reward(h)], 1))
                h = self.dynamics(torch.cat([h, F.one_hot(actions[:, k], 2).to(h.dtype)], 1))
                h.register_hook(lambda g: g * 0.5)
            return out

    model = Net()
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)

    def loss() -> Tensor:
        out = model(torch.randn(16, 6), torch.randint(2, (16, 3)))
        value = torch.zeros(())
        for k, o in enumerate(out):
            part = F.cross_entropy(o[:, :2], torch.randint(2, (16,))) + (o[:, 2:] - 1).square().mean()
            if k:
                part.register_hook(lambda g: g / 3)
            value = value + part
        return value

    return simple_loop(model, optimizer, amp, loss)


@program
def imagination_through_a_world_model(amp: Cast) -> Training:
    class World(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.move, self.decode = dense(6, 24, 12), dense(14, 24, 12), dense(12, 24, 6)

        def latent(self, scores: Tensor) -> Tensor:
            p = scores.float().view(-1, 3, 4).softmax(-1)
            drawn = F.one_hot(torch.distributions.Categorical(p.detach()).sample(), 4).float()
            return (drawn + p - p.detach()).flatten(1)

    world, actor, critic = World(), dense(12, 16, 2), dense(12, 16, 1)
    opt_w, opt_a, opt_c = (
        Adam(world.parameters(), 1e-3),
        Adam(actor.parameters(), 5e-4),
        Adam(critic.parameters(), 5e-4),
    )

    def step() -> Tensor:
        x, a = torch.randn(12, 6), torch.randn(12, 2)
        with amp():
            z = world.latent(world.encode(x))
            after = world.latent(world.move(torch.cat([z, a], 1)))
            loss_w = F.mse_loss(world.decode(z).float(), x) + F.mse_loss(world.decode(after).float(), x.roll(1, 1))
        stepped(opt_w, loss_w)
        world.requires_grad_(False)
        critic.requires_grad_(False)
        with amp():
            z = z.detach()
            states = []
            for _ in range(3):
                z = world.latent(world.move(torch.cat([z, actor(z).tanh()], 1)))
                states.append(z)
            loss_a = -torch.stack([critic(s) for s in states]).mean()
        stepped(opt_a, loss_a)
        world.requires_grad_(True)
        critic.requires_grad_(True)
        with amp():
            loss_c = torch.stack([(critic(s.detach()) - s.detach()[:, :1]).square().mean() for s in states]).mean()
        stepped(opt_c, loss_c)
        return (loss_w + loss_a + loss_c).detach()

    return Training(nn.ModuleDict({"w": world, "a": actor, "c": critic}), [opt_w, opt_a, opt_c], step)


@program
def conservative_values_with_a_lagrange_multiplier(amp: Cast) -> Training:
    values, log_alpha = dense(6, 32, 4), nn.Parameter(torch.zeros(()))
    target = copy.deepcopy(values).requires_grad_(False)
    opt_q, opt_a = Adam(values.parameters(), 1e-3), Adam([log_alpha], 1e-2)
    holder = nn.Module()
    holder.values, holder.log_alpha = values, log_alpha

    def step() -> Tensor:
        x, a = torch.randn(16, 6), torch.randint(4, (16, 1))
        with amp():
            q = values(x).float()
            with torch.no_grad():
                aim = x[:, :1] + 0.9 * target(torch.randn(16, 6)).float().amax(1, keepdim=True)
            gap = (q.logsumexp(1, keepdim=True) - q.gather(1, a)).mean()
            alpha = log_alpha.exp().clamp(0, 100)
            loss_a = -alpha * (gap.detach() - 1.0)
            loss = F.mse_loss(q.gather(1, a), aim) + alpha.detach() * gap
        stepped(opt_a, loss_a)
        stepped(opt_q, loss)
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(values.parameters()), 0.01)
        return loss.detach()

    return Training(holder, [opt_q, opt_a], step)


@program
def trust_region_policy_by_conjugate_gradients(amp: Cast) -> Training:
    policy, value = dense(4, 16, 3, act=nn.Tanh), dense(4, 16, 1, act=nn.Tanh)
    optimizer = Adam(value.parameters(), 1e-2)
    weights = list(policy.parameters())

    def flat(tensors: Any) -> Tensor:
        return torch.cat([t.reshape(-1) for t in tensors])

    def step() -> Tensor:
        x = torch.randn(32, 4)
        old = F.log_softmax(policy(x), 1).detach()
        a = torch.distributions.Categorical(logits=old).sample()[:, None]
        returns = x[:, :1] * (a == 0)
        for _ in range(2):
            loss_v = F.mse_loss(value(x), returns)
            stepped(optimizer, loss_v)
        advantage = returns - value(x).detach()

        def surrogate() -> Tensor:
            return -((F.log_softmax(policy(x), 1) - old).gather(1, a).exp() * advantage).mean()

        def product(v: Tensor) -> Tensor:
            now = F.log_softmax(policy(x), 1)
            kl = (old.exp() * (old - now)).sum(1).mean()
            first = flat(torch.autograd.grad(kl, weights, create_graph=True))
            return flat(torch.autograd.grad((first * v).sum(), weights)) + 0.1 * v

        loss = surrogate()
        g = -flat(torch.autograd.grad(loss, weights))
        d, r = torch.zeros_like(g), g.clone()
        p, rr = r.clone(), r @ r
        for _ in range(5):
            hp = product(p)
            alpha = rr / (p @ hp)
            d, r = d + alpha * p, r - alpha * hp
            p, rr = r + (r @ r) / rr * p, r @ r
        d = d * (0.02 / (d @ product(d))).sqrt()
        before = nn.utils.parameters_to_vector(weights).detach().clone()
        for k in range(4):
            nn.utils.vector_to_parameters(before + d * 0.5**k, weights)
            with torch.no_grad():
                if surrogate() < loss:
                    break
        else:
            nn.utils.vector_to_parameters(before, weights)
        return (loss + loss_v).detach()

    return Training(nn.ModuleDict({"policy": policy, "value": value}), [optimizer], step)


@program
def temporal_differences_with_eligibility_traces(amp: Cast) -> Training:
    model = dense(4, 16, 1, act=nn.Tanh)
    optimizer = SGD(model.parameters(), 0.01)
    traces = [torch.zeros_like(p) for p in model.parameters()]
    state = torch.zeros(1, 4)

    def step() -> Tensor:
        nonlocal state
        optimizer.zero_grad()
        with amp():
            value = model(state)
        value.sum().backward()
        following = 0.9 * state + 0.3 * torch.randn(1, 4)
        with torch.no_grad():
            delta = (following[0, 0] + 0.9 * model(following) - value).item()
        for e, p in zip(traces, model.parameters(), strict=True):
            assert p.grad is not None
            e.mul_(0.72).add_(p.grad)
            p.grad.copy_(-delta * e)
        optimizer.step()
        state = following
        return torch.tensor(delta**2)

    return Training(model, [optimizer], step)


# Meta learning, constraints, robustness


@program
def contexts_adapted_in_an_inner_loop(amp: Cast) -> Training:
    model = dense(5, 24, 24, 1, act=nn.Tanh)
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        total = torch.zeros(())
        optimizer.zero_grad()
        for _ in range(3):
            phase = torch.rand(()) * 3
            x, x2 = torch.rand(10, 1) * 4, torch.rand(10, 1) * 4
            context = torch.zeros(4, requires_grad=True)
            for _ in range(2):
                with amp():
                    inner = F.mse_loss(model(torch.cat([x, context.expand(10, 4)], 1)).float(), (x + phase).sin())
                (g,) = torch.autograd.grad(inner, context, create_graph=True)
                context = context - 0.5 * g
            with amp():
                total = total + F.mse_loss(model(torch.cat([x2, context.expand(10, 4)], 1)).float(), (x2 + phase).sin())
        (total / 3).backward()
        optimizer.step()
        return total.detach()

    return Training(model, [optimizer], step)


@program
def loss_weights_ascended_by_maximize(amp: Cast) -> Training:
    model, weights = dense(2, 24, 1, act=nn.Tanh), nn.Parameter(torch.ones(8))
    holder = nn.Module()
    holder.net, holder.weights = model, weights
    opt, opt_w = Adam(model.parameters(), 1e-3), Adam([weights], 1e-2, maximize=True)

    def step() -> Tensor:
        x = torch.rand(8, 2, requires_grad=True)
        with amp():
            u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = (weights.square() * (du[:, 0] + u[:, 0] - x[:, 1].detach()).square()).mean()
        opt.zero_grad()
        opt_w.zero_grad()
        loss.backward()
        opt.step()
        opt_w.step()
        return loss.detach()

    return Training(holder, [opt, opt_w], step)


@program
def augmented_lagrangian_with_a_clamped_multiplier(amp: Cast) -> Training:
    model, multiplier = dense(8, 24, 4), nn.Parameter(torch.tensor([0.1]))
    holder = nn.Module()
    holder.net, holder.multiplier = model, multiplier
    opt = SGD(
        [{"params": model.parameters(), "lr": 0.05}, {"params": [multiplier], "lr": 0.05, "maximize": True}], 0.05
    )

    def step() -> Tensor:
        x, y = batch()
        with amp():
            out = model(x)
            loss = F.cross_entropy(out, y) + multiplier[0] * (out[:, 0].float().mean() - 0.1)
        stepped(opt, loss)
        with torch.no_grad():
            multiplier.clamp_(min=0)
        return loss.detach()

    return Training(holder, [opt], step)


@program
def invariant_risk_with_a_dummy_scale(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer, count = Adam(model.parameters(), 1e-3), 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        total = torch.zeros(())
        for _ in range(2):
            x, y = batch()
            scale = torch.ones((), requires_grad=True)
            risk = F.cross_entropy(model(x).float() * scale, y)
            (g,) = torch.autograd.grad(risk, scale, create_graph=True)
            total = total + risk + (1.0 if count < 15 else 100.0) * g.square()
        return total / (1.0 if count < 15 else 100.0)

    return simple_loop(model, optimizer, amp, loss)


@program
def worst_group_weights_in_a_buffer(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    model.register_buffer("group_weights", torch.ones(3) / 3)
    optimizer = SGD(model.parameters(), 0.05, weight_decay=1e-2)

    def loss() -> Tensor:
        x, y = batch(24)
        each = F.cross_entropy(model(x), y, reduction="none").view(3, 8).mean(1)
        w: Any = model.group_weights
        w.mul_((0.1 * each.detach()).exp())
        w.div_(w.sum())
        return (each * w).sum()

    return simple_loop(model, optimizer, amp, loss)


@program
def domains_matched_by_kernels(amp: Cast) -> Training:
    body, head = dense(8, 24, 12), nn.Linear(12, 4)
    model = nn.Sequential(body, head)
    optimizer = SGD([{"params": body.parameters(), "lr": 0.01}, {"params": head.parameters(), "lr": 0.1}], momentum=0.9)

    def loss() -> Tensor:
        x, y = batch()
        f, g = body(x), body(torch.randn(16, 8) + 0.5)
        z = torch.cat([f, g]).float()
        d = torch.cdist(z, z).square()
        k: Any = sum((-d / (2 * s)).exp() for s in (1.0, 4.0))
        return F.cross_entropy(head(f), y) + 0.3 * (k[:16, :16].mean() + k[16:, 16:].mean() - 2 * k[:16, 16:].mean())

    return simple_loop(model, optimizer, amp, loss)


@program
def test_time_training_with_restoration(amp: Cast) -> Training:
    body, head, aux = dense(8, 24, 12), nn.Linear(12, 4), nn.Linear(12, 2)
    model = nn.ModuleDict({"body": body, "head": head, "aux": aux})
    optimizer, count = SGD(model.parameters(), 0.05), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch()
        with amp():
            f = body(x)
            loss = F.cross_entropy(head(f), y) + F.cross_entropy(aux(f), (x[:, 0] > 0).long())
        stepped(optimizer, loss)
        if count % 8 == 0:
            saved = copy.deepcopy(model.state_dict())
            inner = SGD(body.parameters(), 0.01)
            for _ in range(3):
                x, _ = batch()
                with amp():
                    own = F.cross_entropy(aux(body(x)), (x[:, 0] > 0).long())
                stepped(inner, own)
            model.load_state_dict(saved)
        return loss.detach()

    return Training(model, [optimizer], step)


# Embeddings and recommenders


@program
def word_vectors_by_two_sparse_tables(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Embedding(60, 8, sparse=True), nn.Embedding(60, 8, sparse=True)
            nn.init.uniform_(self.inner.weight, -0.06, 0.06)
            nn.init.zeros_(self.outer.weight)

        def forward(self, a: Tensor, b: Tensor, wrong: Tensor) -> Tensor:
            v = self.inner(a)
            good = F.logsigmoid((v * self.outer(b)).sum(1))
            bad = F.logsigmoid(-(self.outer(wrong) * v[:, None]).sum(2)).sum(1)
            return -(good + bad).mean()

    model = Net()
    optimizer = SparseAdam(list(model.parameters()), 1e-2)

    def loss() -> Tensor:
        a = torch.randint(60, (16,))
        return model(a, (a + 1) % 60, torch.randint(60, (16, 4)))

    return simple_loop(model, optimizer, amp, loss)


@program
def clicks_by_sparse_bags_and_dense_interaction(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum", sparse=True) for _ in range(3))
            self.bottom, self.top = dense(5, 16, 8), dense(14, 16, 1)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            parts = torch.stack([self.bottom(x), *(b(i) for b, i in zip(self.bags, ids, strict=True))], 1)
            dots = (parts @ parts.mT)[:, *torch.triu_indices(4, 4, 1)]
            return self.top(torch.cat([parts[:, 0], dots], 1))[:, 0]

    model = Net()
    opt_s = SGD(model.bags.parameters(), 0.1)
    opt_d = Adagrad([*model.bottom.parameters(), *model.top.parameters()], 0.02)

    def step() -> Tensor:
        opt_s.zero_grad()
        opt_d.zero_grad()
        x, ids = torch.randn(16, 5), torch.randint(30, (3, 16, 4))
        with amp():
            loss = F.binary_cross_entropy_with_logits(model(x, ids).float(), (x[:, 0] > 0).float())
        loss.backward()
        opt_s.step()
        opt_d.step()
        return loss.detach()

    return Training(model, [opt_s, opt_d], step)


@program
def translations_with_embeddings_renormalised_before_steps(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.things, self.relations = nn.Embedding(30, 8), nn.Embedding(4, 8)

        def forward(self, h: Tensor, r: Tensor, t: Tensor) -> Tensor:
            return (self.things(h) + self.relations(r) - self.things(t)).abs().sum(1)

    model = Net()
    optimizer = SGD(model.parameters(), 0.05)

    def loss() -> Tensor:
        model.things.weight.data = F.normalize(model.things.weight.data, dim=1)
        h, r = torch.randint(30, (16,)), torch.randint(4, (16,))
        t = (h + r + 1) % 30
        return F.relu(1 + model(h, r, t) - model(h, r, torch.randint(30, (16,)))).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def embeddings_with_largest_norm_and_frequencies(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(20, 8, max_norm=1.0)
            self.b = nn.Embedding(20, 8, padding_idx=0, scale_grad_by_freq=True)
            self.head = dense(16, 24, 4)

        def forward(self, t: Tensor) -> Tensor:
            return self.head(torch.cat([self.a(t).mean(1), self.b(t).mean(1)], 1))

    model = Net()
    optimizer = AdamW(model.parameters(), 2e-3)

    def loss() -> Tensor:
        t = torch.randint(20, (16, 6))
        return F.cross_entropy(model(t), t[:, 0] % 4)

    return simple_loop(model, optimizer, amp, loss)


@program
def adaptive_softmax_head(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn = nn.Embedding(40, 16), nn.GRU(16, 24, batch_first=True)
            self.head = nn.AdaptiveLogSoftmaxWithLoss(24, 40, [8, 20], div_value=2.0)

        def forward(self, t: Tensor) -> Tensor:
            h, _ = self.rnn(self.table(t[:, :-1]))
            with torch.autocast("cpu", enabled=False):
                return self.head(h.flatten(0, 1).float(), t[:, 1:].flatten()).loss

    model = Net()
    optimizer = Adagrad(model.parameters(), 0.05)
    return simple_loop(model, optimizer, amp, lambda: model(sequences(4, 10, 40)))


@program
def graph_recommender_with_decay_of_the_batch(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(20, 8), nn.Embedding(30, 8)
            links = (torch.rand(20, 30) < 0.2).float()
            full = torch.zeros(50, 50)
            full[:20, 20:], full[20:, :20] = links, links.t()
            d = full.sum(1).clamp(min=1).rsqrt()
            self.register_buffer("graph", (d[:, None] * full * d).to_sparse())

        def forward(self) -> tuple[Tensor, Tensor]:
            x = torch.cat([self.users.weight, self.items.weight])
            layers = [x]
            for _ in range(2):
                layers.append(torch.sparse.mm(self.graph, layers[-1]))
            return torch.stack(layers).mean(0).split([20, 30])

    model = Net()
    optimizer = Adam(model.parameters(), 5e-3)

    def step() -> Tensor:
        u, i, j = torch.randint(20, (16,)), torch.randint(30, (16,)), torch.randint(30, (16,))
        users, items = model()
        loss = F.softplus((users[u] * (items[j] - items[i])).sum(1)).mean()
        own = model.users(u).square().sum() + model.items(i).square().sum() + model.items(j).square().sum()
        loss = loss + 1e-3 * own / 16
        stepped(optimizer, loss)
        return loss.detach()

    return Training(model, [optimizer], step)


# Recurrent and sequence models


@program
def weight_dropped_lstm_that_switches_to_averages(amp: Cast) -> Training:
    class Dropped(nn.Module):
        rnn: Any

        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn, self.head = nn.Embedding(17, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 17)
            self.head.weight = self.table.weight
            raw = self.rnn.weight_hh_l0
            del self.rnn._parameters["weight_hh_l0"]
            self.raw = nn.Parameter(raw.data)
            self.rnn.flatten_parameters = lambda: None
            object.__setattr__(self.rnn, "weight_hh_l0", self.raw.data)

        def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
            object.__setattr__(self.rnn, "weight_hh_l0", F.dropout(self.raw, 0.3, self.training))
            x = self.table(t)
            state = (torch.zeros(len(t), 16), torch.zeros(len(t), 16))
            w = self.rnn
            out = []
            h, c = state
            for k in range(t.shape[1]):
                gates = F.linear(x[:, k], w.weight_ih_l0, w.bias_ih_l0) + F.linear(h, w.weight_hh_l0, w.bias_hh_l0)
                i, f, g, o = gates.chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                out.append(h)
            hidden = torch.stack(out, 1)
            return self.head(hidden), hidden

    model = Dropped()
    optimizer: Optimizer = SGD(model.parameters(), 0.5, weight_decay=1e-6)
    slow = ASGD(model.parameters(), 0.5, t0=0, lambd=0.0, weight_decay=1e-6)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        t = sequences()
        with amp():
            out, hidden = model(t[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), t[:, 1:].flatten()) + hidden.float().square().mean()
            loss = loss + (hidden[:, 1:] - hidden[:, :-1]).float().square().mean()
        now = optimizer if count < 25 else slow
        now.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        now.step()
        return loss.detach()

    return Training(model, [optimizer, slow], step)


@program
def translation_with_scheduled_sampling(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.encoder, self.cell = (
                nn.Embedding(12, 12),
                nn.GRU(12, 16, batch_first=True),
                nn.GRUCell(12, 16),
            )
            self.out = nn.Linear(16, 12)

        def forward(self, source: Tensor, target: Tensor, forced: float) -> Tensor:
            _, h = self.encoder(self.table(source))
            h, token, outs = h[0], target[:, 0], []
            for k in range(1, target.shape[1]):
                h = self.cell(self.table(token), h)
                logits = self.out(h)
                outs.append(logits)
                token = target[:, k] if random.random() < forced else logits.argmax(1)
            return torch.stack(outs, 1)

    model, count = Net(), 0
    optimizer = Adam(model.parameters(), 2e-3)

    def loss() -> Tensor:
        nonlocal count
        count += 1
        s = torch.randint(1, 12, (8, 6))
        t = torch.cat([torch.zeros(8, 1, dtype=torch.long), s.flip(1)], 1)
        out = model(s, t, max(0.2, 1 - count / 40))
        return F.cross_entropy(out.flatten(0, 1), t[:, 1:].flatten())

    return simple_loop(model, optimizer, amp, loss)


@program
def trees_composed_recursively(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.join, self.head = nn.Embedding(10, 8), nn.Linear(16, 24), nn.Linear(8, 3)

        def node(self, tree: Any) -> Tensor:
            if isinstance(tree, int):
                return self.table.weight[tree]
            left, right = (self.node(part) for part in tree)
            a, b, g = self.join(torch.cat([left, right])).chunk(3)
            return a.tanh() * g.sigmoid() + b.tanh()

        def forward(self, trees: list[Any]) -> Tensor:
            return self.head(torch.stack([self.node(t) for t in trees]))

    def grown(depth: int) -> Any:
        return random.randrange(10) if depth == 0 or random.random() < 0.2 else (grown(depth - 1), grown(depth - 1))

    model = Net()
    optimizer = Adagrad(model.parameters(), 0.02, weight_decay=1e-4)
    return simple_loop(
        model, optimizer, amp, lambda: F.cross_entropy(model([grown(3) for _ in range(6)]), torch.randint(3, (6,)))
    )


@program
def memory_machine_with_learned_start(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.keys, self.out = nn.LSTMCell(12, 16), nn.Linear(16, 16), nn.Linear(24, 4)
            self.memory, self.h0, self.c0 = (
                nn.Parameter(torch.randn(6, 8) * 0.1),
                nn.Parameter(torch.zeros(16)),
                nn.Parameter(torch.zeros(16)),
            )

        def forward(self, x: Tensor) -> Tensor:
            n = len(x)
            m, h, c = self.memory.expand(n, 6, 8), self.h0.expand(n, 16), self.c0.expand(n, 16)
            read, outs = torch.zeros(n, 8), []
            for k in range(x.shape[1]):
                h, c = self.cell(torch.cat([x[:, k], read.to(x.dtype)], 1), (h.to(x.dtype), c.to(x.dtype)))
                key, write = self.keys(h).float().chunk(2, 1)
                w = F.cosine_similarity(m, key[:, None], dim=2).mul(3).softmax(1)
                m = m + w[..., None] * write.tanh()[:, None]
                read = (w[..., None] * m).sum(1)
                outs.append(self.out(torch.cat([h.float(), read], 1)))
            return torch.stack(outs, 1)

    model = Net()
    optimizer = RMSprop(model.parameters(), 1e-3, alpha=0.95, momentum=0.9)

    def loss() -> Tensor:
        x = (torch.rand(6, 8, 4) > 0.5).float()
        return F.binary_cross_entropy_with_logits(model(x), x.roll(2, 1))

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            value = loss()
        value.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        return value.detach()

    return Training(model, [optimizer], step)


@program
def pondering_with_a_halting_distribution(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out, self.halt = nn.GRUCell(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, left, outs, p = torch.zeros(len(x), 16), torch.ones(len(x)), [], []
            for k in range(4):
                h = self.cell(x, h.to(x.dtype))
                stop = self.halt(h)[:, 0].float().sigmoid() if k < 3 else torch.ones(len(x))
                outs.append(self.out(h).float())
                p.append(left * stop)
                left = left * (1 - stop)
            return torch.stack(outs, 1), torch.stack(p, 1)

    model = Net()
    optimizer = Adam(model.parameters(), 1e-3)
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def loss() -> Tensor:
        x, y = batch()
        out, p = model(x)
        each = F.cross_entropy(out.mT, y[:, None].expand(-1, 4), reduction="none")
        return (p * each).sum(1).mean() + 0.01 * F.kl_div(
            p.clamp(1e-6).log(), prior.expand_as(p), reduction="batchmean"
        )

    return simple_loop(model, optimizer, amp, loss)


# Own backward passes


@program
def branches_shaken_differently_in_the_backward(amp: Cast) -> Training:
    class Shake(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            alpha = torch.rand(len(a), 1)
            return alpha * a + (1 - alpha) * b

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            beta = torch.rand(len(grads[0]), 1)
            return beta * grads[0], (1 - beta) * grads[0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b, self.out = (
                nn.Linear(8, 16),
                dense(16, 16, 16),
                dense(16, 16, 16),
                nn.Linear(16, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            a, b = self.a(h), self.b(h)
            return self.out(h + (Shake.apply(a, b) if self.training else (a + b) / 2))

    model = Net()
    return simple_loop(
        model, SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True), amp, lambda: classified(model)
    )


@program
def gradients_quantised_in_the_backward(amp: Cast) -> Training:
    class Rough(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            g = grads[0]
            top = g.abs().max().clamp(min=1e-12)
            return ((g / top * 7 + torch.rand_like(g) - 0.5).round() / 7) * top

    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight.tanh()
            w = w / w.abs().max()
            w = w + ((w * 7).round() / 7 - w).detach()
            return Rough.apply(F.linear(x, w, self.bias))

    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), Quantised(24, 24), nn.ReLU(), nn.Linear(24, 4))
    return simple_loop(model, Adam(model.parameters(), 1e-3), amp, lambda: classified(model))


@program
def reversible_blocks_that_recompute_inputs(amp: Cast) -> Training:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, f: Any, g: Any, *weights: Tensor) -> Tensor:
            ctx.f, ctx.g, ctx.weights = f, g, weights
            a, b = x.chunk(2, 1)
            with torch.no_grad():
                a = a + f(b)
                b = b + g(a)
            out = torch.cat([a, b], 1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (out,) = ctx.saved_tensors
            with torch.no_grad():
                a, b = out.chunk(2, 1)
                b = b - ctx.g(a)
                a = a - ctx.f(b)
            with torch.enable_grad():
                a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
                y = a + ctx.f(b)
                z = b + ctx.g(y)
                result = torch.autograd.grad(torch.cat([y, z], 1), (a, b, *ctx.weights), grads[0])
            return torch.cat(result[:2], 1), None, None, *result[2:]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
            self.blocks = nn.ModuleList(nn.ModuleList([dense(8, 8, 8), dense(8, 8, 8)]) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            pair: Any
            for pair in self.blocks:
                f, g = pair
                h = Reversed.apply(h, f, g, *f.parameters(), *g.parameters())
            return self.out(h)

    model = Net()
    return simple_loop(model, Adam(model.parameters(), 1e-3), nullcontext, lambda: classified(model))


@program
def equilibrium_solved_in_a_hook(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject, self.cell, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
            with torch.no_grad():
                self.cell.weight.mul_(0.4)

        def forward(self, x: Tensor) -> Tensor:
            u = self.inject(x)
            with torch.no_grad():
                z = torch.zeros_like(u)
                for _ in range(20):
                    z = (self.cell(z) + u).tanh()
            z = (self.cell(z) + u).tanh()
            if self.training and torch.is_grad_enabled():
                z0 = z.detach().requires_grad_()
                f0 = (self.cell(z0) + u.detach()).tanh()

                def solve(g: Tensor) -> Tensor:
                    v = g
                    for _ in range(20):
                        v = torch.autograd.grad(f0, z0, v, retain_graph=True)[0] + g
                    return v

                z.register_hook(solve)
            return self.out(z)

    model = Net()
    return simple_loop(model, Adam(model.parameters(), 1e-3), nullcontext, lambda: classified(model))


# Optimizers


class AdaHessian(Optimizer):
    """Adam with the diagonal of the Hessian by Hutchinson's estimate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in params]
        products = torch.autograd.grad([p.grad for p in params], params, grad_outputs=signs)
        with torch.no_grad():
            for p, s, hz in zip(params, signs, products, strict=True):
                state = self.state[p]
                if not state:
                    state.update(n=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["n"] += 1
                state["m"].mul_(0.9).add_(p.grad.detach(), alpha=0.1)
                state["v"].mul_(0.999).addcmul_(hz * s, hz * s, value=0.001)
                m, v = state["m"] / (1 - 0.9 ** state["n"]), state["v"] / (1 - 0.999 ** state["n"])
                p.sub_(self.param_groups[0]["lr"] * m / (v.sqrt() + 1e-2))


@program
def hessian_diagonal_by_double_backward(amp: Cast) -> Training:
    model = dense(8, 24, 4, act=nn.Tanh)
    optimizer = AdaHessian(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward(create_graph=True)
        optimizer.step()
        for p in model.parameters():
            p.grad = None
        return loss.detach()

    return Training(model, [optimizer], step)


class Sophia(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def update_hessian(self) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["h"] = state.get("h", torch.zeros_like(p)).mul_(0.9).addcmul_(p.grad, p.grad, value=0.1 * 16)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p in group["params"]:
            state = self.state[p]
            m = state["m"] = state.get("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad, alpha=0.1)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            ratio = (m.abs() / (0.05 * state.get("h", torch.zeros_like(p)) + 1e-15)).clamp(max=1)
            p.addcmul_(m.sign(), ratio, value=-group["lr"])


@program
def clipped_newton_with_sampled_labels_every_five_steps(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4, act=nn.GELU)
    optimizer, count = Sophia(model.parameters(), 1e-3), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        with amp():
            loss = classified(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if count % 5 == 1:
            x, _ = batch()
            with amp():
                out = model(x)
            y = torch.distributions.Categorical(logits=out.detach().float()).sample()
            F.cross_entropy(out, y).backward()
            optimizer.update_hessian()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def kronecker_factors_by_hooks(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)
    factors: dict[Any, list[Tensor]] = {}
    linears = [m for m in model if isinstance(m, nn.Linear)]

    def seen(m: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            x = args[0].detach().float()
            x = torch.cat([x, torch.ones(len(x), 1)], 1)
            factors[m][0].mul_(0.95).add_(x.t() @ x / len(x), alpha=0.05)

    def returned(m: nn.Module, grads: Any, outs: Any) -> None:
        g = outs[0].detach().float()
        factors[m][1].mul_(0.95).add_(g.t() @ g * len(g), alpha=0.05)

    for m in linears:
        factors[m] = [torch.eye(m.in_features + 1), torch.eye(m.out_features)]
        m.register_forward_pre_hook(seen)
        m.register_full_backward_hook(returned)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        with torch.no_grad():
            for m in linears:
                a, g = factors[m]
                assert m.weight.grad is not None
                assert m.bias.grad is not None
                both = torch.cat([m.weight.grad, m.bias.grad[:, None]], 1)
                new = torch.linalg.solve(g + 0.1 * torch.eye(len(g)), both)
                new = torch.linalg.solve(a + 0.1 * torch.eye(len(a)), new.t()).t()
                m.weight.grad.copy_(new[:, :-1])
                m.bias.grad.copy_(new[:, -1])
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


class Projected(Optimizer):
    """Adam in a space of low rank that is renewed now and then, with moments in eight bits."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @staticmethod
    def packed(x: Tensor) -> tuple[Tensor, Tensor]:
        top = x.abs().max().clamp(min=1e-12)
        return (x / top * 127).round().to(torch.int8), top

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad, self.state[p]
                state["n"] = n = state.get("n", 0) + 1
                if p.ndim == 2:
                    if n % 10 == 1:
                        state["basis"] = torch.linalg.svd(g, full_matrices=False)[0][:, :4]
                    g = state["basis"].t() @ g
                m = state["m"][0].float() / 127 * state["m"][1] if "m" in state else torch.zeros_like(g)
                v = state.get("v", torch.zeros_like(g))
                m, v = m * 0.9 + 0.1 * g, v * 0.99 + 0.01 * g * g
                state["m"], state["v"] = self.packed(m), v
                u = (m / (1 - 0.9**n)) / ((v / (1 - 0.99**n)).sqrt() + 1e-8)
                p.sub_(group["lr"] * (state["basis"] @ u if p.ndim == 2 else u))


@program
def low_rank_projected_moments_in_eight_bits(amp: Cast) -> Training:
    model = Lm()
    optimizer = Projected(model.parameters(), 1e-3)

    def loss() -> Tensor:
        t = sequences()
        return F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())

    return simple_loop(model, optimizer, amp, loss)


@program
def delayed_gradients_of_a_pipeline(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)
    waiting: deque[list[Tensor]] = deque()

    def step() -> Tensor:
        with amp():
            loss = classified(model)
        waiting.append(list(torch.autograd.grad(loss, list(model.parameters()))))
        if len(waiting) > 2:
            for p, g in zip(model.parameters(), waiting.popleft(), strict=True):
                p.grad = g
            optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def zeroth_order_by_two_evaluations(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = SGD(model.parameters(), 1e-3)

    def moved(seed: int, scale: float) -> None:
        made = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, generator=made), alpha=scale)

    def step() -> Tensor:
        x, y = batch()
        seed = random.randrange(10**6)
        with torch.no_grad(), amp():
            moved(seed, 1e-3)
            up = F.cross_entropy(model(x), y)
            moved(seed, -2e-3)
            down = F.cross_entropy(model(x), y)
            moved(seed, 1e-3)
        slope = float(up - down) / 2e-3
        made = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = slope * torch.randn(p.shape, generator=made)
        optimizer.step()
        optimizer.zero_grad()
        return up

    return Training(model, [optimizer], step)


@program
def control_variates_of_clients(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = SGD(model.parameters(), 0.05)
    center = [torch.zeros_like(p) for p in model.parameters()]
    own = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(3)]
    start = [p.detach().clone() for p in model.parameters()]
    count, sums = 0, [torch.zeros_like(p) for p in model.parameters()]

    def step() -> Tensor:
        nonlocal count
        client, inner = count // 3 % 3, count % 3
        count += 1
        if inner == 0:
            with torch.no_grad():
                for p, s in zip(model.parameters(), start, strict=True):
                    p.copy_(s)
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        for p, c, ci in zip(model.parameters(), center, own[client], strict=True):
            assert p.grad is not None
            p.grad.data.add_(c - ci)
        optimizer.step()
        if inner == 2:
            with torch.no_grad():
                for k, p in enumerate(model.parameters()):
                    new = own[client][k] - center[k] + (start[k] - p) / (3 * 0.05)
                    center[k] += (new - own[client][k]) / 3
                    own[client][k] = new
                    sums[k] += p - start[k]
                if client == 2:
                    for s, d in zip(start, sums, strict=True):
                        s.add_(d / 3)
                        d.zero_()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def replicas_copied_and_averaged_in_one_process(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        copies, losses = [copy.deepcopy(model) for _ in range(3)], []
        for replica in copies:
            with amp():
                loss = classified(replica)
            loss.backward()
            losses.append(loss.detach())
        for group in zip(model.parameters(), *(c.parameters() for c in copies), strict=True):
            group[0].grad = torch.stack([q.grad for q in group[1:]]).mean(0)
        optimizer.step()
        return torch.stack(losses).mean()

    return Training(model, [optimizer], step)


@program
def sampled_posterior_with_momentum_refreshed(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer, count = SGD(model.parameters(), 0.01, momentum=0.9), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.005 * (math.cos(math.pi * (count % 20) / 20) + 1) + 1e-4
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(p.detach(), alpha=1e-3)
            if count % 20 > 12:
                p.grad.add_(torch.randn_like(p), alpha=0.02)
        optimizer.step()
        if count % 20 == 0:
            for p in model.parameters():
                optimizer.state[p]["momentum_buffer"].normal_(0, 0.01)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def gaussian_averages_sampled_for_evaluation(amp: Cast) -> Training:
    model = small_cnn()
    optimizer, count = SGD(model.parameters(), 0.05, momentum=0.9), 0
    mean = [torch.zeros_like(p) for p in model.parameters()]
    square = [torch.zeros_like(p) for p in model.parameters()]

    def step() -> Tensor:
        nonlocal count
        count += 1
        model.train()
        x, y = digits()
        with amp():
            loss = F.cross_entropy(model(x), y)
        stepped(optimizer, loss)
        if count > 10 and count % 3 == 0:
            for m, s, p in zip(mean, square, model.parameters(), strict=True):
                m.lerp_(p.detach(), 0.2)
                s.lerp_(p.detach() ** 2, 0.2)
        if count % 13 == 0:
            kept = copy.deepcopy(model.state_dict())
            with torch.no_grad():
                for m, s, p in zip(mean, square, model.parameters(), strict=True):
                    p.copy_(m + (s - m * m).clamp(min=1e-12).sqrt() * torch.randn_like(p))
                for _ in range(2):
                    model(digits()[0])
                model.eval()
                model(digits()[0])
            model.load_state_dict(kept)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def cycles_of_rate_and_polynomial_decay_on_two_optimizers(amp: Cast) -> Training:
    body, head = dense(8, 24, 12), nn.Linear(12, 4)
    model = nn.Sequential(body, nn.ReLU(), head)
    a, b = SGD(body.parameters(), 0.01, momentum=0.9), AdamW(head.parameters(), 2e-3)
    cyclic, decay = CyclicLR(a, 0.005, 0.05, step_size_up=6, mode="triangular2"), PolynomialLR(b, 45, power=0.9)

    def step() -> Tensor:
        a.zero_grad()
        b.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        nn.utils.clip_grad_norm_(body.parameters(), 1.0)
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        a.step()
        b.step()
        cyclic.step()
        decay.step()
        return loss.detach()

    return Training(model, [a, b], step)


@program
def clipping_by_a_percentile_of_past_norms(amp: Cast) -> Training:
    model, norms = dense(8, 24, 24, 4), [1.0]
    optimizer = AdamW(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        nn.utils.clip_grads_with_norm_(model.parameters(), float(np.percentile(norms, 25)), torch.tensor(norms[-1]))
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def gradients_normalised_tensor_by_tensor_for_automata(amp: Cast) -> Training:
    class Cells(nn.Module):
        kernels: Any

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(12, 24, 1), nn.Conv2d(24, 4, 1, bias=False)
            nn.init.zeros_(self.b.weight)
            kernel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
            one = torch.zeros(3, 3)
            one[1, 1] = 1
            self.register_buffer("kernels", torch.stack([one, kernel, kernel.t()]).repeat(4, 1, 1)[:, None])

        def forward(self, x: Tensor, steps: int) -> Tensor:
            for _ in range(steps):
                y = self.b(F.relu(self.a(F.conv2d(x, self.kernels.to(x.dtype), padding=1, groups=4))))
                x = x + y * (torch.rand_like(x[:, :1]) < 0.5)
            return x

    model = Cells()
    optimizer = Adam(model.parameters(), 2e-3)
    pool, aim = torch.zeros(16, 4, 6, 6), torch.rand(4, 6, 6)
    pool[:, :, 3, 3] = 1

    def step() -> Tensor:
        index = torch.randperm(16)[:4]
        with amp():
            x = model(pool[index], random.randint(3, 6))
            loss = (x.float() - aim).square().mean()
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.grad /= p.grad.norm() + 1e-8
        optimizer.step()
        pool[index] = x.detach().float()
        return loss.detach()

    return Training(model, [optimizer], step)


# Structures that change


@program
def splats_that_are_split_and_pruned(amp: Cast) -> Training:
    class Splats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at, self.size = nn.Parameter(torch.rand(12, 2)), nn.Parameter(torch.full((12,), -2.0))
            self.color = nn.Parameter(torch.rand(12, 3))

        def forward(self, x: Tensor) -> Tensor:
            d = (x[:, None] - self.at).square().sum(2)
            w = (-d * (-2 * self.size).exp() / 2).exp()
            return w @ self.color.sigmoid()

    model = Splats()
    names = ("at", "size", "color")
    rates = {"at": 5e-3, "size": 1e-2, "color": 2e-2}
    optimizer = Adam([{"params": [getattr(model, n)], "lr": rates[n], "name": n} for n in names], eps=1e-15)
    xs = torch.stack(torch.meshgrid(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8), indexing="ij"), -1).view(-1, 2)
    image, count = torch.rand(64, 3), 0

    def replaced(choose: Tensor, keep: Tensor) -> None:
        for group in optimizer.param_groups:
            p = group["params"][0]
            state = optimizer.state.pop(p)
            new = nn.Parameter(torch.cat([p[keep], p[choose]]).detach().requires_grad_())
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key][keep], torch.zeros_like(p[choose])])
            group["params"][0] = new
            optimizer.state[new] = state
            setattr(model, group["name"], new)

    def step() -> Tensor:
        nonlocal count
        count += 1
        with amp():
            loss = (model(xs).float() - image).abs().mean()
        loss.backward()
        optimizer.step()
        if count % 12 == 0:
            with torch.no_grad():
                assert model.at.grad is not None
                norm = model.at.grad.norm(dim=1)
                order = norm.argsort(descending=True)
                replaced(order[:3], order[:-1])
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def boosted_networks_added_stage_by_stage(amp: Cast) -> Training:
    class Boosted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([dense(8, 12, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return sum(part(x) for part in self.parts)

    model = Boosted()
    optimizer, count = Adam(model.parts[0].parameters(), 2e-3), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        with amp():
            loss = classified(model)
        stepped(optimizer, loss)
        if count % 14 == 0:
            model.parts.requires_grad_(False)
            model.parts.append(dense(8, 12, 4))
            optimizer.param_groups.clear()
            optimizer.state.clear()
            optimizer.add_param_group({"params": list(model.parts[-1].parameters())})
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def head_widened_for_new_classes(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = dense(8, 24, 24), nn.Linear(24, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.body(x)))

    model = Net()
    optimizer, count = SGD(model.parameters(), 0.05, momentum=0.9), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        classes = 4 if count <= 20 else 7
        if count == 21:
            old, model.head = model.head, nn.Linear(24, 7)
            with torch.no_grad():
                model.head.weight[:4], model.head.bias[:4] = old.weight, old.bias
            optimizer.param_groups[0]["params"] = list(model.parameters())
            for p in old.parameters():
                optimizer.state.pop(p, None)
        x, y = batch(16, 8, classes)
        with amp():
            loss = F.cross_entropy(model(x), y)
        stepped(optimizer, loss)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def architecture_weights_on_validation_batches(amp: Cast) -> Training:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
            self.choices = nn.ModuleList(
                [nn.Identity(), dense(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Tanh()]
            )
            self.alpha = nn.Parameter(1e-3 * torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x))
            return self.out(sum(w * f(h) for w, f in zip(self.alpha.softmax(0), self.choices, strict=True)))

    model = Cell()
    weights = [p for n, p in model.named_parameters() if n != "alpha"]
    opt_w, opt_a = (
        SGD(weights, 0.025, momentum=0.9, weight_decay=3e-4),
        Adam([model.alpha], 3e-3, (0.5, 0.999), weight_decay=1e-3),
    )

    def step() -> Tensor:
        opt_a.zero_grad()
        with amp():
            classified(model).backward()
        opt_a.step()
        opt_w.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 5.0)
        opt_w.step()
        return loss.detach()

    return Training(model, [opt_w, opt_a], step)


@program
def widths_sampled_with_a_sandwich_of_passes(amp: Cast) -> Training:
    class Slim(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.width = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 4), 24

        def forward(self, x: Tensor) -> Tensor:
            n = self.width
            h = F.relu(F.linear(x, self.a.weight[:n], self.a.bias[:n]))
            h = F.relu(F.linear(h, self.b.weight[:n, :n], self.b.bias[:n]))
            return F.linear(h, self.c.weight[:, :n], self.c.bias)

    model = Slim()
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)

    def step() -> Tensor:
        optimizer.zero_grad()
        x, y = batch()
        model.width = 24
        with amp():
            out = model(x)
            loss = F.cross_entropy(out, y)
        loss.backward()
        aim = out.detach().float().softmax(1)
        for width in (6, *random.sample(range(7, 24), 2)):
            model.width = width
            with amp():
                F.cross_entropy(model(x), aim).backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def pruned_before_training_with_masked_gradients(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    classified(model).backward()
    for p in model.parameters():
        if p.ndim > 1:
            assert p.grad is not None
            score = (p * p.grad).abs().flatten()
            mask = ((p * p.grad).abs() >= score.kthvalue(len(score) // 2).values).float()
            p.data.mul_(mask)
            p.register_hook(lambda g, mask=mask: g * mask)
    model.zero_grad()
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    return simple_loop(model, optimizer, amp, lambda: classified(model))


@program
def tasks_drawn_one_by_one_with_zeroed_gradients(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = dense(8, 24, 16), nn.ModuleList(nn.Linear(16, 4) for _ in range(4))

        def forward(self, x: Tensor, task: int) -> Tensor:
            return self.heads[task](F.relu(self.body(x)))

    model = Net()
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        x, y = batch()
        with amp():
            loss = F.cross_entropy(model(x, random.randrange(4)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


# Loops that catch, retry and skip


@program
def batches_split_when_memory_runs_out(amp: Cast) -> Training:
    model, fails = dense(8, 24, 24, 4), iter(range(10**6))
    optimizer = AdamW(model.parameters(), 1e-3)

    def attempt(x: Tensor, y: Tensor, limit: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for a, b in zip(x.split(limit), y.split(limit), strict=True):
            with amp():
                loss = F.cross_entropy(model(a), b, reduction="sum") / len(x)
            if limit == 16 and next(fails) % 7 == 3:
                raise torch.OutOfMemoryError("out of memory")
            loss.backward()
            total += loss.detach()
        return total

    def step() -> Tensor:
        x, y = batch()
        try:
            loss = attempt(x, y, 16)
        except torch.OutOfMemoryError:
            loss = attempt(x, y, 5)
        optimizer.step()
        return loss

    return Training(model, [optimizer], step)


@program
def bad_batches_caught_and_passed_over(amp: Cast) -> Training:
    model = small_cnn()
    optimizer, count = SGD(model.parameters(), 0.05, momentum=0.9), 0

    def step() -> Tensor:
        nonlocal count
        while True:
            count += 1
            x, y = digits()
            if count % 6 == 0:
                x = x[:, :, :2, :2].repeat(1, 2, 1, 1)
            if count % 11 == 0:
                x = x * math.nan
            optimizer.zero_grad()
            try:
                with amp():
                    loss = F.cross_entropy(model(x.nan_to_num(7.0) if count % 11 == 0 else x), y)
            except RuntimeError:
                continue
            if count % 11 == 0:
                continue
            loss.backward()
            optimizer.step()
            return loss.detach()

    return Training(model, [optimizer], step)


@program
def images_that_grow_in_size(amp: Cast) -> Training:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    optimizer, count = SGD(model.parameters(), 0.05, momentum=0.9), 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        x, y = digits()
        size = 6 + 2 * (count // 8 % 4)
        return F.cross_entropy(model(F.interpolate(x, size=(size, size), mode="bilinear")), y, label_smoothing=0.1)

    return simple_loop(model, optimizer, amp, loss)


@program
def untrained_prior_of_one_image(amp: Cast) -> Training:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Conv2d(8, 1, 1), nn.Sigmoid(),
    )  # fmt: skip
    fixed, image = torch.rand(1, 4, 8, 8) * 0.1, torch.rand(1, 1, 8, 8)
    optimizer = Adam(model.parameters(), 1e-2)
    smooth = None

    def loss() -> Tensor:
        nonlocal smooth
        out = model(fixed)
        smooth = out.detach() if smooth is None else 0.99 * smooth + 0.01 * out.detach()
        return F.mse_loss(out.float(), image)

    return simple_loop(model, optimizer, amp, loss)


@program
def objects_matched_by_assignment(amp: Cast) -> Training:
    from scipy.optimize import linear_sum_assignment

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.queries = nn.Linear(6, 16), nn.Embedding(5, 16)
            self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            self.kind, self.box = nn.Linear(16, 4), dense(16, 16, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.decoder(self.queries.weight.expand(len(x), 5, 16), self.front(x))
            return self.kind(h), self.box(h).sigmoid()

    model = Detector()
    optimizer = AdamW(model.parameters(), 1e-3)

    def loss() -> Tensor:
        x = torch.randn(4, 7, 6)
        kinds, boxes = model(x)
        value = torch.zeros(())
        for k, b in zip(kinds.float(), boxes.float(), strict=True):
            y, aim = torch.randint(3, (2,)), torch.rand(2, 2)
            cost = -k.softmax(1)[:, y] + torch.cdist(b, aim, p=1)
            rows, columns = linear_sum_assignment(cost.detach().numpy())
            labels = torch.full((5,), 3)
            labels[rows] = y[columns]
            weight = torch.tensor([1.0, 1, 1, 0.1])
            value = value + F.cross_entropy(k, labels, weight) + 5 * (b[rows] - aim[columns]).abs().mean()
        return value / 4

    return simple_loop(model, optimizer, amp, loss)


# Flows, kernels, energies


@program
def glow_with_activation_norm_set_by_the_first_batch(amp: Cast) -> Training:
    class ActNorm(nn.Module):
        ready: Any

        def __init__(self) -> None:
            super().__init__()
            self.shift, self.log_scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if not self.ready:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.log_scale.copy_(-x.std(0).log())
                    self.ready.fill_(True)
            return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()

    class Glow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(ActNorm() for _ in range(3))
            self.mixes = nn.ParameterList(torch.linalg.qr(torch.randn(6, 6))[0] for _ in range(3))
            self.nets = nn.ModuleList(dense(3, 16, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(len(x))
            for norm, mix, net in zip(self.norms, self.mixes, self.nets, strict=True):
                x, d = norm(x)
                x = x @ mix
                a, b = x.chunk(2, 1)
                s, t = net(a).float().chunk(2, 1)
                x = torch.cat([a, b * s.tanh().exp() + t], 1)
                total = total + d + torch.linalg.slogdet(mix)[1] + s.tanh().sum(1)
            return total - x.square().sum(1) / 2

    model = Glow()
    optimizer = Adam(model.parameters(), 1e-3)
    return simple_loop(model, optimizer, nullcontext, lambda: -model(torch.randn(32, 6) * 2 + 1).mean())


@program
def continuous_flow_with_estimated_trace(amp: Cast) -> Training:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense(4, 24, 3, act=nn.Tanh)

        def forward(self, t: float, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                x = x if x.requires_grad else x.requires_grad_()
                dx = self.net(torch.cat([x, torch.full((len(x), 1), t)], 1))
                (pulled,) = torch.autograd.grad(dx, x, noise, create_graph=True)
            return dx, (pulled * noise).sum(1)

    model = Field()
    optimizer = Adam(model.parameters(), 2e-3)

    def loss() -> Tensor:
        x, noise, log = torch.randn(24, 3) * 0.5 + 1, torch.randn(24, 3), torch.zeros(24)
        for k in range(4):
            dx, trace = model(k / 4, x, noise)
            x, log = x + dx / 4, log + trace / 4
        return (x.square().sum(1) / 2 - log).mean()

    return simple_loop(model, optimizer, nullcontext, loss)


@program
def deep_kernel_by_exact_marginal_likelihood(amp: Cast) -> Training:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense(4, 16, 2, act=nn.Tanh)
            self.raw_scale, self.raw_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> torch.distributions.MultivariateNormal:
            z = self.net(x)
            k = F.softplus(self.raw_scale) * (-torch.cdist(z, z).square() / 2).exp()
            return torch.distributions.MultivariateNormal(
                torch.zeros(len(x)), k + (F.softplus(self.raw_noise) + 1e-3) * torch.eye(len(x))
            )

    model, x = Kernel(), torch.randn(24, 4)
    y = x[:, 0].sin() + 0.1 * torch.randn(24)
    free = {"params": [model.raw_scale, model.raw_noise]}
    groups: list[dict[str, Any]] = [{"params": model.net.parameters(), "weight_decay": 1e-3}, free]
    optimizer = Adam(groups, 1e-2)
    return simple_loop(model, optimizer, nullcontext, lambda: -model(x).log_prob(y) / 24)


@program
def autoencoder_matched_to_a_prior_by_transport(amp: Cast) -> Training:
    model = nn.ModuleDict({"coder": dense(10, 24, 3), "decoder": dense(3, 24, 10)})
    optimizer = Adam(model.parameters(), 1e-3)

    def loss() -> Tensor:
        x = torch.randn(16, 10).cumsum(1) / 3
        z = model["coder"](x).float()
        cost = torch.cdist(z, torch.randn(16, 3)).square()
        a = torch.zeros(16)
        for _ in range(10):
            b = -0.5 * torch.logsumexp((a[:, None] - cost) / 0.5, 0)
            a = -0.5 * torch.logsumexp((b[None] - cost) / 0.5, 1)
        plan = ((a[:, None] + b[None] - cost) / 0.5).exp()
        return F.mse_loss(model["decoder"](z).float(), x) + 0.1 * (plan * cost).sum() / 16

    return simple_loop(model, optimizer, amp, loss)


@program
def predictive_coding_with_inferred_activities(amp: Cast) -> Training:
    a, b = nn.Linear(8, 16), nn.Linear(16, 4)
    model = nn.Sequential(a, nn.Tanh(), b)
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        x, y = batch()
        aim = F.one_hot(y, 4).float()
        h = a(x).detach().clone().requires_grad_()
        inner = SGD([h], 0.1)
        for _ in range(5):
            energy = (h - a(x)).square().sum() / 2 + (aim - b(h.tanh())).square().sum() / 2
            inner.zero_grad()
            energy.backward()
            inner.step()
        optimizer.zero_grad()
        energy = (h.detach() - a(x)).square().sum() / 2 + (aim - b(h.detach().tanh())).square().sum() / 2
        energy.backward()
        optimizer.step()
        return energy.detach()

    return Training(model, [optimizer], step)


@program
def discrete_latents_with_a_learned_baseline(amp: Cast) -> Training:
    model = nn.ModuleDict({"coder": dense(10, 24, 6), "decoder": dense(6, 24, 10), "baseline": dense(10, 16, 1)})
    optimizer = Adam(model.parameters(), 1e-3)

    def loss() -> Tensor:
        x = (torch.rand(16, 10) > 0.6).float()
        q = torch.distributions.Bernoulli(logits=model["coder"](x).float())
        z = q.sample()
        nll = F.binary_cross_entropy_with_logits(model["decoder"](z).float(), x, reduction="none").sum(1)
        base = model["baseline"](x)[:, 0].float()
        signal = (nll - base).detach()
        return (nll + signal * q.log_prob(z).sum(1) + (nll.detach() - base).square()).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def experts_balanced_by_a_bias_without_gradient(amp: Cast) -> Training:
    class Experts(nn.Module):
        load: Any
        bias: Any

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4, bias=False), nn.ModuleList(dense(8, 16, 8) for _ in range(4))
            self.bias, self.out = nn.Parameter(torch.zeros(4), requires_grad=False), nn.Linear(8, 4)
            self.register_buffer("load", torch.zeros(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            s = self.gate(x).float().sigmoid()
            top = (s + self.bias).topk(2, dim=1).indices
            w = s.gather(1, top)
            w = w / w.sum(1, keepdim=True)
            self.load += torch.bincount(top.flatten(), minlength=4)
            y = torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                row, slot = (top == k).nonzero(as_tuple=True)
                y = y.index_add(0, row, (expert(x[row]) * w[row, slot, None]).to(y.dtype))
            return self.out(x + y)

    model = Experts()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

    def step() -> Tensor:
        with amp():
            loss = classified(model)
        stepped(optimizer, loss)
        with torch.no_grad():
            model.bias += 1e-2 * (model.load.mean() - model.load).sign()
            model.load.zero_()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def lazy_modules_filled_by_a_dry_run(amp: Cast) -> Training:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    with torch.no_grad():
        model(torch.zeros(2, 1, 8, 8))
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)

    def loss() -> Tensor:
        x, y = digits()
        return F.cross_entropy(model(x), y)

    return simple_loop(model, optimizer, amp, loss)


@program
def adapters_on_weights_held_in_eight_bits(amp: Cast) -> Training:
    class Frozen(nn.Module):
        scale: Any
        codes: Any

        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            w = torch.randn(b, a) / a**0.5
            self.register_buffer("scale", w.abs().amax(1, keepdim=True) / 127)
            self.register_buffer("codes", (w / self.scale).round().to(torch.int8))
            self.down, self.up = nn.Parameter(torch.randn(2, a) / a), nn.Parameter(torch.zeros(b, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (
                F.linear(x, self.codes * self.scale)
                + F.dropout(x, 0.1, self.training) @ self.down.t() @ self.up.t() * 4
            )

    model = nn.Sequential(Frozen(8, 24), nn.GELU(), Frozen(24, 24), nn.GELU(), Frozen(24, 4))
    return simple_loop(model, AdamW(model.parameters(), 2e-3), amp, lambda: classified(model))


@program
def fake_quantisation_by_the_library(amp: Cast) -> Training:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8)

        def forward(self, w: Tensor) -> Tensor:
            return self.fake(w)

    model = dense(8, 24, 24, 4)
    for m in list(model):
        if isinstance(m, nn.Linear):
            parametrize.register_parametrization(m, "weight", Rounded())
    optimizer, count = SGD(model.parameters(), 0.05, momentum=0.9), 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        if count == 20:
            for m in model.modules():
                if isinstance(m, FakeQuantize):
                    m.disable_observer()
        return classified(model)

    return simple_loop(model, optimizer, nullcontext, loss)


@program
def perceptual_loss_of_a_frozen_network(amp: Cast) -> Training:
    seen = (
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        .requires_grad_(False)
        .eval()
    )
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, padding_mode="reflect"), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, stride=2, padding=1),
    )  # fmt: skip
    optimizer = Adam(model.parameters(), 1e-3)

    def loss() -> Tensor:
        x, _ = digits(8)
        out = model(x)
        f, g = seen(out).float(), seen(x).float()
        gram = [(h.flatten(2) @ h.flatten(2).mT) / 512 for h in (f, g.roll(1, 0))]
        tv = (out[..., 1:] - out[..., :-1]).abs().mean()
        return F.mse_loss(f, g) + F.mse_loss(*gram) + 0.1 * tv

    return simple_loop(model, optimizer, amp, loss)
