"""Twenty more correct training programs, written after the monitor was mended and before it was tried on them."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from blind_programs import Cast, Program, dense, digits, simple_loop, small_cnn
from everyday_programs import Training

PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    PROGRAMS[build.__name__.replace("_", " ")] = build
    return build


@program
def cyclegan_with_image_pool(amp: Cast) -> Training:
    def net() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, 1, 1), nn.InstanceNorm2d(6), nn.ReLU(), nn.Conv2d(6, 1, 3, 1, 1), nn.Tanh()
        )

    def judge() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3, 1, 1))

    parts = nn.ModuleDict({"ab": net(), "ba": net(), "a": judge(), "b": judge()})
    opt_g = Adam([*parts["ab"].parameters(), *parts["ba"].parameters()], 2e-4, (0.5, 0.999))
    opt_d = Adam([*parts["a"].parameters(), *parts["b"].parameters()], 2e-4, (0.5, 0.999))
    pool: list[Tensor] = []

    def step() -> Tensor:
        a, b = torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8)
        with amp():
            fb, fa = parts["ab"](a), parts["ba"](b)
            ja, jb = parts["a"](fa), parts["b"](fb)
            loss = F.mse_loss(ja, torch.ones_like(ja)) + F.mse_loss(jb, torch.ones_like(jb))
            loss = loss + 10 * (F.l1_loss(parts["ba"](fb), a) + F.l1_loss(parts["ab"](fa), b))
            loss = loss + 5 * (F.l1_loss(parts["ba"](a), a) + F.l1_loss(parts["ab"](b), b))
        opt_g.zero_grad()
        loss.backward()
        opt_g.step()
        opt_d.zero_grad()
        pool.append(fa.detach())
        old = pool.pop(0) if len(pool) > 5 and random.random() < 0.5 else fa.detach()
        for judge, real, fake in ((parts["a"], a, old), (parts["b"], b, fb.detach())):
            with amp():
                r, f = judge(real), judge(fake)
                own = 0.5 * (F.mse_loss(r, torch.ones_like(r)) + F.mse_loss(f, torch.zeros_like(f)))
            own.backward()
        opt_d.step()
        return loss.detach()

    return Training(parts, [opt_g, opt_d], step)


@program
def advantage_actor_critic_with_gru(amp: Cast) -> Training:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.pi, self.v = nn.GRUCell(4, 24), nn.Linear(24, 3), nn.Linear(24, 1)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.gru(x, h)
            return self.pi(h), self.v(h), h

    agent = Agent()
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=7e-4, eps=1e-5, alpha=0.99)
    hidden = torch.zeros(5, 24)

    def step() -> Tensor:
        nonlocal hidden
        hidden = hidden.detach()
        logps, values, rewards, entropies = [], [], [], []
        for _ in range(5):
            with amp():
                logits, value, hidden = agent(torch.randn(5, 4), hidden.float())
            chosen = torch.distributions.Categorical(logits=logits.float())
            action = chosen.sample()
            logps.append(chosen.log_prob(action))
            values.append(value.float()[:, 0])
            entropies.append(chosen.entropy())
            rewards.append((action == 1).float())
        with torch.no_grad():
            total = values[-1]
        loss = torch.zeros(())
        for t in reversed(range(5)):
            total = rewards[t] + 0.95 * total
            advantage = total - values[t]
            loss = (
                loss
                - (logps[t] * advantage.detach()).mean()
                + 0.5 * advantage.square().mean()
                - 0.01 * entropies[t].mean()
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return Training(agent, [optimizer], step)


@program
def simsiam_with_stop_gradient(amp: Cast) -> Training:
    class Siam(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(
                nn.Linear(10, 32, bias=False),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Linear(32, 16),
                nn.BatchNorm1d(16, affine=False),
            )
            self.h = nn.Sequential(nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16))

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            za, zb = self.f(a), self.f(b)
            return self.h(za), self.h(zb), za.detach(), zb.detach()

    model = Siam()
    groups: list[dict[str, Any]] = [{"params": model.f.parameters()}, {"params": model.h.parameters(), "fix_lr": True}]
    optimizer = SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-4)
    count = 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        for group in optimizer.param_groups:
            if not group.get("fix_lr"):
                group["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * count / 60))
        x = torch.randn(16, 10)
        pa, pb, za, zb = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        return -(F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean()) * 0.5

    return simple_loop(model, optimizer, amp, loss)


@program
def masked_autoencoder_with_loss_inside(amp: Cast) -> Training:
    class Mae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mask, self.pos = (
                nn.Linear(6, 16),
                nn.Parameter(torch.zeros(1, 1, 16)),
                nn.Parameter(0.02 * torch.randn(1, 9, 16)),
            )
            self.enc = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
            self.dec, self.out = (
                nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True),
                nn.Linear(16, 6),
            )

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.embed(x) + self.pos
            order = torch.rand(x.shape[:2]).argsort(1)
            keep, back = order[:, :4], order.argsort(1)
            seen = self.enc(h.gather(1, keep[..., None].expand(-1, -1, 16)))
            full = torch.cat([seen, self.mask.expand(len(x), 5, -1).to(seen.dtype)], 1).gather(
                1, back[..., None].expand(-1, -1, 16)
            )
            out = self.out(self.dec(full + self.pos))
            hidden = (back >= 4).float()
            error = (out.float() - x).square().mean(-1)
            return {"loss": (error * hidden).sum() / hidden.sum(), "out": out}

    model = Mae()
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
    return simple_loop(model, optimizer, amp, lambda: model(torch.randn(6, 9, 6))["loss"])


@program
def sgd_by_foreach_with_gradients_kept_and_zeroed_in_place(amp: Cast) -> Training:
    model = small_cnn()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)

    def step() -> Tensor:
        x, y = digits()
        optimizer.zero_grad(set_to_none=False)
        with amp():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def cosine_restarts_with_snapshots_ensembled(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10)
    snapshots: list[Any] = []
    count = 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        schedule.step()
        if count % 10 == 0:
            snapshots.append(copy.deepcopy(model.state_dict()))
            now = copy.deepcopy(model.state_dict())
            model.eval()
            for one in snapshots:
                model.load_state_dict(one)
                with torch.no_grad():
                    model(torch.randn(4, 8))
            model.load_state_dict(now)
            model.train()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def lars_written_by_hand(amp: Cast) -> Training:
    class Lars(Optimizer):
        def __init__(self, params: Any, lr: float = 0.1, trust: float = 0.02) -> None:
            super().__init__(params, {"lr": lr, "trust": trust, "momentum": 0.9, "weight_decay": 1e-4})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    d = p.grad
                    if p.ndim > 1:
                        d = d + g["weight_decay"] * p
                        wn, un = p.norm(), d.norm()
                        d = d * torch.where(
                            wn > 0, torch.where(un > 0, g["trust"] * wn / un, torch.ones(())), torch.ones(())
                        )
                    mu = self.state[p].setdefault("mu", torch.zeros_like(p))
                    mu.mul_(g["momentum"]).add_(d)
                    p.add_(mu, alpha=-g["lr"])

    model = small_cnn()

    def loss() -> Tensor:
        x, y = digits()
        return F.cross_entropy(model(x), y)

    return simple_loop(model, Lars(model.parameters()), amp, loss)


@program
def hidden_state_regularised_language_model(amp: Cast) -> Training:
    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.lstm, self.head = nn.Embedding(20, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 20)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, _ = self.lstm(self.e(x))
            return self.head(h), h

    model = Lm()
    optimizer = Adam(model.parameters(), lr=2e-3, weight_decay=1e-6)

    def loss() -> Tensor:
        x = torch.randint(20, (4, 10))
        out, h = model(x[:, :-1])
        return (
            F.cross_entropy(out.flatten(0, 1), x[:, 1:].flatten())
            + 2 * h.square().mean()
            + (h[:, 1:] - h[:, :-1]).square().mean()
        )

    return simple_loop(model, optimizer, amp, loss)


@program
def embeddings_frozen_for_special_tokens_by_zeroing_gradients(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.body = nn.Embedding(30, 12), dense(12, 24, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.e(x).mean(1))

    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randint(30, (16, 6))), torch.randint(4, (16,)))
        loss.backward()
        assert model.e.weight.grad is not None
        model.e.weight.grad[:20] = 0  # only new tokens learn
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def loss_scaled_by_hand(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        (loss * 1024).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(1024)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def curriculum_of_growing_sequences(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.p = nn.Embedding(16, 16), nn.Embedding(32, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(n)
            return self.head(self.body(self.e(x) + self.p.weight[:n], mask=mask, is_causal=True))

    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    count = 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        x = torch.randint(16, (4, 5 + count // 4))
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return simple_loop(model, optimizer, amp, loss)


@program
def deep_ensemble_trained_in_one_loop(amp: Cast) -> Training:
    members = nn.ModuleList(dense(6, 20, 2) for _ in range(3))
    optimizers = [Adam(m.parameters(), lr=1e-3 * (i + 1)) for i, m in enumerate(members)]

    def step() -> Tensor:
        x = torch.randn(16, 6)
        y = x.sum(1)
        total = torch.zeros(())
        for m, o in zip(members, optimizers, strict=True):
            o.zero_grad()
            with amp():
                mean, log = m(x).float().unbind(1)
            loss = F.gaussian_nll_loss(mean, y, log.exp() + 1e-3)
            loss.backward()
            o.step()
            total = total + loss.detach()
        return total

    return Training(members, optimizers, step)


@program
def weights_clipped_by_max_norm_of_rows(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.data = torch.renorm(p.data, 2, 0, 0.6)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def targets_from_the_model_itself_by_label_refinement(amp: Cast) -> Training:
    model = small_cnn()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = digits(48)
    soft = F.one_hot(y, 10).float()

    def step() -> Tensor:
        index = torch.randperm(48)[:16]
        optimizer.zero_grad()
        with amp():
            out = model(x[index])
            loss = -(soft[index] * F.log_softmax(out.float(), 1)).sum(1).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            soft[index] = 0.9 * soft[index] + 0.1 * out.float().softmax(1)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def spatial_transformer(amp: Cast) -> Training:
    class Stn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loc, self.theta, self.body = (
                nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()),
                nn.Linear(16, 6),
                small_cnn(),
            )
            self.theta.weight.data.zero_()
            self.theta.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

        def forward(self, x: Tensor) -> Tensor:
            grid = F.affine_grid(self.theta(self.loc(x)).float().view(-1, 2, 3), [*x.shape], align_corners=False)
            return F.log_softmax(self.body(F.grid_sample(x, grid, align_corners=False)), dim=1)

    model = Stn()
    optimizer = SGD(model.parameters(), lr=0.01)

    def loss() -> Tensor:
        x, y = digits()
        return F.nll_loss(model(x), y)

    return simple_loop(model, optimizer, amp, loss)


@program
def neural_style_image_optimised_beside_a_frozen_network(amp: Cast) -> Training:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pixels = nn.Parameter(torch.rand(1, 3, 12, 12))
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1)).requires_grad_(
                False
            )

        def forward(self) -> Tensor:
            f = self.net(self.pixels).flatten(2)[0]
            return f @ f.T / f.numel()

    model = Image()
    goal = torch.randn(8, 8)
    optimizer = Adam([model.pixels], lr=0.02)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = F.mse_loss(model().float(), goal @ goal.T / 64)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.pixels.clamp_(0, 1)
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def tabular_with_missing_values_and_target_encoding(amp: Cast) -> Training:
    class Tab(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in (5, 7, 3))
            self.norm, self.net = (
                nn.BatchNorm1d(6),
                nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)),
            )

        def forward(self, c: Tensor, x: Tensor) -> Tensor:
            e = torch.cat([t(c[:, i]) for i, t in enumerate(self.tables)], 1)
            return self.net(torch.cat([e, self.norm(torch.nan_to_num(x))], 1))[:, 0]

    model = Tab()
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)

    def loss() -> Tensor:
        x = torch.randn(24, 6).masked_fill(torch.rand(24, 6) < 0.1, float("nan"))
        c = torch.stack([torch.randint(n, (24,)) for n in (5, 7, 3)], 1)
        weight = torch.where(c[:, 0] == 0, 3.0, 1.0)
        return F.binary_cross_entropy_with_logits(model(c, x), (c[:, 1] > 3).float(), weight=weight)

    return simple_loop(model, optimizer, amp, loss)


@program
def averaging_checkpoints_and_going_on_from_the_average(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = Adam(model.parameters(), lr=2e-3)
    saved: list[dict[str, Any]] = []
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
            saved.append(copy.deepcopy(model.state_dict()))
        if count == 32:
            model.load_state_dict({k: sum(one[k] for one in saved) / len(saved) for k in saved[0]})
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def normalised_gradients_with_momentum_by_hand(amp: Cast) -> Training:
    model = dense(8, 32, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.02)
    velocity = [torch.zeros_like(p) for p in model.parameters()]

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        loss.backward()
        for v, p in zip(velocity, model.parameters(), strict=True):
            assert p.grad is not None
            v.mul_(0.9).add_(p.grad / (p.grad.norm() + 1e-8), alpha=0.1)
            p.grad = v.clone()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def semi_supervised_fixmatch(amp: Cast) -> Training:
    model = small_cnn()
    optimizer = SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))

    def step() -> Tensor:
        (x, y), (u, _) = digits(8), digits(24)
        weak, strong = u + 0.05 * torch.randn_like(u), u + 0.5 * torch.randn_like(u)
        with amp():
            out = model(torch.cat([x, weak, strong]))
            sup, w, s = out.split([8, 24, 24])
            with torch.no_grad():
                confidence, label = w.float().softmax(1).max(1)
            loss = (
                F.cross_entropy(sup, y)
                + ((confidence > 0.3) * F.cross_entropy(s.float(), label, reduction="none")).mean()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss.detach()

    return Training(model, [optimizer], step)
