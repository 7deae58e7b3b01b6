"""Lets processes that hold pieces of one parameter agree, through their key-value store, before they compute together.

A collective waits for every process. If one of them has no monitor, or a part of its monitor is off, the others would
wait for ever, or take its next message for the answer. Processes therefore confirm each computation first. The store
keeps one decision for each: a process that sees all others arrive writes "go", one that gives up writes "stop", and the
first to write decides for all.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conserved._torch_compat import default_store
from conserved.errors import ConservedError

START = 5.0
"""Seconds to wait for a process that has no monitor so far."""

WAIT = 30.0
"""Seconds to wait for a process whose monitor is known to be there: as long as a process may read laws or compile."""

_POLL = (0.0005, 0.02)
"""Seconds between two looks into the store, at first and at most."""

_SERIAL = itertools.count()


def several_processes() -> bool:
    """Return whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class NotTogetherError(ConservedError, RuntimeError):
    """A computation over several processes is not made, because not all of them take part."""


class RankAgreement:
    """Agreement of some processes on every computation that they make together.

    Args:
        ranks: global ranks of the processes.
        name: what they compute, the same on all of them; differing names do not agree.
        monitor: number of the monitor, as `announce_monitor` gave it.
    """

    def __init__(self, ranks: Sequence[int], name: str, monitor: int) -> None:
        self._store: Any = default_store()
        self.ranks, self.rank = tuple(ranks), dist.get_rank()
        group = zlib.crc32(f"{self.ranks} {name}".encode())
        self._prefix = f"conserved/together/{monitor}/{group:x}"
        self._presence = [_presence(monitor, rank) for rank in self.ranks]
        self._count, self._ended = 0, ""
        self._former: tuple[str, ...] = ()
        """Keys of the last computation."""

    def confirm(self, topic: str) -> None:
        """Wait until all processes have confirmed the same computation.

        Raises:
            NotTogetherError: a process is missing, has withdrawn, or is about to compute something else. Then nothing
                is computed together any more, on any of the processes.
        """
        if self._ended:
            raise NotTogetherError(self._ended)
        key = f"{self._prefix}/{self._count}"
        self._count += 1
        if self._decide(key, topic) != b"go":
            self._ended = f"not all of the ranks {_spell(self.ranks)} take part in it ({topic})"
            self.withdraw()
            raise NotTogetherError(self._ended)
        self._forget_former(key, topic)

    def reduce(self, topic: str, value: int, by: Callable[[Sequence[int]], int]) -> int:
        """Return a number that all processes agree on: `by` of the numbers of all of them."""
        return int(self.combine(topic, str(value), lambda texts: str(by([*map(int, texts)]))))

    def combine(self, topic: str, text: str, by: Callable[[Sequence[str]], str]) -> str:
        """Return a text that all processes agree on: `by` of the texts of all of them, as the first computes it."""
        key = f"{self._prefix}/{self._count}/value"
        self._store.set(f"{key}/{self.rank}", text)
        self.confirm(topic)
        if self.rank == self.ranks[0]:
            self._store.set(key, by([self._store.get(f"{key}/{rank}").decode() for rank in self.ranks]))
        self._store.wait([key], timedelta(seconds=WAIT))
        return str(self._store.get(key).decode())

    def withdraw(self) -> None:
        """Take part in nothing any more; the other processes stop waiting."""
        self._ended = self._ended or "a part of the monitor of this process is off"
        self._store.set(f"{self._prefix}/withdrawn", str(self.rank))

    def _forget_former(self, key: str, topic: str) -> None:
        """Delete the keys of the previous computation: a process that confirms one has finished the last."""
        if self.rank == self.ranks[0]:
            for old in self._former:
                self._store.delete_key(old)
            self._former = (f"{key}/{topic}", f"{key}/arrived", f"{key}/decision")

    def _decide(self, key: str, topic: str) -> bytes:
        # Each process counts for its own word before it counts for the total, so that the last reads all words.
        self._store.add(f"{key}/{topic}", 1)
        arrived = self._store.add(f"{key}/arrived", 1)
        if arrived == len(self.ranks):
            return self._write(key, "go" if self._store.add(f"{key}/{topic}", 0) == arrived else "stop")
        began, pause = time.monotonic(), _POLL[0]
        while not self._store.check([f"{key}/decision"]):
            waited = time.monotonic() - began
            missing = waited > START and not self._store.check(self._presence)
            if missing or waited > WAIT or self._store.check([f"{self._prefix}/withdrawn"]):
                return self._write(key, "stop")
            time.sleep(pause)
            pause = min(2 * pause, _POLL[1])
        return bytes(self._store.get(f"{key}/decision"))

    def _write(self, key: str, decision: str) -> bytes:
        """Write a decision unless there is one, and return the one that holds."""
        return bytes(self._store.compare_set(f"{key}/decision", "", decision))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let `confirm_together` of this thread ask the processes of this agreement."""
        former, _ACTIVE.agreement = _ACTIVE.agreement, self
        try:
            yield
        finally:
            _ACTIVE.agreement = former


def announce_monitor() -> int:
    """Let other processes know that this one has a monitor, and return its number; they make them in the same order."""
    number = next(_SERIAL)
    default_store().set(_presence(number, dist.get_rank()), "")
    return number


def retract_monitor(number: int) -> None:
    """Let other processes know that a monitor of this one agrees on nothing."""
    default_store().delete_key(_presence(number, dist.get_rank()))


def _presence(monitor: int, rank: int) -> str:
    return f"conserved/together/{monitor}/present/{rank}"


class _Active(threading.local):
    """The agreement of the monitor that is at work in this thread."""

    def __init__(self) -> None:
        self.agreement: RankAgreement | None = None


_ACTIVE = _Active()


def confirm_together(topic: str) -> None:
    """Confirm a computation over several processes, where a monitor makes it.

    Outside of a monitor it does nothing: what a user calls by hand is called on all processes.

    Raises:
        NotTogetherError: not all processes take part.
    """
    if _ACTIVE.agreement is not None:
        _ACTIVE.agreement.confirm(topic)


def active_agreement() -> RankAgreement | None:
    """Return the agreement of the monitor that is at work in this thread."""
    return _ACTIVE.agreement


def _spell(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
