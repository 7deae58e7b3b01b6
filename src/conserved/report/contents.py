"""The contents of a report, read from a run store at one moment, also while others write to it."""

from __future__ import annotations

import json
import platform
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from conserved.errors import InvalidInputError
from conserved.report.audits import AuditSection, audit_section
from conserved.report.claimcards import ClaimCard, claim_card
from conserved.report.comparing import RunComparison, comparison
from conserved.report.heads import AttentionSection, attention_section
from conserved.report.lawtables import LawSection, law_section
from conserved.report.plot import Plot, from_document
from conserved.report.watched import RunSection, run_section
from conserved.store import RunStore
from conserved.store.run_digest import digest
from conserved.store.store_file import report_damage

T = TypeVar("T")

MOST_RUNS = 12
"""Watched runs with a section of their own, the latest; a run is half a dozen plots."""


class NotAStoreError(InvalidInputError, ValueError):
    """The file named as a run store is not one; the message says what it is."""


class NoStoreError(FileNotFoundError, NotAStoreError):
    """There is no file of that name."""


class NoSuchRunError(InvalidInputError):
    """A run was asked for that is not in the store; the message says which are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OmittedRecord:
    """A record that is in the store and not in the report, and why."""

    kind: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Everything a report shows."""

    store: str
    written: str
    """When the latest record was made."""
    found: tuple[str, ...]
    """Sentences of the demonstration, computed from its records."""
    laws: tuple[LawSection, ...]
    figures: tuple[Plot, ...]
    runs: tuple[RunSection, ...]
    claims: tuple[ClaimCard, ...]
    audits: tuple[AuditSection, ...]
    attention: tuple[AttentionSection, ...]
    compared: RunComparison | None
    """The watched runs beside each other, if there are several."""
    trajectories: int
    left_out: tuple[OmittedRecord, ...]
    versions: tuple[tuple[str, str], ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.laws or self.figures or self.runs or self.claims or self.audits or self.attention)

    def counts(self) -> dict[str, int]:
        """Return how many of each there are."""
        names = ("laws", "figures", "runs", "claims", "audits", "attention")
        return {name: len(getattr(self, name)) for name in names} | {"trajectories": self.trajectories}


def read(path: str | Path, runs: Sequence[str] = ()) -> Contents:
    """Return the contents of a store, or of it the `runs` that are named; NoSuchRunError if one is not there.

    NotAStoreError or FileNotFoundError where there is no store, BrokenStoreError where it is damaged.
    """
    path = Path(path)
    known = check(path)
    with report_damage(path), RunStore(path) as store, store.snapshot():
        known_runs = store.runs() if "run" in known else []
        missing = [name for name in runs if name not in known_runs]
        if missing:
            raise NoSuchRunError(f"{path} has no run {missing[0]!r}. It has: {', '.join(known_runs) or 'none'}.")
        chosen = list(dict.fromkeys(runs)) or known_runs
        why = f"only the latest {MOST_RUNS} have a section"
        left_out = [OmittedRecord(kind="run", name=name, reason=why) for name in chosen[:-MOST_RUNS]]
        digests = {name: digest(store, name) for name in chosen[-MOST_RUNS:]}
        return Contents(
            store=path.name,
            written=_latest_time(store, known),
            found=_demo_lines(_each(store, "demo", lambda name, content: (name, content), left_out)),
            laws=_each(store, "laws", law_section, left_out),
            figures=_each(store, "figure", from_document, left_out),
            runs=tuple(_shape("run", digests, lambda name: run_section(digests[name]), left_out)),
            claims=_each(store, "claim", claim_card, left_out),
            audits=_each(store, "audit", audit_section, left_out),
            attention=_each(store, "attention", attention_section, left_out),
            compared=comparison(list(digests.values())) if len(digests) > 1 else None,
            trajectories=len(store.documents_as_text("trajectory")),
            left_out=tuple(left_out),
            versions=_versions(),
        )


_LISTING = """\
select name, started, (select coalesce(max(step), 0) from step where step.run = run.id),
    (select count(*) from law where law.run = run.id)
from run order by started, id"""


def listing(path: str | Path) -> dict[str, Any]:
    """Return the runs of a store, oldest first, and how many records of each other kind it holds; plain data."""
    path = Path(path)
    known = check(path)
    with report_damage(path), RunStore(path) as store, store.snapshot():
        rows = store.select(_LISTING) if "run" in known else []
        runs = [
            {**dict(zip(("name", "started", "steps", "laws"), row, strict=True)), "alarms": len(store.defects(row[0]))}
            for row in rows
        ]
        kinds = "select kind, count(*) from document group by kind order by kind"
        return {"runs": runs, "records": dict(store.select(kinds)) if "document" in known else {}}


def check(path: Path) -> set[str]:
    """Refuse what is not a run store without changing it; a file of no bytes is a store in which nothing is yet.

    Returns:
        The names of its tables.
    """
    if path.is_dir():
        raise NotAStoreError(f"{path} is a folder; name the run store in it, such as {path / 'store.db'}.")
    if not path.exists():
        raise NoStoreError(f"There is no run store at {path}.")
    try:
        with closing(sqlite3.connect(path, timeout=60.0)) as db:
            tables = {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.DatabaseError as problem:
        raise NotAStoreError(f"{path} is not a run store ({problem}).") from problem
    if tables and not tables & {"run", "document"}:
        listing = ", ".join(sorted(tables)[:5])
        raise NotAStoreError(f"{path} is an SQLite database, but not a run store: it has the tables {listing}.")
    return tables


def _each(
    store: RunStore, kind: str, shape: Callable[[str, Mapping[str, Any]], T], left_out: list[OmittedRecord]
) -> tuple[T, ...]:
    """Return the documents of a kind as sections."""
    documents = store.documents_as_text(kind)
    return tuple(_shape(kind, documents, lambda name: shape(name, json.loads(documents[name])), left_out))


def _shape(kind: str, names: Iterable[str], shape: Callable[[str], T], left_out: list[OmittedRecord]) -> list[T]:
    """Return records as sections; one that is damaged or of another version is named and does not sink the rest."""
    items: list[T] = []
    for name in names:
        try:
            items.append(shape(name))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as problem:
            left_out.append(OmittedRecord(kind=kind, name=name, reason=f"{type(problem).__name__}: {problem}"))
    return items


def _demo_lines(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[str, ...]:
    headline = dict(documents).get("summary", {}).get("headline") or ()
    return tuple(str(sentence) for sentence in headline)


def _latest_time(store: RunStore, known: set[str]) -> str:
    """Return the moment of the latest record, as far as the store knows."""
    columns = {"document": "written", "step": "written", "run": "started"}
    moments = [
        store.select(f"select max({column}) from {table}")[0][0] for table, column in columns.items() if table in known
    ]
    latest = max((moment for moment in moments if moment is not None), default=None)
    return "" if latest is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(latest))


def _versions() -> tuple[tuple[str, str], ...]:
    from conserved.version import __version__

    versions = [("conserved", __version__), ("Python", platform.python_version())]
    for package in ("torch", "numpy"):
        try:
            versions.append((package, version(package)))
        except PackageNotFoundError:
            continue
    versions.append(("system", f"{platform.system()} {platform.machine()}"))
    return tuple(versions)
