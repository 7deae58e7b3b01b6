"""Whether an operation runs where the program would catch its error, and then do something else.

`cholesky` raises for some numbers and not for others. A program that catches that error decides by these numbers
without reading any, and the pass that is followed shows one of the two ways only.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType

RAISES_BY_VALUES = tuple(
    f"aten::{name}"
    for name in (
        *("linalg_", "_linalg_", "cholesky", "inverse", "lu_", "triangular_solve", "_assert", "multinomial"),
        *("index", "_index", "gather", "scatter", "take", "embedding", "_embedding_bag", "nll_loss", "bincount"),
        *("geqrf", "ormqr", "logdet", "slogdet", "pinverse", "repeat_interleave", "segment_reduce", "max_unpool"),
    )
)
"""Beginnings of the names of operations that raise for some values of their inputs."""


def is_error_caught(frame: FrameType | None, outermost: str, skipped: tuple[str, ...]) -> bool:
    """Return whether a frame, or one that called it, is inside of a `try` with an `except`.

    Args:
        frame: the innermost frame to look at.
        outermost: name of the function whose callers are not looked at.
        skipped: parts of the paths of code that raises again what it catches.
    """
    while frame is not None and frame.f_code.co_name != outermost:
        offset, path = frame.f_lasti, frame.f_code.co_filename
        ours = not any(part in path for part in skipped)
        if ours and any(start <= offset < end and catches for start, end, catches in _protected(frame.f_code)):
            return True
        frame = frame.f_back
    return False


@cache
def _protected(code: CodeType) -> tuple[tuple[int, int, bool], ...]:
    """Return the ranges of instructions with a handler, and whether it catches errors and does not only clean up."""
    ranges = list(_exception_table(code))
    if not ranges:
        return ()
    instructions = list(dis.get_instructions(code))
    numbers = {instruction.offset: number for number, instruction in enumerate(instructions)}
    names = [instruction.opname for instruction in instructions]
    suppresses = "suppress" in code.co_names
    return tuple((start, end, _catches(names[numbers[target] :], suppresses)) for start, end, target in ranges)


def _catches(names: list[str], suppresses: bool) -> bool:
    """Return whether a handler that begins with these instructions may end without raising again."""
    if not names or names[0] != "PUSH_EXC_INFO":
        return False
    if names[1] == "WITH_EXCEPT_START":
        return suppresses
    if names[1] == "POP_TOP":
        return True
    tested = itertools.takewhile(lambda name: name not in ("RERAISE", "POP_EXCEPT"), names)
    return any(name in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH") for name in tested)


def _exception_table(code: CodeType) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and handler of each range; the format is in CPython's `Objects/exception_handling_notes.txt`."""
    data = iter(code.co_exceptiontable)

    def number() -> int:
        byte = next(data)
        value = byte & 63
        while byte & 64:
            byte = next(data)
            value = value << 6 | byte & 63
        return value

    while True:
        try:
            start = number() * 2
        except StopIteration:
            return
        length, target, _ = number() * 2, number() * 2, number()
        yield start, start + length, target
