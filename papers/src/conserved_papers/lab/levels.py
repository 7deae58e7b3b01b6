"""Gradient descent on the two weights of f(x) = a b x, whose law a² − b² has level sets of two branches (Figure 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from conserved.inference import recognize
from conserved_papers.blocks import FeedForward
from conserved_papers.lab.task import Documents, Task

KIND = "levels"

_STARTS = ((1.6, 0.2), (-1.6, 0.4), (1.3, -0.5), (0.3, 1.5), (-0.4, -1.4), (0.5, -1.6))
"""Three on each side of a² = b²."""

_TIME = 1.5
RATES = (0.2, 0.1, 0.05, 0.025)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels(Task):
    """Paths of (a, b) from six starts for one flow time, on the loss ½(ab − 1)²."""

    kind: ClassVar[str] = KIND
    rate: float

    @property
    def results(self) -> tuple[str, ...]:
        return (f"{self.rate:g}",)

    def perform(self, checkpoint: Path | None = None) -> Documents:
        paths = [_path(start, self.rate) for start in _STARTS]
        return {self.results[0]: {"rate": self.rate, "time": _TIME, "paths": paths}}


def _path(start: tuple[float, float], rate: float) -> dict[str, Any]:
    model = FeedForward(1, 1, "linear").double()
    a, b = model.down.weight, model.up.weight
    with torch.no_grad():
        a.fill_(start[0])
        b.fill_(start[1])
    one = torch.ones(1, 1, dtype=torch.float64)
    laws = recognize(model, one)
    law = laws.laws[0].name
    points, values = [], []
    for _ in range(round(_TIME / rate) + 1):
        points.append([a.item(), b.item()])
        values.append(float(laws.values()[law]))
        grads = torch.autograd.grad(0.5 * (model(one) - 1).square().sum(), (a, b))
        with torch.no_grad():
            for weight, grad in zip((a, b), grads, strict=True):
                weight -= rate * grad
    # The law is known up to its sign.
    sign = math.copysign(1.0, values[0] * (start[0] ** 2 - start[1] ** 2))
    return {"points": points, "law": [sign * value for value in values]}
