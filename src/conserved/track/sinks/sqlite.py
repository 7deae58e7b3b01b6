"""The run store: an SQLite file that survives killed processes and takes several writers at once."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conserved.alarm import Alarm
from conserved.track.record import FIELDS, Entry, StepRecord
from conserved.track.sinks.sink import Run, Sink

_BUSY = 60.0
"""Seconds to wait for another writer."""

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
    "law text not null, value real, bound real, message text not null, primary key (run, step, code, law)) "
    "without rowid",
    "create table if not exists document (kind text not null, name text not null, written real not null, "
    "content text not null, primary key (kind, name))",
)
_STEPWISE = ("step", "entry", "cause", "reading", "alarm")


class RunStore:
    """Reads a run store, also while others write to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"There is no run store at {self.path}.")
        self._db = _connected(self.path)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> bool:
        """Whether SQLite finds the file sound."""
        return self._db.execute("pragma integrity_check").fetchone() == ("ok",)

    @contextmanager
    def snapshot(self) -> Iterator[RunStore]:
        """The store as it is now, whatever is written meanwhile: everything read inside belongs to one moment."""
        self._db.execute("begin")
        try:
            yield self
        finally:
            self._db.rollback()

    def select(self, query: str, *given: Any) -> list[tuple[Any, ...]]:
        """The rows of a query on the tables of a store, for figures that are quicker to compute where the data is."""
        return self._db.execute(query, given).fetchall()

    def runs(self) -> list[str]:
        """The names of all runs, oldest first."""
        return [name for (name,) in self._db.execute("select name from run order by id")]

    def config(self, run: str) -> dict[str, Any]:
        """What a run was started with."""
        found = self._db.execute("select config from run where name = ?", (run,)).fetchone()
        if found is None:
            raise KeyError(f"There is no run {run!r} in {self.path}. There are: {', '.join(self.runs()) or 'none'}.")
        config: dict[str, Any] = json.loads(found[0])
        return config

    def steps(self, run: str) -> list[int]:
        """The steps that were written, in order."""
        return [
            step for (step,) in self._db.execute("select step from step where run = ? order by step", self._id(run))
        ]

    def entries(self, run: str, *, law: str | None = None, step: int | None = None) -> list[Entry]:
        """The ledger of a run, by step and law; of one law or one step if asked."""
        where = "entry.run = ?"
        given: list[int | str] = [*self._id(run)]
        for column, value in (("law.name", law), ("entry.step", step)):
            if value is not None:
                where += f" and {column} = ?"
                given.append(value)
        causes: dict[tuple[int, int], dict[str, float]] = {}
        for at, number, cause, amount in self._db.execute(
            "select step, law, cause, amount from cause where run = ?", self._id(run)
        ):
            causes.setdefault((at, number), {})[cause] = real(amount)
        columns = ("law.name", "entry.step", "entry.law", "entry.first_order", *(f"entry.{name}" for name in FIELDS))
        rows = self._db.execute(
            f"select {', '.join(columns)} from entry join law on law.run = entry.run and law.number = entry.law "
            f"where {where} order by entry.step, entry.law",
            given,
        )
        return [
            Entry(
                law=name,
                step=at,
                first_order=real(first),
                causes=causes.get((at, number), {}),
                **dict(zip(FIELDS, map(real, numbers), strict=True)),
            )
            for name, at, number, first, *numbers in rows
        ]

    def errors(self, run: str, *, by: str = "block") -> dict[int, dict[str, float]]:
        """Equation (10) by step and block, family or law."""
        if by not in ("block", "family", "law"):
            raise ValueError(f'by is "block", "family" or "law"; got {by!r}.')
        column = "name" if by == "law" else by
        found: dict[int, dict[str, float]] = {}
        for step, key, error in self._db.execute(
            f"select step, law.{column}, sum(error * units) / sum(units) from entry join law on law.run = entry.run "
            f"and law.number = entry.law where entry.run = ? group by step, law.{column} order by step",
            self._id(run),
        ):
            found.setdefault(step, {})[key] = real(error)
        return found

    def readings(self, run: str) -> dict[int, dict[str, float]]:
        """What gauges showed, by step."""
        found: dict[int, dict[str, float]] = {}
        for step, name, value in self._db.execute("select step, name, value from reading where run = ?", self._id(run)):
            found.setdefault(step, {})[name] = real(value)
        return found

    def alarms(self, run: str) -> list[Alarm]:
        """Every alarm of a run."""
        return [
            Alarm(step=step, code=code, law=law, value=real(value), limit=real(bound), message=message)
            for step, code, law, value, bound, message in self._db.execute(
                "select step, code, law, value, bound, message from alarm where run = ? order by step", self._id(run)
            )
        ]

    def reference(self, run: str) -> dict[str, Tensor]:
        """The laws when watching began."""
        return {
            name: torch.frombuffer(bytearray(value), dtype=torch.float64).reshape(json.loads(shape))
            for name, shape, value in self._db.execute(
                "select name, shape, value from reference join law using (run, number) where run = ?", self._id(run)
            )
        }

    def documents(self, kind: str) -> dict[str, dict[str, Any]]:
        """What `store_document` put under a kind, by name, oldest first."""
        if not self._db.execute("select 1 from sqlite_master where name = 'document'").fetchone():
            return {}
        rows = self._db.execute("select name, content from document where kind = ? order by written, rowid", (kind,))
        return {name: json.loads(content) for name, content in rows}

    def _id(self, run: str) -> tuple[int]:
        found = self._db.execute("select id from run where name = ?", (run,)).fetchone()
        if found is None:
            raise KeyError(f"There is no run {run!r} in {self.path}. There are: {', '.join(self.runs()) or 'none'}.")
        return (found[0],)


def store_document(path: str | Path, kind: str, name: str, content: Mapping[str, Any]) -> None:
    """Keep a record beside the runs (a finished trajectory, a claim's outcome, an audit), in place of one of that name.

    NaN and infinities are kept; what JSON cannot say at all is the caller's mistake and raises TypeError.
    """
    text = json.dumps(dict(content))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with closing(_connected(Path(path))) as db, _transaction(db):
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute("insert or replace into document values (?, ?, ?, ?)", (kind, name, time.time(), text))


class SQLite(Sink):
    """Writes a run store: one transaction per step, so that a killed process leaves whole steps only."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._db: sqlite3.Connection | None = None

    def begin(self, run: Run) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = _connected(self.path)
        with _transaction(self._db) as db:
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
                for table in _STEPWISE:
                    db.execute(f"delete from {table} where run = ? and step > ?", (self._run, run.step))
            db.executemany(
                "insert or replace into law values (?, ?, ?, ?, ?, ?, ?)",
                [
                    (self._run, number, law.name, law.block, law.family, law.units, formula)
                    for number, (law, formula) in enumerate(zip(run.laws, run.formulas, strict=True))
                ],
            )
            db.executemany(
                "insert or replace into reference values (?, ?, ?, ?)",
                [
                    (
                        self._run,
                        number,
                        json.dumps(list(run.reference[law.name].shape)),
                        _bytes(run.reference[law.name]),
                    )
                    for number, law in enumerate(run.laws)
                    if law.name in run.reference
                ],
            )

    def write(self, record: StepRecord) -> None:
        assert self._db is not None, "begin() opens the store"
        at = (self._run, record.step)
        width = len(FIELDS)
        rows = record.numbers.tolist()
        with _transaction(self._db) as db:
            db.execute("insert or replace into step values (?, ?, ?, ?)", (*at, time.time(), int(record.skipped)))
            db.executemany(
                f"insert or replace into entry values ({', '.join('?' * (4 + len(FIELDS)))})",
                [(*at, number, sum(row[width:]), *row[:width]) for number, row in enumerate(rows)],
            )
            db.executemany(
                "insert or replace into cause values (?, ?, ?, ?, ?)",
                [
                    (*at, number, cause, amount)
                    for number, row in enumerate(rows)
                    for cause, amount in zip(record.causes, row[width:], strict=True)
                ],
            )
            db.executemany(
                "insert or replace into reading values (?, ?, ?, ?)",
                [(*at, name, value) for name, value in record.readings.items()],
            )
            db.executemany(
                "insert or replace into alarm values (?, ?, ?, ?, ?, ?, ?)",
                [(*at, alarm.code, alarm.law, alarm.value, alarm.limit, alarm.message) for alarm in record.alarms],
            )

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All or nothing; the lock is taken at once, so that two writers wait for each other and do not fail."""
    db.execute("begin immediate")
    try:
        yield db
    except BaseException:
        db.rollback()
        raise
    db.commit()


def _connected(path: Path) -> sqlite3.Connection:
    """A write-ahead log lets readers read while a writer writes; a commit outlives the process that made it."""
    db = sqlite3.connect(path, timeout=_BUSY, isolation_level=None)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = normal")
    return db


def _bytes(value: Tensor) -> bytes:
    return value.detach().to("cpu", torch.float64).contiguous().numpy().tobytes()


def real(value: float | None) -> float:
    """SQLite stores NaN as null."""
    return float("nan") if value is None else float(value)
