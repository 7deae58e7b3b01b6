"""Names out of files and models as text that only shows: it cannot move a cursor, clear a screen or hide a line."""

from __future__ import annotations

import unicodedata

_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control and format characters (escape, bidirectional overrides), lone surrogates, separators of lines."""


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return the text with everything that acts instead of showing written as an escape.

    Args:
        text: Anything a file or a module called itself.
        lines: Whether line breaks stay, for text of several lines that is the program's own.

    >>> printable("a\x1b[2Jb\u202e")
    'a\\x1b[2Jb\\u202e'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if lines and c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    return ascii(character)[1:-1]
