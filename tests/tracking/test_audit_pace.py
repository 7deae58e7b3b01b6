"""How often audits come, from times that are known."""

from __future__ import annotations

import random

import pytest

from conserved.tracking import audit_pace
from conserved.tracking.audit_pace import Pace


def shares(
    pace: Pace, *, step: float, extra: float, cost: float, steps: int, noise: float = 0.0, seed: int = 0
) -> tuple[float, int]:
    """The share of the last half of a run that watching and audits took, and the usual interval at its end."""
    chance = random.Random(seed)
    at, interval = 0, 1
    late = lost = 0.0
    intervals = []
    while at < steps:
        at += interval
        times = [step * (1 + noise * chance.uniform(-1, 1)) for _ in range(interval)]
        pace.note(cost, steps=interval, between=sum(times) + extra * times[-1])
        if at > steps / 2:
            late, lost = late + interval * step, lost + extra * step + cost
        interval = pace.interval()
        intervals.append(interval)
    # Now and then successive steps are audited, to measure again what watching makes of a step.
    return lost / late, sorted(intervals[-11:])[5]


CASES = [(0.19, 0.002, 20), (0.0, 0.002, 1), (0.0, 0.05, 5), (0.04, 0.0, 4), (3.0, 1.0, 100)]


@pytest.mark.parametrize("step", [0.05, 2.0])
@pytest.mark.parametrize(("extra", "cost", "interval"), CASES)
def test_what_watching_costs_counts_as_well(step: float, extra: float, cost: float, interval: int) -> None:
    share, last = shares(Pace(0.01), step=step, extra=extra, cost=cost * step, steps=40_000)
    assert last == interval
    assert share <= 0.0105 or last == audit_pace.AT_LEAST


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("extra", "cost", "interval"), CASES)
def test_steps_of_different_lengths_do_not_hide_what_watching_costs(
    seed: int, extra: float, cost: float, interval: int
) -> None:
    share, last = shares(Pace(0.01), step=2.0, extra=extra, cost=2 * cost, steps=8000, noise=0.1, seed=seed)
    assert share <= 0.025 or last == audit_pace.AT_LEAST
    assert interval / 2 <= last <= 2 * interval + 12


def test_steps_of_two_lengths_are_audited_often_where_that_costs_nothing() -> None:
    chance = random.Random(0)
    pace, at, audits = Pace(0.01), 0, 0
    while at < 5000:
        interval = pace.interval()
        pace.note(0.0005, steps=interval, between=sum(chance.choice((0.1, 0.5)) for _ in range(interval)))
        at, audits = at + interval, audits + 1
    assert audits >= 250, "five times as often as at least"


def test_an_evaluation_between_steps_is_not_taken_for_what_watching_costs() -> None:
    pace, at = Pace(0.01), 0
    intervals = []
    while at < 4000:
        intervals.append(pace.interval())
        at += intervals[-1]
        pace.note(0.005, steps=intervals[-1], between=1.0 * intervals[-1] + 500.0 * (at % 50 < intervals[-1]))
    assert sorted(intervals)[len(intervals) // 2] == 1


def test_watching_that_takes_all_the_time_there_is_comes_rarely() -> None:
    pace = Pace(0.01)
    for _ in range(40):
        # A step that is watched takes as long as two that are not.
        pace.note(1.0, steps=pace.interval(), between=10.0)
    assert pace.interval() == audit_pace.AT_LEAST


def test_short_runs_are_audited_at_every_step() -> None:
    pace = Pace(1e-6)
    for _ in range(50):
        pace.note(0.05, steps=1, between=0.1)
        assert pace.interval() == 1
    for _ in range(20):
        pace.note(0.05, steps=pace.interval(), between=0.1)
    assert pace.interval() == audit_pace.AT_LEAST


def test_long_steps_are_not_watched_for_hours_before_it_is_known_what_that_costs() -> None:
    pace = Pace(0.01)
    for _ in range(7):
        assert pace.interval() == 1
        pace.note(0.01, steps=1, between=10.0)
    assert pace.interval() == 2


def test_a_budget_of_everything_buys_every_step() -> None:
    pace = Pace(1.0)
    assert shares(pace, step=1.0, extra=2.0, cost=1.0, steps=200)[1] == 1


def test_times_are_taken_anew_after_a_change() -> None:
    pace = Pace(0.01)
    assert shares(pace, step=1.0, extra=0.19, cost=0.0, steps=500)[1] == 19
    pace.start_again()
    assert shares(pace, step=1.0, extra=0.05, cost=0.0, steps=500)[1] == 5


@pytest.mark.parametrize("budget", [0.0, -1.0, 1.5, float("nan")])
def test_a_budget_is_a_share(budget: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Pace(budget)
