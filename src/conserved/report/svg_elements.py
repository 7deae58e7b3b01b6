"""Pieces of SVG with everything from elsewhere escaped: text, lines, marks, colours that follow the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

_TAGS = re.compile(r"</?(?:sub|sup|b|i|extra)>|<br>", re.IGNORECASE)
"""Tags that labels of figures may hold to set type; they are left out, and everything else is shown literally."""

_COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}|[a-z]{3,20}|rgba?\([0-9., %]{3,40}\)|var\(--[a-z0-9-]{1,20}\)")

_DASHES = {"dot": "1.5 4", "dash": "7 5", "dashdot": "8 4 1.5 4", "longdash": "12 6"}

_SYMBOLS = {
    "x": "M{l},{t}L{r},{b}M{l},{b}L{r},{t}",
    "diamond": "M{x},{t}L{r},{y}L{x},{b}L{l},{y}Z",
    "square": "M{l},{t}H{r}V{b}H{l}Z",
}


def plain(text: Any) -> str:
    """Return a label without the tags that set type."""
    return _TAGS.sub(lambda tag: " · " if tag[0].lower() == "<br>" else "", str(text))


def letters(text: Any) -> str:
    """Return text as it may stand in a page."""
    return escape(plain(text), quote=True)


def colour(value: Any, otherwise: str) -> str:
    """Return a colour that is one; everything else could be a style of its own."""
    return value if isinstance(value, str) and _COLOUR.fullmatch(value) else otherwise


def width_of(text: Any, size: float = 11.5) -> float:
    """Return about how wide a text is; m and w are half as wide again as other letters."""
    words = plain(text)
    return size * (0.56 * len(words) + 0.28 * sum(letter in "mwMW" for letter in words))


def shorten(text: Any, room: float, size: float = 11.5) -> str:
    """Return a label cut to the room there is; the whole of it is in the numbers beside the plot."""
    words, most = plain(text), max(int(min(room, 1e4) / (0.56 * size)), 4)
    return words if len(words) <= most else f"{words[: most - 1]}…"


def number(value: float) -> str:
    """Return a place, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def words(x: float, y: float, text: Any, *, anchor: str = "start", kind: str = "", turn: float = 0.0) -> str:
    """Return a line of text."""
    turned = f' transform="rotate({number(turn)} {number(x)} {number(y)})"' if turn else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"{named}{turned}>{letters(text)}</text>'


def path(points: str, style: str, *, kind: str = "", title: str = "") -> str:
    """Return a path with a style, and words that show when it is pointed at."""
    named = f' class="{kind}"' if kind else ""
    inside = f"<title>{letters(title)}</title>" if title else ""
    return f'<path d="{points}"{named} style="{escape(style, quote=True)}">{inside}</path>'


def polyline(pieces: Iterable[list[tuple[float, float]]], *, closed: bool = False) -> str:
    """Return points as the path of one or more lines."""
    end = "Z" if closed else ""
    return "".join("M" + "L".join(f"{number(x)},{number(y)}" for x, y in piece) + end for piece in pieces if piece)


def stroke(line: Any, shade: str, width: float = 2.0, opacity: Any = 1.0) -> str:
    """Return the style of a line."""
    given = line if isinstance(line, dict) else {}
    wide = given.get("width", width)
    thick = float(wide) if isinstance(wide, int | float) and 0 <= wide <= 20 else width
    style = f"fill:none;stroke:{shade};stroke-width:{thick:g}"
    dash = _DASHES.get(str(given.get("dash")))
    style += f";stroke-dasharray:{dash}" if dash else ""
    return style + (f";opacity:{opacity:g}" if isinstance(opacity, int | float) and 0 <= opacity < 1 else "")


def mark(x: float, y: float, symbol: str, size: float) -> str:
    """Return one mark as a path."""
    half = size / 2
    shape = _SYMBOLS.get(symbol.removesuffix("-open"))
    if shape is None:
        return (
            f"M{number(x - half)},{number(y)}a{half:g},{half:g} 0 1 0 {size:g},0a{half:g},{half:g} 0 1 0 {-size:g},0Z"
        )
    corners = {"x": x, "y": y, "l": x - half, "r": x + half, "t": y - half, "b": y + half}
    return shape.format(**{name: number(value) for name, value in corners.items()})
