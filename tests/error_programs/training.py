"""A plain training loop with a default monitor, and the places where an error program may change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor, Status, check_scale
from error_programs.case import batch
from error_programs.models import tokens

Hook = Callable[[int], Any]


CHECKED: list[bool] | None = None
"""If it is a list, `train` adds whether `check_scale` refutes the gradient of the first step."""


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
            state = torch.get_rng_state()
            loss(model).backward()
            between(number)
            if number == 1 and CHECKED is not None:
                CHECKED.append(_is_refuted(model, loss, state))
            optimizer.step()
            after(number)
            monitor.step()
    return monitor


def _is_refuted(model: nn.Module, loss: Callable[[nn.Module], Tensor], state: Tensor) -> bool:
    """Return whether `check_scale` refutes the gradients of a loss that began with a state of random numbers."""
    after = torch.get_rng_state()

    def again() -> Tensor:
        torch.set_rng_state(state)
        return loss(model)

    refuted = check_scale(model, again).verdict.status is Status.REFUTED
    torch.set_rng_state(after)
    return refuted
