"""Layouts that a user writes by hand, for stacks that leave no trace on parameters."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from conserved.layout.groups import RankGroup, whole_world
from conserved.layout.table import ParameterLayout, PieceCut

GivenLayout = Mapping[str, int | ParameterLayout | None]
"""By pattern of names: the axis that is cut, None for what is replicated, or the whole layout."""


def given_layout(names: list[str], given: GivenLayout, group: Any = None) -> dict[str, ParameterLayout]:
    """Return the layout of parameters whose names match a pattern; the first pattern that matches counts.

    Args:
        names: the parameters of the model.
        given: for instance {"*.up.weight": 0, "*.down.weight": 1, "*": None}.
        group: the process group that parameters are cut or replicated over; by default all processes.

    Raises:
        ValueError: a pattern matches no parameter, or an axis is not a number.
    """
    over = whole_world() if group is None else RankGroup.of("given", group)
    for pattern, value in given.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"Expected `layout` to name parameters, got {pattern!r}, which matches none. Use names of "
                "model.named_parameters()."
            )
        if not (value is None or isinstance(value, int | ParameterLayout)):
            raise ValueError(
                f"Expected an axis, None or a ParameterLayout for {pattern!r}, got {value!r}. Pass the axis that "
                "is split."
            )
    table: dict[str, ParameterLayout] = {}
    for name in names:
        matching = [pattern for pattern in given if fnmatchcase(name, pattern)]
        if matching:
            table[name] = _layout(given[matching[0]], over)
    return table


def _layout(value: int | ParameterLayout | None, over: RankGroup | None) -> ParameterLayout:
    if isinstance(value, ParameterLayout):
        return value
    if over is None:
        return ParameterLayout()
    return ParameterLayout(replicated=(over,)) if value is None else ParameterLayout(cuts=(PieceCut(over, value),))
