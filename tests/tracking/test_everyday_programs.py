"""Everyday programs of many kinds, watched: none ends, none is accused, and every loss is what it was, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from conserved import Monitor
from everyday_programs import BATCH, IN, PROGRAMS, mlp, vectors
from harmless_programs import Combination, run

pytestmark = pytest.mark.usefixtures("as_users_run_it")

MENDED = (
    "adversarial pair with spectral norms", "critic with clamped weights", "actor and critic with soft targets",
    "experts that drop tokens", "lookahead", "lookahead that resets momentum", "langevin noise after steps",
    "decay by hand", "projection onto a ball", "rows of unit norm", "private gradients", "scripted module",
    "checkpoints saved and loaded", "rewound to early weights", "masks held by hand", "stochastic depth",
    "averaged gradient of episodes", "conflicting gradients projected", "second order meta learning",
    "schedule stepped by micro batch", "noise added to gradients", "centred gradients", "clipping by unit",
    "signs with error feedback", "two copies trained side by side", "gradient reversal",
    "warm restarts that clear the state", "adapters merged now and then", "dormant units drawn again",
    "shrunk and perturbed",
)  # fmt: skip
"""Programs that raised an alarm or ended once."""

OTHERS = sorted(set(PROGRAMS) - set(MENDED) - {"loader with forked workers"})


def trained(name: str, dtype: torch.dtype, *, watched: bool) -> tuple[list[Tensor], Monitor | None]:
    """Run a program for some steps; return its losses and the monitor."""
    torch.manual_seed(0)
    training = PROGRAMS[name](dtype)
    monitor = Monitor(training.model, training.optimizers) if watched else None
    losses = []
    for _ in range(18):
        losses.append(training.step().clone())
        if monitor is not None:
            monitor.step(loss=losses[-1])
    if monitor is not None:
        monitor.close()
    return losses, monitor


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", [*MENDED, *random.Random(0).sample(OTHERS, 8)])
def test_an_everyday_program_is_left_alone(name: str) -> None:
    plain, _ = trained(name, torch.float32, watched=False)
    losses, monitor = trained(name, torch.float32, watched=True)
    assert all(map(torch.equal, plain, losses))
    assert monitor is not None
    assert [str(alarm) for alarm in monitor.alarms] == []


@pytest.mark.parametrize("name", ["experts that drop tokens", "projection onto a ball", "lookahead"])
def test_an_everyday_program_in_bfloat16_is_left_alone(name: str) -> None:
    _, monitor = trained(name, torch.bfloat16, watched=True)
    assert monitor is not None
    assert [str(alarm) for alarm in monitor.alarms] == []


def test_reading_laws_leaves_no_casts_to_a_pass_under_autocast() -> None:
    # A cast that reading laws left in the cache of autocast changed the order in which gradients are summed.
    program = Combination("tied gpt", "autocast", "binary", "AdamW", "two passes")
    monitors: list[Monitor] = []

    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        monitors.append(Monitor(model, optimizer))
        return lambda loss: monitors[0].step(loss=loss)

    plain, watched = run(program, None, steps=6), run(program, watch, steps=6)  # type: ignore[arg-type]
    assert all(map(torch.equal, plain, watched))


def test_a_write_that_does_not_come_again_is_stated() -> None:
    torch.manual_seed(0)
    model = mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 8):
            optimizer.zero_grad()
            x, y = vectors(torch.float32)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
            if number == 3:
                with torch.no_grad():
                    model.get_parameter("2.weight").mul_(1.5).add_(0.1)
    assert monitor.alarms == []
    assert [(alarm.code, alarm.step, alarm.tensor) for alarm in monitor.statements] == [
        ("something else wrote", 3, "2.weight")
    ]
    assert "step 3: Something else than the optimizer wrote to 2.weight" in monitor.state


def test_a_gradient_that_the_loop_changes_is_stated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(BATCH, IN)), torch.randint(5, (BATCH,))).backward()
            gradient = model[2].weight.grad
            assert isinstance(gradient, Tensor)
            gradient += 0.1 * torch.randn_like(gradient)
            optimizer.step()
            monitor.step()
    assert monitor.alarms == []
    assert "changes the gradient of 2.weight after" in monitor.statements[0].lines()[0]
