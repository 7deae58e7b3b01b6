"""Long tables of random cases of which a seeded sample is tested, and all with `pytest --whole`."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], count: int, *, seed: int = 0) -> list[Any]:
    """Cases to parametrise a test with: `count` of them always run, the others only with `--whole`."""
    every = list(cases)
    kept = set(random.Random(seed).sample(range(len(every)), count))
    return [case if i in kept else pytest.param(case, marks=pytest.mark.whole) for i, case in enumerate(every)]
