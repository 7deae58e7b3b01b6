"""The laws of a model: all of them at once, their identities and verdicts, and how many are independent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conserved.on_demand import load_on_demand

if TYPE_CHECKING:
    from conserved.laws.change import Change, Reference
    from conserved.laws.law_set import Dropped, Law, LawExplanation, LawSet
    from conserved.laws.program_check import ProgramCheck
else:
    __getattr__ = load_on_demand(
        __name__,
        {"change": "Change Reference", "law_set": "Dropped LawExplanation Law LawSet", "program_check": "ProgramCheck"},
    )

__all__ = ["Change", "Dropped", "Law", "LawExplanation", "LawSet", "ProgramCheck", "Reference"]
