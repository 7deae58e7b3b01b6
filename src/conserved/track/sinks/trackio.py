"""Trackio, the local experiment tracker."""

from __future__ import annotations

from typing import Any

from conserved.optional import require
from conserved.track.record import StepRecord
from conserved.track.sinks.sink import Run, Sink


class Trackio(Sink):
    """Logs the scalars of every step to a trackio project on this machine."""

    def __init__(self, *, project: str = "conserved", laws: bool = False, **options: Any) -> None:
        self._trackio = require("trackio", "The trackio sink")
        self._project, self._laws, self._options = project, laws, options
        self._run: Any = None

    def begin(self, run: Run) -> None:
        self._run = self._trackio.init(project=self._project, name=run.name, config=dict(run.config), **self._options)

    def write(self, record: StepRecord) -> None:
        scalars = {f"conserved/{name}": value for name, value in record.scalars(laws=self._laws).items()}
        self._run.log(scalars, step=record.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
