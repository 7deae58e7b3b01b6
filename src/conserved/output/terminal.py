"""The console that everything is printed on: text on it may come from any file or model, and can only show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment
from rich.text import Text

from conserved.output.lines import TextLine, wrap
from conserved.output.printable import printable


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

    def print_lines(self, lines: Iterable[TextLine]) -> None:
        """Print lines of a result in their styles, wrapped at the width of the terminal."""
        for line in lines:
            for text in wrap(line, self.width):
                self.print(Text(text, style=line.style), soft_wrap=True)
