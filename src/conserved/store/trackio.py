"""Trackio, the local experiment tracker."""

from __future__ import annotations

from typing import Any

from conserved.optional import require
from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord


class Trackio(Sink):
    """Logs the scalars of every step to a trackio project on this machine, or to a run in progress; alarms are alerts
    there.

    Args:
        project: the project of a new run.
        run: a run in progress to log to, instead of a new one.
        laws: whether the numbers of every law are logged as well.
        **options: further arguments of `trackio.init`.
    """

    def __init__(self, project: str = "conserved", *, run: Any = None, laws: bool = False, **options: Any) -> None:
        self._trackio = require("trackio", "The trackio sink") if run is None else None
        self._project, self._laws, self._options = project, laws, options
        self._run, self._given = run, run is not None
        self._announced: set[tuple[str, str]] = set()

    def begin(self, run: Run) -> None:
        if self._trackio is not None:
            options = self._options
            self._run = self._trackio.init(project=self._project, name=run.name, config=dict(run.config), **options)

    def write(self, record: StepRecord) -> None:
        scalars = {f"conserved/{name}": value for name, value in record.scalars(laws=self._laws).items()}
        self._run.log(scalars, step=record.step)
        for alarm in record.alarms:
            if (alarm.code, alarm.family) not in self._announced and hasattr(self._run, "alert"):
                self._announced.add((alarm.code, alarm.family))
                self._run.alert(title=f"conserved: {alarm.code} {alarm.family}", text=str(alarm))

    def close(self) -> None:
        if self._run is not None and not self._given:
            self._run.finish()
