"""Correct training programs as people write them, in float32 or under autocast, for a monitor to leave alone.

They were written before the monitor was tried on any of them. A program builds everything from the current seed and
returns what it trains and a function that makes one step and returns its loss.
"""
# Programs are named after what they run.

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from everyday_programs import Training

Cast = Callable[[], AbstractContextManager[Any]]
"""Makes the context that forward passes and losses are computed in."""

Program = Callable[[Cast], Training]
PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    """Register a program under the name of its function."""
    PROGRAMS[build.__name__.replace("_", " ")] = build
    return build


def dense(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def small_cnn(out: int = 10, channels: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, out),
    )  # fmt: skip


def digits(count: int = 16) -> tuple[Tensor, Tensor]:
    y = torch.randint(10, (count,))
    return torch.randn(count, 1, 8, 8) + y.view(-1, 1, 1, 1) / 5, y


def simple_loop(
    model: nn.Module, optimizer: Optimizer, amp: Cast, loss: Callable[[], Tensor], scheduler: Any = None
) -> Training:
    def step() -> Tensor:
        model.train()
        optimizer.zero_grad()
        with amp():
            value = loss()
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return value.detach()

    return Training(model, [optimizer], step)


# Adversarial


@program
def dcgan(amp: Cast) -> Training:
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 1, 4, 1, 0, bias=False), nn.Flatten(0),
    )  # fmt: skip
    for m in chain(generator.modules(), critic.modules()):
        if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(m.weight, 0.0, 0.02)
    opt_g = Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    lossf = nn.BCEWithLogitsLoss()

    def step() -> Tensor:
        real = torch.randn(8, 1, 8, 8).tanh()
        critic.zero_grad()
        with amp():
            out = critic(real)
            loss_real = lossf(out, torch.ones_like(out))
        loss_real.backward()
        with amp():
            fake = generator(torch.randn(8, 16, 1, 1))
            out = critic(fake.detach())
            loss_fake = lossf(out, torch.zeros_like(out))
        loss_fake.backward()
        opt_d.step()
        generator.zero_grad()
        with amp():
            out = critic(fake)
            loss_g = lossf(out, torch.ones_like(out))
        loss_g.backward()
        opt_g.step()
        return (loss_real + loss_fake + loss_g).detach()

    return Training(nn.ModuleDict({"generator": generator, "critic": critic}), [opt_g, opt_d], step)


@program
def gan_watching_the_generator_alone(amp: Cast) -> Training:
    generator, critic = dense(8, 32, 32, 4), dense(4, 32, 32, 1, act=lambda: nn.LeakyReLU(0.2))
    opt_g, opt_d = Adam(generator.parameters(), lr=1e-3), Adam(critic.parameters(), lr=1e-3)

    def step() -> Tensor:
        real = torch.randn(16, 4) + 1
        with amp():
            loss_d = (
                F.softplus(-critic(real)).mean() + F.softplus(critic(generator(torch.randn(16, 8)).detach())).mean()
            )
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        with amp():
            loss_g = F.softplus(-critic(generator(torch.randn(16, 8)))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        return loss_g.detach()

    return Training(generator, [opt_g], step)


@program
def wgan_with_gradient_penalty_and_five_critic_steps(amp: Cast) -> Training:
    generator, critic = dense(8, 32, 2), dense(2, 32, 32, 1)
    opt_g, opt_d = Adam(generator.parameters(), 1e-4, (0.0, 0.9)), Adam(critic.parameters(), 1e-4, (0.0, 0.9))

    def step() -> Tensor:
        for _ in range(5):
            real, fake = torch.randn(16, 2), generator(torch.randn(16, 8)).detach()
            mix = torch.rand(16, 1)
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            with amp():
                loss = critic(fake).mean() - critic(real).mean()
            loss = loss + 10 * ((grad.norm(2, dim=1) - 1) ** 2).mean()
            opt_d.zero_grad(set_to_none=True)
            loss.backward()
            opt_d.step()
        opt_g.zero_grad(set_to_none=True)
        with amp():
            value = -critic(generator(torch.randn(16, 8))).mean()
        value.backward()
        opt_g.step()
        return value.detach()

    return Training(nn.ModuleList([generator, critic]), [opt_g, opt_d], step)


@program
def pix2pix_with_requires_grad_switched(amp: Cast) -> Training:
    net = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, 1, 1), nn.Tanh())
    judge = nn.Sequential(nn.Conv2d(2, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, 1, 1))
    opt_g, opt_d = Adam(net.parameters(), 2e-4, (0.5, 0.999)), Adam(judge.parameters(), 2e-4, (0.5, 0.999))

    def need(flag: bool) -> None:
        for p in judge.parameters():
            p.requires_grad = flag

    def step() -> Tensor:
        a, b = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8).tanh()
        with amp():
            fake = net(a)
        need(True)
        opt_d.zero_grad()
        with amp():
            pf, pr = judge(torch.cat([a, fake.detach()], 1)), judge(torch.cat([a, b], 1))
            loss_d = 0.5 * (F.mse_loss(pf, torch.zeros_like(pf)) + F.mse_loss(pr, torch.ones_like(pr)))
        loss_d.backward()
        opt_d.step()
        need(False)
        opt_g.zero_grad()
        with amp():
            pf = judge(torch.cat([a, fake], 1))
            loss_g = F.mse_loss(pf, torch.ones_like(pf)) + 100 * F.l1_loss(fake, b)
        loss_g.backward()
        opt_g.step()
        return (loss_d + loss_g).detach()

    return Training(nn.ModuleDict({"g": net, "d": judge}), [opt_g, opt_d], step)


@program
def adversarial_training_by_fgsm(amp: Cast) -> Training:
    model = small_cnn()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def step() -> Tensor:
        x, y = digits()
        x.requires_grad_(True)
        with amp():
            F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(attacked), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def free_adversarial_training(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    delta = torch.zeros(16, 8)

    def step() -> Tensor:
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        loss = torch.zeros(())
        for _ in range(3):
            noise = delta.clone().requires_grad_(True)
            with amp():
                loss = F.cross_entropy(model(x + noise), y)
            optimizer.zero_grad()
            loss.backward()
            assert noise.grad is not None
            delta.add_(0.05 * noise.grad.sign()).clamp_(-0.2, 0.2)
            optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def virtual_adversarial_training(amp: Cast) -> Training:
    model = dense(6, 24, 24, 3)
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        x, y = torch.randn(12, 6), torch.randint(3, (12,))
        with torch.no_grad():
            prior = F.softmax(model(x), -1)
        d = F.normalize(torch.randn_like(x), dim=1).requires_grad_()
        distance = F.kl_div(F.log_softmax(model(x + 10 * d), -1), prior, reduction="batchmean")
        distance.backward()
        assert d.grad is not None
        d = F.normalize(d.grad, dim=1)
        model.zero_grad()
        with amp():
            smooth = F.kl_div(F.log_softmax(model(x + 1.0 * d), -1), prior, reduction="batchmean")
            loss = F.cross_entropy(model(x), y) + smooth
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


# Reinforcement learning


class CartLike:
    """A tiny world: push a point towards the origin."""

    def __init__(self) -> None:
        self.state = torch.randn(4)
        self.age = 0

    def reset(self) -> Tensor:
        self.state, self.age = torch.randn(4), 0
        return self.state

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.state = 0.9 * self.state + 0.1 * (action - 0.5) + 0.05 * torch.randn(4)
        self.age += 1
        return self.state, -float(self.state.square().sum()), self.age >= 12


@program
def reinforce_with_baseline(amp: Cast) -> Training:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.action_head, self.value_head = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.relu(self.affine1(x))
            return F.softmax(self.action_head(x), dim=-1), self.value_head(x)

    model, world = Policy(), CartLike()
    optimizer = Adam(model.parameters(), lr=3e-2)

    def step() -> Tensor:
        saved, rewards = [], []
        state, done = world.reset(), False
        while not done:
            with amp():
                probs, value = model(state)
            chosen = torch.distributions.Categorical(probs.float())
            action = chosen.sample()
            saved.append((chosen.log_prob(action), value.float()))
            state, reward, done = world.step(int(action))
            rewards.append(reward)
        returns, total = deque[float](), 0.0
        for r in reversed(rewards):
            total = r + 0.99 * total
            returns.appendleft(total)
        goal = torch.tensor(list(returns))
        goal = (goal - goal.mean()) / (goal.std() + 1e-8)
        policy, values = [], []
        for (logp, value), ret in zip(saved, goal, strict=True):
            policy.append(-logp * (ret - value.item()))
            values.append(F.smooth_l1_loss(value, ret.view(1)))
        optimizer.zero_grad()
        loss = torch.stack(policy).sum() + torch.stack(values).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def ppo_with_minibatches_and_clipping(amp: Cast) -> Training:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic, self.actor = dense(4, 32, 32, 1, act=nn.Tanh), dense(4, 32, 32, 2, act=nn.Tanh)
            for m in self.modules():
                if isinstance(m, nn.Linear):
                    nn.init.orthogonal_(m.weight, math.sqrt(2))
                    nn.init.zeros_(m.bias)

        def value(self, x: Tensor) -> Tensor:
            return self.critic(x)

        def act(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            chosen = torch.distributions.Categorical(logits=self.actor(x).float())
            action = chosen.sample() if action is None else action
            return action, chosen.log_prob(action), chosen.entropy(), self.critic(x)

    agent = Agent()
    optimizer = Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

    def step() -> Tensor:
        obs = torch.randn(32, 4)
        with torch.no_grad():
            action, old, _, value = agent.act(obs)
        rewards = torch.randn(32)
        returns = rewards + 0.9 * value.flatten()
        advantage = returns - value.flatten()
        loss = torch.zeros(())
        for _ in range(2):
            for index in torch.randperm(32).split(16):
                with amp():
                    _, new, entropy, v = agent.act(obs[index], action[index])
                ratio = (new - old[index]).exp()
                adv = advantage[index]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
                loss = pg - 0.01 * entropy.mean() + 0.5 * 0.5 * (v.flatten() - returns[index]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        return loss.detach()

    return Training(agent, [optimizer], step)


@program
def dqn_with_soft_target(amp: Cast) -> Training:
    policy, target = dense(4, 32, 32, 2), dense(4, 32, 32, 2)
    target.load_state_dict(policy.state_dict())
    optimizer = AdamW(policy.parameters(), lr=1e-4, amsgrad=True)
    memory: deque[tuple[Tensor, int, Tensor, float]] = deque(maxlen=200)
    world = CartLike()
    world.reset()

    def step() -> Tensor:
        loss = torch.zeros(())
        for _ in range(4):
            state = world.state
            with torch.no_grad():
                action = int(policy(state[None]).argmax()) if float(torch.rand(())) > 0.2 else int(torch.randint(2, ()))
            after, reward, done = world.step(action)
            memory.append((state, action, after, reward))
            if done:
                world.reset()
        chosen = [memory[i] for i in torch.randint(len(memory), (16,)).tolist()]
        states, nexts = torch.stack([c[0] for c in chosen]), torch.stack([c[2] for c in chosen])
        actions, rewards = torch.tensor([[c[1]] for c in chosen]), torch.tensor([c[3] for c in chosen])
        with amp():
            q = policy(states).gather(1, actions)
            with torch.no_grad():
                best = target(nexts).max(1).values
            loss = F.smooth_l1_loss(q, (0.99 * best + rewards).unsqueeze(1).to(q.dtype))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        goal, own = target.state_dict(), policy.state_dict()
        for key in own:
            goal[key] = own[key] * 0.005 + goal[key] * 0.995
        target.load_state_dict(goal)
        return loss.detach()

    return Training(policy, [optimizer], step)


@program
def sac_with_learned_temperature(amp: Cast) -> Training:
    actor, q1, q2 = dense(3, 32, 4), dense(5, 32, 1), dense(5, 32, 1)
    t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
    log_alpha = torch.zeros(1, requires_grad=True)
    opt_a = Adam(actor.parameters(), lr=3e-4)
    opt_q = Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
    opt_t = Adam([log_alpha], lr=1e-3)

    def sample(s: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(s).float().chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        a = raw.tanh()
        return a, (normal.log_prob(raw) - torch.log(1 - a.square() + 1e-6)).sum(-1, keepdim=True)

    def step() -> Tensor:
        s, a, r, s2 = torch.randn(16, 3), torch.rand(16, 2) * 2 - 1, torch.randn(16, 1), torch.randn(16, 3)
        with torch.no_grad():
            a2, lp2 = sample(s2)
            at = torch.cat([s2, a2], -1)
            goal = r + 0.99 * (torch.min(t1(at), t2(at)) - log_alpha.exp() * lp2)
        with amp():
            sa = torch.cat([s, a], -1)
            loss_q = F.mse_loss(q1(sa).float(), goal) + F.mse_loss(q2(sa).float(), goal)
        opt_q.zero_grad()
        loss_q.backward()
        opt_q.step()
        with amp():
            new, lp = sample(s)
            both = torch.cat([s, new], -1)
            loss_a = (log_alpha.exp().detach() * lp - torch.min(q1(both), q2(both)).float()).mean()
        opt_a.zero_grad()
        loss_a.backward()
        opt_a.step()
        loss_t = -(log_alpha.exp() * (lp.detach() - 2.0)).mean()
        opt_t.zero_grad()
        loss_t.backward()
        opt_t.step()
        with torch.no_grad():
            for net, slow in ((q1, t1), (q2, t2)):
                for p, t in zip(net.parameters(), slow.parameters(), strict=True):
                    t.data.mul_(0.995).add_(0.005 * p.data)
        return (loss_q + loss_a).detach()

    return Training(nn.ModuleDict({"actor": actor, "q1": q1, "q2": q2}), [opt_a, opt_q, opt_t], step)


@program
def ddpg_with_delayed_policy(amp: Cast) -> Training:
    actor, critic = nn.Sequential(dense(3, 24, 2), nn.Tanh()), dense(5, 24, 1)
    actor_t, critic_t = copy.deepcopy(actor), copy.deepcopy(critic)
    opt_a, opt_c = Adam(actor.parameters(), 1e-3), Adam(critic.parameters(), 1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        s, a, r, s2 = torch.randn(16, 3), torch.rand(16, 2) * 2 - 1, torch.randn(16, 1), torch.randn(16, 3)
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(a)).clamp(-0.5, 0.5)
            goal = r + 0.99 * critic_t(torch.cat([s2, (actor_t(s2) + noise).clamp(-1, 1)], 1))
        with amp():
            loss = F.mse_loss(critic(torch.cat([s, a], 1)).float(), goal)
        opt_c.zero_grad()
        loss.backward()
        opt_c.step()
        if count % 2 == 0:
            with amp():
                policy = -critic(torch.cat([s, actor(s)], 1)).mean()
            opt_a.zero_grad()
            policy.backward()
            opt_a.step()
            for net, slow in ((actor, actor_t), (critic, critic_t)):
                for p, t in zip(net.parameters(), slow.parameters(), strict=True):
                    t.data.copy_(0.005 * p.data + 0.995 * t.data)
        return loss.detach()

    return Training(nn.ModuleDict({"actor": actor, "critic": critic}), [opt_a, opt_c], step)


# Self-supervised


@program
def simclr(amp: Cast) -> Training:
    encoder = nn.Sequential(dense(12, 48, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = SGD(encoder.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def loss() -> Tensor:
        x = torch.randn(12, 12)
        views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
        z = F.normalize(encoder(views), dim=1)
        similarity = (z @ z.T / 0.5).masked_fill(torch.eye(24, dtype=torch.bool), -1e4)
        return F.cross_entropy(similarity, torch.arange(24).roll(12))

    return simple_loop(encoder, optimizer, amp, loss)


@program
def moco_with_queue(amp: Cast) -> Training:
    class MoCo(nn.Module):
        queue: Tensor
        ptr: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = dense(10, 32, 8), dense(10, 32, 8)
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                b.data.copy_(a.data)
                b.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(8, 64), dim=0))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            q = F.normalize(self.q(a), dim=1)
            with torch.no_grad():
                for p, s in zip(self.q.parameters(), self.k.parameters(), strict=True):
                    s.data = s.data * 0.999 + p.data * 0.001
                k = F.normalize(self.k(b), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
            at = int(self.ptr)
            self.queue[:, at : at + len(k)] = k.T
            self.ptr[0] = (at + len(k)) % 64
            return logits

    model = MoCo()
    optimizer = SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)

    def loss() -> Tensor:
        x = torch.randn(16, 10)
        out = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(out, torch.zeros(16, dtype=torch.long))

    return simple_loop(model, optimizer, amp, loss)


@program
def byol_with_target_inside(amp: Cast) -> Training:
    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
            self.predictor = dense(16, 16, 16)
            self.target = copy.deepcopy(self.online)
            for p in self.target.parameters():
                p.requires_grad_(False)

        @torch.no_grad()
        def update(self, tau: float) -> None:
            for p, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
                t.lerp_(p, 1 - tau)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            with torch.no_grad():
                ta, tb = self.target(a), self.target(b)
            return (
                2 - F.cosine_similarity(self.predictor(self.online(a)), tb, dim=-1).mean()
                - F.cosine_similarity(self.predictor(self.online(b)), ta, dim=-1).mean()
            )  # fmt: skip

    model = Byol()
    optimizer = Adam([*model.online.parameters(), *model.predictor.parameters()], lr=1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x = torch.randn(16, 10)
        with amp():
            loss = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update(1 - (1 - 0.99) * (math.cos(math.pi * count / 40) + 1) / 2)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def barlow_twins(amp: Cast) -> Training:
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    norm = nn.BatchNorm1d(16, affine=False)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(24, 10)
        a, b = norm(model(x + 0.1 * torch.randn_like(x))), norm(model(x + 0.1 * torch.randn_like(x)))
        c = (a.T @ b / 24).float()
        on = (c.diagonal() - 1).square().sum()
        return on + 0.005 * (c - torch.diag(c.diagonal())).square().sum()

    return simple_loop(model, optimizer, amp, loss)


@program
def dino_with_centering(amp: Cast) -> Training:
    student = nn.Sequential(
        dense(10, 32, 32), nn.LayerNorm(32), parametrizations.weight_norm(nn.Linear(32, 24, bias=False))
    )
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = AdamW(student.parameters(), lr=1e-3, weight_decay=0.04)
    center = torch.zeros(1, 24)

    def step() -> Tensor:
        nonlocal center
        x = torch.randn(16, 10)
        a, b = x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)
        with amp():
            sa, sb = student(a), student(b)
            with torch.no_grad():
                ta, tb = teacher(a).float(), teacher(b).float()
            goal_a, goal_b = F.softmax((ta - center) / 0.04, -1), F.softmax((tb - center) / 0.04, -1)
            loss = -(goal_a * F.log_softmax(sb / 0.1, -1) + goal_b * F.log_softmax(sa / 0.1, -1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in student.parameters():
            if p.grad is not None:
                norm = p.grad.data.norm(2)
                coefficient = 3.0 / (norm + 1e-6)
                if coefficient < 1:
                    p.grad.data.mul_(coefficient)
        optimizer.step()
        with torch.no_grad():
            for p, t in zip(student.parameters(), teacher.parameters(), strict=True):
                t.data.mul_(0.996).add_((1 - 0.996) * p.detach().data)
            center = 0.9 * center + 0.1 * torch.cat([ta, tb]).mean(0, keepdim=True)
        return loss.detach()

    return Training(student, [optimizer], step)


@program
def mean_teacher_as_a_module(amp: Cast) -> Training:
    student = small_cnn()
    teacher = small_cnn()
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.detach_()
    optimizer = SGD(student.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = digits()
        with amp():
            out = student(x + 0.1 * torch.randn_like(x))
            with torch.no_grad():
                goal = teacher(x + 0.1 * torch.randn_like(x))
            ramp = math.exp(-5 * (1 - min(count / 30, 1)) ** 2)
            loss = F.cross_entropy(out[:8], y[:8]) + ramp * F.mse_loss(out.softmax(1), goal.softmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        alpha = min(1 - 1 / (count + 1), 0.99)
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.data.mul_(alpha).add_(s.data, alpha=1 - alpha)
        return loss.detach()

    return Training(student, [optimizer], step)


# Generative


class TimeMlp(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.time, self.inp = nn.Linear(16, width), nn.Linear(2, width)
        self.mid, self.out = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        freq = torch.exp(-math.log(1000.0) * torch.arange(8) / 8)
        emb = torch.cat([(t[:, None] * freq).sin(), (t[:, None] * freq).cos()], -1)
        h = F.silu(self.inp(x) + self.time(emb))
        return self.out(F.silu(self.mid(h)))


@program
def ddpm_with_ema_swapped_for_sampling(amp: Cast) -> Training:
    model = TimeMlp()
    shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}
    optimizer = AdamW(model.parameters(), lr=1e-3)
    betas = torch.linspace(1e-4, 0.02, 100)
    alphas = (1 - betas).cumprod(0)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, t, noise = torch.randn(32, 2), torch.randint(100, (32,)), torch.randn(32, 2)
        noisy = alphas[t].sqrt()[:, None] * x + (1 - alphas[t]).sqrt()[:, None] * noise
        with amp():
            loss = F.mse_loss(model(noisy, t.float()), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for k, v in model.state_dict().items():
                shadow[k].lerp_(v, 0.01)
        if count % 10 == 0:
            saved = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(shadow)
            model.eval()
            with torch.no_grad():
                z = torch.randn(8, 2)
                for i in range(5):
                    z = z - 0.1 * model(z, torch.full((8,), float(99 - 20 * i)))
            model.load_state_dict(saved)
            model.train()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def flow_matching_with_condition_dropout(amp: Cast) -> Training:
    class Cond(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.label, self.net = nn.Embedding(5, 8), dense(11, 48, 48, 2, act=nn.SiLU)

        def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            return self.net(torch.cat([x, t, self.label(y)], -1))

    model = Cond()
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)

    def loss() -> Tensor:
        x1, x0, t = torch.randn(32, 2) + 2, torch.randn(32, 2), torch.rand(32, 1)
        y = torch.where(torch.rand(32) < 0.1, torch.full((32,), 4), torch.randint(4, (32,)))
        return F.mse_loss(model((1 - t) * x0 + t * x1, t, y), x1 - x0)

    return simple_loop(model, optimizer, amp, loss)


@program
def denoising_score_matching(amp: Cast) -> Training:
    model = dense(3, 48, 48, 2, act=nn.Softplus)
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x, sigma = torch.randn(32, 2), torch.rand(32, 1) + 0.1
        noise = torch.randn_like(x)
        out = model(torch.cat([x + sigma * noise, sigma.log()], 1))
        return (out * sigma + noise).square().sum(1).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def sliced_score_matching_by_double_backward(amp: Cast) -> Training:
    energy = dense(2, 32, 32, 1, act=nn.Softplus)
    optimizer = Adam(energy.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(24, 2, requires_grad=True)
        v = torch.randn_like(x)
        (score,) = torch.autograd.grad(-energy(x).sum(), x, create_graph=True)
        (jv,) = torch.autograd.grad((score * v).sum(), x, create_graph=True)
        return ((jv * v).sum(1) + 0.5 * (score * v).sum(1).square()).float().mean()

    return simple_loop(energy, optimizer, amp, loss)


@program
def energy_model_with_langevin_sampler(amp: Cast) -> Training:
    energy = dense(2, 32, 32, 1, act=nn.SiLU)
    optimizer = Adam(energy.parameters(), lr=1e-3, betas=(0.0, 0.999))
    buffer = [torch.randn(64, 2)]

    def step() -> Tensor:
        index = torch.randint(64, (16,))
        x = buffer[0][index].clone()
        for p in energy.parameters():
            p.requires_grad = False
        for _ in range(5):
            x.requires_grad_(True)
            energy(x).sum().backward()
            assert x.grad is not None
            x = (x - 0.1 * x.grad + 0.05 * torch.randn_like(x)).detach()
        for p in energy.parameters():
            p.requires_grad = True
        buffer[0][index] = x
        real = torch.randn(16, 2) + 1
        with amp():
            ep, en = energy(real), energy(x)
            loss = ep.mean() - en.mean() + 0.1 * (ep.square() + en.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(energy, [optimizer], step)


@program
def beta_vae_with_free_bits(amp: Cast) -> Training:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.mu, self.logvar, self.dec = (
                nn.Linear(12, 24),
                nn.Linear(24, 4),
                nn.Linear(24, 4),
                dense(4, 24, 12),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = F.relu(self.enc(x))
            mu, logvar = self.mu(h), self.logvar(h)
            return self.dec(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar

    model = Vae()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x = torch.rand(16, 12)
        out, mu, logvar = model(x)
        kl = (-0.5 * (1 + logvar - mu.square() - logvar.exp())).mean(0).clamp(min=0.05).sum()
        return F.binary_cross_entropy_with_logits(out, x, reduction="sum") / 16 + 4 * kl

    return simple_loop(model, optimizer, amp, loss)


@program
def vq_vae_with_ema_codebook(amp: Cast) -> Training:
    class Vq(nn.Module):
        codes: Tensor
        sizes: Tensor
        sums: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = dense(10, 32, 6), dense(6, 32, 10)
            self.register_buffer("codes", torch.randn(12, 6))
            self.register_buffer("sizes", torch.ones(12))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.enc(x)
            with torch.no_grad():
                index = torch.cdist(z.float(), self.codes).argmin(1)
                hot = F.one_hot(index, 12).float()
                if self.training:
                    self.sizes.mul_(0.95).add_(0.05 * hot.sum(0))
                    self.sums.mul_(0.95).add_(0.05 * hot.T @ z.float())
                    self.codes.copy_(self.sums / self.sizes.clamp(min=1e-2)[:, None])
            q = self.codes[index]
            commit = F.mse_loss(z, q.detach())
            return self.dec(z + (q - z).detach()), commit

    model = Vq()
    optimizer = Adam(model.parameters(), lr=2e-3)

    def loss() -> Tensor:
        x = torch.randn(16, 10)
        out, commit = model(x)
        return F.mse_loss(out, x) + 0.25 * commit

    return simple_loop(model, optimizer, amp, loss)


@program
def vq_vae_with_learned_codebook(amp: Cast) -> Training:
    class Vq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.codes, self.dec = dense(10, 32, 6), nn.Embedding(16, 6), dense(6, 32, 10)
            self.codes.weight.data.uniform_(-1 / 16, 1 / 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.enc(x)
            distance = z.square().sum(1, keepdim=True) - 2 * z @ self.codes.weight.T + self.codes.weight.square().sum(1)
            q = self.codes(distance.argmin(1))
            loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
            return self.dec(z + (q - z).detach()), loss

    model = Vq()
    optimizer = Adam(model.parameters(), lr=2e-3)

    def loss() -> Tensor:
        x = torch.randn(16, 10)
        out, extra = model(x)
        return F.mse_loss(out, x) + extra

    return simple_loop(model, optimizer, amp, loss)


@program
def real_nvp(amp: Cast) -> Training:
    class Coupling(nn.Module):
        mask: Tensor

        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([1.0, 0.0] if flip else [0.0, 1.0]))
            self.s, self.t = dense(2, 24, 2, act=nn.Tanh), dense(2, 24, 2, act=nn.Tanh)
            self.scale = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            s = self.s(x * self.mask).tanh() * self.scale.exp() * (1 - self.mask)
            return x * self.mask + (1 - self.mask) * (x * s.exp() + self.t(x * self.mask)), s.sum(1)

    model = nn.ModuleList(Coupling(bool(i % 2)) for i in range(4))
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(32, 2) * torch.tensor([1.0, 0.3]) + 1
        total = torch.zeros(32)
        for layer in model:
            x, logdet = layer(x)
            total = total + logdet
        return (0.5 * x.square().sum(1) - total).float().mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def autoregressive_made(amp: Cast) -> Training:
    class Masked(nn.Linear):
        mask: Tensor

        def __init__(self, a: int, b: int, mask: Tensor) -> None:
            super().__init__(a, b)
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.mask * self.weight, self.bias)

    m = torch.randint(1, 7, (32,))
    first, last = (m[:, None] >= torch.arange(1, 8)).float(), (torch.arange(1, 8)[:, None] > m).float()
    model = nn.Sequential(Masked(7, 32, first), nn.ReLU(), Masked(32, 7, last))
    optimizer = Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)

    def loss() -> Tensor:
        x = (torch.rand(32, 7) > 0.3).float()
        return F.binary_cross_entropy_with_logits(model(x), x)

    return simple_loop(model, optimizer, amp, loss)


# Optimizers and their tricks


@program
def sam_with_two_passes_as_in_the_repository(amp: Cast) -> Training:
    class SAM(Optimizer):
        def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
            super().__init__(params, dict(rho=rho, **kwargs))
            self.base_optimizer = base(self.param_groups, **kwargs)
            self.param_groups = self.base_optimizer.param_groups
            self.defaults.update(self.base_optimizer.defaults)

        @torch.no_grad()
        def first_step(self, zero_grad: bool = False) -> None:
            norm = torch.stack(
                [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
            ).norm()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["old_p"] = p.data.clone()
                        p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
            if zero_grad:
                self.zero_grad()

        @torch.no_grad()
        def second_step(self, zero_grad: bool = False) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data = self.state[p]["old_p"]
            self.base_optimizer.step()
            if zero_grad:
                self.zero_grad()

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise NotImplementedError

    model = small_cnn()
    optimizer = SAM(model.parameters(), SGD, lr=0.05, momentum=0.9)

    def step() -> Tensor:
        x, y = digits()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        with amp():
            F.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def lbfgs_full_batch(amp: Cast) -> Training:
    model = dense(3, 16, 16, 1, act=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, history_size=5)
    x = torch.randn(32, 3)
    y = x.sum(1, keepdim=True).sin()

    def step() -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            with amp():
                loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Training(model, [optimizer], step)


@program
def adam_then_lbfgs(amp: Cast) -> Training:
    model = dense(1, 16, 16, 1, act=nn.Tanh)
    adam, lbfgs = Adam(model.parameters(), lr=1e-2), torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=5)
    x = torch.linspace(-1, 1, 24)[:, None]
    count = 0

    def loss() -> Tensor:
        with amp():
            return F.mse_loss(model(x), (3 * x).sin())

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count <= 20:
            adam.zero_grad()
            value = loss()
            value.backward()
            adam.step()
            return value.detach()

        def closure() -> Tensor:
            lbfgs.zero_grad()
            value = loss()
            value.backward()
            return value

        return lbfgs.step(closure).detach()

    return Training(model, [adam, lbfgs], step)


@program
def swa_with_bn_update_and_swap(amp: Cast) -> Training:
    model = small_cnn()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    swa = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    swa_scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = digits()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if count > 20:
            swa.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        if count == 40:
            torch.optim.swa_utils.update_bn([digits()[0] for _ in range(2)], swa)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def schedule_of_groups_with_layer_decay(amp: Cast) -> Training:
    model = dense(8, 24, 24, 24, 4)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    groups = [{"params": list(m.parameters()), "lr": 1e-3 * 0.7 ** (3 - i)} for i, m in enumerate(layers)]
    optimizer = AdamW(groups)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: min(1.0, (e + 1) / 10))

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)), label_smoothing=0.1)

    return simple_loop(model, optimizer, amp, loss, warm)


@program
def param_groups_changed_in_mid_run(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count == 12:
            for group in optimizer.param_groups:
                group["weight_decay"] = 1e-3
        if count in (20, 30):
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
        if count == 25:
            optimizer.param_groups[0]["momentum"] = 0.95
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def rmsprop_for_one_part_and_adagrad_for_another(amp: Cast) -> Training:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.net = nn.Embedding(30, 8), dense(8, 24, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.table(x).mean(1))

    model = Model()
    a, b = torch.optim.Adagrad(model.table.parameters(), lr=0.1), RMSprop(model.net.parameters(), lr=1e-3, alpha=0.9)

    def step() -> Tensor:
        with amp():
            loss = F.binary_cross_entropy_with_logits(model(torch.randint(30, (16, 5))), torch.rand(16, 1).round())
        a.zero_grad()
        b.zero_grad()
        loss.backward()
        a.step()
        b.step()
        return loss.detach()

    return Training(model, [a, b], step)


@program
def sparse_embedding_with_sparse_adam(amp: Cast) -> Training:
    class SkipGram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = nn.Embedding(50, 12, sparse=True), nn.Embedding(50, 12, sparse=True)
            self.u.weight.data.uniform_(-0.1, 0.1)
            self.v.weight.data.uniform_(-0.1, 0.1)

        def forward(self, u: Tensor, v: Tensor, n: Tensor) -> Tensor:
            eu, ev, en = self.u(u), self.v(v), self.v(n)
            good = F.logsigmoid((eu * ev).sum(1).clamp(-10, 10))
            bad = F.logsigmoid(-torch.bmm(en, eu.unsqueeze(2)).squeeze(2).clamp(-10, 10)).sum(1)
            return -(good + bad).mean()

    model = SkipGram()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)

    def loss() -> Tensor:
        return model(torch.randint(50, (16,)), torch.randint(50, (16,)), torch.randint(50, (16, 5)))

    return simple_loop(model, optimizer, amp, loss)


@program
def embedding_bag_text_classification(amp: Cast) -> Training:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc = nn.EmbeddingBag(100, 16, sparse=False), nn.Linear(16, 4)

        def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
            return self.fc(self.embedding(text, offsets))

    model = Text()
    optimizer = SGD(model.parameters(), lr=5.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)

    def step() -> Tensor:
        lengths = torch.randint(2, 9, (16,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randint(100, (int(lengths.sum()),)), offsets), torch.randint(4, (16,)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def gradient_accumulation_with_last_partial_batch(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(52, 8), torch.randint(4, (52,))

    def micro() -> Iterator[tuple[Tensor, Tensor, bool]]:
        while True:
            order = torch.randperm(52).split(8)
            for i, index in enumerate(order):
                yield data[0][index], data[1][index], (i + 1) % 4 == 0 or i + 1 == len(order)

    batches = micro()

    def step() -> Tensor:
        total = torch.zeros(())
        while True:
            x, y, last = next(batches)
            with amp():
                loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            total = total + loss.detach()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                return total

    return Training(model, [optimizer], step)


@program
def accumulation_where_monitor_steps_every_micro_batch(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        with amp():
            loss = F.cross_entropy(model(torch.randn(8, 8)), torch.randint(4, (8,))) / 4
        loss.backward()
        if count % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def annealed_gradient_noise(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.05)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        sigma = (0.01 / (1 + count) ** 0.55) ** 0.5
        for p in model.parameters():
            assert p.grad is not None
            p.grad += sigma * torch.randn_like(p.grad)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def manual_sgd_in_no_grad(amp: Cast) -> Training:
    model = dense(8, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.1)  # made for its zero_grad alone

    def step() -> Tensor:
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.1 * p.grad)
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def gradient_centralisation_and_agc(amp: Cast) -> Training:
    model = small_cnn()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step() -> Tensor:
        x, y = digits()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                if p.ndim > 1:
                    p.grad -= p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True)
                    axes = tuple(range(1, p.ndim))
                    most = 0.02 * p.square().sum(axes, keepdim=True).sqrt().clamp(min=1e-3)
                    own = p.grad.square().sum(axes, keepdim=True).sqrt().clamp(min=1e-6)
                    p.grad.copy_(torch.where(own > most, p.grad * (most / own), p.grad))
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def pcgrad_on_shared_trunk(amp: Cast) -> Training:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b = dense(8, 32, 32), nn.Linear(32, 3), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.relu(self.trunk(x))
            return self.a(h), self.b(h)

    model = Tasks()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        x = torch.randn(16, 8)
        with amp():
            a, b = model(x)
            losses = [F.cross_entropy(a, torch.randint(3, (16,))), F.mse_loss(b, x[:, :1])]
        shared = list(model.trunk.parameters())
        optimizer.zero_grad()
        per_task = [torch.autograd.grad(one, shared, retain_graph=True) for one in losses]
        flat = [torch.cat([g.flatten() for g in gs]) for gs in per_task]
        mixed = [flat[0].clone(), flat[1].clone()]
        for i, j in ((0, 1), (1, 0)):
            dot = mixed[i] @ flat[j]
            if dot < 0:
                mixed[i] -= dot / flat[j].square().sum() * flat[j]
        sum(losses).backward()  # type: ignore[union-attr]
        total, at = mixed[0] + mixed[1], 0
        for p in shared:
            p.grad = total[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
        return (losses[0] + losses[1]).detach()

    return Training(model, [optimizer], step)


@program
def grad_norm_balancing(amp: Cast) -> Training:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b = dense(8, 32, 16), nn.Linear(16, 1), nn.Linear(16, 1)
            self.weights = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.trunk(x))
            return torch.cat([self.a(h), self.b(h)], 1)

    model = Tasks()
    optimizer = Adam(model.parameters(), lr=1e-3)
    start: list[Tensor] = []

    def step() -> Tensor:
        x = torch.randn(16, 8)
        with amp():
            out = model(x)
            losses = (out - torch.stack([x[:, 0], 10 * x[:, 1]], 1)).square().mean(0)
        if not start:
            start.append(losses.detach())
        loss = (model.weights * losses).sum()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        model.weights.grad = None
        last = model.trunk.get_parameter("2.weight")
        norms = torch.stack([
            torch.autograd.grad(model.weights[i] * losses[i], last, retain_graph=True, create_graph=True)[0].norm()
            for i in range(2)
        ])  # fmt: skip
        rate = losses.detach() / start[0]
        goal = (norms.mean() * (rate / rate.mean()) ** 0.12).detach()
        model.weights.grad = torch.autograd.grad((norms - goal).abs().sum(), model.weights)[0]
        optimizer.step()
        with torch.no_grad():
            model.weights.mul_(2 / model.weights.sum())
        return loss.detach()

    return Training(model, [optimizer], step)


# Freezing, growing, pruning


@program
def gradual_unfreezing_with_new_groups(amp: Cast) -> Training:
    model = dense(8, 24, 24, 24, 4)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for m in layers[:-1]:
        m.requires_grad_(False)
    optimizer = AdamW(layers[-1].parameters(), lr=1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count in (10, 20, 30):
            layer = layers[3 - count // 10]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 5e-4})
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def backbone_frozen_after_warm_up(amp: Cast) -> Training:
    model = nn.Sequential(small_cnn(16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count == 16:
            for p in model[0].parameters():
                p.requires_grad = False
        if count >= 16:
            model[0].eval()
        x, y = digits()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def alternating_blocks_of_parameters(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    halves = [list(model[:2].parameters()), list(model[2:].parameters())]
    optimizers = [SGD(half, lr=0.05, momentum=0.9) for half in halves]
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        active = (count // 5) % 2
        for i, half in enumerate(halves):
            for p in half:
                p.requires_grad_(i == active)
        for one in optimizers:
            one.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizers[active].step()
        return loss.detach()

    return Training(model, optimizers, step)


@program
def progressive_growing_with_fade_in(amp: Cast) -> Training:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 24)])
            self.heads = nn.ModuleList(nn.Linear(24, 4) for _ in range(3))
            self.depth, self.alpha = 0, 1.0

        def forward(self, x: Tensor) -> Tensor:
            before = x
            for i in range(self.depth + 1):
                before, x = x, F.relu(self.blocks[i](x))
            out = self.heads[self.depth](x)
            if self.alpha < 1 and self.depth > 0:
                out = self.alpha * out + (1 - self.alpha) * self.heads[self.depth - 1](before)
            return out

    model = Growing()
    optimizer = Adam(model.parameters(), lr=1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        model.depth = min(count // 14, 2)
        model.alpha = min(1.0, (count % 14) / 7) if model.depth else 1.0
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def iterative_magnitude_pruning_with_finetuning(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count in (10, 20, 30):
            for m in model:
                if isinstance(m, nn.Linear):
                    prune.l1_unstructured(m, "weight", amount=0.2)
        if count == 36:
            for m in model:
                if isinstance(m, nn.Linear):
                    prune.remove(m, "weight")
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def gradual_sparsity_by_masking_data(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = Adam(model.parameters(), lr=1e-3)
    masks: dict[str, Tensor] = {}
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        if count % 8 == 0:
            for name, p in model.named_parameters():
                if p.ndim == 2:
                    masks[name] = (p.abs() > p.abs().flatten().quantile(0.1 * count / 8)).float()
        for name, p in model.named_parameters():
            if name in masks:
                p.data.mul_(masks[name])
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def group_lasso_by_proximal_steps(amp: Cast) -> Training:
    model = dense(8, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.05)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            w = model.get_parameter("0.weight")
            norm = w.norm(dim=0, keepdim=True)
            w.mul_((1 - 0.05 * 0.02 / norm.clamp(min=1e-8)).clamp(min=0))
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def fake_quantised_weights_with_observers(amp: Cast) -> Training:
    class QLinear(nn.Linear):
        low: Tensor
        high: Tensor

        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)
            self.register_buffer("low", torch.zeros(()))
            self.register_buffer("high", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.low.mul_(0.9).add_(0.1 * x.float().min())
                self.high.mul_(0.9).add_(0.1 * x.float().max())
            scale = float((self.high - self.low).clamp(min=1e-3) / 255)
            x = torch.fake_quantize_per_tensor_affine(x.float(), scale, int(-float(self.low) / scale), -100000, 100000)
            w_scale = self.weight.detach().abs().amax(1) / 127
            zero = torch.zeros(len(w_scale), dtype=torch.int32)
            w = torch.fake_quantize_per_channel_affine(self.weight, w_scale, zero, 0, -128, 127)
            return F.linear(x, w, self.bias)

    model = nn.Sequential(QLinear(8, 32), nn.ReLU(), QLinear(32, 32), nn.ReLU(), QLinear(32, 4))
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))

    return simple_loop(model, optimizer, amp, loss)


@program
def learned_step_size_quantisation(amp: Cast) -> Training:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    class Lsq(nn.Linear):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)
            self.step = nn.Parameter(2 * self.weight.detach().abs().mean() / math.sqrt(7))

        def forward(self, x: Tensor) -> Tensor:
            g = 1 / math.sqrt(self.weight.numel() * 7)
            s = (self.step - self.step * g).detach() + self.step * g
            w = Round.apply((self.weight / s).clamp(-8, 7)) * s
            return F.linear(x, w, self.bias)

    model = nn.Sequential(Lsq(8, 32), nn.ReLU(), Lsq(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))

    return simple_loop(model, optimizer, amp, loss)


# Normalised weights


@program
def weight_norm_network(amp: Cast) -> Training:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 32)), nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(32, 32)), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = Adam(model.parameters(), lr=2e-3)

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))

    return simple_loop(model, optimizer, amp, loss)


@program
def old_style_spectral_norm(amp: Cast) -> Training:
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(8, 32)), nn.LeakyReLU(0.1), nn.utils.spectral_norm(nn.Linear(32, 32)),
        nn.LeakyReLU(0.1), nn.utils.spectral_norm(nn.Linear(32, 1)),
    )  # fmt: skip
    optimizer = RMSprop(model.parameters(), lr=5e-4)

    def loss() -> Tensor:
        real, fake = torch.randn(16, 8) + 1, torch.randn(16, 8)
        return F.relu(1 - model(real)).mean() + F.relu(1 + model(fake)).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def symmetric_weights_by_parametrization(amp: Cast) -> Training:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    layer = nn.Linear(12, 12)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), layer, nn.ReLU(), nn.Linear(12, 3))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 6)), torch.randint(3, (16,)))

    return simple_loop(model, optimizer, amp, loss)


@program
def arcface_with_normalised_head(amp: Cast) -> Training:
    class Arc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weight = dense(8, 32, 16), nn.Parameter(torch.randn(6, 16))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight)).float()
            angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
            hot = F.one_hot(y, 6).bool()
            return 16 * torch.where(hot, (angle + 0.3).cos(), cosine)

    model = Arc()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def loss() -> Tensor:
        y = torch.randint(6, (16,))
        return F.cross_entropy(model(torch.randn(16, 8) + y[:, None], y), y)

    return simple_loop(model, optimizer, amp, loss)


# Meta, functional, ensembles


@program
def maml_by_functional_call(amp: Cast) -> Training:
    model = dense(1, 24, 24, 1)
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        total = torch.zeros(())
        for _ in range(3):
            phase, size = 3 * torch.rand(()), 1 + torch.rand(())
            xs, xq = torch.rand(8, 1) * 4 - 2, torch.rand(8, 1) * 4 - 2
            fast: dict[str, Tensor] = dict(model.named_parameters())
            for _ in range(2):
                with amp():
                    inner = F.mse_loss(functional_call(model, fast, xs), size * (xs + phase).sin())
                grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {k: v - 0.05 * g for (k, v), g in zip(fast.items(), grads, strict=True)}
            with amp():
                total = total + F.mse_loss(functional_call(model, fast, xq), size * (xq + phase).sin())
        optimizer.zero_grad()
        (total / 3).backward()
        optimizer.step()
        return total.detach()

    return Training(model, [optimizer], step)


@program
def reptile_with_inner_optimizer(amp: Cast) -> Training:
    model = dense(1, 24, 24, 1, act=nn.Tanh)
    optimizer = SGD(model.parameters(), lr=0.02)

    def step() -> Tensor:
        before = copy.deepcopy(model.state_dict())
        phase = 3 * torch.rand(())
        loss = torch.zeros(())
        for _ in range(4):
            x = torch.rand(10, 1) * 4 - 2
            optimizer.zero_grad()
            with amp():
                loss = F.mse_loss(model(x), (x + phase).sin())
            loss.backward()
            optimizer.step()
        after = model.state_dict()
        model.load_state_dict({k: before[k] + (after[k] - before[k]) * 0.3 for k in before})
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def vmapped_ensemble_of_stacked_parameters(amp: Cast) -> Training:
    members = [dense(4, 16, 16, 1) for _ in range(4)]
    base = copy.deepcopy(members[0]).to("meta")
    stacked, buffers = stack_module_state(members)

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in stacked.items()})

        def forward(self, x: Tensor) -> Tensor:
            params = {k: self.stack[k.replace(".", "_")] for k in stacked}
            return vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), (0, 0, None))(params, buffers, x)

    model = Ensemble()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(16, 4)
        return (model(x) - x.sum(1, keepdim=True)).square().mean((1, 2)).sum()

    return simple_loop(model, optimizer, amp, loss)


@program
def gradients_by_torch_func_put_into_grad(amp: Cast) -> Training:
    model = dense(6, 24, 24, 3)
    optimizer = Adam(model.parameters(), lr=2e-3)

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with amp():
            return F.cross_entropy(functional_call(model, params, (x,)), y)

    def step() -> Tensor:
        x, y = torch.randn(16, 6), torch.randint(3, (16,))
        params = {k: p.detach() for k, p in model.named_parameters()}
        grads, value = torch.func.grad_and_value(loss_of)(params, x, y)
        for name, p in model.named_parameters():
            p.grad = grads[name]
        optimizer.step()
        return value.detach()

    return Training(model, [optimizer], step)


@program
def dp_sgd_by_per_sample_gradients(amp: Cast) -> Training:
    model = dense(6, 24, 3, act=nn.Tanh)
    optimizer = SGD(model.parameters(), lr=0.1)

    def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    def step() -> Tensor:
        x, y = torch.randn(16, 6), torch.randint(3, (16,))
        params = {k: p.detach() for k, p in model.named_parameters()}
        with amp():
            per = vmap(grad(one), (None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            clipped = torch.einsum("b,b...->...", factor, per[name].float())
            p.grad = (clipped + 0.5 * torch.randn_like(p)) / 16
        optimizer.step()
        with torch.no_grad():
            return F.cross_entropy(model(x), y)

    return Training(model, [optimizer], step)


# Loops with checkpoints and restarts


@program
def early_stopping_with_best_weights_reloaded(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = Adam(model.parameters(), lr=5e-3)
    best: list[Any] = [float("inf"), None]
    held = torch.randn(32, 8), torch.randint(4, (32,))
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        model.train()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        if count % 5 == 0:
            model.eval()
            with torch.no_grad():
                score = float(F.cross_entropy(model(held[0]), held[1]))
            if score < best[0]:
                best[:] = [score, copy.deepcopy(model.state_dict())]
        if count == 30:
            model.load_state_dict(best[1])
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def learning_rate_finder_that_restores(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count <= 15:
            for group in optimizer.param_groups:
                group["lr"] = 1e-5 * 10 ** (count / 3)
        if count == 16:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            for group in optimizer.param_groups:
                group["lr"] = 3e-3
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def folds_that_reset_parameters_and_optimizer_state(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = Adam(model.parameters(), lr=3e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count in (14, 27):
            for m in model.modules():
                if hasattr(m, "reset_parameters"):
                    m.reset_parameters()  # type: ignore[operator]
            optimizer.state.clear()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def skip_steps_on_spikes(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    past: deque[float] = deque(maxlen=20)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        scale = 50.0 if count % 9 == 0 else 1.0
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(scale * torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if len(past) < 5 or norm < 4 * sum(past) / len(past):
            optimizer.step()
            past.append(norm)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def dropout_schedule(amp: Cast) -> Training:
    model = nn.Sequential(
        nn.Linear(8, 48), nn.ReLU(), nn.Dropout(0.0), nn.Linear(48, 48), nn.ReLU(), nn.Dropout(0.0), nn.Linear(48, 4)
    )
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    count = 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        for m in model:
            if isinstance(m, nn.Dropout):
                m.p = min(0.5, 0.02 * count)
        return F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))

    return simple_loop(model, optimizer, amp, loss)


@program
def evaluation_between_steps_with_metrics(amp: Cast) -> Training:
    model = small_cnn()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.5)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        model.train()
        x, y = digits()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if count % 4 == 0:
            model.eval()
            with torch.inference_mode():
                x, y = digits(32)
                scheduler.step(float(F.cross_entropy(model(x), y)))
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def model_shared_with_hogwild_threads(amp: Cast) -> Training:
    model = dense(6, 24, 3)
    model.share_memory()
    optimizer = SGD(model.parameters(), lr=0.05)

    def loss() -> Tensor:
        return F.nll_loss(F.log_softmax(model(torch.randn(16, 6)), 1), torch.randint(3, (16,)))

    return simple_loop(model, optimizer, amp, loss)


# Kinds of numbers


@program
def double_precision_regression(amp: Cast) -> Training:
    model = dense(4, 24, 24, 1, act=nn.Tanh).double()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(16, 4, dtype=torch.float64)
        return F.huber_loss(model(x).double(), x.prod(1, keepdim=True))

    return simple_loop(model, optimizer, amp, loss)


@program
def complex_valued_network(amp: Cast) -> Training:
    class ModRelu(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.zeros(width))

        def forward(self, z: Tensor) -> Tensor:
            size = z.abs() + 1e-8
            return F.relu(size + self.b) * z / size

    model = nn.Sequential(
        nn.Linear(8, 16, dtype=torch.complex64), ModRelu(16), nn.Linear(16, 16, dtype=torch.complex64), ModRelu(16),
        nn.Linear(16, 2, dtype=torch.complex64),
    )  # fmt: skip
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        x = torch.randn(16, 8, dtype=torch.complex64)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :2]).abs().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def fourier_layer_with_complex_weights(amp: Cast) -> Training:
    class Spectral(nn.Module):
        def __init__(self, width: int, modes: int) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.rand(width, width, modes, dtype=torch.cfloat) / width**2)
            self.skip, self.modes = nn.Conv1d(width, width, 1), modes

        def forward(self, x: Tensor) -> Tensor:
            f = torch.fft.rfft(x.float())
            out = torch.zeros_like(f)
            out[..., : self.modes] = torch.einsum("bix,iox->box", f[..., : self.modes], self.weights)
            return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))

    class Fno(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.drop = nn.Linear(2, 12), nn.Linear(12, 1)
            self.layers = nn.ModuleList(Spectral(12, 5) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = self.lift(x).transpose(1, 2)
            for layer in self.layers:
                h = layer(h)
            return self.drop(h.transpose(1, 2))

    model = Fno()
    optimizer = Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def loss() -> Tensor:
        grid = torch.linspace(0, 1, 24)[None, :, None].expand(4, 24, 1)
        u = torch.randn(4, 24, 1).cumsum(1)
        out = model(torch.cat([u, grid], -1)).float()
        return ((out - u.cumsum(1) / 24).norm(dim=1) / u.cumsum(1).norm(dim=1)).mean()

    return simple_loop(model, optimizer, amp, loss)


# Sequences


@program
def bidirectional_lstm_with_packed_sequences(amp: Cast) -> Training:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 12, padding_idx=0)
            self.lstm = nn.LSTM(12, 16, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
            self.out = nn.Linear(32, 5)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = rnn.pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
            out, _ = rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.out(out)

    model = Tagger()
    optimizer = Adam(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        lengths = torch.randint(3, 9, (8,))
        lengths[0] = 8
        x, y = torch.randint(1, 30, (8, 8)), torch.randint(5, (8, 8))
        pad = torch.arange(8) >= lengths[:, None]
        return F.cross_entropy(model(x.masked_fill(pad, 0), lengths).flatten(0, 1), y.masked_fill(pad, -100).flatten())

    return simple_loop(model, optimizer, amp, loss)


@program
def ctc_speech_model(amp: Cast) -> Training:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(8, 24, 3, stride=1, padding=1), nn.BatchNorm1d(24)
            self.gru, self.out = nn.GRU(24, 24, bidirectional=True), nn.Linear(48, 11)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.norm(self.conv(x))).permute(2, 0, 1)
            return F.log_softmax(self.out(self.gru(h)[0]).float(), -1)

    model = Speech()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    lossf = nn.CTCLoss(blank=0, zero_infinity=True)

    def step() -> Tensor:
        x, y = torch.randn(4, 8, 20), torch.randint(1, 11, (4, 6))
        optimizer.zero_grad()
        with amp():
            out = model(x)
        loss = lossf(out, y, torch.full((4,), 20), torch.randint(2, 7, (4,)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def seq2seq_with_attention_and_teacher_forcing(amp: Cast) -> Training:
    encoder_e, decoder_e = nn.Embedding(20, 16), nn.Embedding(20, 16)
    encoder, decoder = nn.GRU(16, 24, batch_first=True), nn.GRUCell(16 + 24, 24)
    attention, out = nn.Linear(48, 1), nn.Linear(48, 20)
    parts = nn.ModuleDict(
        {"ee": encoder_e, "de": decoder_e, "enc": encoder, "dec": decoder, "att": attention, "out": out}
    )
    opt_enc = Adam([*encoder_e.parameters(), *encoder.parameters()], lr=2e-3)
    opt_dec = Adam([p for n in ("de", "dec", "att", "out") for p in parts[n].parameters()], lr=2e-3)

    def step() -> Tensor:
        x, y = torch.randint(1, 20, (6, 7)), torch.randint(1, 20, (6, 5))
        opt_enc.zero_grad()
        opt_dec.zero_grad()
        with amp():
            memory, h = encoder(encoder_e(x))
            h = h[0]
            token, loss = torch.zeros(6, dtype=torch.long), torch.zeros(())
            forcing = float(torch.rand(())) < 0.5
            for t in range(5):
                score = attention(torch.cat([memory, h[:, None].expand_as(memory)], -1)).softmax(1)
                context = (score * memory).sum(1)
                h = decoder(torch.cat([decoder_e(token), context.to(h.dtype)], -1), h)
                logits = out(torch.cat([h, context.to(h.dtype)], -1))
                loss = loss + F.cross_entropy(logits, y[:, t])
                token = y[:, t] if forcing else logits.argmax(-1).detach()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        opt_enc.step()
        opt_dec.step()
        return loss.detach()

    return Training(parts, [opt_enc, opt_dec], step)


@program
def stateful_rnn_language_model_with_tied_weights(amp: Cast) -> Training:
    class Rnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.rnn, self.decoder = nn.Embedding(30, 20), nn.LSTM(20, 20, 2), nn.Linear(20, 30)
            self.decoder.weight = self.encoder.weight
            nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

        def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
            out, hidden = self.rnn(self.encoder(x), hidden)
            return F.log_softmax(self.decoder(out).view(-1, 30), dim=1), hidden

    model = Rnn()
    optimizer = SGD(model.parameters(), lr=2.0)
    hidden: Any = (torch.zeros(2, 4, 20), torch.zeros(2, 4, 20))

    def step() -> Tensor:
        nonlocal hidden
        hidden = tuple(h.detach() for h in hidden)
        x = torch.randint(30, (9, 4))
        model.zero_grad()
        with amp():
            out, hidden = model(x[:-1], tuple(h.float() for h in hidden))
            loss = F.nll_loss(out, x[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def linear_chain_crf(amp: Cast) -> Training:
    class Crf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.moves, self.start = (
                dense(8, 24, 4),
                nn.Parameter(torch.randn(4, 4)),
                nn.Parameter(torch.randn(4)),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            e = self.body(x).float()
            score = self.start[y[:, 0]] + e[:, 0].gather(1, y[:, :1])[:, 0]
            alpha = self.start + e[:, 0]
            for t in range(1, x.shape[1]):
                score = score + self.moves[y[:, t - 1], y[:, t]] + e[:, t].gather(1, y[:, t : t + 1])[:, 0]
                alpha = torch.logsumexp(alpha[:, :, None] + self.moves, 1) + e[:, t]
            return (alpha.logsumexp(1) - score).mean()

    model = Crf()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        return model(torch.randn(8, 6, 8), torch.randint(4, (8, 6)))

    return simple_loop(model, optimizer, amp, loss)


@program
def scheduled_masked_language_model(amp: Cast) -> Training:
    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(40, 24), nn.Parameter(0.02 * torch.randn(10, 24))
            layer = nn.TransformerEncoderLayer(24, 2, 48, 0.1, "gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.dense, self.norm, self.bias = nn.Linear(24, 24), nn.LayerNorm(24), nn.Parameter(torch.zeros(40))

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            h = self.encoder(self.tokens(x) + self.positions, src_key_padding_mask=pad)
            return self.norm(F.gelu(self.dense(h))) @ self.tokens.weight.T + self.bias

    model = Bert()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    lr = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=60)

    def loss() -> Tensor:
        y = torch.randint(1, 40, (6, 10))
        lengths = torch.randint(4, 11, (6, 1))
        pad = torch.arange(10) >= lengths
        hide = (torch.rand(6, 10) < 0.3) & ~pad
        hide[:, 0] = True
        out = model(y.masked_fill(hide, 0), pad)
        return F.cross_entropy(out[hide], y[hide])

    return simple_loop(model, optimizer, amp, loss, lr)


@program
def lora_on_frozen_transformer(amp: Cast) -> Training:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a, self.b = (
                nn.Parameter(torch.randn(4, base.in_features) / 8),
                nn.Parameter(torch.zeros(base.out_features, 4)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
            self.n1, self.n2, self.up, self.down = (
                nn.LayerNorm(16),
                nn.LayerNorm(16),
                nn.Linear(16, 32),
                nn.Linear(32, 16),
            )
            self.e, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

        def forward(self, x: Tensor) -> Tensor:
            h = self.e(x)
            n = self.n1(h)
            q, k, v = (f(n).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
            h = h + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return self.head(h + self.down(F.gelu(self.up(self.n2(h)))))

    model = Net()
    model.requires_grad_(False)
    model.q, model.v = Lora(model.q), Lora(model.v)  # type: ignore[assignment]
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def loss() -> Tensor:
        x = torch.randint(20, (4, 9))
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return simple_loop(model, optimizer, amp, loss)


@program
def direct_preference_optimisation(amp: Cast) -> Training:
    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.gru, self.head = nn.Embedding(20, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(self.e(x))[0])

    def logp(model: nn.Module, x: Tensor) -> Tensor:
        return F.log_softmax(model(x[:, :-1]).float(), -1).gather(2, x[:, 1:, None])[..., 0].sum(1)

    policy = Lm()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = RMSprop(policy.parameters(), lr=1e-3)

    def loss() -> Tensor:
        good, bad = torch.randint(20, (6, 8)), torch.randint(20, (6, 8))
        with torch.no_grad():
            rg, rb = logp(reference, good), logp(reference, bad)
        margin = (logp(policy, good) - rg) - (logp(policy, bad) - rb)
        return -F.logsigmoid(0.1 * margin).mean()

    return simple_loop(policy, optimizer, amp, loss)


# Science


@program
def neural_ode_by_rk4(amp: Cast) -> Training:
    field = dense(2, 32, 2, act=nn.Tanh)
    optimizer = RMSprop(field.parameters(), lr=1e-3)
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])

    def loss() -> Tensor:
        y = torch.randn(12, 2)
        goal = y @ torch.matrix_exp(matrix)
        for _ in range(5):
            h = 0.2
            k1 = field(y**3)
            k2 = field((y + h / 2 * k1) ** 3)
            k3 = field((y + h / 2 * k2) ** 3)
            k4 = field((y + h * k3) ** 3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return (y - goal).abs().mean()

    return simple_loop(field, optimizer, amp, loss)


@program
def physics_informed_heat_equation(amp: Cast) -> Training:
    model = dense(2, 24, 24, 24, 1, act=nn.Tanh)
    optimizer = Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    def loss() -> Tensor:
        x, t = torch.rand(32, 1, requires_grad=True), torch.rand(32, 1, requires_grad=True)
        u = model(torch.cat([x, t], 1))
        (ut,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
        (ux,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        (uxx,) = torch.autograd.grad(ux, x, torch.ones_like(ux), create_graph=True)
        x0 = torch.rand(16, 1)
        start = model(torch.cat([x0, torch.zeros_like(x0)], 1)) - (math.pi * x0).sin()
        edge = model(torch.cat([torch.randint(2, (16, 1)).float(), torch.rand(16, 1)], 1))
        return (ut - 0.1 * uxx).square().mean() + 10 * start.square().mean() + 10 * edge.square().mean()

    return simple_loop(model, optimizer, amp, loss, scheduler)


@program
def inverse_problem_with_learned_coefficient(amp: Cast) -> Training:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.k = dense(1, 24, 24, 1, act=nn.Tanh), nn.Parameter(torch.tensor(0.5))

        def forward(self, t: Tensor) -> Tensor:
            return self.net(t)

    model = Inverse()
    groups: list[dict[str, Any]] = [{"params": model.net.parameters()}, {"params": [model.k], "lr": 1e-2}]
    optimizer = Adam(groups, lr=1e-3)

    def loss() -> Tensor:
        t = torch.rand(32, 1, requires_grad=True)
        u = model(t)
        (ut,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        data = torch.rand(16, 1)
        return (ut + model.k * u).square().mean() + (model(data) - (-2 * data).exp()).square().mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def hamiltonian_network(amp: Cast) -> Training:
    energy = dense(2, 32, 32, 1, act=nn.Tanh)
    optimizer = Adam(energy.parameters(), lr=1e-3, weight_decay=1e-4)

    def loss() -> Tensor:
        x = torch.randn(32, 2, requires_grad=True)
        (dh,) = torch.autograd.grad(energy(x).sum(), x, create_graph=True)
        flow = torch.stack([dh[:, 1], -dh[:, 0]], 1)
        goal = torch.stack([x[:, 1], -x[:, 0].sin()], 1).detach()
        return (flow - goal).square().mean()

    return simple_loop(energy, optimizer, amp, loss)


@program
def forces_from_an_energy_of_distances(amp: Cast) -> Training:
    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z, self.net, self.out = nn.Embedding(3, 8), dense(8 + 8 + 8, 24, 24, act=nn.SiLU), nn.Linear(24, 1)

        def forward(self, z: Tensor, r: Tensor) -> Tensor:
            d = (r[:, :, None] - r[:, None]).square().sum(-1).add(torch.eye(5)).sqrt()
            rbf = torch.exp(-(d[..., None] - torch.linspace(0, 4, 8)).square())
            e = self.z(z)
            pair = torch.cat([e[:, :, None].expand(-1, -1, 5, -1), e[:, None].expand(-1, 5, -1, -1), rbf], -1)
            return self.out(self.net(pair)).sum((1, 2, 3))

    model = Potential()
    optimizer = Adam(model.parameters(), lr=1e-3, amsgrad=True)

    def loss() -> Tensor:
        z, r = torch.randint(3, (6, 5)), torch.randn(6, 5, 3, requires_grad=True)
        e = model(z, r)
        (force,) = torch.autograd.grad(-e.sum(), r, create_graph=True)
        return 0.01 * (e - r.detach().square().sum((1, 2))).square().mean() + (force + 2 * r.detach()).square().mean()

    return simple_loop(model, optimizer, amp, loss)


# Graphs and metrics


@program
def graph_convolution_full_batch(amp: Cast) -> Training:
    class Gcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.randn(10, 16) / 4), nn.Parameter(torch.randn(16, 3) / 4)
            self.b1, self.b2 = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor, adj: Tensor) -> Tensor:
            h = F.relu(torch.sparse.mm(adj, x @ self.w1) + self.b1)
            h = F.dropout(h, 0.5, self.training)
            return F.log_softmax(torch.sparse.mm(adj, h @ self.w2) + self.b2, 1)

    model = Gcn()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    a = (torch.rand(30, 30) < 0.1).float()
    a = ((a + a.T + torch.eye(30)) > 0).float()
    d = a.sum(1).rsqrt()
    adj, x, y, train = (d[:, None] * a * d).to_sparse(), torch.randn(30, 10), torch.randint(3, (30,)), torch.arange(12)

    def step() -> Tensor:
        model.train()
        optimizer.zero_grad()
        out = model(x, adj)
        loss = F.nll_loss(out[train], y[train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x, adj)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def message_passing_by_index_add(amp: Cast) -> Training:
    class Mpnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.message, self.update = nn.Linear(5, 16), dense(34, 24, 16), nn.GRUCell(16, 16)
            self.read = dense(16, 16, 1)

        def forward(self, x: Tensor, edges: Tensor, attr: Tensor, batch: Tensor) -> Tensor:
            h = self.lift(x).float()
            for _ in range(3):
                m = self.message(torch.cat([h[edges[0]], h[edges[1]], attr], 1)).float()
                h = self.update(torch.zeros_like(h).index_add(0, edges[1], m), h).float()
            return self.read(torch.zeros(4, 16).index_add(0, batch, h))

    model = Mpnn()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        n, e = 20, 50
        batch = torch.arange(4).repeat_interleave(5)
        x = torch.randn(n, 5)
        out = model(x, torch.randint(n, (2, e)), torch.randn(e, 2), batch)
        return F.l1_loss(out.float(), torch.zeros(4, 1).index_add(0, batch, x[:, :1]))

    return simple_loop(model, optimizer, amp, loss)


@program
def matrix_factorisation_with_bpr(amp: Cast) -> Training:
    class Mf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item, self.bias = nn.Embedding(20, 8), nn.Embedding(40, 8), nn.Embedding(40, 1)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.bias.weight)

        def forward(self, u: Tensor, i: Tensor) -> Tensor:
            return (self.user(u) * self.item(i)).sum(-1) + self.bias(i)[..., 0]

    model = Mf()
    optimizer = Adam(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        u, i, j = torch.randint(20, (32,)), torch.randint(40, (32,)), torch.randint(40, (32,))
        ridge = model.user(u).square().sum() + model.item(i).square().sum() + model.item(j).square().sum()
        return -F.logsigmoid(model(u, i) - model(u, j)).mean() + 1e-3 * ridge / 32

    return simple_loop(model, optimizer, amp, loss)


@program
def triplets_with_hard_mining(amp: Cast) -> Training:
    model = dense(8, 32, 8)
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        y = torch.randint(4, (24,))
        z = F.normalize(model(torch.randn(24, 8) + y[:, None])).float()
        d = (2 - 2 * z @ z.T).clamp(min=1e-8).sqrt()
        same = y[:, None] == y
        hard_pos = (d * same).max(1).values
        hard_neg = (d + 10.0 * same).min(1).values
        return F.relu(hard_pos - hard_neg + 0.3).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def prototypes_and_nearest_neighbours(amp: Cast) -> Training:
    model = small_cnn(12)
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        support = torch.randn(15, 1, 8, 8) + torch.arange(5).repeat_interleave(3).view(-1, 1, 1, 1)
        query = torch.randn(10, 1, 8, 8) + torch.arange(5).repeat_interleave(2).view(-1, 1, 1, 1)
        z = model(torch.cat([support, query])).float()
        centers = z[:15].view(5, 3, -1).mean(1)
        return F.cross_entropy(-torch.cdist(z[15:], centers).square(), torch.arange(5).repeat_interleave(2))

    return simple_loop(model, optimizer, amp, loss)


@program
def focal_loss_detector(amp: Cast) -> Training:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 12, 3, 2, 1), nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 12, 3, 1, 1), nn.ReLU()
            )
            self.cls, self.box = nn.Conv2d(12, 4, 3, 1, 1), nn.Conv2d(12, 4, 3, 1, 1)
            nn.init.constant_(self.cls.bias, -math.log(99))  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return self.cls(h), self.box(h)

    model = Detector()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def loss() -> Tensor:
        scores, boxes = (o.float() for o in model(torch.randn(4, 3, 16, 16)))
        hot = (torch.rand_like(scores) < 0.02).float()
        p, ce = scores.sigmoid(), F.binary_cross_entropy_with_logits(scores, hot, reduction="none")
        pt = p * hot + (1 - p) * (1 - hot)
        focal = ((0.25 * hot + 0.75 * (1 - hot)) * (1 - pt) ** 2 * ce).sum() / hot.sum().clamp(min=1)
        inside = hot.amax(1, keepdim=True)
        return focal + (
            F.smooth_l1_loss(boxes, torch.randn_like(boxes), reduction="none") * inside
        ).sum() / inside.sum().clamp(min=1)

    return simple_loop(model, optimizer, amp, loss)


@program
def unet_with_dice_and_deep_supervision(amp: Cast) -> Training:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d1, self.d2 = nn.Conv2d(1, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 1, 1)
            self.u1, self.c1 = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, 1, 1)
            self.head, self.side = nn.Conv2d(8, 2, 1), nn.Conv2d(16, 2, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a = F.relu(self.d1(x))
            b = F.relu(self.d2(F.max_pool2d(a, 2)))
            return self.head(F.relu(self.c1(torch.cat([a, self.u1(b)], 1)))), F.interpolate(
                self.side(b), scale_factor=2
            )

    def dice(out: Tensor, y: Tensor) -> Tensor:
        p = out.float().softmax(1)[:, 1]
        return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)

    model = UNet()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(4, 1, 16, 16)
        y = (x[:, 0] > 0.5).long()
        main, side = model(x)
        return (
            F.cross_entropy(main.float(), y) + dice(main, y) + 0.4 * (F.cross_entropy(side.float(), y) + dice(side, y))
        )

    return simple_loop(model, optimizer, amp, loss)


# Students, experts, mixtures


@program
def distillation_with_hint_layers(amp: Cast) -> Training:
    teacher, student, hint = dense(8, 48, 48, 4).eval(), dense(8, 16, 16, 4), nn.Linear(16, 48)
    teacher.requires_grad_(False)
    optimizer = Adam([*student.parameters(), *hint.parameters()], lr=1e-3)

    def step() -> Tensor:
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        with amp():
            with torch.no_grad():
                mid_t = teacher[:2](x)
                out_t = teacher[2:](mid_t)
            mid_s = student[:2](x)
            out_s = student[2:](mid_s)
            soft = F.kl_div(F.log_softmax(out_s / 4, 1), F.softmax(out_t / 4, 1), reduction="batchmean") * 16
            loss = 0.3 * F.cross_entropy(out_s, y) + 0.7 * soft + 0.1 * F.mse_loss(hint(mid_s), mid_t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(nn.ModuleList([student, hint]), [optimizer], step)


@program
def mutual_learning_of_two_networks(amp: Cast) -> Training:
    nets = nn.ModuleList([dense(8, 24, 4), dense(8, 32, 4)])
    optimizers = [SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]

    def step() -> Tensor:
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        with amp():
            outs = [net(x) for net in nets]
        losses = []
        for i in range(2):
            with amp():
                kl = F.kl_div(F.log_softmax(outs[i], 1), F.softmax(outs[1 - i].detach(), 1), reduction="batchmean")
                losses.append(F.cross_entropy(outs[i], y) + kl)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (losses[0] + losses[1]).detach()

    return Training(nets, optimizers, step)


@program
def mixture_of_experts_with_balance_loss(amp: Cast) -> Training:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(dense(8, 16, 8) for _ in range(4))
            self.head = nn.Linear(8, 3)
            self.aux = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            p = self.gate(x).float().softmax(-1)
            top, index = p.topk(2, -1)
            top = top / top.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                rows, slot = (index == e).nonzero(as_tuple=True)
                if len(rows):
                    out = out.index_add(0, rows, (top[rows, slot, None] * expert(x[rows])).to(out.dtype))
            self.aux = 4 * (p.mean(0) * F.one_hot(index[:, 0], 4).float().mean(0)).sum()
            return self.head(x + out)

    model = Moe()
    optimizer = AdamW(model.parameters(), lr=2e-3)

    def loss() -> Tensor:
        out = model(torch.randn(24, 8))
        return F.cross_entropy(out, torch.randint(3, (24,))) + 0.01 * model.aux

    return simple_loop(model, optimizer, amp, loss)


@program
def gaussian_mixture_density_network(amp: Cast) -> Training:
    class Mdn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pi, self.mu, self.sigma = (
                nn.Linear(1, 24),
                nn.Linear(24, 4),
                nn.Linear(24, 4),
                nn.Linear(24, 4),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.body(x).tanh()
            return F.log_softmax(self.pi(h).float(), 1), self.mu(h).float(), self.sigma(h).float().exp()

    model = Mdn()
    optimizer = Adam(model.parameters(), lr=5e-3)

    def loss() -> Tensor:
        y = torch.rand(32, 1) * 4 - 2
        x = y + 0.5 * (3 * y).sin() + 0.1 * torch.randn_like(y)
        pi, mu, sigma = model(x)
        return -(pi + torch.distributions.Normal(mu, sigma).log_prob(y)).logsumexp(1).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def bayes_by_backprop(amp: Cast) -> Training:
    class BayesLinear(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.mu, self.rho = nn.Parameter(torch.randn(b, a) / a**0.5), nn.Parameter(torch.full((b, a), -4.0))
            self.bias = nn.Parameter(torch.zeros(b))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.mu + F.softplus(self.rho) * torch.randn_like(self.mu), self.bias)

        def kl(self) -> Tensor:
            s = F.softplus(self.rho)
            return (0.5 * (s.square() + self.mu.square()) - s.log() - 0.5).sum()

    model = nn.Sequential(BayesLinear(6, 24), nn.ReLU(), BayesLinear(24, 3))
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        ce = F.cross_entropy(model(torch.randn(16, 6)), torch.randint(3, (16,)))
        return ce + 1e-3 * sum(m.kl() for m in model if isinstance(m, BayesLinear))

    return simple_loop(model, optimizer, amp, loss)


@program
def mixup_and_cutmix_with_soft_targets(amp: Cast) -> Training:
    model = small_cnn()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def loss() -> Tensor:
        x, y = digits()
        lam, order = float(torch.distributions.Beta(0.4, 0.4).sample()), torch.randperm(16)
        if float(torch.rand(())) < 0.5:
            x = lam * x + (1 - lam) * x[order]
        else:
            x = x.clone()
            x[:, :, 2:6, 2:6] = x[order][:, :, 2:6, 2:6]
            lam = 0.75
        out = model(x)
        return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order])

    return simple_loop(model, optimizer, amp, loss)


@program
def rotation_pretext_then_finetuning_with_new_head(amp: Cast) -> Training:
    body, head = small_cnn(16), nn.Linear(16, 4)
    model = nn.Sequential(body, nn.ReLU(), head)
    optimizer = Adam(model.parameters(), lr=1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count, optimizer
        count += 1
        if count == 20:
            model[2] = nn.Linear(16, 10)
            optimizer.param_groups.clear()
            optimizer.state.clear()
            optimizer.add_param_group({"params": list(model.parameters()), "lr": 5e-4})
        x, y = digits()
        if count < 20:
            y = torch.randint(4, (16,))
            x = torch.stack([torch.rot90(a, int(k), (1, 2)) for a, k in zip(x, y, strict=True)])
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def elastic_weight_consolidation_between_tasks(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer = SGD(model.parameters(), lr=0.05)
    fisher: dict[str, Tensor] = {}
    anchor: dict[str, Tensor] = {}
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count == 20:
            fisher.update({n: torch.zeros_like(p) for n, p in model.named_parameters()})
            for _ in range(8):
                model.zero_grad()
                F.nll_loss(F.log_softmax(model(torch.randn(1, 8)), 1), torch.randint(4, (1,))).backward()
                for n, p in model.named_parameters():
                    assert p.grad is not None
                    fisher[n] += p.grad.square() / 8
            anchor.update({n: p.detach().clone() for n, p in model.named_parameters()})
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        for n, p in model.named_parameters():
            if fisher:
                loss = loss + 20 * (fisher[n] * (p - anchor[n]).square()).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def evolution_strategy_into_grad(amp: Cast) -> Training:
    model = dense(4, 16, 2, act=nn.Tanh)
    optimizer = Adam(model.parameters(), lr=1e-2)

    def step() -> Tensor:
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        noise = torch.randn(6, len(flat))
        x = torch.randn(16, 4)
        scores = []
        with torch.no_grad():
            for e in torch.cat([noise, -noise]):
                nn.utils.vector_to_parameters(flat + 0.05 * e, model.parameters())
                with amp():  # Of its own: a region keeps the casts of the first weights.
                    scores.append(F.mse_loss(model(x).float(), x[:, :2]))
            nn.utils.vector_to_parameters(flat, model.parameters())
        score = torch.stack(scores)
        direction = ((score[:6] - score[6:])[:, None] * noise).mean(0) / 0.1
        at = 0
        for p in model.parameters():
            p.grad = direction[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
        return score.mean()

    return Training(model, [optimizer], step)


@program
def layer_outputs_penalised_by_hooks(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    saved: list[Tensor] = []
    for m in model:
        if isinstance(m, nn.ReLU):
            m.register_forward_hook(lambda mod, args, out: saved.append(out))
    optimizer = Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        saved.clear()
        out = model(torch.randn(16, 8))
        return F.cross_entropy(out, torch.randint(4, (16,))) + 1e-3 * sum(k.abs().mean() for k in saved)

    return simple_loop(model, optimizer, amp, loss)


@program
def tensor_hooks_that_scale_gradients_of_a_layer(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    for p in model[0].parameters():
        p.register_hook(lambda g: 0.1 * g)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))

    return simple_loop(model, optimizer, amp, loss)


@program
def nested_bilevel_hyperparameters(amp: Cast) -> Training:
    model = dense(6, 24, 3)
    log_decay = torch.tensor(-4.0, requires_grad=True)
    optimizer, outer = SGD(model.parameters(), lr=0.05), Adam([log_decay], lr=0.05)

    def step() -> Tensor:
        x, y = torch.randn(16, 6), torch.randint(3, (16,))
        params: dict[str, Tensor] = dict(model.named_parameters())
        inner = F.cross_entropy(functional_call(model, params, (x,)), y)
        inner = inner + log_decay.exp() * sum(p.square().sum() for p in params.values())
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        moved = {k: p - 0.05 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        outer.zero_grad()
        F.cross_entropy(functional_call(model, moved, (torch.randn(16, 6),)), torch.randint(3, (16,))).backward()
        outer.step()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss = loss + log_decay.exp().detach() * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def teacher_that_follows_in_forward(amp: Cast) -> Training:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = dense(8, 24, 24, 6), dense(8, 24, 24, 6)
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.mul_(0.9).add_(s, alpha=0.1)
                goal = self.teacher(x + 0.1 * torch.randn_like(x))
            return self.student(x), goal

    model = Pair()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(16, 8)
        out, goal = model(x)
        return F.mse_loss(out, goal.to(out.dtype)) + F.cross_entropy(out, torch.randint(6, (16,)))

    return simple_loop(model, optimizer, amp, loss)
