"""What optimizers do to the laws of a small decoder, step by step, from the exact ledger."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from conserved.store.step_record import Entry
from conserved.tracking import Monitor, MonitorConfig
from conserved_papers.lab.recipes import build, examples_of, small_text
from conserved_papers.lab.task import Documents, Task
from conserved_papers.lab.train import loss_of

KIND = "account"

_STEPS = 60
_PARTS = ("observed", "first_order", "second_order", "residual")

OPTIMIZERS: Mapping[str, tuple[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": ("SGD", lambda p: torch.optim.SGD(p, lr=0.002)),
    "momentum": ("SGD with momentum 0.9", lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9)),
    "decay": ("SGD with weight decay 0.1", lambda p: torch.optim.SGD(p, lr=0.002, weight_decay=0.1)),
    "adam": ("Adam", lambda p: torch.optim.Adam(p, lr=0.0005)),
    "adamw": ("AdamW with decay 0.1", lambda p: torch.optim.AdamW(p, lr=0.0005, weight_decay=0.1)),
}
"""By name, a title and how to make each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(Task):
    """One optimizer on the small decoder with softmax gating, from one seed.

    Per family and step the document holds ‖·‖ over all laws of the family of the observed change, of its first- and
    second-order parts and of what is left, each over the size of the laws' terms, and equation (10).
    """

    kind: ClassVar[str] = KIND
    optimizer: str
    seed: int = 0

    @property
    def results(self) -> tuple[str, ...]:
        return (f"{self.optimizer}/{self.seed}",)

    def perform(self, checkpoint: Path | None = None) -> Documents:
        recipe = small_text()
        examples = examples_of(recipe).to(torch.device("cpu"), torch.float64)
        model = build(recipe, self.seed).double()
        title, make = OPTIMIZERS[self.optimizer]
        optimizer = make(model.parameters())
        monitor = Monitor(model, optimizer, loss="cross_entropy", every=1, config=MonitorConfig(dtype=torch.float64))
        losses: list[float] = []
        errors: dict[str, list[float]] = defaultdict(list)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            value = loss_of(model(examples.inputs), examples.targets, examples.loss)
            value.backward()
            optimizer.step()
            monitor.step()
            losses.append(value.item())
            for family, error in monitor.errors(by="family").items():
                errors[family].append(error)
        content: dict[str, Any] = {
            "optimizer": self.optimizer,
            "title": title,
            "seed": self.seed,
            "at": list(range(1, _STEPS + 1)),
            "loss": losses,
            "alarms": len(monitor.alarms),
            "families": {family: {"error": errors[family], **parts} for family, parts in _by_family(monitor).items()},
        }
        monitor.close()
        return {self.results[0]: content}


def _by_family(monitor: Monitor) -> dict[str, dict[str, list[float]]]:
    """Return the parts of each step's change by family, over the size of the terms."""
    families = {symmetry.name: symmetry.family for symmetry in monitor.laws if symmetry.exact}
    sizes: dict[str, float] = defaultdict(float)
    for name, family in families.items():
        sizes[family] += float(monitor.reference.scales[name].abs().max()) ** 2
    steps: dict[int, list[Entry]] = defaultdict(list)
    for entry in monitor.ledger():
        if entry.law in families:
            steps[entry.step].append(entry)
    result: dict[str, dict[str, list[float]]] = {
        family: {part: [] for part in _PARTS} for family in dict.fromkeys(families.values())
    }
    for entries in steps.values():
        for family, parts in result.items():
            mine = [entry for entry in entries if families[entry.law] == family]
            for part in _PARTS:
                total = math.hypot(*(getattr(entry, part) for entry in mine))
                parts[part].append(total / math.sqrt(sizes[family]) if sizes[family] else total)
    return result
