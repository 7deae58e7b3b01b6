"""What theory says of discrete time, each as a fitted exponent: order, growth, schedules, decay, momentum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import nn

from conserved import Monitor, MonitorConfig
from conserved.tracking import Combination, Entry, ParameterStep, Update, optimizer_rules, register_rule
from tolerances import ORDER
from training import decoder, exact_text_loss, noise_loss, stepping, train, vision

FLOW_TIME = 0.4


def fitted(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y ∝ x^p, by least squares."""
    a = torch.tensor(x, dtype=torch.float64).log()
    b = torch.tensor(y, dtype=torch.float64).log()
    a = a - a.mean()
    return float((a * (b - b.mean())).sum() / (a * a).sum())


def same_batch(model: nn.Module, _: int) -> torch.Tensor:
    return exact_text_loss(model, 0)


def drifts(monitor: Monitor, step: int, *, lawful: bool = True) -> dict[str, float]:
    """|h − h_0| of every law at a step, over the size of its terms."""
    return {
        entry.law: abs(entry.drift) / float(monitor.reference.scales[entry.law].abs().max())
        for entry in monitor.ledger(step=step)
        if ("not_" not in entry.law) is lawful
    }


def descend(step_size: float, steps: int, *, impostors: bool = False) -> Monitor:
    torch.manual_seed(0)
    model = decoder(positions="none").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=step_size)
    monitor = Monitor(model, optimizer, loss="cross_entropy", config=MonitorConfig(baselines=impostors))
    train(model, optimizer, same_batch, steps, after=lambda _: monitor.step())
    return monitor


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_at_equal_flow_time_laws_drift_to_first_order_impostors_to_order_zero_and_linear_laws_not_at_all() -> None:
    sizes = [0.02, 0.01, 0.005]
    runs = {size: descend(size, round(FLOW_TIME / size), impostors=True) for size in sizes}
    laws = {size: drifts(run, round(FLOW_TIME / size)) for size, run in runs.items()}
    false = {size: drifts(run, round(FLOW_TIME / size), lawful=False) for size, run in runs.items()}
    one = runs[sizes[0]].laws
    quadratic = [symmetry.name for symmetry in one if not symmetry.kind.linear and "not_" not in symmetry.family]
    linear = [symmetry.name for symmetry in one if symmetry.kind.linear and "not_" not in symmetry.family]
    assert quadratic
    assert linear
    for name in quadratic:
        assert fitted(sizes, [laws[size][name] for size in sizes]) == pytest.approx(1, abs=ORDER), name
    for name in linear:
        assert max(laws[size][name] for size in sizes) < 1e-14, name
    moving = [name for name in false[sizes[0]] if "class_shift" not in name]
    assert moving
    for name in moving:
        assert fitted(sizes, [false[size][name] for size in sizes]) == pytest.approx(0, abs=ORDER), name


def stochastic(schedule: Callable[[int], float], steps: int) -> Monitor:
    """A new batch every step: gradients that do not settle."""
    torch.manual_seed(0)
    model = vision().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    monitor = Monitor(model, optimizer, where="layers.0.attention")

    def after(_: int) -> None:
        monitor.step()
        scheduler.step()

    train(model, optimizer, noise_loss, steps, after=after)
    return monitor


def constant(size: float) -> Callable[[int], float]:
    return lambda _: size


def spread(entries: list[Entry]) -> dict[int, float]:
    """The total drift of all laws by step."""
    total: dict[int, float] = {}
    for entry in entries:
        total[entry.step] = math.hypot(total.get(entry.step, 0.0), entry.drift)
    return total


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_at_a_constant_step_the_drift_grows_as_the_square_of_the_step_times_their_number() -> None:
    runs = {size: spread(stochastic(constant(size), 96).ledger()) for size in (0.0005, 0.001, 0.002)}
    counts = [12, 24, 48, 96]
    for size, drift in runs.items():
        assert fitted(counts, [drift[count] for count in counts]) == pytest.approx(1, abs=ORDER), size
    for count in counts:
        exponent = fitted(list(runs), [drift[count] for drift in runs.values()])
        assert exponent == pytest.approx(2, abs=ORDER), count


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_with_steps_that_fall_as_one_over_k_the_drift_stays_bounded() -> None:
    monitor = stochastic(lambda k: 0.05 / (k + 1), 320)
    drift = spread(monitor.ledger())
    counts = [40, 80, 160, 320]
    assert fitted(counts, [drift[count] for count in counts]) == pytest.approx(0, abs=ORDER)
    # Σ 1/(k+1)² = π²/6, so equation (9) is a bound for all times.
    for row in monitor.bounds():
        assert row.applies
        assert row.square_steps < 0.05**2 * math.pi**2 / 6
        assert row.observed <= row.bound


@pytest.mark.parametrize("size", [0.02, 0.05], ids=str)
def test_equation_9_bounds_the_drift_and_the_account_predicts_it(size: float) -> None:
    monitor = descend(size, 20)
    for row in monitor.bounds():
        assert row.applies
        assert row.square_steps == pytest.approx(20 * size**2)
        assert row.observed <= row.second_order * (1 + 1e-9) + 1e-14
        assert row.second_order <= row.bound * (1 + 1e-9)
        assert row.observed == pytest.approx(row.predicted, rel=1e-6, abs=1e-14)
    assert any(row.observed > 0.05 * row.bound for row in monitor.bounds()), "a bound that is never near says little"


def test_equation_9_does_not_speak_of_other_optimizers() -> None:
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 3, after=lambda _: monitor.step())
    assert not any(row.applies for row in monitor.bounds())


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
def test_with_weight_decay_laws_decay_as_e_to_minus_two_lambda_t(decoupled: bool) -> None:
    """The distance to the decay law is of first order in the step, at equal flow time."""
    decay, time = 0.5, 0.4
    sizes = [0.02, 0.01, 0.005]
    gaps: dict[str, list[float]] = {}
    for size in sizes:
        torch.manual_seed(0)
        model = decoder(positions="none").double()
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.SGD(model.parameters(), lr=size, weight_decay=decay)
        if decoupled:
            # Adam with β = 0 and ε far above the gradients is descent with step lr/ε, decoupled decay λ·ε beside it.
            big = 1e8
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=size * big, betas=(0.0, 0.0), eps=big, weight_decay=decay / big
            )
        monitor = Monitor(model, optimizer)
        train(model, optimizer, same_batch, round(time / size), after=stepping(monitor))
        for row in monitor.decay():
            assert row.predicted == pytest.approx(math.exp(-(1 if monitor.laws[row.law].kind.linear else 2) * 0.2))
            assert row.observed == pytest.approx(row.predicted, rel=0.1)
            gaps.setdefault(row.law, []).append(abs(row.observed - row.predicted))
    assert gaps
    for law, result in gaps.items():
        assert fitted(sizes, result) == pytest.approx(1, abs=ORDER), law


def test_legs_that_decay_differently_have_no_decay_law() -> None:
    model = decoder().double()
    gains = [p for p in model.parameters() if p.ndim == 1]
    rest = [p for p in model.parameters() if p.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": gains, "weight_decay": 0.0}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.1)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 2, after=lambda _: monitor.step())
    assert not [row for row in monitor.decay() if row.law.endswith("gain")]
    assert [row for row in monitor.decay() if "query_key" in row.law]
    assert not monitor.alarms


@pytest.mark.parametrize("told", [True, False])
def test_a_decay_by_another_name_is_known_if_the_rule_says_so_and_not_said_otherwise(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shrinking(torch.optim.Optimizer):
        def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
            super().__init__(parameters, {"lr": 0.01, "shrink": 0.5})

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= group["lr"] * (parameter.grad + group["shrink"] * parameter.data)

    def update(step: ParameterStep) -> Update:
        lr, shrink = step.group["lr"], step.group["shrink"]
        before = (Combination.of(step.parameter) + lr * step.descent_gradient) / (1 - lr * shrink)
        return Update(gradient=step.descent_gradient, rate=lr, parts={"decay": lr * shrink * before})

    monkeypatch.setattr(optimizer_rules, "_RULES", dict(optimizer_rules._RULES))
    rates: dict[str, Any] = {"decay": itemgetter("shrink")} if told else {}
    register_rule(Shrinking, update, **rates)
    model = decoder(positions="none").double()
    optimizer = Shrinking(model.parameters())
    monitor = Monitor(model, optimizer)
    train(model, optimizer, same_batch, 40, after=stepping(monitor))
    assert not monitor.alarms
    rows = {row.law: row for row in monitor.decay()}
    assert bool(rows) == told
    for law, row in rows.items():
        assert row.predicted == pytest.approx(math.exp(-(1 if monitor.laws[law].kind.linear else 2) * 0.2))
        assert row.observed == pytest.approx(row.predicted, rel=0.1)


@pytest.mark.parametrize("positions", ["none", "rotary"], ids=["GL", "rotary"])
def test_heavy_ball_angular_momenta_decay_by_the_momentum_exactly_at_any_step_size(positions: str) -> None:
    momentum, steps = 0.8, [1, 3, 6, 10]
    model = decoder(positions=positions).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, dampening=0.3, weight_decay=0.01)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = 0.01 * torch.randn_like(parameter)
    monitor = Monitor(model, optimizer)
    sizes: dict[str, list[float]] = {}

    def after(number: int) -> None:
        monitor.step()
        if number + 1 in steps:
            for row in monitor.angular_momenta():
                assert row.factor == pytest.approx(momentum ** (number + 1))
                assert row.error < 1e-13, row
                sizes.setdefault(row.law, []).append(row.now / row.start)

    train(model, optimizer, exact_text_loss, max(steps), after=after)
    turning = [s.name for s in monitor.laws if s.kind.code in ("general_linear", "complex_scaling")]
    assert sorted(sizes) == sorted(turning)
    for law, result in sizes.items():
        rate = fitted([math.exp(step) for step in steps], result)
        assert rate == pytest.approx(math.log(momentum), abs=1e-9), law


def test_a_run_that_starts_at_rest_has_no_angular_momentum() -> None:
    model = decoder(positions="none").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 10, after=lambda _: monitor.step())
    rows = monitor.angular_momenta()
    assert rows
    assert max(row.error for row in rows) < 1e-13


def test_nesterov_momentum_has_no_such_invariant() -> None:
    model = decoder(positions="none").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 2, after=lambda _: monitor.step())
    assert monitor.angular_momenta() == []


class Rolling(torch.optim.Optimizer):
    """v ← friction · v + g and θ ← θ − lr · v: heavy-ball momentum by other names, and descent without friction."""

    def __init__(self, parameters: Iterable[nn.Parameter], friction: float) -> None:
        super().__init__(parameters, {"lr": 0.05, "friction": friction})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["friction"]).add_(parameter.grad)
                parameter.sub_(group["lr"] * velocity)


def rolling(step: ParameterStep) -> Update:
    lr, velocity = step.group["lr"], Combination.of(step.state["velocity"])
    return Update(gradient=step.descent_gradient, rate=lr, parts={"momentum": lr * (velocity - step.descent_gradient)})


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("friction", [0.0, 0.8], ids=["descent", "heavy ball"])
def test_an_optimizer_with_words_of_its_own_says_in_its_rule_which_theory_it_follows(
    friction: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_rules, "_RULES", dict(optimizer_rules._RULES))
    theory: dict[str, Any] = {
        "plain": lambda group: group["friction"] == 0,
        "momentum": lambda group: group["friction"] or None,
        "buffer": "velocity",
    }
    register_rule(Rolling, rolling, **(theory if told else {}))
    model = decoder(positions="none").double()
    optimizer = Rolling(model.parameters(), friction)
    for parameter in model.parameters():
        optimizer.state[parameter]["velocity"] = 0.01 * torch.randn_like(parameter)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 4, after=lambda _: monitor.step())
    assert not monitor.alarms
    assert any(row.applies for row in monitor.bounds()) == (told and friction == 0)
    turning = monitor.angular_momenta()
    assert bool(turning) == (told and friction > 0)
    for row in turning:
        assert row.start > 0
        assert row.factor == pytest.approx(friction**4)
        assert row.error < 1e-13, row
