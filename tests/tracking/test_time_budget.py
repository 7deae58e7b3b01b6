"""Which steps a monitor looks at, from times that are known."""

from __future__ import annotations

import random

import pytest

from conserved.tracking.time_budget import MOST, TimeBudget
from conserved.tracking.watching_cost import WatchingCost

pytestmark = pytest.mark.budget


def simulate(
    budget: TimeBudget, *, step: float, look: float, base: float = 0.0, first: float = 0.0, steps: int = 5000
) -> list[float]:
    """Return the seconds that a monitor took in every step, with looks and steps of known length."""
    spent = []
    for number in range(1, steps + 1):
        looked = budget.due(number)
        spent.append(base + (look if looked else 0.0) + (first if number == 1 else 0.0))
        budget.note(number, spent=spent[-1], run=step, looked=looked)
    return spent


@pytest.mark.parametrize("step", [0.0005, 0.02, 2.0])
@pytest.mark.parametrize("look", [0.0001, 0.004, 0.3])
@pytest.mark.parametrize("base", [0.0, 0.0003])
def test_what_is_taken_after_any_number_of_steps_is_the_allowance_and_one_look(
    step: float, look: float, base: float
) -> None:
    spent = simulate(TimeBudget(share=0.05, least=0.002), step=step, look=look, base=base, first=5 * look)
    allowance, total = max(0.05 * step, 0.002), 0.0
    for number, seconds in enumerate(spent, 1):
        total += seconds
        looks_forced = (number // MOST + number.bit_length()) * (look + base)
        assert total <= (number + 1) * allowance + 6 * look + base + looks_forced


@pytest.mark.parametrize(("look", "apart"), [(0.001, 1), (0.01, 6), (0.1, 59)])
def test_looks_are_as_far_apart_as_their_cost_asks_for(look: float, apart: int) -> None:
    budget = TimeBudget(share=0.05, least=0.002)
    simulate(budget, step=0.001, look=look, base=0.0003)
    assert abs(budget.interval - apart) <= 1


def test_a_pause_does_not_buy_a_row_of_expensive_steps() -> None:
    budget = TimeBudget(share=0.05)
    simulate(budget, step=0.1, look=0.05, steps=100)
    budget.note(101, spent=0.0, run=600.0, looked=False)
    looks = 0
    for number in range(102, 122):
        looks += (looked := budget.due(number))
        budget.note(number, spent=0.05 if looked else 0.0, run=0.1, looked=looked)
    assert looks <= 3


def test_a_monitor_that_cannot_afford_anything_still_looks_now_and_then() -> None:
    budget = TimeBudget(share=0.01)
    spent = simulate(budget, step=0.001, look=2.0, base=0.01, steps=3 * MOST)
    looks = [number for number, seconds in enumerate(spent, 1) if seconds > 1]
    assert looks == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2024, 2048]


def test_the_first_look_does_not_leave_the_steps_after_it_unseen() -> None:
    spent = simulate(TimeBudget(share=0.05, least=0.002), step=0.0005, look=0.002, base=0.0005, first=0.08, steps=100)
    assert sum(seconds > 0.002 for seconds in spent[1:20]) >= 10
    assert sum(spent) <= 100 * 0.002 + 0.08 + 0.004


def test_a_long_look_does_not_leave_the_steps_after_it_unseen() -> None:
    """Passes that are run again on suspicion take seconds; the audits after them are as important as before."""
    budget = TimeBudget(share=0.01)
    simulate(budget, step=0.1, look=0.008, first=10.0, steps=500)
    looks = []
    for step in range(501, 1001):
        if looked := budget.due(step):
            looks.append(step)
        budget.note(step, spent=(4.0 if len(looks) == 1 else 0.008) * looked, run=0.1, looked=looked)
    assert 40 <= len(looks) <= 60, looks


def test_debts_are_paid_in_the_long_run() -> None:
    spent = simulate(TimeBudget(share=0.01), step=0.1, look=0.008, first=1.0, steps=20_000)
    assert sum(spent) <= 20_000 * 0.001 + 0.02
    assert sum(spent) >= 0.9 * 20_000 * 0.001


def test_processes_that_look_together_follow_the_number_they_agreed_on() -> None:
    budget = TimeBudget(share=0.05, together=True)
    budget.interval = 7
    looks = []
    for step in range(1, 30):
        if budget.due(step):
            looks.append(step)
            budget.note(step, spent=9.0, run=1.0, looked=True)
    assert looks == [1, 2, 4, 8, 15, 16, 23]
    assert [step for step in range(1, 200) if budget.revises(step)] == [2, 4, 8, 16, 32, 64, 128, 192]


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_budget_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="budget"):
        TimeBudget(share=share)


@pytest.mark.parametrize("extra", [0.0, 0.04, 0.19, 3.0])
def test_what_watching_adds_on_a_device_follows_from_times_between_audits(extra: float) -> None:
    chance, cost = random.Random(0), WatchingCost()
    for steps in [1] * 20 + [5] * 20 + [20] * 20:
        times = [0.5 * (1 + 0.01 * chance.uniform(-1, 1)) for _ in range(steps)]
        cost.note(steps, sum(times) + extra * 0.5)
    assert cost.seconds() == pytest.approx(extra * 0.5, abs=0.005)


def test_what_watching_adds_is_nothing_while_it_is_not_known() -> None:
    cost = WatchingCost()
    for _ in range(10):
        cost.note(1, 0.5)
    assert cost.seconds() == 0.0
