"""Where in a source a statement stands: line ranges, their fingerprints, and the list of all that the sources assert.

The sources are not part of this package. Whoever has them in a folder can lay every reading beside its passage:
`python -m conserved_papers.claims.page FOLDER` writes the fingerprints, `pytest --sources FOLDER` checks them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from conserved_papers.claims.texts import read_text

Spans = tuple[tuple[int, int], ...]
"""First and last lines of a passage, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A source as a text file: its title, the name it had here, its SHA-256 and its number of lines."""

    title: str
    file: str
    digest: str
    lines: int


DOCUMENTS = {
    "paper": Document(
        title="Conservation Laws for Modern Neural Architectures (arXiv 2606.17816)",
        file="001_3fc482ece999c6a4.txt",
        digest="ce53f3081654ce75",
        lines=1334,
    ),
    "summary": Document(
        title="A reader's summary of that paper", file="003_985b14e6748adad9.txt", digest="fc1472617802c6ed", lines=118
    ),
    "blog": Document(
        title="A Conservation Law in Attention (blog post)",
        file="000_40f0ee34dea87af5.txt",
        digest="d4a0e2906e2113f9",
        lines=154,
    ),
    "softmax": Document(
        title="A news summary of On the Invariants of Softmax Attention (arXiv 2605.02907)",
        file="002_d21638c09ad7ae83.txt",
        digest="3ad35156d909f545",
        lines=22,
    ),
    "note": Document(
        title="Natural Attention: Theoretical Foundations (note, 2024)",
        file="004_8bec89fcb28048d3.txt",
        digest="d9240073e9823a26",
        lines=231,
    ),
}
"""The documents whose claims come with this package, by the first part of their codes, in the order they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A place in a source: what it is called there, its lines, and a fingerprint of them."""

    document: str
    place: str
    lines: Spans = ()
    fingerprint: str = ""

    def __str__(self) -> str:
        return f"{self.place}, {format_lines(self.lines)}" if self.lines else self.place


def spans(text: str) -> Spans:
    """Line ranges as they are written: "308-310, 338"."""
    result = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(last or first) < int(first):
            raise ValueError(f"Lines are written as 308-310, 338; got {text!r}.")
        result.append((int(first), int(last or first)))
    return tuple(result)


def format_lines(lines: Spans) -> str:
    """Line ranges in words."""
    single = len(lines) == 1 and lines[0][0] == lines[0][1]
    return ("line " if single else "lines ") + ", ".join(f"{a}–{b}" if a != b else f"{a}" for a, b in lines)


def fingerprint(text: Sequence[str], lines: Spans) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of those lines, without space at their ends."""
    chosen = [line.strip() for first, last in lines for line in text[first - 1 : last]]
    return hashlib.sha256("\n".join(chosen).encode()).hexdigest()[:16]


def read(folder: Path, document: str) -> list[str]:
    """Return the lines of a source in a folder, found by its name or by its contents."""
    wanted = DOCUMENTS[document]
    named = folder / wanted.file
    for path in [named] if named.is_file() else sorted(folder.glob("*.txt")):
        content = path.read_text(encoding="utf-8")
        if path == named or hashlib.sha256(content.encode()).hexdigest().startswith(wanted.digest):
            return content.splitlines()
    raise FileNotFoundError(f"{folder} has no {wanted.file}, nor a text with the digest {wanted.digest}.")


@cache
def fingerprints() -> dict[str, str]:
    """Return the fingerprints of all passages, by document and lines."""
    path = files("conserved_papers.claims").joinpath("fingerprints.json")
    result: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return result


def key(document: str, lines: Spans) -> str:
    """Return how a passage is called among the fingerprints."""
    return f"{document} {format_lines(lines)}"


def passage(document: str, place: str, lines: str) -> Passage:
    """Return a passage with its fingerprint, if there is one."""
    where = spans(lines)
    return Passage(
        document=document, place=place, lines=where, fingerprint=fingerprints().get(key(document, where), "")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """Something a source says, in our words, with the claims that judge it or the reason why none does."""

    document: str
    lines: Spans
    words: str
    codes: tuple[str, ...] = ()
    reason: str = ""


@cache
def sentences() -> tuple[Sentence, ...]:
    """Return all that the sources say, in their order, from sentences.yaml."""
    return tuple(_sentence(document, row) for document, rows in read_text("sentences").items() for row in rows)


def _sentence(document: str, row: Mapping[str, Any]) -> Sentence:
    # A code without its source is one of this document.
    codes = (code if code.partition(".")[0] in DOCUMENTS else f"{document}.{code}" for code in row.get("claims", ()))
    return Sentence(
        document=document,
        lines=spans(str(row["lines"])),
        words=row["says"],
        codes=tuple(codes),
        reason=row.get("reason", ""),
    )
