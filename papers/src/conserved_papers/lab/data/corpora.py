"""Penn Treebank and WikiText-103 as they are published, and any plain text, in words or in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from conserved_papers.lab.data.examples import Text, UnusableDataError, as_bytes, as_words

END = "<eos>"
"""The end of a line, as is customary for both corpora."""

PENN, WIKI = "ptb.train.txt", "wiki.train.tokens"
_CORPORA = {
    "Penn Treebank": (PENN, ("", "data", "simple-examples/data")),
    "WikiText-103": (WIKI, ("", "wikitext-103", "wikitext-103-v1")),
}
"""By title, the training text (of Penn Treebank Mikolov's preprocessed one) and the folders it may be in."""


def corpus_in(path: Path) -> tuple[str, Path] | None:
    """Return the title and the file of a corpus in a folder; or of a file that has the name of one."""
    for title, (name, folders) in _CORPORA.items():
        for file in (path, *(path / inner / name for inner in folders)):
            if file.name == name and file.is_file():
                return title, file
    return None


def tokenised(path: Path, name: str, vocabulary: int) -> Text:
    """Return a text whose words are set apart by spaces already, with a mark for every end of line."""
    return as_words(name, (word for line in _lines(path) for word in [*line.split(), END] if line.strip()), vocabulary)


def plain_text(path: Path, vocabulary: int) -> Text:
    """Any text in UTF-8: bytes if the model's vocabulary is that of bytes, else words and single signs."""
    if vocabulary == 256:
        return as_bytes(path.name, "".join(_lines(path)).encode())
    return as_words(path.name, (word for line in _lines(path) for word in re.findall(r"\w+|[^\w\s]", line)), vocabulary)


def _lines(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise UnusableDataError(
            f"{path} is not a text in UTF-8: byte {problem.start:,} is 0x{problem.object[problem.start]:02x}."
        ) from problem
    except OSError as problem:
        raise UnusableDataError(f"{path} cannot be read: {problem.strerror}.") from problem
    if "\0" in text:
        raise UnusableDataError(f"{path} holds zero bytes; it is not a text.")
    if not text.strip():
        raise UnusableDataError(f"{path} is empty; a text was expected.")
    return iter(text.splitlines(keepends=True))
