"""The sink that writes the run store: an SQLite file that survives killed processes and takes several writers."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conserved.alarm import Alarm
from conserved.store.sink import Run, Sink
from conserved.store.step_record import FIELDS, StepRecord
from conserved.store.store_file import (
    FileMark,
    RunTakenError,
    Writer,
    connect_to_write,
    transaction,
)

_SCHEMA = (
    "create table if not exists run (id integer primary key, name text unique not null, started real not null, "
    "config text not null)",
    "create table if not exists law (run integer not null, number integer not null, name text not null, "
    "block text not null, family text not null, units integer not null, formula text not null, "
    "primary key (run, number)) without rowid",
    "create table if not exists reference (run integer not null, number integer not null, shape text not null, "
    "value blob not null, primary key (run, number)) without rowid",
    "create table if not exists step (run integer not null, step integer not null, written real not null, "
    "skipped integer not null, primary key (run, step)) without rowid",
    f"create table if not exists entry (run integer not null, step integer not null, law integer not null, "
    f"first_order real, {', '.join(f'{name} real' for name in FIELDS)}, primary key (run, step, law)) without rowid",
    "create table if not exists cause (run integer not null, step integer not null, law integer not null, "
    "cause text not null, amount real, primary key (run, step, law, cause)) without rowid",
    "create table if not exists reading (run integer not null, step integer not null, name text not null, "
    "value real, primary key (run, step, name)) without rowid",
    "create table if not exists alarm (run integer not null, step integer not null, code text not null, "
    "law text not null, value real, bound real, message text not null, family text not null, laws text not null, "
    "count integer not null, last integer not null, number integer not null, primary key (run, step, code, law)) "
    "without rowid",
    "create table if not exists document (kind text not null, name text not null, written real not null, "
    "content text not null, primary key (kind, name))",
    "create table if not exists writer (run integer primary key, machine text not null, process integer not null, "
    "began text not null, since real not null, token text not null)",
)
DETAIL = 250
"""Steps whose rows are kept one by one, in every doubling of the number of steps."""

_FORESEEN = (1_000, 10_000, 100_000)
"""Lengths of runs for which the size of the store is stated in advance."""

_LARGE = 1e9
"""Bytes from which on that is a warning."""

LOGGER = logging.getLogger("conserved")

_STEPWISE = ("step", "entry", "cause", "reading", "alarm")


def _alarm_row(run: int, number: int, alarm: Alarm) -> tuple[Any, ...]:
    numbers = (run, alarm.step, alarm.code, alarm.law, alarm.value, alarm.limit)
    return (*numbers, alarm.message, alarm.family, json.dumps(alarm.laws), alarm.count, alarm.last, number)


def store_document(path: str | Path, kind: str, name: str, content: Mapping[str, Any]) -> None:
    """Keep a record beside the runs of a store: a finished trajectory, a claim's outcome, an audit.

    Args:
        path: the file of the store; it is made if it is not there.
        kind: the sort of document, such as "figure", by which `RunStore.documents` finds it.
        name: its name; a document of the same kind and name is replaced.
        content: plain data for JSON; NaN and infinities are kept.

    Raises:
        TypeError: `content` holds something that JSON cannot say.
    """
    text = json.dumps(dict(content))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(connect_to_write(path)) as db, transaction(db, path):
        for statement in _SCHEMA:
            db.execute(statement)
        _insert(db, "document", [(kind, name, time.time(), text)])


def _insert(db: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Put rows into a table, in place of those with the same key."""
    rows = list(rows)
    if rows:
        db.executemany(f"insert or replace into {table} values ({', '.join('?' * len(rows[0]))})", rows)


class SQLite(Sink):
    """Writes a run store: one transaction per step, so that a killed process leaves whole steps only.

    A run has one writer. A second process that begins a run of the same name while the first still runs is refused. A
    sink that loses its run to a second monitor of the same process raises RunTakenError at its next step.
    """

    slow = True

    def __init__(self, path: str | Path, *, detail: int | None = DETAIL) -> None:
        """Create a sink that writes the store at `path`.

        Args:
            path: the file of the store; it is made if it is not there.
            detail: number of steps, in each doubling of the number of steps, for which the rows of every law are kept;
                None keeps all. Of every step its readings, alarms and totals are kept.

        Raises:
            ValueError: `detail` is less than one.
        """
        if detail is not None and detail < 1:
            raise ValueError(
                f"Expected detail of at least 1 or None, got {detail}. Pass a number of steps, or None to keep all."
            )
        self.path, self._detail = Path(path), detail
        self._late: StepRecord | None = None
        self._db: sqlite3.Connection | None = None
        self._writer = Writer()

    def begin(self, run: Run) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        db = connect_to_write(self.path)
        self._writer, self._name = Writer(), run.name
        try:
            with transaction(db, self.path):
                self._take(db, run)
                self._write_laws(db, run)
        except BaseException:
            db.close()
            raise
        self._db, self._mark = db, FileMark.of(self.path)
        if run.laws:
            causes = len(run.config.get("optimizer", ())) + 2
            bytes_of = {steps: estimate(len(run.laws), causes, steps, self._detail) for steps in _FORESEEN}
            sizes = ", ".join(f"{size / 1e6:,.0f} MB for {steps:,} steps" for steps, size in bytes_of.items())
            level = logging.WARNING if max(bytes_of.values()) > _LARGE else logging.INFO
            LOGGER.log(level, "%s: %d laws, about %s", self.path, len(run.laws), sizes)

    def _take(self, db: sqlite3.Connection, run: Run) -> None:
        """Make the run this writer's, with its later steps void, unless another process is at it."""
        for statement in _SCHEMA:
            db.execute(statement)
        known = db.execute("select id from run where name = ?", (run.name,)).fetchone()
        if known is None:
            cursor = db.execute(
                "insert into run (name, started, config) values (?, ?, ?)",
                (run.name, time.time(), json.dumps(dict(run.config))),
            )
            self._run = int(cursor.lastrowid or 0)
        else:
            self._run = int(known[0])
            self._refuse_if_taken(db)
            for table in _STEPWISE:
                db.execute(f"delete from {table} where run = ? and step > ?", (self._run, run.step))
        who = self._writer
        _insert(db, "writer", [(self._run, who.machine, who.process, who.began, who.since, who.token)])

    def _write_laws(self, db: sqlite3.Connection, run: Run) -> None:
        for number, (law, formula) in enumerate(zip(run.laws, run.formulas, strict=True)):
            _insert(db, "law", [(self._run, number, law.name, law.block, law.family, law.units, formula)])
            if (value := run.reference.get(law.name)) is not None:
                _insert(db, "reference", [(self._run, number, json.dumps(list(value.shape)), _bytes(value))])

    def write(self, record: StepRecord) -> None:
        assert self._db is not None, "begin() opens the store"
        self._mark.check()
        at = (self._run, record.step)
        detailed_step = self._detail is None or bool(record.alarms) or is_detailed(record.step, self._detail)
        self._late = None if detailed_step else record
        readings = dict(record.readings) if detailed_step else dict(record.readings) | record.totals()
        with transaction(self._db, self.path) as db:
            self._check_own(db)
            _insert(db, "step", [(*at, time.time(), int(record.skipped))])
            if detailed_step:
                self._write_rows(db, record)
            _insert(db, "reading", ((*at, name, value) for name, value in readings.items()))
            _insert(db, "alarm", (_alarm_row(self._run, n, alarm) for n, alarm in enumerate(record.alarms)))

    def _write_rows(self, db: sqlite3.Connection, record: StepRecord) -> None:
        """Write a row for every law, and one for each of its causes."""
        at, width, rows = (self._run, record.step), len(FIELDS), record.numbers.tolist()
        _insert(db, "entry", ((*at, law, sum(row[width:]), *row[:width]) for law, row in enumerate(rows)))
        amounts = [zip(record.causes, row[width:], strict=True) for row in rows]
        _insert(db, "cause", ((*at, law, *amount) for law, parts in enumerate(amounts) for amount in parts))

    def note_state(self, state: str) -> None:
        if self._db is not None:
            with transaction(self._db, self.path) as db:
                _insert(db, "document", [("state", self._name, time.time(), json.dumps({"state": state}))])

    def close(self) -> None:
        if self._db is None:
            return
        if self._late is not None:
            # The last step is what a run came to: it has all its rows.
            with suppress(OSError, RunTakenError), transaction(self._db, self.path) as db:
                self._check_own(db)
                self._write_rows(db, self._late)
        # A row that stays behind, as on a full disk, is recognised by its process having ended.
        with suppress(OSError), transaction(self._db, self.path) as db:
            db.execute("delete from writer where run = ? and token = ?", (self._run, self._writer.token))
        self._db.close()
        self._db = None

    def _refuse_if_taken(self, db: sqlite3.Connection) -> None:
        row = db.execute(
            "select machine, process, began, since, token from writer where run = ?", (self._run,)
        ).fetchone()
        if row is None or not (other := Writer(*row)).elsewhere():
            return
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(other.since))
        raise RunTakenError(
            f"The run {self._name!r} in {self.path} is being written by process {other.process} since {since}. "
            "Close it, or give this run a name of its own with run=."
        )

    def _check_own(self, db: sqlite3.Connection) -> None:
        writer = db.execute("select process, token from writer where run = ?", (self._run,)).fetchone()
        if writer is None or writer[1] != self._writer.token:
            who = "by another writer, which has finished" if writer is None else f"by a writer in process {writer[0]}"
            raise RunTakenError(
                f"The run {self._name!r} in {self.path} was taken over {who}; this step is not written, so that the "
                "two are not mixed. Give every run a name of its own with run=."
            )


def is_detailed(step: int, most: int) -> bool:
    """Return whether the rows of a step are kept.

    At first all steps are kept, then `most` in every doubling of the number of steps.
    """
    stride = 1
    while step > 2 * most * stride:
        stride *= 2
    return step % stride == 0


def estimate(laws: int, causes: int, steps: int, most: int | None) -> float:
    """Return about how many bytes a run of so many steps takes."""
    stored = (
        steps if most is None else min(steps, int(2 * most + most * max(0.0, math.log2(max(steps / (2 * most), 1)))))
    )
    return stored * laws * (140 + 52 * causes) + steps * 600.0


def _bytes(value: Tensor) -> bytes:
    return value.detach().to("cpu", torch.float64).contiguous().numpy().tobytes()
