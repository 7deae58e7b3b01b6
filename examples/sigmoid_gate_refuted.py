"""Theorem 4.7 of the paper lists Σ W_i among the laws of a normalised-sigmoid router. Count, and halve the step."""

import copy

import torch

from conserved import discover
from conserved.blocks import MixtureOfExperts


def drift(model: MixtureOfExperts, step: float, time: float = 4.0) -> float:
    """How far gradient descent over a fixed flow time moves the sum of the router's rows, against their size."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    before, size = model.router.weight.sum(0).clone(), model.router.weight.norm().item()
    x, target = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(round(time / step)):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    return (model.router.weight.sum(0) - before).norm().item() / size


for gate in ("softmax", "sigmoid"):
    torch.manual_seed(0)
    model = MixtureOfExperts(dim=3, hidden=2, experts=3, gate=gate).double()
    found = discover(model, torch.zeros(4, 3))
    drifts = "  ".join(f"step {step:g}: {drift(model, step):.1e}" for step in (0.04, 0.02, 0.01))
    print(f"{gate}: {found.count} laws of {found.parameters} parameters;  Σ W_i drifts by  {drifts}")
