"""Loops as people write them: groups, schedulers, accumulation, scalers, fused kernels, compilation, closures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor, MonitorConfig, blocks
from conserved.tracking import GENERIC
from conserved.tracking import Monitor as SameMonitor
from training import (
    LENGTH,
    VOCABULARY,
    decoder,
    exact_text_loss,
    sentences,
    stepping,
    text_loss,
    train,
    without_epsilon,
)

EXACT = 1e-13


def worst(monitor: Monitor) -> float:
    return max(abs(entry.residual) for entry in monitor.ledger())


def test_there_is_one_monitor() -> None:
    assert Monitor is SameMonitor


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_groups_with_rates_of_their_own_are_accounted_for(cls: Any) -> None:
    model = decoder().double()
    gains = [p for p in model.parameters() if p.ndim == 1]
    keys = [model.get_parameter("layers.0.attention.k.weight")]
    rest = [p for p in model.parameters() if p.ndim > 1 and p is not keys[0]]
    groups: list[dict[str, Any]] = [
        {"params": gains, "lr": 0.01, "weight_decay": 0.0},
        {"params": keys, "lr": 0.002},
        {"params": rest},
    ]
    optimizer = cls(groups, lr=0.004, weight_decay=0.01)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 6, after=lambda _: monitor.step())
    assert worst(monitor) < EXACT
    rates = {entry.law for entry in monitor.ledger() if abs(entry.causes.get("rates", 0.0)) > 1e-9}
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    mixed = {
        symmetry.name
        for symmetry in monitor.laws
        if len({group_of[id(monitor.laws.parameters[name])] for name in symmetry.parameters}) > 1
    }
    assert rates == mixed
    assert "layers.0.attention.query_key[0]" in rates
    assert "layers.0.attention.value_output[0]" not in rates


@pytest.mark.parametrize("rate", ["float", "tensor"])
def test_schedulers_that_step_before_the_monitor_do_not_confuse_it(rate: str) -> None:
    model = decoder().double()
    lr = torch.tensor(0.05, dtype=torch.float64) if rate == "tensor" else 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    monitor = Monitor(model, optimizer)

    def after(_: int) -> None:
        scheduler.step()
        monitor.step()

    train(model, optimizer, exact_text_loss, 6, after=after)
    assert worst(monitor) < EXACT
    assert [entry.rate for entry in monitor.ledger(law="norm.gain")] == pytest.approx([0.05 * 0.7**k for k in range(6)])


def test_a_warm_up_from_zero_is_a_step_that_moves_nothing() -> None:
    model = decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)
    monitor = Monitor(model, optimizer)

    def after(_: int) -> None:
        monitor.step()
        scheduler.step()

    train(model, optimizer, exact_text_loss, 4, after=after)
    assert all(entry.observed == 0 for entry in monitor.ledger(step=1))
    assert worst(monitor) < EXACT
    assert not monitor.alarms


def test_gradients_are_accumulated_between_steps() -> None:
    model = decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    monitor = Monitor(model, optimizer)
    for number in range(9):
        (exact_text_loss(model, number) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            monitor.step()
            optimizer.zero_grad()
    assert {entry.step for entry in monitor.ledger()} == {1, 2, 3}
    assert worst(monitor) < EXACT


class Overflowing:
    """A loss that is infinite in chosen steps, as half precision makes it."""

    def __init__(self, *when: int) -> None:
        self.when = when

    def __call__(self, model: nn.Module, number: int) -> Tensor:
        loss = text_loss(model, number)
        return loss * torch.inf if number in self.when else loss


@pytest.mark.parametrize("way", ["plain", "fused", "fused, counts on a device"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_steps_that_a_gradient_scaler_skips_move_nothing(cls: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = way != "plain"
    if "device" in way:
        monkeypatch.setattr("conserved.tracking.optimizer_watch.remote", lambda tensor: True)
        monkeypatch.setattr("conserved.tracking.optimizer_rules._number", lambda step: step.to(torch.float64))
    model = decoder()
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {"weight_decay": 0.1}
    optimizer = cls(model.parameters(), lr=0.01, fused=fused, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    monitor = Monitor(model, optimizer)
    loss = Overflowing(2, 4)
    for number in range(7):
        optimizer.zero_grad()
        scaler.scale(loss(model, number)).backward()
        scaler.step(optimizer)
        monitor.step()
        scaler.update()
    assert not monitor.alarms, monitor.alarms[0].message
    still = {entry.step for entry in monitor.ledger() if entry.observed == 0}
    assert {3, 5} <= still
    assert all(any(entry.observed != 0 for entry in monitor.ledger(step=step)) for step in (1, 2, 4, 6, 7))


def test_autocast_is_noticed_by_the_account() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer, loss="cross_entropy")

    def loss(net: nn.Module, number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return text_loss(net, number)

    train(model, optimizer, loss, 20, after=lambda _: monitor.step())
    assert not monitor.alarms
    # What bfloat16 leaves in the gradients is far above what float32 would.
    strict = Monitor(model, optimizer, loss="cross_entropy", config=MonitorConfig(precision=torch.float32))
    train(model, optimizer, loss, 20, after=lambda _: strict.step())
    ratio = max(entry.excess for entry in strict.ledger()) / max(entry.excess for entry in monitor.ledger())
    assert ratio > 3


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
        (torch.optim.SGD, {"foreach": False, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.RMSprop, {"foreach": True, "momentum": 0.5}),
        (torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"maximize": True, "weight_decay": 0.1}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else " ".join(value),
)
def test_every_implementation_of_an_optimizer_follows_its_rule(cls: Any, options: dict[str, Any]) -> None:
    model = decoder().double()
    optimizer = cls(model.parameters(), lr=0.002, **options)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 6, after=lambda _: monitor.step())
    assert worst(monitor) < EXACT
    assert not monitor.alarms


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_users_run_it")
def test_a_compiled_model_is_watched_through_its_own_parameters() -> None:
    model = decoder().double()
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.003)
    monitor = Monitor(compiled, optimizer)
    assert all(not symmetry.name.startswith("_orig_mod") for symmetry in monitor.laws)
    train(compiled, optimizer, exact_text_loss, 3, after=lambda _: monitor.step())
    assert worst(monitor) < EXACT


@pytest.mark.parametrize("rule", [None, GENERIC], ids=["own", "generic"])
def test_gradients_may_be_computed_inside_the_step(rule: Any) -> None:
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = Monitor(model, optimizer, config=MonitorConfig(rule=rule))
    for number in range(4):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = exact_text_loss(model, number)
            loss.backward()
            return loss

        optimizer.step(closure)
        monitor.step()
    assert worst(monitor) < EXACT


def test_an_optimizer_that_steps_many_times_inside_is_accounted_for_by_the_generic_rule() -> None:
    model = decoder().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    monitor = Monitor(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = exact_text_loss(model, 0)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        monitor.step()
    assert worst(monitor) < EXACT
    assert max(abs(entry.first_order) for entry in monitor.ledger()) > 1e-6


def test_sparse_gradients_are_read() -> None:
    model = without_epsilon(blocks.DecoderLM(VOCABULARY, 8, 1, 2, 6, max_length=LENGTH)).double()
    model.get_submodule("embedding").sparse = True  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer, loss="cross_entropy")
    train(model, optimizer, exact_text_loss, 3, after=lambda _: monitor.step())
    assert worst(monitor) < EXACT
    assert not monitor.alarms


def test_parts_of_a_model_that_a_batch_does_not_reach_stay_where_they_are() -> None:
    model = blocks.DecoderLM(
        VOCABULARY, 8, 1, 2, 6, max_length=LENGTH, experts=4, top_k=2, positions="rotary-half"
    ).double()
    without_epsilon(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    monitor = Monitor(model, optimizer)

    def loss(net: nn.Module, number: int) -> Tensor:
        batch = sentences(number, count=1)[:, :2]
        return F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    train(model, optimizer, loss, 6, after=lambda _: monitor.step())
    assert worst(monitor) < EXACT
    assert not monitor.alarms


def test_step_counts_on_a_device_are_followed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conserved.tracking.optimizer_watch.remote", lambda tensor: True)
    model = decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    train(model, optimizer, exact_text_loss, 2)
    monitor = Monitor(model, optimizer, every=2)
    train(model, optimizer, exact_text_loss, 6, after=stepping(monitor))
    assert worst(monitor) < EXACT
    optimizer.load_state_dict(optimizer.state_dict())
    for state in optimizer.state.values():
        state["step"] -= 1
    train(model, optimizer, exact_text_loss, 4, after=stepping(monitor))
    assert worst(monitor) < EXACT


def test_groups_added_during_training_are_followed() -> None:
    model = decoder().double()
    names = dict(model.named_parameters())
    head = names.pop("head.weight")
    optimizer = torch.optim.SGD(names.values(), lr=0.05, momentum=0.9)
    optimizer.add_param_group({"params": [head], "lr": 0.05})
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 2, after=lambda _: monitor.step())
    extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra], "lr": 0.01})
    train(model, optimizer, exact_text_loss, 2, after=lambda _: monitor.step())
    assert worst(monitor) < EXACT


def test_laws_that_become_known_inside_a_step_are_watched_from_the_next_one_on() -> None:
    class Two(torch.nn.Module):
        """Called with two tensors, which nobody can guess."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 2, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.second(self.first(x) + self.first(y))

    torch.manual_seed(0)
    model = Two().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    monitor = Monitor(model, optimizer)
    x, y = torch.randn(2, 5, 3, dtype=torch.float64)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x, y).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        monitor.step()
    assert [record.step for record in monitor.records] == [2, 3]
    assert worst(monitor) < EXACT
