"""Gradients that differ from the same pass run again, and that no code has touched since: a bad device, or the loss?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved import Monitor

STEPS = 20


def run(accumulated: Callable[[int, dict[str, Tensor]], None], penalty: float = 0.0) -> Monitor:
    """Train a model whose gradients are changed as they are accumulated, where no replay and no version shows it."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    number = 0
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():

        def change(p: Tensor, name: str = name) -> None:
            assert p.grad is not None
            accumulated(number, {name: p.grad})

        parameter.register_post_accumulate_grad_hook(change)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, optimizer)
    x = torch.randn(64, 8)
    for number in range(1, STEPS + 1):  # noqa: B007
        optimizer.zero_grad()
        loss = (model(x) - x[:, :4]).square().mean() + penalty * model[2].weight.square().sum()
        loss.backward()
        optimizer.step()
        monitor.step()
    monitor.close()
    return monitor


def test_a_factor_that_comes_again_is_told_at_once() -> None:
    """A factor on one side of an identity comes from no loss."""

    def change(number: int, gradients: dict[str, Tensor]) -> None:
        if number >= 3 and "2.weight" in gradients:
            gradients["2.weight"].mul_(1.05)

    (alarm,) = [alarm for alarm in run(change).alarms if alarm.kind in ("gradient", "hardware")]
    assert alarm.step == 3


@pytest.mark.parametrize("names", [("0.weight", "4.weight")])
def test_a_device_that_fails_here_and_there_is_told(names: tuple[str, ...]) -> None:
    def change(number: int, gradients: dict[str, Tensor]) -> None:
        name = names[number % len(names)]
        if number >= 3 and name in gradients:
            gradients[name].view(-1)[number] += 5.0

    alarms = [alarm for alarm in run(change).alarms if alarm.kind in ("gradient", "hardware")]
    assert alarms
    assert alarms[0].step <= 5


def test_a_loss_that_sees_the_weights_is_not_accused() -> None:
    monitor = run(lambda number, gradients: None, penalty=0.01)
    assert not monitor.alarms
    assert "laws" in str(monitor.state)
