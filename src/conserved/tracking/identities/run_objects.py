"""Objects of a run that a monitor is not given: gradient scalers, schedulers, averaged models."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel


@dataclass(slots=True, eq=False)
class RunObjects:
    """Weak references to what was there when the process was searched."""

    scalers: list[weakref.ref[Any]] = field(default_factory=list)
    schedulers: list[weakref.ref[Any]] = field(default_factory=list)
    averages: list[weakref.ref[Any]] = field(default_factory=list)
    copies: list[weakref.ref[Any]] = field(default_factory=list)
    """Modules with the parameters of the model, in other tensors."""

    @staticmethod
    def search(model: nn.Module | None = None) -> RunObjects:
        """Look once at every object of the process, which takes about 80 ms where torch is imported."""
        found = RunObjects()
        scaler = torch.amp.GradScaler
        shapes = [] if model is None else [p.shape for p in model.parameters()]
        for each in gc.get_objects():
            # By type: `isinstance` asks proxies, which may raise.
            kind = type(each)
            if issubclass(kind, LRScheduler):
                found.schedulers.append(weakref.ref(each))
            elif issubclass(kind, scaler):
                found.scalers.append(weakref.ref(each))
            elif issubclass(kind, AveragedModel):
                found.averages.append(weakref.ref(each))
            elif kind is type(model) and each is not model and model is not None and _is_copy(each, model, shapes):
                found.copies.append(weakref.ref(each))
        return found


def _is_copy(module: nn.Module, model: nn.Module, shapes: list[torch.Size]) -> bool:
    own = list(module.parameters())
    return bool(own) and [p.shape for p in own] == shapes and own[0] is not next(iter(model.parameters()))


def wrapped_ids(optimizer: Any) -> set[int]:
    """Return the identities of an optimizer and of those it wraps, as accelerate's does."""
    found: set[int] = set()
    while optimizer is not None and id(optimizer) not in found:
        found.add(id(optimizer))
        optimizer = getattr(optimizer, "optimizer", None)
    return found


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the identities of an optimizer's tensors."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
