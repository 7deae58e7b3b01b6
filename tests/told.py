"""What a monitor has told of a run: alarms, and statements of what a program may mean."""

from __future__ import annotations

from conserved import Monitor
from conserved.alarm import Alarm


def told(monitor: Monitor) -> list[Alarm]:
    """Return the alarms and the statements of a run by step, alarms of a step first."""
    return sorted((*monitor.alarms, *monitor.statements), key=lambda alarm: (alarm.step, not alarm.certain))
