"""The laws of a model: all of them at once, their identities and verdicts, and how many are independent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conserved.on_demand import load_on_demand

if TYPE_CHECKING:
    from conserved.laws.law_set import Change, Dropped, Law, LawExplanation, LawSet, Reference
    from conserved.laws.program_check import ProgramCheck
else:
    __getattr__ = load_on_demand(
        __name__,
        {"law_set": "Change Dropped LawExplanation Law LawSet Reference", "program_check": "ProgramCheck"},
    )

__all__ = ["Change", "Dropped", "Law", "LawExplanation", "LawSet", "ProgramCheck", "Reference"]
