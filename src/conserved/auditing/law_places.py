"""The entries that a law speaks of, in words: `c_attn.weight[:,32:40] (keys, head 0)`."""

from __future__ import annotations

import re

from conserved.symmetry import Leg, Symmetry

_SIDES = {
    "query_key": ("queries", "keys"),
    "value_output": ("values", "outputs"),
    "query_scale": ("queries", "queries"),
    "key_scale": ("keys", "keys"),
    "gated_neurons": ("down", "up"),
    "neurons": ("in", "out"),
}
"""By family of law, what legs of positive and of negative degree are."""

_KEY, _QUERY = re.compile(r"(^|[._])(k|key|keys)([._]|$)|key"), re.compile(r"(^|[._])(q|query|queries)([._]|$)|query")


def described(leg: Leg, symmetry: Symmetry) -> str:
    """Return a leg as a slice of its parameter, with its role in the law and its head."""
    sides = _SIDES.get(symmetry.family)
    words = []
    if sides is not None:
        plus, minus = reversed(sides) if _swapped(symmetry) else sides
        words.append(plus if leg.degree > 0 else minus)
        if symmetry.part.isdigit():
            words.append(f"{'group' if _grouped(symmetry) else 'head'} {symmetry.part}")
    return f"{leg.view} ({', '.join(words)})" if words else str(leg.view)


def _swapped(symmetry: Symmetry) -> bool:
    """Return whether keys come first in a law of queries and keys, to go by the names of parameters."""
    if symmetry.family != "query_key":
        return False
    first = [leg.view.parameter for leg in symmetry.legs if leg.degree > 0]
    return all(_KEY.search(name) and not _QUERY.search(name) for name in first)


def _grouped(symmetry: Symmetry) -> bool:
    """Return whether several heads share one."""
    if symmetry.family not in ("query_key", "value_output"):
        return False
    weights = [leg for leg in symmetry.legs if leg.view.m > 1]
    return any(sum(leg.degree * sign > 0 for leg in weights) > 1 for sign in (1, -1))
