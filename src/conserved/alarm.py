"""An alarm: what every monitor tells people and sinks when something should be looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something a person should look at: where, when, what was found and what it was held against."""

    step: int
    code: str
    law: str
    """The law, or the series of readings, that it is about."""
    value: float
    limit: float
    message: str
