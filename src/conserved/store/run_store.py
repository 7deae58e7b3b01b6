"""The run store as it is read: runs, their ledgers, alarms and documents in an SQLite file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conserved.alarm import Alarm
from conserved.alarm_groups import AlarmGroups
from conserved.store.step_record import FIELDS, Entry
from conserved.store.store_file import (
    BrokenStoreError,
    connect,
    name_file_in_errors,
    report_damage,
)

ENTRIES = "entry join law on law.run = entry.run and law.number = entry.law where entry.run = ?"
"""The ledger of a run with the names of its laws."""

MEAN_ERROR = "sum(error * units) / sum(units)"
"""Equation (10) over rows of it."""


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


def _tensor(value: bytes, shape: list[int]) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.float64).reshape(shape)


def real(value: float | None) -> float:
    """Return a stored number; SQLite stores NaN as null."""
    return float("nan") if value is None else float(value)
