"""Find, prove, watch and use the quantities that neural-network training conserves."""

__version__ = "0.1.0"

import importlib
from typing import Any

from conserved import blocks
from conserved.certify import Certificate, certify
from conserved.discover import Discovery, discover, find_laws
from conserved.impostors import impostors
from conserved.laws import Dropped, Law, LawSet, Reference
from conserved.recognize import Component, recognize, register
from conserved.symmetry import Kind, Leg, Symmetry, View
from conserved.verdict import Evidence, Status, Verdict, Witness

__all__ = [
    "Certificate",
    "Component",
    "Discovery",
    "Dropped",
    "Evidence",
    "Kind",
    "Law",
    "LawSet",
    "Leg",
    "Reference",
    "Status",
    "Symmetry",
    "Verdict",
    "View",
    "Witness",
    "blocks",
    "certify",
    "discover",
    "find_laws",
    "impostors",
    "recognize",
    "register",
]


def __getattr__(name: str) -> Any:
    """Parts that are imported when they are first used."""
    if name == "attention":
        return importlib.import_module("conserved.attention")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
