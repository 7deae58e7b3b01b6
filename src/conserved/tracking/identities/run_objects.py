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
    """Modules with the parameters of the model, in other tensors that no optimizer holds."""
    unheld: list[weakref.ref[Any]] = field(default_factory=list)
    """Parameters outside of the model that have a gradient and that no optimizer of the process holds."""

    @property
    def scaler(self) -> Any:
        """A gradient scaler that is in use; None if there is none."""
        alive = (reference() for reference in self.scalers)
        return next((s for s in alive if s is not None and s.is_enabled() and s._scale is not None), None)

    @staticmethod
    def optimizers() -> list[Optimizer]:
        """Return every optimizer of the process."""
        # By type: `isinstance` asks proxies, which may raise.
        return [
            each for each in gc.get_objects() if issubclass(type(each), Optimizer) and hasattr(each, "param_groups")
        ]

    @staticmethod
    def search(model: nn.Module | None = None) -> RunObjects:
        """Look once at every object of the process: about 20 ms for the half million that importing torch makes."""
        objects = RunObjects()
        everything = gc.get_objects()
        # By type: `isinstance` asks proxies, which may raise. Types are few, so that objects are looked at in C.
        lists = {
            kind: own for kind in set(map(type, everything)) if (own := objects._list_for(kind, model)) is not None
        }
        optimized: set[int] = set()
        for each in [item for item in everything if type(item) in lists]:
            if issubclass(type(each), Optimizer):
                optimized |= parameter_ids(each)
            elif issubclass(type(each), nn.Parameter):
                if each.requires_grad and each.grad is not None:
                    objects.unheld.append(weakref.ref(each))
            elif model is None or len({type(each), type(model)}) > 1 or _is_copy(each, model):
                lists[type(each)].append(weakref.ref(each))
        alive = [(copy, module) for copy in objects.copies if (module := copy()) is not None]
        objects.copies = [copy for copy, module in alive if optimized.isdisjoint(map(id, module.parameters()))]
        optimized |= set() if model is None else {id(p) for p in model.parameters()}
        objects.unheld = [ref for ref in objects.unheld if id(ref()) not in optimized]
        return objects

    def _list_for(self, kind: type, model: nn.Module | None) -> list[weakref.ref[Any]] | None:
        """Return the list that objects of a type go into; None for types that are not wanted."""
        if issubclass(kind, LRScheduler):
            return self.schedulers
        if issubclass(kind, torch.amp.GradScaler):
            return self.scalers
        if issubclass(kind, AveragedModel):
            return self.averages
        if issubclass(kind, Optimizer | nn.Parameter):
            return []
        return self.copies if kind is type(model) else None


def _is_copy(module: nn.Module, model: nn.Module) -> bool:
    """Return whether another module has the parameters of the model, in other tensors."""
    if module is model:
        return False
    own, others = list(module.parameters()), list(model.parameters())
    return bool(own) and [p.shape for p in own] == [p.shape for p in others] and own[0] is not others[0]


def wrapped_ids(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer and of the optimizers that it wraps, as that of accelerate does."""
    ids: set[int] = set()
    while optimizer is not None and id(optimizer) not in ids:
        ids.add(id(optimizer))
        optimizer = getattr(optimizer, "optimizer", None)
    return ids


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the identities of an optimizer's tensors."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
