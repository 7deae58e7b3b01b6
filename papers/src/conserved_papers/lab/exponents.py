"""How drift grows: with the number of steps, with the step size at fixed steps, and at fixed flow time.

Exponents are fitted to the change of all laws of a family together over the size of their terms. Equation (10), a mean
of ratios, follows whichever law starts nearest to zero; its exponents are those of that one law.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from conserved_papers.lab.fits import FittedInterval, exponent, interval
from conserved_papers.lab.trajectory import Trajectory

Runs = Mapping[float, Sequence[Trajectory]]
"""Trajectories by initial step size, with the same seeds in the same order."""

_FIRST = 4
"""Growth is fitted from this step on."""

_SAME_TIME = 0.01


def by_rate(trajectories: Sequence[Trajectory]) -> dict[float, list[Trajectory]]:
    """Step sizes in rising order, seeds in rising order."""
    rates = sorted({trajectory.step for trajectory in trajectories})
    return {rate: sorted((t for t in trajectories if t.step == rate), key=lambda t: t.seed) for rate in rates}


def growth(trajectories: Sequence[Trajectory], family: str) -> FittedInterval:
    """Return p of drift ∝ (Σ τ_i²)^p over seeds; at a constant step Σ τ_i² = τ² k, so this is the exponent in k."""
    return interval([_growth(run, run.squares, family, min(_FIRST, run.steps / 4)) for run in trajectories])


def growth_after(trajectories: Sequence[Trajectory], family: str, share: float) -> FittedInterval:
    """Return the exponent p of drift ∝ k^p from a share of the steps on, over seeds: whether the drift still grows."""
    return interval([_growth(run, run.at, family, share * run.steps) for run in trajectories])


def _growth(run: Trajectory, across: Sequence[float | int], family: str, first: float) -> float:
    """Return the exponent p of drift ∝ across^p from a step on."""
    indices, drift = [index for index, step in enumerate(run.at) if step >= first], run.quantity(family).drift
    return exponent([across[index] for index in indices], [drift[index] for index in indices])


def in_step_size(runs: Runs, family: str) -> FittedInterval:
    """Return the exponent p of drift ∝ τ^p at the same number of steps, over seeds."""
    last = min(run.steps for group in runs.values() for run in group)
    recorded = [set(run.at) for group in runs.values() for run in group]
    common = max((step for step in set.intersection(*recorded) if step <= last), default=None)
    return _over_seeds(runs, family, None if common is None else dict.fromkeys(runs, common))


def at_flow_time(runs: Runs, family: str) -> FittedInterval:
    """Return p of drift ∝ τ^p at the same flow time τk, over seeds: 1 for a quadratic law, 0 for what is not
    conserved.
    """
    return _over_seeds(runs, family, steps_at_flow_time(runs))


def steps_at_flow_time(runs: Runs) -> dict[float, int] | None:
    """Return by step size the recorded steps at the latest flow time Σ τ_i that all reach; None if there is none."""
    first = runs[min(runs)][0]
    for time in reversed(first.time[1:]):
        steps = {rate: _step_at(group[0], time) for rate, group in runs.items()}
        result = {rate: step for rate, step in steps.items() if step is not None}
        if len(result) == len(steps):
            return result
    return None


def _step_at(run: Trajectory, time: float) -> int | None:
    """Return the recorded step at a flow time, to one per cent."""
    index = min(range(len(run.time)), key=lambda index: abs(run.time[index] - time))
    return run.at[index] if abs(run.time[index] - time) < _SAME_TIME * time else None


def _over_seeds(runs: Runs, family: str, steps: Mapping[float, int] | None) -> FittedInterval:
    """Return the exponent p of drift ∝ τ^p at such steps; None where runs have none in common."""
    if steps is None:
        return FittedInterval(math.nan, None, None)
    seeds = sorted(set.intersection(*({run.seed for run in group} for group in runs.values())))
    result = []
    for seed in seeds:
        of_seed = {rate: next(run for run in group if run.seed == seed) for rate, group in runs.items()}
        errors = [run.quantity(family).drift[run.at.index(steps[rate])] for rate, run in of_seed.items()]
        result.append(exponent(list(of_seed), errors))
    return interval(result)
