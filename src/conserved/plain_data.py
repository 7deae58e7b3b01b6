"""Plain values as they come from a JSON file, refused in one sentence where nobody would have written them."""

from __future__ import annotations

import sys
from typing import Any

_LARGEST = 1 << 48
"""No axis of a tensor is longer."""


def size(value: Any) -> int:
    """A whole number from a file, such as the length of an axis; TypeError or ValueError for anything else."""
    if type(value) is not int:
        raise TypeError(f"{_shown(value)} is not a whole number")
    if not 0 <= value < _LARGEST:
        raise ValueError(f"{_shown(value)} is no size or place of an axis")
    return value


def real(value: Any) -> float:
    """A finite number from a file."""
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise TypeError(f"{_shown(value)} is not a finite number")
    return float(value)


def text(value: Any) -> str:
    """A name from a file; JSON can say half of a character, which cannot be written anywhere."""
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{_shown(value)} holds half of a character")
    return value


def _shown(value: Any) -> str:
    """A value for a message: short, in ASCII, whatever it is."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return "a number of more than 308 digits"
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
