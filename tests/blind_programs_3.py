"""Seventy-one more correct training programs of other kinds, written before the monitor was tried on them."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, hessian, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize, prune, skip_init
from torch.optim import ASGD, LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from blind_programs import Cast, Program, dense, digits, simple_loop, small_cnn
from everyday_programs import Training

PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    PROGRAMS[build.__name__.replace("_", " ")] = build
    return build


def batch(count: int = 16, inputs: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, inputs), torch.randint(classes, (count,))


def classified(model: Any) -> Tensor:
    x, y = batch()
    return F.cross_entropy(model(x), y)


# Adversarial and generative


@program
def gan_with_spectral_norm_hinge_and_r1_every_four_steps(amp: Cast) -> Training:
    g = dense(4, 24, 24, 6)
    d = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 24)), nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(24, 1)),
    )  # fmt: skip
    og, od = Adam(g.parameters(), 1e-3, (0.0, 0.9)), Adam(d.parameters(), 1e-3, (0.0, 0.9))
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        real = torch.randn(16, 6) * 2 + 1
        od.zero_grad()
        with amp():
            fake = g(torch.randn(16, 4)).detach()
            loss_d = F.relu(1 - d(real)).mean() + F.relu(1 + d(fake)).mean()
        loss_d.backward()
        if count % 4 == 0:
            real.requires_grad_(True)
            out = d(real).sum()
            (slope,) = torch.autograd.grad(out, real, create_graph=True)
            (4 * 5.0 * slope.square().sum(1).mean()).backward()
        od.step()
        og.zero_grad()
        with amp():
            loss_g = -d(g(torch.randn(16, 4))).mean()
        loss_g.backward()
        og.step()
        return (loss_d + loss_g).detach()

    return Training(nn.ModuleDict({"g": g, "d": d}), [og, od], step)


@program
def style_generator_with_average_for_sampling(amp: Cast) -> Training:
    class G(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.const = dense(4, 16, 16), nn.Parameter(torch.randn(1, 16))
            self.noise, self.style, self.out = nn.Parameter(torch.zeros(16)), nn.Linear(16, 32), nn.Linear(16, 6)

        def forward(self, z: Tensor) -> Tensor:
            scale, shift = self.style(self.map(F.normalize(z, dim=1) * 2)).chunk(2, 1)
            h = self.const + self.noise * torch.randn(len(z), 16)
            return self.out(F.leaky_relu((1 + scale) * F.layer_norm(h, (16,)) + shift, 0.2))

    g, d = G(), dense(6, 24, 1)
    average = copy.deepcopy(g).requires_grad_(False)
    og, od = Adam(g.parameters(), 2e-3, (0.0, 0.99)), Adam(d.parameters(), 2e-3, (0.0, 0.99))

    def step() -> Tensor:
        for p in g.parameters():
            p.requires_grad_(False)
        od.zero_grad()
        with amp():
            one = F.softplus(d(g(torch.randn(16, 4)))).mean() + F.softplus(-d(torch.randn(16, 6))).mean()
        one.backward()
        od.step()
        for p in g.parameters():
            p.requires_grad_(True)
        for p in d.parameters():
            p.requires_grad_(False)
        og.zero_grad()
        with amp():
            two = F.softplus(-d(g(torch.randn(16, 4)))).mean()
        two.backward()
        og.step()
        for p in d.parameters():
            p.requires_grad_(True)
        with torch.no_grad():
            for a, p in zip(average.parameters(), g.parameters(), strict=True):
                a.lerp_(p, 0.02)
        return (one + two).detach()

    return Training(nn.ModuleDict({"g": g, "d": d}), [og, od], step)


@program
def diffusion_with_velocity_target_and_min_snr(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.a, self.b = nn.Embedding(50, 16), nn.Linear(6, 16), nn.Linear(16, 6)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.b(F.silu(self.a(x) + self.time(t)))

    model = Net()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    alpha = torch.linspace(0.999, 0.01, 50)
    optimizer = AdamW(model.parameters(), 2e-3, weight_decay=0.0)

    def step() -> Tensor:
        x, t, e = torch.randn(32, 6) * 0.5 + 1, torch.randint(50, (32,)), torch.randn(32, 6)
        a = alpha[t, None]
        optimizer.zero_grad()
        with amp():
            out = model(a.sqrt() * x + (1 - a).sqrt() * e, t)
            snr = (a / (1 - a)).squeeze(1)
            weight = snr.clamp(max=5) / (snr + 1)
            loss = (weight * (out - (a.sqrt() * e - (1 - a).sqrt() * x)).square().mean(1)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(model)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def consistency_training_with_stop_gradient_teacher(amp: Cast) -> Training:
    student = dense(7, 32, 6)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = RAdam(student.parameters(), 1e-3)

    def step() -> Tensor:
        x, t, noise = torch.randn(16, 6), torch.rand(16, 1), torch.randn(16, 6)
        optimizer.zero_grad()
        with amp():
            near = student(torch.cat([x + (t + 0.05) * noise, t + 0.05], 1))
            with torch.no_grad():
                far = teacher(torch.cat([x + t * noise, t], 1))
            loss = ((near - far).square().sum(1) + 1e-4).sqrt().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
                a.mul_(0.95).add_(b, alpha=0.05)
        return loss.detach()

    return Training(student, [optimizer], step)


@program
def wake_sleep_helmholtz(amp: Cast) -> Training:
    up, down = nn.Linear(8, 4), nn.Linear(4, 8)
    prior = nn.Parameter(torch.zeros(4))
    model = nn.ModuleDict({"up": up, "down": down})
    model.register_parameter("prior", prior)
    optimizer = SGD(model.parameters(), 0.05)

    def step() -> Tensor:
        x = (torch.rand(16, 8) > 0.6).float()
        optimizer.zero_grad()
        with amp():
            with torch.no_grad():
                h = torch.bernoulli(up(x).sigmoid().float())
            wake = F.binary_cross_entropy_with_logits(down(h), x)
            wake = wake + F.binary_cross_entropy_with_logits(prior.expand(16, 4), h)
        wake.backward()
        with amp():
            with torch.no_grad():
                dream = torch.bernoulli(prior.sigmoid().expand(16, 4))
                seen = torch.bernoulli(down(dream).sigmoid().float())
            sleep = F.binary_cross_entropy_with_logits(up(seen), dream)
        sleep.backward()
        optimizer.step()
        return (wake + sleep).detach()

    return Training(model, [optimizer], step)


@program
def restricted_boltzmann_machine_by_contrastive_divergence(amp: Cast) -> Training:
    class RBM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a, self.b = (
                nn.Parameter(0.1 * torch.randn(8, 6)), nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(6))
            )  # fmt: skip

        def forward(self, v: Tensor) -> Tensor:
            return -(v @ self.a) - F.softplus(v @ self.w + self.b).sum(1)

    model = RBM()
    optimizer = SGD(model.parameters(), 0.05, momentum=0.5)

    def step() -> Tensor:
        v = (torch.rand(16, 8) > 0.5).float()
        with torch.no_grad():
            h = torch.bernoulli((v @ model.w + model.b).sigmoid())
            dream = torch.bernoulli((h @ model.w.t() + model.a).sigmoid())
        optimizer.zero_grad()
        with amp():
            loss = (model(v) - model(dream)).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def gumbel_softmax_autoencoder_with_annealed_temperature(amp: Cast) -> Training:
    enc, dec = nn.Linear(8, 12), nn.Linear(12, 8)
    model = nn.Sequential(enc, dec)
    optimizer, tau = AdamW(model.parameters(), 2e-3), 2.0

    def step() -> Tensor:
        nonlocal tau
        tau = max(0.5, tau * 0.98)
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        with amp():
            code = F.gumbel_softmax(enc(x).view(16, 3, 4), tau=tau, hard=True)
            loss = F.mse_loss(dec(code.flatten(1)), x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


# Reinforcement


@program
def impala_with_shared_torso_and_rmsprop(amp: Cast) -> Training:
    torso, policy, value = dense(6, 24, 24), nn.Linear(24, 3), nn.Linear(24, 1)
    model = nn.ModuleList([torso, policy, value])
    optimizer = RMSprop(model.parameters(), 1e-3, eps=0.01)

    def step() -> Tensor:
        s, a, r = torch.randn(5, 4, 6), torch.randint(3, (5, 4)), torch.rand(5, 4)
        with torch.no_grad():
            old = policy(torso(s)).log_softmax(-1).gather(-1, a[..., None]).squeeze(-1) + 0.1 * torch.randn(5, 4)
        optimizer.zero_grad()
        with amp():
            h = F.relu(torso(s))
            logp = policy(h).log_softmax(-1)
            v = value(h).squeeze(-1)
            chosen = logp.gather(-1, a[..., None]).squeeze(-1)
            rho = (chosen.detach() - old).exp().clamp(max=1.0)
            target = r + 0.9 * torch.cat([v[1:], v[-1:]]).detach()
            advantage = rho * (target - v).detach()
            loss = -(chosen * advantage).mean() + 0.5 * (target - v).square().mean()
            loss = loss + 0.01 * (logp.exp() * logp).sum(-1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 40.0)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def distributional_values_with_dueling_and_noisy_layers(amp: Cast) -> Training:
    class Noisy(nn.Linear):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)
            self.sigma = nn.Parameter(torch.full((b, a), 0.05))

        def forward(self, x: Tensor) -> Tensor:
            w = self.weight + self.sigma * torch.randn_like(self.sigma) if self.training else self.weight
            return F.linear(x, w, self.bias)

    class Q(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.v, self.a = nn.Linear(6, 24), Noisy(24, 11), Noisy(24, 33)

        def forward(self, s: Tensor) -> Tensor:
            h = F.relu(self.body(s))
            a = self.a(h).view(-1, 3, 11)
            return self.v(h)[:, None] + a - a.mean(1, keepdim=True)

    online = Q()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer, count = Adam(online.parameters(), 5e-4, eps=1.5e-4), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        s, a = torch.randn(16, 6), torch.randint(3, (16,))
        with torch.no_grad():
            goal = target(s).softmax(-1)[torch.arange(16), a]
        optimizer.zero_grad()
        with amp():
            logp = online(s)[torch.arange(16), a].log_softmax(-1)
            loss = -(goal * logp).sum(-1).mean()
        loss.backward()
        optimizer.step()
        if count % 8 == 0:
            target.load_state_dict(online.state_dict())
        return loss.detach()

    return Training(online, [optimizer], step)


@program
def quantile_regression_agent_with_replay(amp: Cast) -> Training:
    online, target = dense(5, 32, 2 * 8), dense(5, 32, 2 * 8)
    target.load_state_dict(online.state_dict())
    memory: deque[tuple[Tensor, int, float, Tensor]] = deque(maxlen=200)
    optimizer = Adam(online.parameters(), 1e-3)
    tau = (torch.arange(8) + 0.5) / 8
    state = torch.zeros(5)

    def step() -> Tensor:
        nonlocal state
        for _ in range(8):
            with torch.no_grad():
                action = (
                    int(online(state).view(2, 8).mean(1).argmax()) if random.random() > 0.2 else random.randrange(2)
                )
            after = 0.9 * state + 0.3 * torch.randn(5) + 0.1 * action
            memory.append((state, action, float(-after.abs().sum()), after))
            state = after
        picked = random.sample(list(memory), 8)
        s, after = torch.stack([one[0] for one in picked]), torch.stack([one[3] for one in picked])
        a, r = torch.tensor([one[1] for one in picked]), torch.tensor([one[2] for one in picked])
        with torch.no_grad():
            ahead = target(after).view(8, 2, 8)
            goal = r[:, None] + 0.9 * ahead[torch.arange(8), ahead.mean(2).argmax(1)]
        optimizer.zero_grad()
        with amp():
            q = online(s).view(8, 2, 8)[torch.arange(8), a]
            gap = goal[:, None] - q[:, :, None]
            loss = ((tau[:, None] - (gap.detach() < 0).float()).abs() * F.huber_loss(
                q[:, :, None].expand_as(gap), goal[:, None].expand_as(gap), reduction="none")).mean()  # fmt: skip
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for t, p in zip(target.parameters(), online.parameters(), strict=True):
                t.data.copy_(0.05 * p.data + 0.95 * t.data)
        return loss.detach()

    return Training(online, [optimizer], step)


@program
def curiosity_with_frozen_random_network(amp: Cast) -> Training:
    random_net, predictor, policy = dense(6, 16, 8), dense(6, 24, 8), dense(6, 24, 3)
    random_net.requires_grad_(False)
    model = nn.ModuleDict({"random": random_net, "predictor": predictor, "policy": policy})
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 1e-3)

    def step() -> Tensor:
        s = torch.randn(32, 6)
        optimizer.zero_grad()
        with amp():
            error = (predictor(s) - random_net(s)).square().mean(1)
            bonus = (error - error.mean()).detach()
            dist = torch.distributions.Categorical(logits=policy(s).float())
            loss = error.mean() - (dist.log_prob(dist.sample()) * bonus).mean() - 0.01 * dist.entropy().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def twin_critics_with_two_optimizers_and_delayed_entropy(amp: Cast) -> Training:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pi, self.q1, self.q2 = dense(4, 24, 4), dense(6, 24, 1), dense(6, 24, 1)
            self.log_alpha = nn.Parameter(torch.zeros(()))

    m = Agent()
    oq = Adam([*m.q1.parameters(), *m.q2.parameters()], 1e-3)
    op, oa = Adam(m.pi.parameters(), 1e-3), Adam([m.log_alpha], 1e-3)
    goal = copy.deepcopy(nn.ModuleList([m.q1, m.q2]))
    count = 0

    def act(s: Tensor) -> tuple[Tensor, Tensor]:
        mu, log = m.pi(s).chunk(2, -1)
        dist = torch.distributions.Normal(mu.float(), log.float().clamp(-3, 1).exp())
        u = dist.rsample()
        return u.tanh(), (dist.log_prob(u) - (1 - u.tanh().square() + 1e-6).log()).sum(-1)

    def step() -> Tensor:
        nonlocal count
        count += 1
        s, a, r = torch.randn(16, 4), torch.rand(16, 2) * 2 - 1, torch.rand(16)
        with torch.no_grad(), amp():
            b, logp = act(s)
            q = torch.min(*(g(torch.cat([s, b], 1)).squeeze(1) for g in goal))
            y = r + 0.9 * (q - m.log_alpha.exp() * logp)
        with amp():
            loss: Any = sum(F.mse_loss(g(torch.cat([s, a], 1)).squeeze(1).float(), y.float()) for g in (m.q1, m.q2))
        oq.zero_grad(set_to_none=True)
        loss.backward()
        oq.step()
        if count % 2 == 0:
            with amp():
                b, logp = act(s)
                pq = torch.min(*(g(torch.cat([s, b], 1)).squeeze(1) for g in (m.q1, m.q2)))
                policy = (m.log_alpha.exp().detach() * logp - pq).mean()
            op.zero_grad(set_to_none=True)
            policy.backward()
            op.step()
            oa.zero_grad()
            (-m.log_alpha * (logp + 2).detach()).mean().backward()
            oa.step()
        with torch.no_grad():
            for t, p in zip(goal.parameters(), [*m.q1.parameters(), *m.q2.parameters()], strict=True):
                t.lerp_(p, 0.01)
        return loss.detach()

    return Training(m, [oq, op, oa], step)


@program
def decision_transformer_with_masked_returns(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r, self.s, self.a, self.t = (
                nn.Linear(1, 16),
                nn.Linear(4, 16),
                nn.Embedding(3, 16),
                nn.Embedding(6, 16),
            )
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

        def forward(self, r: Tensor, s: Tensor, a: Tensor) -> Tensor:
            t = self.t(torch.arange(6))
            x = torch.stack([self.r(r) + t, self.s(s) + t, self.a(a) + t], 2).flatten(1, 2)
            return self.head(self.body(x, mask=nn.Transformer.generate_square_subsequent_mask(18))[:, 1::3])

    model = Net()
    optimizer = AdamW(model.parameters(), 1e-3, weight_decay=1e-2)

    def loss() -> Tensor:
        a = torch.randint(3, (8, 6))
        return F.cross_entropy(model(torch.rand(8, 6, 1), torch.randn(8, 6, 4), a).flatten(0, 1), a.flatten())

    return simple_loop(model, optimizer, amp, loss)


# Meta-learning and torch.func


@program
def implicit_maml_with_proximal_inner_loop(amp: Cast) -> Training:
    model = dense(4, 16, 1)
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(3):
            w, x = torch.randn(4, 1), torch.randn(10, 4)
            inner = copy.deepcopy(model)
            own = SGD(inner.parameters(), 0.05)
            for _ in range(3):
                own.zero_grad()
                near = sum((a - b.detach()).square().sum()
                           for a, b in zip(inner.parameters(), model.parameters(), strict=True))  # fmt: skip
                (F.mse_loss(inner(x), x @ w) + 0.5 * near).backward()
                own.step()
            own.zero_grad()
            outer = F.mse_loss(inner(x), x @ w)
            outer.backward()
            for p, q in zip(model.parameters(), inner.parameters(), strict=True):
                assert q.grad is not None
                p.grad = q.grad.clone() / 3 if p.grad is None else p.grad + q.grad / 3
            total = total + outer.detach() / 3
        optimizer.step()
        return total

    return Training(model, [optimizer], step)


@program
def meta_sgd_with_learned_inner_rates(amp: Cast) -> Training:
    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense(4, 16, 1)
            self.rates = nn.ParameterList([nn.Parameter(torch.full_like(p, 0.03)) for p in self.net.parameters()])

    meta = Meta()
    optimizer = Adam(meta.parameters(), 1e-3)

    def step() -> Tensor:
        w, x, x2 = torch.randn(4, 1), torch.randn(10, 4), torch.randn(10, 4)
        names: dict[str, Tensor] = dict(meta.net.named_parameters())
        optimizer.zero_grad()
        with amp():
            inner = F.mse_loss(functional_call(meta.net, names, (x,)), x @ w)
            slopes = torch.autograd.grad(inner, list(names.values()), create_graph=True)
            fast = {k: p - r * g for (k, p), r, g in zip(names.items(), meta.rates, slopes, strict=True)}
            outer = F.mse_loss(functional_call(meta.net, fast, (x2,)), x2 @ w)
        outer.backward()
        optimizer.step()
        return outer.detach()

    return Training(meta, [optimizer], step)


@program
def functional_gradients_applied_by_hand_with_adamw(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = AdamW(model.parameters(), 1e-3)

    def objective(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    def step() -> Tensor:
        x, y = batch()
        params = {k: p.detach() for k, p in model.named_parameters()}
        grads, value = grad_and_value(objective)(params, x, y)
        for k, p in model.named_parameters():
            p.grad = grads[k]
        optimizer.step()
        return value.detach()

    return Training(model, [optimizer], step)


@program
def forward_gradients_by_jvp(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = SGD(model.parameters(), 0.02)

    def step() -> Tensor:
        x, y = batch()
        params = {k: p.detach() for k, p in model.named_parameters()}
        along = {k: torch.randn_like(p) for k, p in params.items()}
        value, slope, *_ = jvp(lambda q: F.cross_entropy(functional_call(model, q, (x,)), y), (params,), (along,))
        for k, p in model.named_parameters():
            p.grad = slope * along[k]
        optimizer.step()
        return value.detach()

    return Training(model, [optimizer], step)


@program
def gauss_newton_step_of_a_small_regression(amp: Cast) -> Training:
    model = dense(3, 6, 1, act=nn.Tanh)
    optimizer = SGD(model.parameters(), 1.0)

    def step() -> Tensor:
        x = torch.randn(20, 3)
        y = x.sin().sum(1)
        params = {k: p.detach() for k, p in model.named_parameters()}

        def out(q: dict[str, Tensor]) -> Tensor:
            return functional_call(model, q, (x,)).squeeze(1)

        jac = jacrev(out)(params)
        flat = torch.cat([jac[k].flatten(1) for k in params], 1)
        rest = out(params) - y
        move = torch.linalg.solve(flat.t() @ flat + 0.5 * torch.eye(flat.shape[1]), flat.t() @ rest)
        for p, part in zip(model.parameters(), move.split([q.numel() for q in params.values()]), strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()
        return rest.square().mean()

    return Training(model, [optimizer], step)


@program
def curl_free_field_with_hessian_penalty(amp: Cast) -> Training:
    model = dense(3, 16, 1, act=nn.Softplus)
    optimizer = Adam(model.parameters(), 2e-3)

    def step() -> Tensor:
        x = torch.randn(8, 3)
        optimizer.zero_grad()
        curvature = vmap(hessian(lambda one: model(one).squeeze(0)))(x)
        slope = vmap(torch.func.grad(lambda one: model(one).squeeze(0)))(x)
        loss = (slope - x.cos()).square().mean() + 0.01 * curvature.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def feedback_alignment_by_autograd_function(amp: Cast) -> Training:
    class Feedback(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, back: Tensor) -> Tensor:
            ctx.save_for_backward(x, back)
            return x @ w.t() + b

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            (g,) = grads
            x, back = ctx.saved_tensors
            return g @ back, g.t() @ x, g.sum(0), None

    class Layer(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(b, a) / a**0.5), nn.Parameter(torch.zeros(b))
            self.register_buffer("back", torch.randn(b, a) / a**0.5)

        def forward(self, x: Tensor) -> Tensor:
            return Feedback.apply(x.float(), self.weight, self.bias, self.back)

    model = nn.Sequential(Layer(8, 24), nn.ReLU(), Layer(24, 4))
    return simple_loop(model, SGD(model.parameters(), 0.05), amp, lambda: classified(model))


# Optimizers and schedules


@program
def rprop_full_batch(amp: Cast) -> Training:
    model, (x, y) = dense(8, 16, 4), batch(64)
    return simple_loop(model, Rprop(model.parameters(), 1e-3), amp, lambda: F.cross_entropy(model(x), y))


@program
def asgd_and_evaluation_with_averages(amp: Cast) -> Training:
    model = dense(8, 16, 4)
    optimizer = ASGD(model.parameters(), 0.05, t0=5)
    count = 0

    def evaluate() -> None:
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(optimizer.state[p]["ax"])
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 8))
        model.train()
        with torch.no_grad():
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)

    inner = simple_loop(model, optimizer, amp, lambda: classified(model))

    def step() -> Tensor:
        nonlocal count
        count += 1
        value = inner.step()
        if count % 10 == 0:
            evaluate()
        return value

    return Training(model, [optimizer], step)


@program
def lbfgs_with_strong_wolfe_per_minibatch(amp: Cast) -> Training:
    model = dense(8, 16, 4)
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        x, y = batch(64)

        def closure() -> Tensor:
            optimizer.zero_grad()
            with amp():
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return torch.as_tensor(optimizer.step(closure)).detach()

    return Training(model, [optimizer], step)


@program
def adaptive_sharpness_aware_with_inner_adam(amp: Cast) -> Training:
    class ASAM(Optimizer):
        def __init__(self, params: Any, base: type[Optimizer], rho: float, **options: Any) -> None:
            super().__init__(params, {"rho": rho, **options})
            self.base = base(self.param_groups, **options)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            closure = torch.enable_grad()(closure)
            loss = closure()
            params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
            norm = torch.stack([(p.abs() * p.grad).norm() for p in params]).norm() + 1e-12
            moves = [p.square() * p.grad * (0.5 / norm) for p in params]
            for p, m in zip(params, moves, strict=True):
                p.add_(m)
            closure()
            for p, m in zip(params, moves, strict=True):
                p.sub_(m)
            self.base.step()
            return loss

    model = dense(8, 24, 24, 4)
    optimizer = ASAM(model.parameters(), AdamW, 0.5, lr=1e-3)

    def step() -> Tensor:
        x, y = batch(32)

        def closure() -> Tensor:
            optimizer.zero_grad()
            with amp():
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Training(model, [optimizer], step)


@program
def stochastic_weight_averaging_with_its_schedule(amp: Cast) -> Training:
    model = small_cnn()
    averaged = AveragedModel(model)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    first = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    late = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = digits()
        model.train()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if count > 15:
            averaged.update_parameters(model)
            late.step()
        else:
            first.step()
        if count == 38:
            update_bn([digits()[0] for _ in range(3)], averaged)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def chained_and_sequential_schedules(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = NAdam(model.parameters(), 2e-3)
    warm = LinearLR(optimizer, 0.1, 1.0, 5)
    rest = torch.optim.lr_scheduler.PolynomialLR(optimizer, 30)
    both = SequentialLR(optimizer, [warm, rest], [5])
    chained = ChainedScheduler([both])
    return simple_loop(model, optimizer, amp, lambda: classified(model), chained)


@program
def plateau_scheduler_per_epoch_and_rate_in_the_log(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    count, rates = 0, []

    inner = simple_loop(model, optimizer, amp, lambda: classified(model))

    def step() -> Tensor:
        nonlocal count
        count += 1
        value = inner.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if count % 5 == 0:
            model.eval()
            with torch.no_grad():
                plateau.step(classified(model))
            model.train()
        return value

    return Training(model, [optimizer], step)


@program
def one_cycle_with_groups_and_accumulation(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 1e-3)
    schedule = OneCycleLR(optimizer, [2e-3, 1e-3], total_steps=100)

    def step() -> Tensor:
        total = torch.zeros(())
        for _ in range(4):
            with amp():
                loss = classified(model) / 4
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Training(model, [optimizer], step)


@program
def sparse_adagrad_embeddings_and_dense_body(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.body = nn.Embedding(100, 8, sparse=True), dense(8, 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.e(x).mean(1))

    model = Net()
    one, two = Adagrad(model.e.parameters(), 0.05), Adam(model.body.parameters(), 1e-3)

    def step() -> Tensor:
        one.zero_grad()
        two.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randint(100, (16, 5))), torch.randint(4, (16,)))
        loss.backward()
        one.step()
        two.step()
        return loss.detach()

    return Training(model, [one, two], step)


@program
def gradient_surgery_by_grad_vaccine(amp: Cast) -> Training:
    trunk, heads = dense(8, 24, 24), nn.ModuleList([nn.Linear(24, 4), nn.Linear(24, 1)])
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        x, y = batch()
        with amp():
            h = F.relu(trunk(x))
            losses = [F.cross_entropy(heads[0](h), y), F.mse_loss(heads[1](h).squeeze(1), x.sum(1))]
        shared = list(trunk.parameters())
        grads = [torch.autograd.grad(one, shared, retain_graph=True) for one in losses]
        flat = [torch.cat([g.flatten() for g in one]) for one in grads]
        cos = F.cosine_similarity(flat[0], flat[1], dim=0)
        if cos < 0.2:
            flat[1] = flat[1] + 0.2 * flat[0] * flat[1].norm() / flat[0].norm()
        optimizer.zero_grad()
        (losses[0] + losses[1]).backward()
        merged = (flat[0] + flat[1]).split([p.numel() for p in shared])
        for p, g in zip(shared, merged, strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
        return (losses[0] + losses[1]).detach()

    return Training(model, [optimizer], step)


@program
def decoupled_rates_by_multiplying_gradients_of_biases(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            if name.endswith("bias"):
                p.grad *= 2.0
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def skipping_non_finite_gradients_by_hand(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = AdamW(model.parameters(), 1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch()
        if count % 11 == 0:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def trust_region_that_rejects_steps(amp: Cast) -> Training:
    model = dense(8, 16, 4)
    optimizer = SGD(model.parameters(), 0.3)
    x, y = batch(64)

    def step() -> Tensor:
        kept = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad(), amp():
            after = F.cross_entropy(model(x), y)
        if after > loss:
            model.load_state_dict(kept)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        else:
            for group in optimizer.param_groups:
                group["lr"] *= 1.05
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def hypergradient_descent_on_the_rate(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = SGD(model.parameters(), 0.02)
    past: list[Tensor] = []

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        now = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if past:
            slope = sum(float((a * b).sum()) for a, b in zip(past, now, strict=True))
            for group in optimizer.param_groups:
                group["lr"] = min(max(group["lr"] + 1e-4 * slope, 1e-3), 0.1)
        past[:] = now
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


# Compression


@program
def movement_pruning_with_learned_scores(amp: Cast) -> Training:
    class Masked(nn.Linear):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)
            self.scores = nn.Parameter(0.01 * torch.randn(b, a))

        def forward(self, x: Tensor) -> Tensor:
            mask = (self.scores >= self.scores.flatten().median()).to(x.dtype)
            soft = self.scores.sigmoid()
            return F.linear(x, self.weight * (mask + soft - soft.detach()), self.bias)

    model = nn.Sequential(Masked(8, 24), nn.ReLU(), Masked(24, 4))
    return simple_loop(model, AdamW(model.parameters(), 2e-3), amp, lambda: classified(model))


@program
def sparse_training_that_drops_and_grows(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    weights = [p for p in model.parameters() if p.ndim > 1]
    masks = [(torch.rand_like(p) > 0.5).float() for p in weights]
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    count = 0

    def hold() -> None:
        with torch.no_grad():
            for p, m in zip(weights, masks, strict=True):
                p.mul_(m)
                if p.grad is not None:
                    p.grad.mul_(m)
                if "momentum_buffer" in optimizer.state[p]:
                    optimizer.state[p]["momentum_buffer"].mul_(m)

    hold()

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        if count % 12 == 0:
            for p, m in zip(weights, masks, strict=True):
                assert p.grad is not None
                drop = p.abs().masked_fill(m == 0, 9).flatten().topk(5, largest=False).indices
                grow = p.grad.abs().masked_fill(m == 1, 0).flatten().topk(5).indices
                m.view(-1)[drop], m.view(-1)[grow] = 0, 1
        hold()
        optimizer.step()
        hold()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def lottery_ticket_rewound_twice(amp: Cast) -> Training:
    model = dense(8, 32, 4)
    start = copy.deepcopy(model.state_dict())
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        optimizer.step()
        if count in (15, 30):
            for layer in (model[0], model[2]):
                prune.l1_unstructured(layer, "weight", 0.3)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(start[name.removesuffix("_orig")])
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def structured_pruning_that_rebuilds_the_network(amp: Cast) -> Training:
    holder: Any = nn.Module()
    holder.net = dense(8, 32, 4)
    holder.forward = lambda x: holder.net(x)
    optimizer = SGD(holder.parameters(), 0.05)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(holder(batch()[0]), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        if count == 20:
            keep = holder.net[0].weight.norm(dim=1).topk(24).indices
            small: Any = dense(8, 24, 4)
            with torch.no_grad():
                small[0].weight.copy_(holder.net[0].weight[keep])
                small[0].bias.copy_(holder.net[0].bias[keep])
                small[2].weight.copy_(holder.net[2].weight[:, keep])
                small[2].bias.copy_(holder.net[2].bias)
            holder.net = small
            optimizer.param_groups.clear()
            optimizer.state.clear()
            optimizer.add_param_group({"params": list(holder.parameters())})
        return loss.detach()

    return Training(holder, [optimizer], step)


@program
def adapters_with_dora_scaling(amp: Cast) -> Training:
    class Dora(nn.Module):
        def __init__(self, base: nn.Linear, r: int = 2) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(r, base.in_features) * 0.1), nn.Parameter(
                torch.zeros(base.out_features, r))  # fmt: skip
            self.m = nn.Parameter(base.weight.norm(dim=1, keepdim=True).detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            w = self.base.weight + self.b @ self.a
            return F.linear(x, self.m * w / w.norm(dim=1, keepdim=True).detach(), self.base.bias)

    model = nn.Sequential(Dora(nn.Linear(8, 24)), nn.ReLU(), Dora(nn.Linear(24, 4)))
    trained = [p for p in model.parameters() if p.requires_grad]
    return simple_loop(model, AdamW(trained, 2e-3), amp, lambda: classified(model))


@program
def adapters_switched_by_task(amp: Cast) -> Training:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = dense(8, 24, 24).requires_grad_(False)
            self.tasks = nn.ModuleList([dense(24, 4, 24) for _ in range(3)])
            self.heads = nn.ModuleList([nn.Linear(24, 4) for _ in range(3)])

        def forward(self, x: Tensor, task: int) -> Tensor:
            h = self.base(x)
            return self.heads[task](h + self.tasks[task](h))

    model, count = Switched(), 0
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x, count % 3), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def prompt_tuning_of_a_frozen_encoder(amp: Cast) -> Training:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(20, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.requires_grad_(False)
            self.prompt, self.head = nn.Parameter(0.02 * torch.randn(4, 16)), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.cat([self.prompt.expand(len(x), -1, -1), self.e(x)], 1)
            return self.head(self.body(h)[:, 0])

    model = Prompted()
    optimizer = AdamW([model.prompt, *model.head.parameters()], 1e-2)
    return simple_loop(model, optimizer, amp, lambda: F.cross_entropy(
        model(torch.randint(20, (8, 6))), torch.randint(4, (8,))))  # fmt: skip


@program
def quantisation_with_noise_and_range_learning(amp: Cast) -> Training:
    class Quant(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner, self.log = inner, nn.Parameter(inner.weight.abs().max().log().detach())

        def forward(self, x: Tensor) -> Tensor:
            s = self.log.exp() / 7
            w = self.inner.weight / s
            w = (w.clamp(-7, 7) + (w.clamp(-7, 7).round() - w.clamp(-7, 7)).detach()) * s
            pick = torch.rand_like(w) < 0.5
            return F.linear(x, torch.where(pick, w, self.inner.weight), self.inner.bias)

    model = nn.Sequential(Quant(nn.Linear(8, 24)), nn.ReLU(), Quant(nn.Linear(24, 4)))
    return simple_loop(model, Adam(model.parameters(), 1e-3), amp, lambda: classified(model))


@program
def ternary_weights_with_latent_clipping(amp: Cast) -> Training:
    class Ternary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            t = 0.7 * self.weight.abs().mean()
            w = torch.where(self.weight.abs() > t, self.weight.sign(), torch.zeros_like(self.weight))
            return F.linear(x, self.weight + (w - self.weight).detach(), self.bias)

    model = nn.Sequential(Ternary(8, 32), nn.BatchNorm1d(32), nn.Hardtanh(), Ternary(32, 4))
    optimizer = Adam(model.parameters(), 1e-2)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        optimizer.step()
        for m in model:
            if isinstance(m, Ternary):
                m.weight.data.clamp_(-1, 1)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def distillation_with_teacher_that_was_trained_first(amp: Cast) -> Training:
    teacher, student = dense(8, 48, 4), dense(8, 12, 4)
    both = nn.ModuleDict({"teacher": teacher, "student": student})
    ot, os_ = Adam(teacher.parameters(), 1e-3), Adam(student.parameters(), 1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch()
        if count <= 15:
            ot.zero_grad()
            with amp():
                loss = F.cross_entropy(teacher(x), y)
            loss.backward()
            ot.step()
            return loss.detach()
        teacher.eval()
        os_.zero_grad()
        with amp():
            with torch.no_grad():
                soft = (teacher(x) / 3).softmax(1)
            out = student(x)
            loss = 9 * F.kl_div((out / 3).log_softmax(1), soft, reduction="batchmean") + F.cross_entropy(out, y)
        loss.backward()
        os_.step()
        return loss.detach()

    return Training(both, [ot, os_], step)


# Structure


@program
def layer_drop_that_scales_with_depth(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(8, 24), nn.Linear(24, 4)
            self.blocks = nn.ModuleList([dense(24, 24, 24) for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x)
            for i, b in enumerate(self.blocks):
                if not self.training or random.random() > 0.1 * i:
                    h = h + b(h)
            return self.out(h)

    model = Net()
    return simple_loop(model, AdamW(model.parameters(), 1e-3), amp, lambda: classified(model))


@program
def early_exits_with_confidence(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 24)])
            self.exits = nn.ModuleList([nn.Linear(24, 4) for _ in range(3)])

        def forward(self, x: Tensor) -> list[Tensor]:
            outs = []
            for b, e in zip(self.blocks, self.exits, strict=True):
                x = F.relu(b(x))
                outs.append(e(x))
                if outs[-1].detach().softmax(1).amax(1).mean() > 0.5:
                    break
            return outs

    model = Net()

    def loss() -> Tensor:
        x, y = batch()
        return torch.stack([F.cross_entropy(o.float(), y) for o in model(x)]).sum()

    return simple_loop(model, AdamW(model.parameters(), 1e-2), amp, loss)


@program
def checkpointed_blocks_with_dropout(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(8, 24), nn.Linear(24, 4)
            self.a = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 24))
            self.b = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x)
            h = h + checkpoint(self.a, h, use_reentrant=True)
            return self.out(checkpoint_sequential(self.b, 2, h, use_reentrant=False))

    model = Net()
    return simple_loop(model, AdamW(model.parameters(), 1e-3), amp, lambda: classified(model))


@program
def universal_transformer_with_shared_layer(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(20, 16)
            self.layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
            self.steps = nn.Parameter(torch.zeros(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            h = self.e(x)
            for s in self.steps:
                h = self.layer(h + s)
            return h @ self.e.weight.t()

    model = Net()

    def loss() -> Tensor:
        x = torch.randint(20, (8, 7))
        masked = x.clone()
        masked[:, ::3] = 0
        return F.cross_entropy(model(masked)[:, ::3].flatten(0, 1), x[:, ::3].flatten())

    return simple_loop(model, AdamW(model.parameters(), 2e-3), amp, loss)


@program
def state_space_model_with_scan(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_a, self.b, self.c = (
                nn.Parameter(torch.rand(16)), nn.Linear(4, 16, bias=False), nn.Linear(16, 4, bias=False)
            )  # fmt: skip
            self.gate, self.skip = nn.Linear(4, 16), nn.Parameter(torch.ones(4))

        def forward(self, u: Tensor) -> Tensor:
            h, ys = torch.zeros(len(u), 16), []
            a = torch.exp(-F.softplus(self.log_a))
            for t in range(u.shape[1]):
                h = a * h + self.b(u[:, t]) * self.gate(u[:, t]).sigmoid()
                ys.append(self.c(h) + self.skip * u[:, t])
            return torch.stack(ys, 1)

    model = Net()

    def loss() -> Tensor:
        u = torch.randn(8, 10, 4)
        return F.mse_loss(model(u)[:, 1:].float(), u[:, :-1])

    return simple_loop(model, AdamW(model.parameters(), 3e-3), amp, loss)


@program
def graph_attention_with_edge_dropout(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.s, self.d, self.out = (
                nn.Linear(5, 16, bias=False), nn.Linear(16, 1), nn.Linear(16, 1), nn.Linear(16, 3)
            )  # fmt: skip

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            h = self.w(x)
            src, dst = edges[:, torch.rand(edges.shape[1]) > 0.2]
            e = F.leaky_relu(self.s(h)[src] + self.d(h)[dst], 0.2).squeeze(1).float()
            e = (e - e.max()).exp()
            total = torch.zeros(len(x)).index_add(0, dst, e)
            m = torch.zeros(len(x), 16).index_add(0, dst, (e / (total[dst] + 1e-9))[:, None] * h[src].float())
            return self.out(F.elu(m + h))

    model, x, y = Net(), torch.randn(30, 5), torch.randint(3, (30,))
    edges, train = torch.randint(30, (2, 120)), torch.rand(30) < 0.5
    optimizer = Adam(model.parameters(), 5e-3, weight_decay=5e-4)
    return simple_loop(model, optimizer, amp, lambda: F.cross_entropy(model(x, edges)[train], y[train]))


@program
def link_prediction_with_negative_sampling(amp: Cast) -> Training:
    model: Any = nn.ModuleDict({"node": nn.Embedding(50, 12), "relation": nn.Embedding(4, 12)})
    optimizer = Adagrad(model.parameters(), 0.05)

    def step() -> Tensor:
        h, r, t, n = (torch.randint(k, (32,)) for k in (50, 4, 50, 50))
        optimizer.zero_grad()
        with amp():

            def score(a: Tensor, b: Tensor) -> Tensor:
                return (model["node"](a) + model["relation"](r) - model["node"](b)).norm(p=1, dim=1)

            loss = F.margin_ranking_loss(score(h, n), score(h, t), torch.ones(32), margin=1.0)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model["node"].weight.div_(model["node"].weight.norm(dim=1, keepdim=True).clamp_min(1.0))
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def point_cloud_network_with_max_pool_and_transform(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 9))
            self.a = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
            self.head = dense(32, 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            t = self.t(x).amax(1).view(-1, 3, 3).to(x.dtype) + torch.eye(3)
            return self.head(self.a((x @ t).transpose(1, 2)).amax(2))

    model = Net()
    return simple_loop(model, Adam(model.parameters(), 1e-3), amp, lambda: F.cross_entropy(
        model(torch.randn(8, 20, 3)), torch.randint(4, (8,))))  # fmt: skip


@program
def set_transformer_with_induced_points(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.points, self.seed = nn.Parameter(torch.randn(1, 4, 16)), nn.Parameter(torch.randn(1, 1, 16))
            self.inp, self.out = nn.Linear(3, 16), nn.Linear(16, 2)
            self.m1, self.m2, self.m3 = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x)
            i = self.m1(self.points.expand(len(x), -1, -1), h, h, need_weights=False)[0]
            h = h + self.m2(h, i, i, need_weights=False)[0]
            return self.out(self.m3(self.seed.expand(len(x), -1, -1), h, h, need_weights=False)[0].squeeze(1))

    model = Net()

    def loss() -> Tensor:
        x = torch.randn(8, 9, 3)
        return F.mse_loss(model(x).float(), torch.stack([x.amax((1, 2)), x.mean((1, 2))], 1))

    return simple_loop(model, AdamW(model.parameters(), 2e-3), amp, loss)


@program
def radiance_field_with_hash_grid(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: Any = nn.ModuleList([nn.Embedding(64, 2) for _ in range(3)])
            for p in self.tables.parameters():
                nn.init.uniform_(p, -1e-4, 1e-4)
            self.mlp = dense(6, 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            feats = []
            for level, t in enumerate(self.tables):
                s = x * 2 ** (level + 2)
                low, part = s.floor().long(), s - s.floor()
                corner = [t(((low[:, 0] + i) * 73856093 ^ (low[:, 1] + j) * 19349663) % 64)
                          * (part[:, :1] if i else 1 - part[:, :1]) * (part[:, 1:] if j else 1 - part[:, 1:])
                          for i in (0, 1) for j in (0, 1)]  # fmt: skip
                feats.append(torch.stack(corner).sum(0))
            return self.mlp(torch.cat(feats, 1))

    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": model.tables.parameters()},
        {"params": model.mlp.parameters(), "weight_decay": 1e-6},
    ]
    optimizer = Adam(groups, 1e-2, (0.9, 0.99), 1e-15)

    def loss() -> Tensor:
        x = torch.rand(64, 2)
        rgb, density = model(x).float().split([3, 1], 1)
        weight = 1 - torch.exp(-F.softplus(density))
        return F.mse_loss(
            (weight * rgb.sigmoid()).view(8, 8, 3).mean(1), x.view(8, 8, 2).mean(1).sin() @ torch.ones(2, 3) / 2
        )

    return simple_loop(model, optimizer, amp, loss)


@program
def neural_process_with_split_context(amp: Cast) -> Training:
    enc, dec = dense(2, 24, 24), dense(13, 24, 2)
    model = nn.ModuleDict({"enc": enc, "dec": dec})
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        x = torch.rand(8, 12, 1) * 4
        y = (x + torch.rand(8, 1, 1)).sin()
        n = random.randint(3, 9)
        optimizer.zero_grad()
        with amp():

            def latent(k: int) -> Any:
                mu, s = enc(torch.cat([x[:, :k], y[:, :k]], 2)).mean(1).chunk(2, 1)
                return torch.distributions.Normal(mu.float(), 0.1 + 0.9 * s.float().sigmoid())

            prior, post = latent(n), latent(12)
            z = post.rsample()[:, None].expand(-1, 12, -1)
            mu, s = dec(torch.cat([z, x], 2)).float().chunk(2, 2)
            loss = -torch.distributions.Normal(mu, 0.1 + F.softplus(s)).log_prob(y).mean()
            loss = loss + 0.01 * torch.distributions.kl_divergence(post, prior).sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def kolmogorov_arnold_layers_with_splines(amp: Cast) -> Training:
    class KAN(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.base, self.spline = nn.Parameter(torch.randn(b, a) / a), nn.Parameter(0.1 * torch.randn(b, a, 6))
            self.grid: Tensor
            self.register_buffer("grid", torch.linspace(-2, 2, 6))

        def forward(self, x: Tensor) -> Tensor:
            bumps = torch.exp(-((x[..., None] - self.grid) / 0.8).square())
            return F.linear(F.silu(x), self.base) + torch.einsum("nag,bag->nb", bumps.to(self.spline), self.spline)

    model = nn.Sequential(KAN(4, 8), KAN(8, 1))

    def loss() -> Tensor:
        x = torch.randn(32, 4)
        return F.mse_loss(model(x).squeeze(1).float(), (x[:, 0] * x[:, 1]).sin() + x[:, 2].square())

    return simple_loop(model, AdamW(model.parameters(), 3e-3), amp, loss)


@program
def siren_with_its_own_initialisation(amp: Cast) -> Training:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(30 * x)

    model: Any = nn.Sequential(nn.Linear(2, 32), Sine(), nn.Linear(32, 32), Sine(), nn.Linear(32, 1))
    with torch.no_grad():
        model[0].weight.uniform_(-0.5, 0.5)
        for i in (2, 4):
            bound = math.sqrt(6 / 32) / 30
            model[i].weight.uniform_(-bound, bound)
    grid = torch.rand(100, 2) * 2 - 1

    def loss() -> Tensor:
        return F.mse_loss(model(grid).squeeze(1).float(), (grid * 3).sin().prod(1))

    return simple_loop(model, Adam(model.parameters(), 1e-4), amp, loss)


# Loops


class Task(nn.Module):
    """A module that knows its optimizers and steps, as Lightning modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(8, 24, 4)
        self.logged: dict[str, Tensor] = {}

    def configure_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer = AdamW(self.parameters(), 2e-3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.logged["loss"] = loss.detach()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return (self.net(batch[0]).argmax(1) == batch[1]).float().mean()


@program
def module_with_training_step_and_a_trainer_with_closures(amp: Cast) -> Training:
    task = Task()
    optimizer, schedule = task.configure_optimizers()
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        task.train()

        def closure() -> Tensor:
            with amp():
                loss = task.training_step(batch(), count)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(task.parameters(), 0.5)
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        schedule.step()
        if count % 7 == 0:
            task.eval()
            with torch.no_grad():
                for i in range(2):
                    task.validation_step(batch(), i)
            task.train()
        return torch.as_tensor(loss).detach()

    return Training(task, [optimizer], step)


@program
def sanity_validation_then_training_with_frozen_backbone_for_one_epoch(amp: Cast) -> Training:
    backbone, head = small_cnn(16), nn.Linear(16, 10)
    model = nn.Sequential(backbone, head)
    model.eval()
    with torch.no_grad():
        model(digits()[0])
    backbone.requires_grad_(False)
    optimizer = Adam(head.parameters(), 1e-3)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        model.train()
        if count <= 12:
            backbone.eval()
        if count == 13:
            backbone.requires_grad_(True)
            optimizer.add_param_group({"params": backbone.parameters(), "lr": 1e-4})
        x, y = digits()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def encoder_frozen_midway_by_detaching_its_output(amp: Cast) -> Training:
    encoder, head = dense(8, 24, 24), nn.Linear(24, 4)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    optimizer = AdamW(model.parameters(), 2e-3, weight_decay=0.0)
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch()
        optimizer.zero_grad(set_to_none=True)
        with amp():
            h = encoder(x)
            loss = F.cross_entropy(head(h.detach() if count > 20 else h), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def coordinate_blocks_frozen_by_requires_grad_in_turns(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    optimizer = SGD(model.parameters(), 0.05)
    count = 0

    def step() -> Tensor:
        nonlocal count
        for i, layer in enumerate(layers):
            layer.requires_grad_(i == count // 5 % len(layers))
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def two_losses_with_retained_graph_and_two_optimizers(amp: Cast) -> Training:
    shared, a, b = dense(8, 24, 24), nn.Linear(24, 4), nn.Linear(24, 1)
    model = nn.ModuleDict({"shared": shared, "a": a, "b": b})
    o1 = Adam([*shared.parameters(), *a.parameters()], 1e-3)
    o2 = Adam(b.parameters(), 1e-3)

    def step() -> Tensor:
        x, y = batch()
        with amp():
            h = F.relu(shared(x))
            one, two = F.cross_entropy(a(h), y), F.mse_loss(b(h).squeeze(1).float(), x.mean(1))
        o1.zero_grad()
        o2.zero_grad()
        one.backward(retain_graph=True)
        two.backward()
        o1.step()
        o2.step()
        return (one + two).detach()

    return Training(model, [o1, o2], step)


@program
def deep_supervision_with_local_losses_and_one_optimizer_each(amp: Cast) -> Training:
    blocks = nn.ModuleList([nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 24)])
    heads = nn.ModuleList([nn.Linear(24, 4) for _ in range(3)])
    model = nn.ModuleDict({"blocks": blocks, "heads": heads})
    optimizers = [Adam([*b.parameters(), *h.parameters()], 1e-3) for b, h in zip(blocks, heads, strict=True)]

    def step() -> Tensor:
        x, y = batch()
        total = torch.zeros(())
        for b, h, o in zip(blocks, heads, optimizers, strict=True):
            o.zero_grad()
            with amp():
                out = F.relu(b(x))
                loss = F.cross_entropy(h(out), y)
            loss.backward()
            o.step()
            x, total = out.detach(), total + loss.detach()
        return total

    return Training(model, optimizers, step)


@program
def curriculum_that_swaps_the_loss_midway(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer, count = AdamW(model.parameters(), 1e-3), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch()
        optimizer.zero_grad()
        with amp():
            out = model(x)
            if count <= 20:
                loss = F.cross_entropy(out, y)
            else:
                p = out.softmax(1)[torch.arange(16), y]
                loss = ((1 - p) ** 2 * -(p + 1e-6).log()).mean() + 0.1 * F.multi_margin_loss(out.float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def active_learning_that_starts_again_in_every_round(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = Adam(model.parameters(), 2e-3)
    pool, labels, known, count = torch.randn(100, 8), torch.randint(4, (100,)), list(range(10)), 0

    def step() -> Tensor:
        nonlocal count, optimizer
        count += 1
        if count % 13 == 0:
            with torch.no_grad():
                doubt = 1 - model(pool).softmax(1).amax(1)
            known.extend(int(i) for i in doubt.topk(10).indices)
        pick = torch.tensor(random.sample(known, 10))
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(pool[pick]), labels[pick])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def population_that_exploits_and_explores(amp: Cast) -> Training:
    members = nn.ModuleList([dense(8, 16, 4) for _ in range(3)])
    optimizers = [SGD(m.parameters(), 0.02 * (i + 1), momentum=0.9) for i, m in enumerate(members)]
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch(32)
        losses = []
        for m, o in zip(members, optimizers, strict=True):
            o.zero_grad()
            with amp():
                loss = F.cross_entropy(m(x), y)
            loss.backward()
            o.step()
            losses.append(loss.detach())
        if count % 15 == 0:
            best, worst = int(torch.stack(losses).argmin()), int(torch.stack(losses).argmax())
            members[worst].load_state_dict(members[best].state_dict())
            optimizers[worst].load_state_dict(optimizers[best].state_dict())
            for g in optimizers[worst].param_groups:
                g["lr"] *= random.choice([0.8, 1.2])
        return torch.stack(losses).mean()

    return Training(members, optimizers, step)


@program
def continual_learning_with_gradient_projection_memory(amp: Cast) -> Training:
    model: Any = dense(8, 24, 4)
    optimizer, count = SGD(model.parameters(), 0.05), 0
    basis: list[Tensor] = []

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        if count == 20:
            basis.append(torch.linalg.svd(torch.randn(40, 8).t())[0][:, :3])
        for q in basis:
            g = model[0].weight.grad
            assert g is not None
            g.sub_(g @ q @ q.t())
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def online_learning_from_a_stream_with_replay_and_warm_head(amp: Cast) -> Training:
    class Stream:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            shift = 0.0
            while True:
                shift += 0.05
                y = torch.randint(4, (8,))
                yield torch.randn(8, 8) + shift * y[:, None].float(), y

    model, source = dense(8, 24, 4), iter(Stream())
    memory: deque[tuple[Tensor, Tensor]] = deque(maxlen=20)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)

    def loss() -> Tensor:
        now = next(source)
        old = random.choice(memory) if memory else now
        memory.append(now)
        x, y = torch.cat([now[0], old[0]]), torch.cat([now[1], old[1]])
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    return simple_loop(model, optimizer, amp, loss)


@program
def reparametrised_in_the_loop_and_undone(amp: Cast) -> Training:
    class Skew(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu(1) - x.triu(1).transpose(-1, -2)

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    parametrize.register_parametrization(model[0], "weight", Skew())
    optimizer = Adam(model.parameters(), 2e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp(), parametrize.cached():
            loss = classified(model) + 0.1 * classified(model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def model_made_on_meta_and_filled_later(amp: Cast) -> Training:
    model = nn.Sequential(skip_init(nn.Linear, 8, 24), nn.ReLU(), skip_init(nn.Linear, 24, 4))
    for m in model:
        if isinstance(m, nn.Linear):
            nn.init.orthogonal_(m.weight)
            nn.init.zeros_(m.bias)
    with torch.device("meta"):
        twin = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    twin.load_state_dict(model.state_dict(), assign=True)
    return simple_loop(twin, AdamW(twin.parameters(), 1e-3), amp, lambda: classified(twin))


@program
def influence_by_stateless_calls_between_steps(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer, count = AdamW(model.parameters(), 1e-3), 0
    inner = simple_loop(model, optimizer, amp, lambda: classified(model))

    def step() -> Tensor:
        nonlocal count
        count += 1
        value = inner.step()
        if count % 6 == 0:
            x, y = batch(4)
            params = {k: p.detach() for k, p in model.named_parameters()}
            _, pull, *_ = vjp(lambda q: F.cross_entropy(functional_call(model, q, (x,)), y), params)
            pull(torch.ones(()))
            torch.nn.utils.parameters_to_vector(model.parameters())
        return value

    return Training(model, [optimizer], step)
