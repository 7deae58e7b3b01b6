"""The run store: an SQLite file that survives killed processes and takes several writers at once."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conserved.alarm import Alarm
from conserved.alarm_groups import AlarmGroups
from conserved.store.sink import Run, Sink
from conserved.store.step_record import FIELDS, Entry, StepRecord
from conserved.store.store_file import (
    BrokenStoreError,
    FileMark,
    RunTakenError,
    Writer,
    connect,
    connect_to_write,
    name_file_in_errors,
    report_damage,
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

ENTRIES = "entry join law on law.run = entry.run and law.number = entry.law where entry.run = ?"
"""The ledger of a run with the names of its laws."""

MEAN_ERROR = "sum(error * units) / sum(units)"
"""Equation (10) over rows of it."""

_STEPWISE = ("step", "entry", "cause", "reading", "alarm")


def _alarm_row(run: int, number: int, alarm: Alarm) -> tuple[Any, ...]:
    numbers = (run, alarm.step, alarm.code, alarm.law, alarm.value, alarm.limit)
    return (*numbers, alarm.message, alarm.family, json.dumps(alarm.laws), alarm.count, alarm.last, number)


class RunStore:
    """Reads a run store, also while others write to it. A damaged store raises `BrokenStoreError` with the file.

    Args:
        path: the file of the store.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"Expected a run store at {self.path}, got no file. Check the path.")
        self._db = connect(self.path)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> bool:
        """Return whether SQLite's integrity check passes."""
        return self.select("pragma integrity_check") == [("ok",)]

    @contextmanager
    def snapshot(self) -> Iterator[RunStore]:
        """Read a consistent snapshot inside the block, even while other processes write."""
        with name_file_in_errors(self.path):
            self._db.execute("begin")
        try:
            yield self
        finally:
            self._db.rollback()

    def select(self, query: str, *given: Any) -> list[tuple[Any, ...]]:
        """Return the rows of an SQL query on the tables of the store, for figures that are quicker to compute where
        the data
        is.

        Args:
            query: the query, with a question mark for each value.
            *given: the values.

        Returns:
            The rows as tuples.
        """
        with name_file_in_errors(self.path):
            return self._db.execute(query, given).fetchall()

    def runs(self) -> list[str]:
        """Return the names of all runs, oldest first."""
        return [self._text(name, "the name of a run") for (name,) in self.select("select name from run order by id")]

    def config(self, run: str) -> dict[str, Any]:
        """Return the settings that the run of this name was started with."""
        number = self._id(run)
        with report_damage(self.path):
            return dict(json.loads(self.select("select config from run where id = ?", number)[0][0]))

    def steps(self, run: str) -> list[int]:
        """Return the steps that were written of the run of this name, in order."""
        return [step for (step,) in self.select("select step from step where run = ? order by step", self._id(run))]

    def entries(self, run: str, *, law: str | None = None, step: int | None = None) -> list[Entry]:
        """Return the ledger of a run.

        Args:
            run: the name of the run.
            law: the name of one law; by default all.
            step: the number of one step; by default all that are kept.

        Returns:
            One entry for each step and law, by step.

        Raises:
            KeyError: there is no run of this name.
        """
        where = "run = ?"
        given: list[int | str] = [self._id(run)]
        if step is not None:
            where += " and step = ?"
            given.append(step)
        with report_damage(self.path):
            names = dict(self.select("select number, name from law where run = ?", given[0]))
            if law is not None:
                where += " and law in (select value from json_each(?))"
                given.append(json.dumps([number for number, name in names.items() if name == law]))
            causes: dict[tuple[int, int], dict[str, float]] = {}
            for at, number, cause, amount in self.select(
                f"select step, law, cause, amount from cause where {where}", *given
            ):
                causes.setdefault((at, number), {})[cause] = real(amount)
            rows = self.select(
                f"select law, step, first_order, {', '.join(FIELDS)} from entry where {where} order by step, law",
                *given,
            )
            return [
                Entry(
                    law=names[number],
                    step=at,
                    first_order=real(first),
                    causes=causes.get((at, number), {}),
                    **dict(zip(FIELDS, map(real, numbers), strict=True)),
                )
                for number, at, first, *numbers in rows
            ]

    def errors(self, run: str, *, by: str = "block") -> dict[int, dict[str, float]]:
        """Return Equation (10) over the steps of a run.

        Args:
            run: the name of the run.
            by: whether one number is given for each "block", "family" or "law".

        Returns:
            By step, then by block, family or law, the mean relative change of the laws.

        Raises:
            ValueError: `by` is another word.
            KeyError: there is no run of this name.
        """
        if by not in ("block", "family", "law"):
            raise ValueError(f'Expected by="block", "family" or "law", got {by!r}. Pass one of them.')
        column = "name" if by == "law" else by
        query = f"select step, law.{column}, {MEAN_ERROR} from {ENTRIES} group by step, law.{column} order by step"
        return self._by_step(self.select(query, self._id(run)))

    def readings(self, run: str) -> dict[int, dict[str, float]]:
        """Return the readings of gauges and audits of the run of this name, by step."""
        query = "select step, name, value from reading where run = ? and name not like 'total/%'"
        return self._by_step(self.select(query, self._id(run)))

    def totals(self, run: str) -> dict[int, dict[str, float]]:
        """Return the totals, by step, of steps of a run whose rows were not kept one by one."""
        query = "select step, name, value from reading where run = ? and name like 'total/%'"
        return self._by_step(self.select(query, self._id(run)))

    def alarms(self, run: str, *, most: int = -1) -> list[Alarm]:
        """Return the alarms of a run as they were raised, by step; `defects` groups them.

        Args:
            run: the name of the run.
            most: the largest number of alarms to read; −1 for all.

        Returns:
            The alarms, the first ones if there are more.

        Raises:
            KeyError: there is no run of this name.
        """
        columns = "step, code, law, value, bound, message, family, laws, count, last"
        query = f"select {columns} from alarm where run = ? order by step, number limit ?"
        rows = self.select(query, self._id(run), most)
        with report_damage(self.path):
            return [
                Alarm(
                    step=step,
                    code=code,
                    law=law,
                    value=real(value),
                    limit=real(bound),
                    message=message,
                    family=family,
                    laws=tuple(json.loads(laws)),
                    count=count,
                    last=last,
                )
                for step, code, law, value, bound, message, family, laws, count, last in rows
            ]

    def defects(self, run: str) -> list[Alarm]:
        """Return the alarms of a run, one for each defect, as its monitor counts them.

        Args:
            run: the name of the run.

        Returns:
            The alarms, in the order of their first steps.

        Raises:
            KeyError: there is no run of this name.
        """
        return AlarmGroups(self.alarms(run)).all

    def state(self, run: str) -> str:
        """Return the last state that the monitor of this run recorded, as text; empty if it recorded none."""
        return str(self.documents("state").get(run, {}).get("state", ""))

    def reference(self, run: str) -> dict[str, Tensor]:
        """Return the laws of the run of this name when watching began, by name of the law."""
        rows = self.select(
            "select name, shape, value from reference join law using (run, number) where run = ?", self._id(run)
        )
        with report_damage(self.path):
            return {name: _tensor(value, json.loads(shape)) for name, shape, value in rows}

    def documents(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the documents that `store_document` put under a kind, by name, oldest first."""
        with report_damage(self.path):
            return {name: json.loads(content) for name, content in self.documents_as_text(kind).items()}

    def documents_as_text(self, kind: str) -> dict[str, str]:
        """Return the documents of a kind as JSON text, without parsing it."""
        if not self.select("select 1 from sqlite_master where name = 'document'"):
            return {}
        rows = self.select("select name, content from document where kind = ? order by written, rowid", kind)
        return {self._text(name, f"the name of a document ({kind})"): content for name, content in rows}

    def _by_step(self, rows: list[tuple[Any, ...]]) -> dict[int, dict[str, float]]:
        """Return rows of (step, name, value)."""
        steps: dict[int, dict[str, float]] = {}
        with report_damage(self.path):
            for step, name, value in rows:
                steps.setdefault(step, {})[name] = real(value)
        return steps

    def _text(self, value: Any, label: str) -> str:
        if not isinstance(value, str):
            raise BrokenStoreError(f"{self.path} is damaged: {label} is {type(value).__name__}, not text.")
        return value

    def _id(self, run: str) -> int:
        rows = self.select("select id from run where name = ?", run)
        if not rows:
            raise KeyError(
                f"Expected a run of {self.path}, got {run!r}. There are: {', '.join(self.runs()) or 'none'}."
            )
        return int(rows[0][0])


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


def _tensor(value: bytes, shape: list[int]) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.float64).reshape(shape)


def real(value: float | None) -> float:
    """Return a stored number; SQLite stores NaN as null."""
    return float("nan") if value is None else float(value)
