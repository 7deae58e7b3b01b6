"""Identities of a step run as they do on an accelerator, where no tensor is on the host."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import conserved.tracking.identities as package
from conserved.boundary import Boundary
from conserved.tracking.identities import StepIdentities


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_no_identity_needs_weights_on_the_host(
    monkeypatch: pytest.MonkeyPatch, make: type[torch.optim.Optimizer], kind: torch.dtype
) -> None:
    """Every module that asks whether a tensor is on the host is told that none is; an exception would be raised."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    modules = [module for module in map(importlib.import_module, names) if hasattr(module, "on_host")]
    assert len(modules) > 1
    for module in modules:
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).to(kind)
    optimizer = make(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True), allowance=lambda: 1e9)
    for _ in range(6):
        x = torch.randn(32, 8, dtype=kind)
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), x.argmax(1) % 4).backward()
        identities.before_optimizer(optimizer, closure=False)
        optimizer.step()
        identities.after_optimizer(optimizer)
        identities.after_step()
    identities.close()
    assert [alarm.code for alarm in identities.take_alarms() if alarm.code != "swallowed"] == []
