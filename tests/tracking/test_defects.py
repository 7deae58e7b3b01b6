"""A planted defect shows as a residual in the laws it touches, at the step it happens, and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor, MonitorConfig
from conserved.tracking import Growth, rule_of
from told import told
from training import decoder, exact_text_loss, muon_and_adamw, sentences, text_loss, train

WHEN, STEPS = 4, 8
QUERY = "layers.0.attention.q.weight"
KEY = "layers.0.attention.k.weight"


def touching(monitor: Monitor, *parameters: str) -> set[str]:
    return {symmetry.name for symmetry in monitor.laws if set(parameters) & set(symmetry.parameters)}


def broken(monitor: Monitor) -> dict[int, set[str]]:
    """Laws with a residual above rounding, by step."""
    result: dict[int, set[str]] = {}
    monitor.flush()
    for record in monitor.records:
        for alarm in record.statements:
            if alarm.code == "residual":
                result.setdefault(alarm.step, set()).update(alarm.laws or (alarm.law,))
    return result


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "heavy ball": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.003),
    "Muon and AdamW": muon_and_adamw,
    "unknown": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_nudged_outside_the_optimizer(optimizer: str, dtype: torch.dtype) -> None:
    model = decoder().to(dtype)
    stepped = OPTIMIZERS[optimizer](model)
    monitor = Monitor(model, stepped, loss="cross_entropy")
    loss = exact_text_loss if dtype == torch.float64 else text_loss

    def after(number: int) -> None:
        monitor.step()
        if number + 2 == WHEN:
            with torch.no_grad():
                model.get_parameter(QUERY)[1].add_(0.01)

    train(model, stepped, loss, STEPS, after=after)
    assert broken(monitor) == {WHEN: touching(monitor, QUERY)}
    assert {alarm.code for alarm in told(monitor)} == {"something else wrote"}, "one defect, one alarm"


def test_a_nudge_between_the_step_and_the_monitor_belongs_to_that_step() -> None:
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer)

    def after(number: int) -> None:
        if number + 1 == WHEN:
            with torch.no_grad():
                model.get_parameter(KEY)[0].mul_(1.001)
        monitor.step()

    train(model, optimizer, exact_text_loss, STEPS, after=after)
    assert broken(monitor) == {WHEN: touching(monitor, KEY)}


def test_the_residual_is_the_change_the_nudge_made() -> None:
    model = decoder(positions="none").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 3, after=lambda _: monitor.step())
    law = monitor.laws["layers.0.attention.query_key[0]"]
    before = law.law(monitor.laws.parameters).detach()
    with torch.no_grad():
        model.get_parameter(QUERY)[1].add_(0.01)
    change = law.law(monitor.laws.parameters).detach() - before
    train(model, optimizer, exact_text_loss, 1, after=lambda _: monitor.step())
    (entry,) = monitor.ledger(law=law.name, step=4)
    assert float((change - entry.residual).abs().min()) < 1e-12


class HalfReduced:
    """A gradient of one parameter that only half of the batch went into, as after an all-reduce that did not happen."""

    def __init__(self, parameter: str, when: int) -> None:
        self.parameter, self.when = parameter, when

    def __call__(self, model: nn.Module, number: int) -> Tensor:
        if number + 1 == self.when:
            half = sentences(number)[:2]
            loss = F.cross_entropy(model(half[:, :-1]).flatten(0, 1), half[:, 1:].flatten())
            (local,) = torch.autograd.grad(loss, [model.get_parameter(self.parameter)])
            handle: list[Any] = []

            def swap(gradient: Tensor) -> Tensor:
                handle[0].remove()
                return local

            handle.append(model.get_parameter(self.parameter).register_hook(swap))
        return exact_text_loss(model, number)


@pytest.mark.parametrize("optimizer", ["SGD", "heavy ball", "AdamW", "Muon and AdamW"])
def test_a_gradient_that_was_not_reduced(optimizer: str) -> None:
    model = decoder().double()
    stepped = OPTIMIZERS[optimizer](model)
    monitor = Monitor(model, stepped, loss="cross_entropy")
    train(model, stepped, HalfReduced(KEY, WHEN), STEPS, after=lambda _: monitor.step())
    assert broken(monitor) == {WHEN: touching(monitor, KEY)}


def test_a_wrong_learning_rate_on_one_matrix() -> None:
    class Mistaken(torch.optim.SGD):
        """Uses three times the learning rate for one parameter in one step."""

        count = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.count += 1
            super().step()
            if self.count == WHEN:
                wrong = model.get_parameter(QUERY)
                assert wrong.grad is not None
                wrong.sub_(2 * self.param_groups[0]["lr"] * wrong.grad)

    model = decoder().double()
    optimizer = Mistaken(model.parameters(), lr=0.05)
    rule = rule_of(torch.optim.SGD(model.parameters(), lr=0.05))
    monitor = Monitor(model, optimizer, config=MonitorConfig(rule=rule), loss="cross_entropy")
    train(model, optimizer, exact_text_loss, STEPS, after=lambda _: monitor.step())
    assert broken(monitor) == {WHEN: touching(monitor, QUERY)}


def test_weights_tied_after_the_fact_by_their_storage() -> None:
    model = decoder(kv_heads=2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer, loss="cross_entropy")

    def after(number: int) -> None:
        monitor.step()
        if number + 2 == WHEN:
            model.get_parameter(KEY).data = model.get_parameter(QUERY).data

    train(model, optimizer, exact_text_loss, STEPS, after=after)
    result = broken(monitor)
    assert min(result) == WHEN
    assert set(result) == set(range(WHEN, STEPS + 1)), "every later step moves both through one storage"
    assert all(laws <= touching(monitor, QUERY, KEY) for laws in result.values())
    assert {law for law in touching(monitor, QUERY, KEY) if "query_key" in law} <= result[WHEN]


def test_weights_tied_after_the_fact_by_their_name() -> None:
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer, loss="cross_entropy")

    def after(number: int) -> None:
        monitor.step()
        if number + 2 == WHEN:
            model.get_submodule("head").weight = model.get_submodule("embedding").weight

    train(model, optimizer, exact_text_loss, STEPS, after=after)
    (alarm,) = monitor.alarms
    assert (alarm.step, alarm.code) == (WHEN, "replaced")
    assert "steps 1 tensor that the model does not have any more" in alarm.message
    # The laws are those of the tied model from then on.
    assert monitor.state == "watching"
    assert "head.weight" not in monitor.laws.parameters


def test_a_slow_leak_raises_an_alarm_though_no_step_does() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = Monitor(model, optimizer, where="*query_key*")
    scale = 1 + 1e-6

    def after(_: int) -> None:
        with torch.no_grad():
            model.get_parameter(QUERY).mul_(scale)
        monitor.step()

    train(model, optimizer, text_loss, 60, after=after)
    codes = {alarm.code for alarm in told(monitor)}
    assert codes == {"leak"}
    assert min(alarm.step for alarm in told(monitor)) > 1


def test_a_statement_is_told_once_per_law_and_recorded_every_time(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer, where="*query_key*")

    def after(_: int) -> None:
        with torch.no_grad():
            model.get_parameter(QUERY).mul_(1.01)
        monitor.step()

    with caplog.at_level(logging.INFO, logger="conserved"):
        train(model, optimizer, exact_text_loss, 5, after=after)
    assert caplog.text.count("no alarm, as a program may mean it") == 1
    assert f"Something else than the optimizer wrote to {QUERY}" in caplog.text
    (alarm,) = told(monitor)
    assert (alarm.step, alarm.last) == (1, 5)
    assert all(record.statements for record in monitor.records)


def test_a_reading_that_grows_raises_an_alarm() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    values: Iterator[float] = iter([1.0, 1.5, 2.5, 1.0])
    monitor = Monitor(
        model,
        optimizer,
        config=MonitorConfig(
            gauges={"coherence": lambda: next(values), "logit": lambda: torch.tensor(2.0)},
            alarms=[Growth(reading="coherence", factor=2.0), Growth(reading="absent", factor=1.0)],
        ),
    )
    train(model, optimizer, text_loss, 4, after=lambda _: monitor.step())
    (alarm,) = monitor.alarms
    assert (alarm.step, alarm.code, alarm.law, alarm.value) == (3, "growth", "coherence", 2.5)
    assert [record.readings["logit"] for record in monitor.records] == [2.0] * 4


@pytest.mark.parametrize("maximize", [False, True], ids=["descent", "ascent"])
def test_clipping_by_value_is_a_cause_if_the_monitor_is_told_and_is_stated_if_not(maximize: bool) -> None:
    for announced in (True, False):
        torch.manual_seed(0)
        model = decoder(positions="none").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, maximize=maximize)
        monitor = Monitor(model, optimizer, loss="cross_entropy")
        for number in range(4):
            optimizer.zero_grad()
            exact_text_loss(model, number).backward()
            if announced:
                monitor.before_clipping()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            monitor.step()
        entries = monitor.ledger()
        if announced:
            assert max(abs(entry.residual) for entry in entries) < 1e-13
            assert max(abs(entry.causes["clipping"]) for entry in entries) > 1e-4
            assert not monitor.alarms
        else:
            assert max(abs(entry.residual) for entry in entries) > 1e-4
            assert not monitor.alarms
            assert "clipped by value" in monitor.state


def test_clipping_by_the_norm_of_all_moves_no_law_to_first_order() -> None:
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer, loss="cross_entropy")
    for number in range(4):
        optimizer.zero_grad()
        exact_text_loss(model, number).backward()
        monitor.before_clipping()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        monitor.step()
    assert max(abs(entry.causes["clipping"]) for entry in monitor.ledger()) < 1e-14
    assert not monitor.alarms
