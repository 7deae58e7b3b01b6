"""Objects of a run that a monitor is not given: gradient scalers, schedulers, averaged models."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel


@dataclass(slots=True, eq=False)
class RunObjects:
    """Weak references to what was there when the process was searched."""

    scalers: list[weakref.ref[Any]] = field(default_factory=list)
    schedulers: list[weakref.ref[Any]] = field(default_factory=list)
    averages: list[weakref.ref[Any]] = field(default_factory=list)

    @staticmethod
    def search() -> RunObjects:
        """Look once at every object of the process, which takes about 80 ms where torch is imported."""
        found = RunObjects()
        scaler = torch.amp.GradScaler
        for each in gc.get_objects():
            # By type: `isinstance` asks proxies, which may raise.
            kind = type(each)
            if issubclass(kind, LRScheduler):
                found.schedulers.append(weakref.ref(each))
            elif issubclass(kind, scaler):
                found.scalers.append(weakref.ref(each))
            elif issubclass(kind, AveragedModel):
                found.averages.append(weakref.ref(each))
        return found


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the identities of an optimizer's tensors."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
