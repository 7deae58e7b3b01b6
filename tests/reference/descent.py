"""Gradient descent written out for one plain module, and how laws drift over it: the obvious way."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conserved import LawSet


@dataclass(frozen=True, kw_only=True)
class Descent:
    """The trained module, its losses before and after, and by family ‖change‖ over ‖terms‖ of the laws."""

    model: nn.Module
    losses: list[float]
    drift: dict[str, float]


def descend(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    watched: Callable[[nn.Module], LawSet],
    *,
    step: float,
    time: float,
) -> Descent:
    """Follow the gradient of `loss` from a copy of `model` for a flow time."""
    model = copy.deepcopy(model)
    laws = watched(model)
    start = laws.reference(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    losses = []
    for _ in range(max(1, round(time / step))):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    with torch.no_grad():
        losses.append(loss(model).item())
    end = laws.values(dtype=torch.float64)
    change: dict[str, float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)
    for symmetry in laws:
        change[symmetry.family] += float((end[symmetry.name] - start.values[symmetry.name]).square().sum())
        size[symmetry.family] += float(start.scales[symmetry.name].square().sum())
    drift = {family: math.sqrt(change[family] / size[family]) if size[family] else 0.0 for family in change}
    return Descent(model=model, losses=losses, drift=drift)
