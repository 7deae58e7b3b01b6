"""Thirty-two further correct training programs, written after statements were told from alarms and before any ran."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

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


@program
def spiking_network_with_surrogate_gradients(amp: Cast) -> Training:
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            ctx.save_for_backward(v)
            return (v > 0).to(v.dtype)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (v,) = ctx.saved_tensors
            return grads[0] / (1 + 10 * v.abs()).square()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 24), nn.Linear(24, 4)

        def forward(self, x: Tensor) -> Tensor:
            v, out = torch.zeros(len(x), 24), torch.zeros(len(x), 4)
            for _ in range(5):
                v = 0.8 * v + self.a(x)
                s = Spike.apply(v - 1)
                v = v - s
                out = out + self.b(s)
            return out / 5

    model = Net()
    return simple_loop(model, Adam(model.parameters(), 2e-3), amp, lambda: classified(model))


@program
def lazily_regularised_classifier(amp: Cast) -> Training:
    model = dense(8, 24, 24, 4)
    optimizer, count = AdamW(model.parameters(), 1e-3), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
            if count % 8 == 0:
                loss = loss + 8e-2 * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def orthogonality_penalty_every_step(amp: Cast) -> Training:
    model: Any = dense(8, 24, 24, 4)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

    def loss() -> Tensor:
        w = model[2].weight
        return classified(model) + 0.01 * (w @ w.t() - torch.eye(24)).square().sum()

    return simple_loop(model, optimizer, amp, loss)


@program
def gradients_through_numpy_and_back(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    velocity = [np.zeros(tuple(p.shape), dtype=np.float32) for p in model.parameters()]
    optimizer = SGD(model.parameters(), 1.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        for p, v in zip(model.parameters(), velocity, strict=True):
            assert p.grad is not None
            v *= 0.9
            v += 0.02 * p.grad.numpy()
            p.grad.copy_(torch.from_numpy(v))
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def heavy_ball_by_not_clearing_gradients(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = SGD(model.parameters(), 0.02)

    def step() -> Tensor:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.9)
        with amp():
            loss = classified(model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def loader_with_weighted_sampler_and_epochs(amp: Cast) -> Training:
    x, y = batch(64)
    sampler = WeightedRandomSampler(torch.rand(64).tolist(), 64)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = AdamW(model.parameters(), 1e-3)
    state: list[Any] = []

    def step() -> Tensor:
        if not state:
            state.extend(loader)
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        a, b = state.pop()
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def monte_carlo_dropout_between_steps(amp: Cast) -> Training:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
    optimizer, count = Adam(model.parameters(), 1e-3), 0
    inner = simple_loop(model, optimizer, amp, lambda: classified(model))

    def step() -> Tensor:
        nonlocal count
        count += 1
        value = inner.step()
        if count % 5 == 0:
            with torch.no_grad():
                torch.stack([model(torch.randn(4, 8)) for _ in range(4)]).var(0)
        return value

    return Training(model, [optimizer], step)


@program
def batch_norm_recalibrated_before_evaluation(amp: Cast) -> Training:
    model, count = small_cnn(), 0
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

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
        if count % 9 == 0:
            for m in model.modules():
                if isinstance(m, nn.BatchNorm2d):
                    m.reset_running_stats()
            with torch.no_grad():
                for _ in range(3):
                    model(digits()[0])
            model.eval()
            with torch.no_grad():
                model(digits()[0])
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def only_the_head_is_given_to_the_optimizer(amp: Cast) -> Training:
    backbone, head = dense(8, 24, 24), nn.Linear(24, 4)
    model = nn.Sequential(backbone, nn.ReLU(), head)
    return simple_loop(model, SGD(head.parameters(), 0.05), amp, lambda: classified(model))


@program
def warm_start_by_steps_without_gradients(amp: Cast) -> Training:
    model, count = dense(8, 24, 4), 0
    optimizer = SGD(model.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def untied_midway(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.h = nn.Embedding(20, 12), nn.Linear(12, 20, bias=False)
            self.body = dense(12, 24, 12)
            self.h.weight = self.e.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.h(self.body(self.e(x)))

    model, count = Net(), 0
    optimizer = AdamW(model.parameters(), 1e-3)

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count == 15:
            model.h.weight = nn.Parameter(model.e.weight.detach().clone())
            optimizer.add_param_group({"params": [model.h.weight]})
        x = torch.randint(20, (8, 5))
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x).flatten(0, 1), (x.flatten() + 1) % 20)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def clip_two_towers_with_learned_scale(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = dense(8, 24, 12), dense(6, 24, 12)
            self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.scale.exp() * F.normalize(self.a(x), dim=1) @ F.normalize(self.b(z), dim=1).t()

    model = Net()
    optimizer = AdamW(model.parameters(), 2e-3)

    def step() -> Tensor:
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        with amp():
            logits = model(x, x[:, :6] + 0.1 * torch.randn(16, 6))
            loss = (F.cross_entropy(logits, torch.arange(16)) + F.cross_entropy(logits.t(), torch.arange(16))) / 2
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(max=math.log(100))
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def supervised_contrast_over_the_batch(amp: Cast) -> Training:
    model = dense(8, 32, 12)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)

    def loss() -> Tensor:
        x, y = batch(24)
        z = F.normalize(model(torch.cat([x, x + 0.1 * torch.randn_like(x)])).float(), dim=1)
        sim = (z @ z.t() / 0.2).masked_fill(torch.eye(48, dtype=torch.bool), -1e9)
        same = (torch.cat([y, y])[:, None] == torch.cat([y, y])[None]).float().fill_diagonal_(0)
        return -(same * sim.log_softmax(1)).sum(1).div(same.sum(1)).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def expected_reward_of_a_softmax_policy(amp: Cast) -> Training:
    model = dense(6, 24, 3)
    optimizer = Adam(model.parameters(), 2e-3)

    def loss() -> Tensor:
        s = torch.randn(32, 6)
        return -(model(s).softmax(1) * s[:, :3]).sum(1).mean()

    return simple_loop(model, optimizer, amp, loss)


@program
def pointer_network_over_positions(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.q, self.v = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 16), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            h, last = self.gru(x)
            return self.v(torch.tanh(h + self.q(last[-1])[:, None])).squeeze(2)

    model = Net()

    def loss() -> Tensor:
        x = torch.randn(16, 7, 3)
        return F.cross_entropy(model(x), x.sum(2).argmax(1))

    return simple_loop(model, AdamW(model.parameters(), 2e-3), amp, loss)


@program
def unlearning_by_ascent_then_repair(amp: Cast) -> Training:
    model, count = dense(8, 24, 4), 0
    optimizer = SGD(model.parameters(), 0.01)

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        (-loss if 10 < count <= 16 else loss).backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def least_squares_gan_with_noisy_labels(amp: Cast) -> Training:
    g, d = dense(4, 24, 5), dense(5, 24, 1)
    og, od = RMSprop(g.parameters(), 5e-4), RMSprop(d.parameters(), 5e-4)

    def step() -> Tensor:
        real = torch.randn(16, 5) + 1
        od.zero_grad()
        with amp():
            fake = g(torch.randn(16, 4))
            one = (d(real) - random.uniform(0.8, 1.1)).square().mean() + d(fake.detach()).square().mean()
        one.backward()
        od.step()
        og.zero_grad()
        with amp():
            two = (d(fake) - 1).square().mean()
        two.backward()
        og.step()
        return (one + two).detach()

    return Training(nn.ModuleDict({"g": g, "d": d}), [og, od], step)


@program
def extragradient_for_a_game(amp: Cast) -> Training:
    g, d = dense(4, 16, 4), dense(4, 16, 1)
    model = nn.ModuleDict({"g": g, "d": d})
    optimizer = SGD(model.parameters(), 0.02)

    def field() -> Tensor:
        real, fake = torch.randn(16, 4), g(torch.randn(16, 4))
        value = d(real).mean() - d(fake).mean()
        for p, h in zip(
            d.parameters(), torch.autograd.grad(-value, list(d.parameters()), retain_graph=True), strict=True
        ):
            p.grad = h
        for p, h in zip(g.parameters(), torch.autograd.grad(value, list(g.parameters())), strict=True):
            p.grad = h
        return value.detach()

    def step() -> Tensor:
        kept = [p.detach().clone() for p in model.parameters()]
        field()
        optimizer.step()
        value = field()
        with torch.no_grad():
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)
        optimizer.step()
        return value

    return Training(model, [optimizer], step)


@program
def shampoo_written_by_hand(amp: Cast) -> Training:
    class Shampoo(Optimizer):
        def __init__(self, params: Any, lr: float = 0.02) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    g = p.grad.view(p.shape[0], -1)
                    state = self.state[p]
                    left = state.setdefault("l", 1e-2 * torch.eye(g.shape[0]))
                    right = state.setdefault("r", 1e-2 * torch.eye(g.shape[1]))
                    left.add_(g @ g.t())
                    right.add_(g.t() @ g)
                    roots = []
                    for m in (left, right):
                        values, vectors = torch.linalg.eigh(m)
                        roots.append(vectors * values.clamp_min(1e-6).pow(-0.25) @ vectors.t())
                    p.add_((roots[0] @ g @ roots[1]).view_as(p), alpha=-group["lr"])

    model = dense(8, 16, 4)
    return simple_loop(model, Shampoo(model.parameters()), amp, lambda: classified(model))


@program
def adam_with_skipped_outlier_updates(amp: Cast) -> Training:
    class Careful(Adam):
        def step(self, closure: Any = None) -> Any:
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            norm = float(torch.stack([g.norm() for g in grads]).norm())
            if norm > 0.6:
                return None
            return super().step(closure)

    model = dense(8, 24, 4)
    return simple_loop(model, Careful(model.parameters(), 2e-3), amp, lambda: classified(model))


@program
def fine_tuning_with_layerwise_reinitialisation(amp: Cast) -> Training:
    model: Any = dense(8, 24, 24, 4)
    count = 0
    optimizer = AdamW(model.parameters(), 1e-3)
    inner = simple_loop(model, optimizer, amp, lambda: classified(model))

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count == 18:
            model[4].reset_parameters()
            for p in model[4].parameters():
                optimizer.state.pop(p, None)
        return inner.step()

    return Training(model, [optimizer], step)


@program
def weights_noised_for_the_pass_and_restored(amp: Cast) -> Training:
    model = dense(8, 24, 4)
    optimizer = SGD(model.parameters(), 0.05)

    def step() -> Tensor:
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))
        optimizer.zero_grad()
        with amp():
            loss = classified(model)
        loss.backward()
        with torch.no_grad():
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def rezero_blocks_with_late_gates(amp: Cast) -> Training:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.gate = dense(24, 24, 24), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * self.f(x)

    model = nn.Sequential(nn.Linear(8, 24), *(Block() for _ in range(4)), nn.Linear(24, 4))
    return simple_loop(model, AdamW(model.parameters(), 1e-3), amp, lambda: classified(model))


@program
def equal_heads_that_break_symmetry_by_dropout(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.drop = nn.Linear(8, 24), nn.Dropout(0.5)
            self.heads = nn.ModuleList([nn.Linear(24, 4) for _ in range(3)])
            for h in self.heads:
                h.load_state_dict(self.heads[0].state_dict())

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.body(x))
            return torch.stack([head(self.drop(h)) for head in self.heads]).mean(0)

    model = Net()
    return simple_loop(model, SGD(model.parameters(), 0.05), amp, lambda: classified(model))


@program
def dropped_modalities(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, a: Tensor | None, b: Tensor | None) -> Tensor:
            h = torch.zeros(16, 16)
            if a is not None:
                h = h + F.relu(self.a(a))
            if b is not None:
                h = h + F.relu(self.b(b))
            return self.head(h)

    model = Net()

    def loss() -> Tensor:
        a, b = torch.randn(16, 8), torch.randn(16, 6)
        which = np.random.randint(3)
        return F.cross_entropy(model(None if which == 1 else a, None if which == 2 else b), torch.randint(4, (16,)))

    return simple_loop(model, AdamW(model.parameters(), 1e-3), amp, loss)


@program
def mixed_precision_steps_now_and_then_in_full(amp: Cast) -> Training:
    model, count = dense(8, 32, 32, 4), 0
    optimizer = AdamW(model.parameters(), 1e-3)

    def step() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        if count % 7 == 0:
            loss = classified(model)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                loss = classified(model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def cached_features_after_the_encoder_is_frozen(amp: Cast) -> Training:
    encoder, head = dense(8, 24, 24), nn.Linear(24, 4)
    model = nn.Sequential(encoder, head)
    optimizer, count = Adam(model.parameters(), 2e-3), 0
    x, y = batch(64)
    cache: list[Tensor] = []

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count == 16:
            encoder.requires_grad_(False)
            with torch.no_grad():
                cache.append(encoder(x))
        pick = torch.randint(64, (16,))
        optimizer.zero_grad()
        with amp():
            out = head(cache[0][pick]) if cache else model(x[pick])
            loss = F.cross_entropy(out, y[pick])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def teacher_copied_from_the_student_at_intervals(amp: Cast) -> Training:
    student = dense(8, 24, 4)
    model = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})
    optimizer, count = SGD(student.parameters(), 0.05), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        x, y = batch()
        optimizer.zero_grad()
        with amp():
            out = student(x)
            with torch.no_grad():
                soft = model["teacher"](x).softmax(1)
            loss = F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
        loss.backward()
        optimizer.step()
        if count % 11 == 0:
            model["teacher"].load_state_dict(student.state_dict())
        return loss.detach()

    return Training(model, [optimizer], step)


@program
def random_masks_by_parametrization_and_python_random(amp: Cast) -> Training:
    class Mask(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * (1.0 if random.random() < 0.8 else 0.5)

    model = dense(8, 24, 4)
    parametrize.register_parametrization(model[0], "weight", Mask())
    return simple_loop(model, NAdam(model.parameters(), 1e-3), amp, lambda: classified(model))


@program
def global_pruning_and_made_permanent(amp: Cast) -> Training:
    model, count = dense(8, 32, 4), 0
    optimizer = SGD(model.parameters(), 0.05)
    inner = simple_loop(model, optimizer, amp, lambda: classified(model))

    def step() -> Tensor:
        nonlocal count, inner
        count += 1
        value = inner.step()
        if count == 15:
            prune.global_unstructured([(model[0], "weight"), (model[2], "weight")], prune.L1Unstructured, amount=0.3)
            prune.remove(model[0], "weight")
            prune.remove(model[2], "weight")
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": list(model.parameters())})
        return value

    return Training(model, [optimizer], step)


@program
def bilevel_sample_weights(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.weigher = dense(8, 16, 4), dense(1, 8, 1)

    model = Net()
    inner, outer = SGD(model.net.parameters(), 0.05), Adam(model.weigher.parameters(), 1e-3)

    def step() -> Tensor:
        x, y = batch()
        params: dict[str, Tensor] = dict(model.net.named_parameters())
        each = F.cross_entropy(functional_call(model.net, params, (x,)), y, reduction="none")
        w = model.weigher(each.detach()[:, None]).sigmoid().squeeze(1)
        slopes = torch.autograd.grad((w * each).mean(), list(params.values()), create_graph=True)
        moved = {k: p - 0.05 * g for (k, p), g in zip(params.items(), slopes, strict=True)}
        a, b = batch()
        outer.zero_grad()
        F.cross_entropy(functional_call(model.net, moved, (a,)), b).backward()
        outer.step()
        inner.zero_grad()
        with torch.no_grad():
            w = model.weigher(each.detach()[:, None]).sigmoid().squeeze(1)
        with amp():
            loss = (w * F.cross_entropy(model.net(x), y, reduction="none")).mean()
        loss.backward()
        inner.step()
        return loss.detach()

    return Training(model, [inner, outer], step)


@program
def reentrant_checkpoints_with_python_randomness(amp: Cast) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(8, 24), nn.Linear(24, 4)
            self.blocks = nn.ModuleList([dense(24, 24, 24) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x)
            for b in self.blocks:
                if random.random() < 0.7:
                    h = h + checkpoint(b, h, use_reentrant=False)
            return self.out(h)

    model = Net()
    return simple_loop(model, AdamW(model.parameters(), 1e-3), amp, lambda: classified(model))
