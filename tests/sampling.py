"""Long tables of cases of which a part is tested, and all with `pytest --whole`."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest


def but_for(cases: Iterable[Any], *names: str) -> list[Any]:
    """Cases to parametrise a test with: those of these names run only with `--whole`."""
    every = list(cases)
    assert set(names) <= {case.name for case in every}
    return [pytest.param(case, marks=pytest.mark.whole) if case.name in names else case for case in every]


def names_left_out(cases: Iterable[Any], count: int, *, seed: int = 0, always: Iterable[str] = ()) -> list[str]:
    """The names of `count` cases drawn at random, for `but_for`; those of `always` are not drawn."""
    return random.Random(seed).sample([case.name for case in cases if case.name not in set(always)], count)


def sampled(cases: Iterable[Any], count: int, *, seed: int = 0) -> list[Any]:
    """Cases to parametrise a test with: `count` of them always run, the others only with `--whole`."""
    every = list(cases)
    drawn = set(random.Random(seed).sample(range(len(every)), count))
    return [case if i in drawn else pytest.param(case, marks=pytest.mark.whole) for i, case in enumerate(every)]
