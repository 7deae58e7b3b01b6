"""A default monitor names silent errors within a step, and says nothing of their correct twins."""

from __future__ import annotations

import random
import re

import pytest
import torch

from error_programs import loops, updates
from error_programs.case import CASES, Case

_MODULES = (loops.__name__, updates.__name__)
_ALONE = [one for one in CASES if one.program.__module__ in _MODULES and one.how == "default"]

SAMPLE = random.Random(0).sample(_ALONE, 6)
"""The whole table is `benchmarks/silent_errors.py`."""


@pytest.mark.parametrize("one", SAMPLE, ids=lambda one: one.name)
def test_an_error_is_named_and_its_twin_is_not_accused(one: Case) -> None:
    torch.manual_seed(0)
    alarms = one.program(True).alarms
    named = [a for a in alarms if a.kind in one.kinds and re.search(one.words, a.message, re.S)]
    assert named, [str(alarm) for alarm in alarms]
    assert min(alarm.step for alarm in named) <= one.at + 1
    torch.manual_seed(0)
    assert [str(alarm) for alarm in one.program(False).alarms] == []
