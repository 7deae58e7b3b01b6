"""A plain training loop with a default monitor, and the places where an error program may change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import batch
from error_programs.models import tokens

Hook = Callable[[int], Any]


def nothing(_: int) -> None:
    """Do nothing in this step."""


def classify(model: nn.Module) -> Tensor:
    """Return the loss of a classifier on a fresh batch of vectors."""
    x, y = batch()
    return F.cross_entropy(model(x), y)


def predict_next(model: nn.Module) -> Tensor:
    """Return the loss of a language model on fresh tokens."""
    x, y = tokens()
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(
    model: nn.Module,
    optimizer: Any,
    loss: Callable[[nn.Module], Tensor] = classify,
    *,
    steps: int = 6,
    before: Hook = nothing,
    between: Hook = nothing,
    after: Hook = nothing,
) -> Monitor:
    """Train under a default monitor; call `before`, `between` backward and step, and `after` with the step's number."""
    with Monitor(model, optimizer) as monitor:
        for number in range(1, steps + 1):
            before(number)
            optimizer.zero_grad()
            loss(model).backward()
            between(number)
            optimizer.step()
            after(number)
            monitor.step()
    return monitor
