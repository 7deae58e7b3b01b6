"""Numbers as people read them, and text that does not tell where on a machine things were."""

from __future__ import annotations

import math
import re
from typing import Any

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def superscript(exponent: int) -> str:
    """Return an exponent in small digits."""
    return str(exponent).translate(_RAISED)


def numeral(value: Any, digits: int = 3) -> str:
    """Return three significant digits, powers of ten written out, a dash for what is not there; text as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.{digits}g}"
        text = f"{value:,.0f}" if "e" in text or abs(value) >= 1000 else text
        return text.replace("-", "−")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}×10{superscript(int(exponent))}".replace("-", "−", 1)


def format_number(value: Any, longest: int = 400) -> str:
    """Return plain data in one line: numbers as numerals, lists with brackets, cut where nobody reads on."""
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(format_number(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = ", ".join(f"{key}: {format_number(item)}" for key, item in value.items())
    else:
        text = numeral(value, digits=6)
    return text if len(text) <= longest else text[:longest] + "…"


_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][^\s/\\:;,'\"<>|]+){2,}[/\\]?")


def without_folders(value: Any) -> Any:
    """Return plain data in which every absolute path is its last part alone: a report travels, the machine does not."""
    if isinstance(value, str):
        return _PATH.sub(_last, value)
    if isinstance(value, dict):
        return {str(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    return value


def _last(match: re.Match[str]) -> str:
    before = match.string[match.start() - 1] if match.start() else " "
    if before.isalnum() or before in "._-)/":
        return match[0]
    return re.split(r"[/\\]", match[0].rstrip("/\\"))[-1]
