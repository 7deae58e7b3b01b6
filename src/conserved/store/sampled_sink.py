"""A sink that hands on only some records, for places that do not want every step."""

from __future__ import annotations

from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord


class SampledSink(Sink):
    """Every `every`-th record, and all records with an alarm or an audit."""

    def __init__(self, sink: Sink, every: int) -> None:
        self._sink, self._every = sink, max(int(every), 1)

    def begin(self, run: Run) -> None:
        self._sink.begin(run)

    def write(self, record: StepRecord) -> None:
        audited = any(name.startswith("audit/") for name in record.readings)
        if record.step % self._every == 0 or record.alarms or audited:
            self._sink.write(record)

    def close(self) -> None:
        self._sink.close()
