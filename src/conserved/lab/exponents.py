"""How drift grows: with the number of steps, with the step size at fixed steps, and at fixed flow time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from conserved.lab.fits import Interval, exponent, interval
from conserved.lab.trajectory import Trajectory

Runs = Mapping[float, Sequence[Trajectory]]
"""Trajectories by initial step size, with the same seeds in the same order."""

_FIRST = 4
"""Growth is fitted from this step on."""


def by_rate(trajectories: Sequence[Trajectory]) -> dict[float, list[Trajectory]]:
    """Step sizes in rising order, seeds in rising order."""
    rates = sorted({trajectory.step for trajectory in trajectories})
    return {rate: sorted((t for t in trajectories if t.step == rate), key=lambda t: t.seed) for rate in rates}


def growth(trajectories: Sequence[Trajectory], family: str) -> Interval:
    """p of error ∝ (Σ τ_i²)^p over seeds; at a constant step Σ τ_i² = τ² k, so this is the exponent in k."""
    found = []
    for run in trajectories:
        kept = [place for place, step in enumerate(run.at) if step >= min(_FIRST, run.steps / 4)]
        error = run.quantity(family).mean
        found.append(exponent([run.squares[place] for place in kept], [error[place] for place in kept]))
    return interval(found)


def growth_after(trajectories: Sequence[Trajectory], family: str, share: float) -> Interval:
    """p of error ∝ k^p from a share of the steps on, over seeds: whether the drift still grows."""
    found = []
    for run in trajectories:
        kept = [place for place, step in enumerate(run.at) if step >= share * run.steps]
        error = run.quantity(family).mean
        found.append(exponent([run.at[place] for place in kept], [error[place] for place in kept]))
    return interval(found)


def in_step_size(runs: Runs, family: str) -> Interval:
    """p of error ∝ τ^p at the same number of steps, over seeds."""
    last = min(run.steps for group in runs.values() for run in group)
    common = [step for step in _common(runs) if step <= last]
    if not common:
        return Interval(math.nan, None, None)
    return _over_seeds(runs, family, dict.fromkeys(runs, common[-1]))


def at_flow_time(runs: Runs, family: str) -> Interval:
    """p of error ∝ τ^p at the same flow time τk, over seeds: 1 for a quadratic law, 0 for what is not conserved."""
    steps = steps_at_flow_time(runs)
    return Interval(math.nan, None, None) if steps is None else _over_seeds(runs, family, steps)


def steps_at_flow_time(runs: Runs) -> dict[float, int] | None:
    """By step size, the recorded steps that all reach the latest flow time they can all reach; None if there are none.

    The steps must be constant over each run.
    """
    smallest = min(runs)
    for last in reversed(_common({smallest: runs[smallest]})):
        steps = {rate: last * smallest / rate for rate in runs}
        if last and all(_recorded(runs[rate], step) for rate, step in steps.items()):
            return {rate: round(step) for rate, step in steps.items()}
    return None


def _common(runs: Runs) -> list[int]:
    """Steps that all runs recorded."""
    recorded = [set(run.at) for group in runs.values() for run in group]
    return sorted(set.intersection(*recorded)) if recorded else []


def _recorded(group: Sequence[Trajectory], step: float) -> bool:
    return abs(step - round(step)) < 1e-6 and all(round(step) in run.at for run in group)


def _over_seeds(runs: Runs, family: str, steps: Mapping[float, int]) -> Interval:
    seeds = sorted(set.intersection(*({run.seed for run in group} for group in runs.values())))
    found = []
    for seed in seeds:
        of_seed = {rate: next(run for run in group if run.seed == seed) for rate, group in runs.items()}
        errors = [run.quantity(family).mean[run.at.index(steps[rate])] for rate, run in of_seed.items()]
        found.append(exponent(list(of_seed), errors))
    return interval(found)
