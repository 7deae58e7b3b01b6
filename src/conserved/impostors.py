"""`impostors(laws)`: the baselines of a law set, under their first name; they are `laws.baselines()`."""

from __future__ import annotations

from conserved.laws import LawSet


def impostors(laws: LawSet) -> LawSet:
    """One spoiled form for every law that has one; see `LawSet.baselines`."""
    return laws.baselines()
