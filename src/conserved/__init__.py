"""Find, prove, watch and use the quantities that neural-network training conserves."""

from typing import TYPE_CHECKING

from conserved import blocks
from conserved.certify import Certificate, certify
from conserved.discover import Discovery, discover, find_laws
from conserved.impostors import impostors
from conserved.laws import Dropped, Law, LawSet, Reference
from conserved.recognize import Component, recognize, register
from conserved.symmetry import Kind, Leg, Symmetry, View
from conserved.verdict import Evidence, Status, Verdict, Witness
from conserved.version import __version__

if TYPE_CHECKING:
    from conserved.track import Monitor

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
    "Monitor",
    "Reference",
    "Status",
    "Symmetry",
    "Verdict",
    "View",
    "Witness",
    "__version__",
    "blocks",
    "certify",
    "discover",
    "find_laws",
    "impostors",
    "recognize",
    "register",
]


def __getattr__(name: str) -> object:
    """Load what only training runs need when it is first asked for."""
    if name == "Monitor":
        from conserved.track import Monitor

        return Monitor
    raise AttributeError(f"module 'conserved' has no attribute {name!r}")
