"""Correct programs that once raised an alarm: none does, and none has another loss than without a monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from harmless_programs import TRICKS, AfterStep, Combination, Decoder, drawn, run

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def watched(program: Combination, *, steps: int = 8, seed: int = 0, **options: Any) -> Monitor:
    """Run a program with a monitor and without, and hold their losses and parameters against each other."""
    monitors: list[Monitor] = []

    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> AfterStep:
        monitors.append(Monitor(model, optimizer, **options))
        return lambda loss: monitors[0].step(loss=loss)

    plain, result = run(program, None, steps=steps, seed=seed), run(program, watch, steps=steps, seed=seed)
    assert all(map(torch.equal, plain, result)), "the run was changed"
    monitors[0].flush()
    return monitors[0]


EXAMPLES = {
    "dropout": ("gpt", "float32"),
    "clip value": ("llama", "bfloat16"),
    "layer drop": ("gpt", "float64"),
    "checkpoint": ("llama", "float32"),
    "adversarial": ("convolutional", "float64"),
    "penalty": ("mlp", "float64"),
    "thrown away": ("llama", "float32"),
    "frozen stem": ("tied gpt", "float32"),
}
"""The architecture and precision that a trick is tried with, where that matters."""


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_of_training_raise_no_alarm(trick: str) -> None:
    architecture, precision = EXAMPLES.get(trick, ("mlp", "float32"))
    monitor = watched(Combination(architecture, precision, "cross entropy", "AdamW", trick))
    assert monitor.alarms == []


@pytest.mark.parametrize("program", drawn(8, seed=11), ids=str)
def test_drawn_programs_raise_no_alarm(program: Combination) -> None:
    assert watched(program, steps=6).alarms == []


@pytest.mark.parametrize("optimizer", ["RAdam", "ASGD"])
def test_updates_below_the_spacing_of_bfloat16_are_remarked_and_raise_no_alarm(optimizer: str) -> None:
    monitor = watched(Combination("gpt", "bfloat16", "cross entropy", optimizer, "none"), steps=12)
    assert monitor.alarms == []
    assert "precision since step" in monitor.state
    assert "bfloat16 weights with an update did not change" in monitor.state


@pytest.mark.parametrize("seed", range(2))
def test_skipped_steps_do_not_leak(seed: int) -> None:
    program = Combination("mlp", "float32", "cross entropy", "SGD, momentum, decay", "none")
    monitor = watched(program, steps=60, seed=seed, every=10)
    assert [record.step for record in monitor.records] == [10, 20, 30, 40, 50, 60]
    assert monitor.alarms == []


@pytest.mark.parametrize("architecture", ["convolutional", "tied gpt"])
def test_the_account_knows_of_autocast(architecture: str) -> None:
    monitor = watched(Combination(architecture, "autocast", "cross entropy", "SGD", "none"), steps=12)
    assert monitor.alarms == []
    # The tolerance of the account is that of bfloat16: none of its entries comes near it, and none is at rounding of
    # single precision.
    assert max(entry.excess for entry in monitor.ledger()) < 1


def test_a_penalty_on_the_weights_that_is_not_told_of_is_seen_in_the_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer)
    for _ in range(6):
        x = torch.randn(16, 5)
        loss = model(x).square().mean() + 0.02 * sum(p.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step()
    assert monitor.alarms == []
    assert monitor.last_audit is not None
    assert "contain 0.04 times the parameters" in monitor.last_audit.verdict.message


def test_a_line_search_is_audited_nowhere_and_raises_no_alarm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    monitor = Monitor(model, optimizer)
    x, y = torch.randn(32, 5), torch.randn(32, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(6):
        monitor.step(loss=optimizer.step(closure))
    assert monitor.alarms == []


def test_two_networks_that_play_against_each_other_raise_no_alarm() -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (made, judge)]
    monitors = [Monitor(net, optimizer) for net, optimizer in zip((made, judge), optimizers, strict=True)]
    for _ in range(10):
        real, fake = torch.randn(16, 6), made(torch.randn(16, 4))
        optimizers[1].zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        optimizers[1].step()
        monitors[1].step()
        optimizers[0].zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        optimizers[0].step()
        monitors[0].step()
    assert [monitor.alarms for monitor in monitors] == [[], []]


def test_a_wrong_gradient_is_still_seen_after_a_pass_that_was_thrown_away() -> None:
    torch.manual_seed(0)
    model = Decoder(gated=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer)
    for number in range(4):
        tokens = torch.randint(13, (4, 8))
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), tokens.flatten()).backward()
        if number == 2:
            weight = model.get_parameter("blocks.0.up.weight")
            assert weight.grad is not None
            weight.grad *= 2
        optimizer.step()
        monitor.step()
    # It was changed after the pass, so that the same pass run again is right; all of it, so that it was no bit flip.
    assert [(alarm.step, alarm.code) for alarm in monitor.alarms] == [(3, "gradient")]
    assert "optimizer.step() changes gradients" in monitor.alarms[0].message


@pytest.mark.parametrize("spoil", [lambda g: g * 1.5, lambda g: g.flip(0), lambda g: torch.zeros_like(g)])
def test_what_excuses_a_penalty_does_not_excuse_a_wrong_gradient(spoil: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer)
    for number in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 5)).square().mean().backward()
        weight = model[0].weight
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        if number == 0:
            weight.grad.copy_(spoil(weight.grad.clone()))
        optimizer.step()
        monitor.step()
    assert [alarm.code for alarm in monitor.alarms] == ["hardware"]


def test_a_loop_that_updates_its_weights_by_itself_raises_no_alarm() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        model.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
        monitor.step()
    assert not monitor.alarms
    assert "updates its weights by itself" in monitor.state


def stepped_after_a_write(marks: bool) -> Monitor:
    """Train while parameters are written between backward and the step, as sharpness-aware loops and ZeRO-3 do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for parameter in model.parameters():
        if marks:
            vars(parameter)["ds_tensor"] = torch.empty(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1)
        optimizer.step()
        monitor.step()
    return monitor


def test_parameters_that_zero_3_fetches_are_not_taken_for_perturbed_ones() -> None:
    assert "as by SAM" in str(stepped_after_a_write(marks=False).state)
    assert "as by SAM" not in str(stepped_after_a_write(marks=True).state)
