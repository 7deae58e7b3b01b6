"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conserved.optional import require
from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord


class TensorBoard(Sink):
    """Writes scalars under `conserved/`: equation (10) by block, and the largest parts of the account.

    An alarm is a text, the first time it is raised.

    Args:
        folder: where new event files are written; give this or `writer`.
        writer: the SummaryWriter of a run, to write beside its other scalars.
        laws: whether the numbers of every law are written as well.

    Raises:
        ValueError: both `folder` and `writer` are given, or neither.
    """

    def __init__(self, folder: str | Path | None = None, *, writer: Any = None, laws: bool = False) -> None:
        if (folder is None) == (writer is None):
            raise ValueError(
                "Expected either a folder for new event files or the writer of a run. Pass exactly one of them."
            )
        if writer is None:
            require("tensorboard", "The TensorBoard sink")
        self._folder, self._laws = folder, laws
        self._writer, self._own = writer, writer is None
        self._announced: set[tuple[str, str]] = set()

    def begin(self, run: Run) -> None:
        if self._own:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=run.step + 1 if run.step else None)
        formulas = "\n\n".join(f"{law.name}: {formula}" for law, formula in zip(run.laws, run.formulas, strict=True))
        self._writer.add_text("conserved/laws", formulas, run.step)

    def write(self, record: StepRecord) -> None:
        for name, value in record.scalars(laws=self._laws).items():
            self._writer.add_scalar(f"conserved/{name}", value, record.step)
        for alarm in record.alarms:
            if (alarm.code, alarm.family) in self._announced:
                continue
            self._announced.add((alarm.code, alarm.family))
            self._writer.add_text(f"conserved/alarm/{alarm.code}", str(alarm), alarm.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.flush()
            if self._own:
                self._writer.close()
