"""The file of a run store: opened, written all or nothing, and named in everything that goes wrong with it."""

from __future__ import annotations

import os
import socket
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from conserved.errors import InvalidInputError

_BUSY = 60.0
"""Seconds to wait for another writer."""

_HINTS = {
    sqlite3.SQLITE_FULL: "Make room, or name another file; the steps stored before are safe.",
    sqlite3.SQLITE_BUSY: f"Another process has held it for {_BUSY:.0f} s.",
    sqlite3.SQLITE_NOTADB: "It is not a run store; name another file.",
    sqlite3.SQLITE_CORRUPT: "It is damaged; keep it for SQLite's .recover and name another file.",
    sqlite3.SQLITE_READONLY: "It may not be changed; check its permissions.",
    sqlite3.SQLITE_CANTOPEN: "Check that its folder is there and may be written to.",
}
"""Advice on SQLite's errors, by their codes."""


class BrokenStoreError(InvalidInputError, OSError, sqlite3.DatabaseError):
    """A run store cannot be read or written; the message names the file. It is SQLite's own error too, as ever."""


class RunTakenError(InvalidInputError, RuntimeError):
    """Two writers have one run name."""


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Put the file's name into SQLite's errors, which say what is wrong and not with what."""
    try:
        yield
    except BrokenStoreError:
        raise
    except sqlite3.Error as problem:
        code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
        raise BrokenStoreError(f"{path}: {problem}. {_HINTS.get(code, '')}".strip()) from problem


@contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Name the file in errors while reading; contents that nobody would have written count as damage."""
    try:
        with name_file_in_errors(path):
            yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as problem:
        raise BrokenStoreError(f"{path} is damaged ({type(problem).__name__}: {problem}).") from problem


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection on which nothing begins by itself; text that is not UTF-8 is shown as far as it can be.

    A monitor opens it on a thread of its own and closes it at the end; one thread uses it at a time.
    """
    with name_file_in_errors(path):
        db = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
    db.text_factory = lambda text: text.decode("utf-8", "replace")
    return db


def connect_to_write(path: Path) -> sqlite3.Connection:
    """Open a database to write, with a write-ahead log: readers read meanwhile, and a commit outlives its process."""
    db = connect(path)
    try:
        with name_file_in_errors(path):
            db.execute("pragma journal_mode = wal")
            db.execute("pragma synchronous = normal")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[sqlite3.Connection]:
    """Run a transaction, all or nothing. The lock is taken at once, so that two writers wait instead of failing."""
    with name_file_in_errors(path):
        db.execute("begin immediate")
        try:
            yield db
        except BaseException:
            # A full disk may have ended the transaction already.
            with suppress(sqlite3.Error):
                db.rollback()
            raise
        db.commit()


@dataclass(frozen=True, slots=True)
class FileMark:
    """The identity of a file when it was opened: SQLite writes to a deleted database without an error."""

    path: Path
    place: tuple[int, int]

    @staticmethod
    def of(path: Path) -> FileMark:
        status = path.stat()
        return FileMark(path, (status.st_dev, status.st_ino))

    def check(self) -> None:
        """Raise BrokenStoreError unless the path still refers to that file."""
        try:
            same = FileMark.of(self.path) == self
        except OSError:
            raise BrokenStoreError(
                f"{self.path} was deleted or moved while a run was being written to it, and the steps written since "
                "cannot be found. Put it back and go on from a checkpoint, or begin a run in another file."
            ) from None
        if not same:
            raise BrokenStoreError(
                f"{self.path} was replaced by another file while a run was being written to it, and the steps written "
                "since cannot be found. Go on from a checkpoint, or begin a run in another file."
            )


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a run: a process, distinguished from a later one of the same number, and one writer in it."""

    machine: str = field(default_factory=lambda: _machine())
    process: int = field(default_factory=os.getpid)
    began: str = field(default_factory=lambda: _began(os.getpid()) or "")
    since: float = field(default_factory=time.time)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def elsewhere(self) -> bool:
        """Return whether it is another process, on this machine, that still runs."""
        if self.machine != _machine() or self.process == os.getpid() or sys.platform == "win32":
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            # It runs, as somebody else's.
            pass
        return _began(self.process) == self.began


def _machine() -> str:
    """Return this machine and, in a container, the table its process numbers are of."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _began(process: int) -> str | None:
    """Return when a process began, in the kernel's clock; empty where that is unknown, None if it has ended."""
    try:
        # The second field is the program's name in parentheses, which may hold anything.
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]
