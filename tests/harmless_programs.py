"""Correct training programs for a monitor to leave alone: precision × loss × optimizer × architecture × trick.

A program builds everything from a seed and calls back after every step, so that it can be run twice, with a monitor and
without, and its losses compared bit for bit.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

AfterStep = Callable[[Tensor], None]
"""Called with the loss after every optimizer step."""

Watch = Callable[[nn.Module, Optimizer], AfterStep]
"""Given what a program trains, returns what it calls after every step."""


class Block(nn.Module):
    """A transformer block in the manner of GPT: pre-norm attention and a feed-forward part, either with a residual."""

    def __init__(self, width: int, heads: int, *, gated: bool, drop: float, layer_drop: float) -> None:
        super().__init__()
        kind: Any = nn.RMSNorm if gated else nn.LayerNorm
        self.heads, self.gated, self.drop, self.layer_drop = heads, gated, drop, layer_drop
        self.norm1, self.norm2 = kind(width), kind(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=not gated), nn.Linear(width, width, bias=not gated)
        self.up, self.down = nn.Linear(width, 2 * width, bias=not gated), nn.Linear(2 * width, width, bias=not gated)
        self.gate = nn.Linear(width, 2 * width, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.layer_drop and float(torch.rand(())) < self.layer_drop:
            return x
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.drop, self.training)
        hidden = self.norm2(x)
        inner = F.gelu(self.up(hidden)) if self.gate is None else F.silu(self.gate(hidden)) * self.up(hidden)
        return x + F.dropout(self.down(inner), self.drop, self.training)


class Decoder(nn.Module):
    """A small language model."""

    def __init__(
        self,
        *,
        gated: bool = False,
        tied: bool = False,
        drop: float = 0.0,
        layer_drop: float = 0.0,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        width = 16
        self.embedding, self.positions = nn.Embedding(13, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, 2, gated=gated, drop=drop, layer_drop=layer_drop) for _ in range(2))
        self.norm = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
        self.head = nn.Linear(width, 13, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Convolutional(nn.Module):
    """A small image network with batch norm and a residual."""

    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(drop), nn.Linear(24, 13))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.body(x)))


class Recurrent(nn.Module):
    """A recurrent network over a sequence of vectors."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cell, self.head = kind(5, 12, batch_first=True), nn.Linear(12, 13)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def _mlp(*, drop: float = 0.0, **_: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 12), nn.ReLU(), nn.Dropout(drop), nn.Linear(12, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 13)
    )


def _tokens() -> Tensor:
    return torch.randint(13, (4, 8))


def _images() -> Tensor:
    return torch.randn(4, 1, 8, 8)


ARCHITECTURES: dict[str, tuple[Callable[..., nn.Module], Callable[[], Tensor]]] = {
    "mlp": (_mlp, lambda: torch.randn(6, 5)),
    "linear pair": (lambda **_: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 13)), lambda: torch.randn(6, 5)),
    "convolutional": (lambda drop=0.0, **_: Convolutional(drop=drop), _images),
    "gpt": (lambda drop=0.0, layer_drop=0.0, checkpointed=False: Decoder(
        drop=drop, layer_drop=layer_drop, checkpointed=checkpointed), _tokens),
    "tied gpt": (lambda drop=0.0, layer_drop=0.0, checkpointed=False: Decoder(
        tied=True, drop=drop, layer_drop=layer_drop, checkpointed=checkpointed), _tokens),
    "llama": (lambda drop=0.0, layer_drop=0.0, checkpointed=False: Decoder(
        gated=True, drop=drop, layer_drop=layer_drop, checkpointed=checkpointed), _tokens),
    "lstm": (lambda **_: Recurrent(nn.LSTM), lambda: torch.randn(4, 6, 5)),
    "gru": (lambda **_: Recurrent(nn.GRU), lambda: torch.randn(4, 6, 5)),
    "torch transformer": (lambda drop=0.0, **_: nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=drop, batch_first=True), nn.Flatten(), nn.Linear(48, 13)),
        lambda: torch.randn(4, 6, 8)),
}  # fmt: skip
"""By name: how the model is built, and its inputs."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD, momentum, decay": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-2),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=2e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=2e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=2e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}

PRECISIONS = ("float32", "float64", "bfloat16", "autocast")

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda out, target: F.cross_entropy(out.float(), target),
    "smoothed cross entropy": lambda out, target: F.cross_entropy(out.float(), target, label_smoothing=0.1),
    "mean square": lambda out, target: (out - F.one_hot(target, out.shape[-1])).square().mean(),
    "absolute": lambda out, target: F.l1_loss(out, F.one_hot(target, out.shape[-1]).to(out.dtype)),
    "binary": lambda out, target: F.binary_cross_entropy_with_logits(
        out, F.one_hot(target, out.shape[-1]).to(out.dtype)
    ),
    "hinge": lambda out, target: F.multi_margin_loss(out.float(), target),
}

TRICKS = (
    "none", "dropout", "clip norm", "clip value", "accumulate", "layer drop", "checkpoint", "schedule",
    "weight average", "L2 in the loss", "features in the loss", "frozen stem", "freeze in mid-run",
    "unfreeze in mid-run", "thrown away", "adversarial", "penalty", "sharpness", "scaled loss", "two passes",
    "evaluation between", "frozen head",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Combination:
    """One program of the table."""

    architecture: str
    precision: str
    loss: str
    optimizer: str
    trick: str

    def __str__(self) -> str:
        return " × ".join((self.architecture, self.precision, self.loss, self.optimizer, self.trick))


def drawn(count: int, seed: int = 0) -> list[Combination]:
    """Return combinations in which every entry of every column occurs about equally often."""
    chance = random.Random(seed)
    columns: list[Iterator[str]] = []
    for column in (ARCHITECTURES, PRECISIONS, LOSSES, OPTIMIZERS, TRICKS):
        entries: list[str] = list(column)
        many = [one for _ in range(count // len(entries) + 1) for one in chance.sample(entries, len(entries))]
        columns.append(iter(many[:count]))
    return [Combination(*row) for row in zip(*columns, strict=True)]


class SharpnessAware:
    """Sharpness-aware minimisation around an optimizer: gradients at perturbed weights, a step from the old ones."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def perturb(self) -> None:
        """Move up the gradient."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.float().norm() for p in trained]).norm() + 1e-12
        self.kept = [(p, p.detach().clone()) for p in trained]
        for p in trained:
            p.add_(p.grad * (0.05 / norm).to(p.dtype))

    @torch.no_grad()
    def restore(self) -> None:
        """Move back."""
        for p, value in self.kept:
            p.copy_(value)


def run(program: Combination, watch: Watch | None, *, steps: int, seed: int = 0) -> list[Tensor]:
    """Train a program; return its losses and, last, its parameters and buffers."""
    torch.manual_seed(seed)
    build, inputs = ARCHITECTURES[program.architecture]
    trick = program.trick
    options: dict[str, Any] = {"drop": 0.1} if trick == "dropout" else {}
    if "gpt" in program.architecture or program.architecture == "llama":
        options |= {"layer_drop": 0.3} if trick == "layer drop" else {}
        options |= {"checkpointed": True} if trick == "checkpoint" else {}
    model = build(**options)
    kind = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(program.precision, torch.float32)
    model.to(kind)
    first, last = next(iter(model.parameters())), list(model.parameters())[-1]
    if trick in ("frozen stem", "unfreeze in mid-run"):
        first.requires_grad_(False)
    if trick == "frozen head":
        last.requires_grad_(False)
    optimizer = OPTIMIZERS[program.optimizer](list(model.parameters()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if trick == "schedule" else None
    average = copy.deepcopy(model) if trick == "weight average" else None
    after = watch(model, optimizer) if watch is not None else None
    losses = []
    context: Any = torch.autocast("cpu", torch.bfloat16) if program.precision == "autocast" else nullcontext()

    def objective(x: Tensor) -> Tensor:
        hidden: list[Tensor] = []
        leaf = next(m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.RNNBase))

        def keep(module: nn.Module, args: Any, out: Any) -> None:
            hidden.append(out[0] if isinstance(out, tuple) else out)

        handle = leaf.register_forward_hook(keep)
        with context:
            out = model(x)
            loss = LOSSES[program.loss](out, target[: len(out)])
        handle.remove()
        if trick == "L2 in the loss":
            loss = loss + 1e-2 * sum(p.float().square().sum() for p in model.parameters())
        if trick == "features in the loss":
            loss = loss + 0.1 * hidden[0].float().square().mean()
        return loss

    for number in range(steps):
        x = inputs()
        x = x.to(kind) if x.is_floating_point() else x
        target = torch.randint(13, (64,))
        if trick == "freeze in mid-run" and number == steps // 2:
            first.requires_grad_(False)
        if trick == "unfreeze in mid-run" and number == steps // 2:
            first.requires_grad_(True)
        optimizer.zero_grad()
        loss = _differentiated(program, model, optimizer, objective, x)
        if trick == "clip norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if trick == "clip value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if after is not None:
            after(loss)
        if average is not None:
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
        if trick == "evaluation between" and number % 3 == 0:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        losses.append(loss.detach().clone())
    return [*losses, *(value.detach().clone() for value in model.state_dict().values())]


def _differentiated(
    program: Combination, model: nn.Module, optimizer: Optimizer, objective: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Run the passes of one step as the trick asks; return the loss whose gradients are used."""
    trick, real = program.trick, x.is_floating_point()
    if trick == "accumulate":
        for _ in range(3):
            loss = objective(x) / 3
            loss.backward()
        return loss
    if trick == "two passes":
        (objective(x) + objective(x.flip(0))).backward()
        return objective(x).detach()
    if trick == "thrown away":
        objective(x).backward()
        optimizer.zero_grad()
    if trick == "adversarial" and real:
        moved = x.clone().requires_grad_()
        objective(moved).backward()
        assert moved.grad is not None
        x = (x + 0.01 * moved.grad.sign()).detach()
        model.zero_grad()
    twice = program.loss != "hinge" and program.architecture in ("mlp", "linear pair", "convolutional")
    if trick == "penalty" and real and twice:
        moved = x.clone().requires_grad_()
        loss = objective(moved)
        (grad,) = torch.autograd.grad(loss, moved, create_graph=True)
        (loss + grad.float().square().sum()).backward()
        return loss
    if trick == "sharpness":
        sam = SharpnessAware(optimizer)
        objective(x).backward()
        sam.perturb()
        optimizer.zero_grad()
        loss = objective(x)
        loss.backward()
        sam.restore()
        return loss
    loss = objective(x)
    if trick == "scaled loss":
        (loss * 64.0).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= 64.0
        return loss
    loss.backward()
    return loss
