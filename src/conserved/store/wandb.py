"""Weights & Biases, offline unless asked otherwise."""

from __future__ import annotations

from typing import Any

from conserved.optional import require
from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord


class WeightsAndBiases(Sink):
    """Logs the scalars of every step to a new run, or to a run in progress; alarms are alerts there.

    Args:
        project: the project of a new run.
        run: a run in progress to log to, instead of a new one.
        laws: whether the numbers of every law are logged as well.
        **options: further arguments of `wandb.init`; the mode is "offline" unless given here.
    """

    def __init__(self, project: str = "conserved", *, run: Any = None, laws: bool = False, **options: Any) -> None:
        if run is None:
            self._wandb = require("wandb", "The Weights & Biases sink")
        self._project, self._given, self._laws = project, run, laws
        self._options = {"mode": "offline"} | options
        self._run = run
        self._announced: set[tuple[str, str]] = set()

    def begin(self, run: Run) -> None:
        if self._given is None:
            self._run = self._wandb.init(project=self._project, name=run.name, config=dict(run.config), **self._options)
        # The step of another logger may run ahead of ours; a metric of our own keeps the two apart.
        self._run.define_metric("conserved/*", step_metric="conserved/step")

    def write(self, record: StepRecord) -> None:
        scalars = {f"conserved/{name}": value for name, value in record.scalars(laws=self._laws).items()}
        self._run.log({"conserved/step": record.step} | scalars)
        for alarm in record.alarms:
            if (alarm.code, alarm.family) not in self._announced and hasattr(self._run, "alert"):
                self._announced.add((alarm.code, alarm.family))
                self._run.alert(title=f"conserved: {alarm.code} {alarm.family}"[:63], text=str(alarm))

    def close(self) -> None:
        if self._given is None and self._run is not None:
            self._run.finish()
