"""Small models, losses and optimizers that the tests of tracking run on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved import Monitor, blocks

VOCABULARY, LENGTH = 11, 6


def decoder(**options: Any) -> nn.Module:
    """Grouped rotary attention, RMS norm, SwiGLU; exact norms unless asked for others."""
    chosen: dict[str, Any] = {"max_length": LENGTH, "kv_heads": 1, "positions": "rotary-half"} | options
    return without_epsilon(blocks.DecoderLM(VOCABULARY, 8, 1, 2, 6, **chosen))


def vision() -> nn.Module:
    """Full heads with biases, layer norm, learned positions."""
    return without_epsilon(blocks.VisionTransformer(4, 2, 8, 1, 2, 6, channels=1, classes=3))


def without_epsilon(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.eps = 0.0
    return model


def sentences(seed: int = 0, count: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def images(seed: int = 0, count: int = 4) -> Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def text_loss(model: nn.Module, seed: int = 0) -> Tensor:
    """Next-token cross-entropy on a batch that the seed chooses."""
    batch = sentences(seed)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def exact_text_loss(model: nn.Module, seed: int = 0) -> Tensor:
    batch = sentences(seed)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def image_loss(model: nn.Module, seed: int = 0) -> Tensor:
    batch = images(seed).to(next(model.parameters()).dtype)
    return F.cross_entropy(model(batch), torch.arange(len(batch)) % 3)


def noise_loss(model: nn.Module, seed: int = 0) -> Tensor:
    """Targets that cannot be learnt, so that gradients keep their size."""
    targets = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.mse_loss(model(images(seed)), targets)


def train(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    loss: Callable[[nn.Module, int], Tensor],
    steps: int,
    *,
    after: Callable[[int], None] = lambda number: None,
) -> None:
    """The plainest loop there is; a new batch every step, `after` at the end of each."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for number in range(steps):
        for one in optimizers:
            one.zero_grad()
        loss(model, number).backward()
        for one in optimizers:
            one.step()
        after(number)


def stepping(monitor: Monitor) -> Callable[[int], None]:
    """What a plain loop does after every step."""
    return lambda number: monitor.step()


@dataclass(frozen=True, slots=True)
class OptimizerCase:
    """An optimizer, or several that share a model, by name."""

    name: str
    build: Callable[[nn.Module], list[Optimizer]]
    causes: frozenset[str]


def _case(name: str, cls: Any, causes: str, **options: Any) -> OptimizerCase:
    return OptimizerCase(name, lambda model: [cls(model.parameters(), **options)], frozenset(causes.split()))


def muon_and_adamw(model: nn.Module, **options: Any) -> list[Optimizer]:
    """Muon takes matrices only; the rest goes to AdamW, as everyone does it."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=0.005, weight_decay=0.1, **options),
        torch.optim.AdamW(rest, lr=0.003, weight_decay=0.01),
    ]


OPTIMIZERS = [
    _case("SGD", torch.optim.SGD, "", lr=0.05),
    _case("SGD, decay", torch.optim.SGD, "decay", lr=0.05, weight_decay=0.02),
    _case(
        "SGD, momentum, dampening, decay",
        torch.optim.SGD,
        "momentum decay",
        lr=0.02,
        momentum=0.9,
        dampening=0.2,
        weight_decay=0.02,
    ),
    _case(
        "SGD, Nesterov, decay",
        torch.optim.SGD,
        "momentum decay",
        lr=0.02,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.02,
    ),
    _case("SGD, maximize", torch.optim.SGD, "momentum", lr=1e-3, momentum=0.5, maximize=True),
    _case("Adam, coupled decay", torch.optim.Adam, "momentum preconditioner decay", lr=0.003, weight_decay=0.02),
    _case("Adam, amsgrad", torch.optim.Adam, "momentum preconditioner", lr=0.003, amsgrad=True),
    _case("AdamW", torch.optim.AdamW, "momentum preconditioner decay", lr=0.003, weight_decay=0.1),
    _case("Adamax, decay", torch.optim.Adamax, "momentum preconditioner decay", lr=0.003, weight_decay=0.02),
    _case("RMSprop", torch.optim.RMSprop, "preconditioner", lr=0.002),
    _case("RMSprop, decay", torch.optim.RMSprop, "preconditioner decay", lr=0.002, weight_decay=0.02),
    _case(
        "RMSprop, centered, momentum, decay",
        torch.optim.RMSprop,
        "preconditioner momentum decay",
        lr=0.001,
        centered=True,
        momentum=0.9,
        weight_decay=0.02,
    ),
    OptimizerCase("Muon and AdamW", muon_and_adamw, frozenset({"momentum", "preconditioner", "decay", "rates"})),
    _case("Adagrad, by the generic rule", torch.optim.Adagrad, "update", lr=0.01),
]


def ids(case: OptimizerCase) -> str:
    return case.name
