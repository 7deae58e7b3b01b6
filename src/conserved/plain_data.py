"""Plain values: what results become for JSON; what comes from a file, refused where nobody would have written it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

_LARGEST = 1 << 48
"""No axis of a tensor is longer."""


def record_of(thing: Any, names: str) -> dict[str, Any]:
    """Return the named attributes of a thing, as JSON has them."""
    return {name: plain(getattr(thing, name)) for name in names.split()}


def plain(value: Any) -> Any:
    """Return a value as JSON has it: things by their record, or by their fields.

    Members of enumerations become their values.
    """
    if hasattr(value, "record"):
        return value.record()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return record_of(value, " ".join(field.name for field in fields(value)))
    return value


def size(value: Any) -> int:
    """Return a whole number from a file, such as the length of an axis; TypeError or ValueError for anything else."""
    if type(value) is not int:
        raise TypeError(f"{_show(value)} is not a whole number")
    if not 0 <= value < _LARGEST:
        raise ValueError(f"{_show(value)} is not a size or an index of an axis")
    return value


def real(value: Any) -> float:
    """Return a finite number from a file."""
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise TypeError(f"{_show(value)} is not a finite number")
    return float(value)


def text(value: Any) -> str:
    """Return a name from a file; JSON can say half of a character, which cannot be written anywhere."""
    if not isinstance(value, str):
        raise TypeError(f"{_show(value)} is not text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{_show(value)} holds half of a character")
    return value


def _show(value: Any) -> str:
    """Return a value for a message: short, in ASCII, whatever it is."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return "a number of more than 308 digits"
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
