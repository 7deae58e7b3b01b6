"""Text that is safe to show on a terminal: names out of files and models cannot move the cursor or hide what stands."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment

_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control and format characters (escape, bidirectional overrides), lone surrogates, separators of lines."""


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with everything that acts instead of showing written as an escape.

    Args:
        text: Anything a file or a module called itself.
        lines: Whether line breaks stay, for text of several lines that is the program's own.

    >>> printable("a\x1b[2Jb\u202e")
    'a\\x1b[2Jb\\u202e'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if lines and c == "\n" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    return ascii(character)[1:-1]


class _Shown(RenderHook):
    """Every piece of text on its way to the terminal, without the control characters that are not the program's."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Safe(item) for item in renderables]


class _Safe:
    def __init__(self, inside: RenderableType) -> None:
        self.inside = inside

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> Iterable[Segment]:
        yield from _safe(console.render(self.inside, options))


def _safe(segments: Iterable[Segment]) -> Iterable[Segment]:
    for segment in segments:
        yield segment if segment.control else Segment(printable(segment.text, lines=True), segment.style)


class Console(rich.console.Console):
    """Rich's console; what is printed on it may come from anywhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.push_render_hook(_Shown())
