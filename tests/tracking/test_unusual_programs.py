"""Right programs of unusual kinds raise no alarm under a default monitor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conserved import Monitor
from unusual_programs import PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_alarm_on_a_right_program(program: Callable[[], Monitor]) -> None:
    torch.manual_seed(0)
    monitor = program()
    assert not monitor.alarms, [alarm.message for alarm in monitor.alarms]
