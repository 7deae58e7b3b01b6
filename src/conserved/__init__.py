"""Find, prove, watch and use the quantities that neural-network training conserves."""

import importlib
from typing import TYPE_CHECKING, Any

from conserved import blocks
from conserved.audit import Audit, Gauge, GradientsDoNotConserve, audit, audit_every, gauge, landing, replicas
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
    "Audit",
    "Certificate",
    "Component",
    "Discovery",
    "Dropped",
    "Evidence",
    "Gauge",
    "GradientsDoNotConserve",
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
    "audit",
    "audit_every",
    "blocks",
    "certify",
    "discover",
    "find_laws",
    "gauge",
    "impostors",
    "landing",
    "recognize",
    "register",
    "replicas",
]


def __getattr__(name: str) -> Any:
    """Load what not every program needs when it is first asked for."""
    if name == "Monitor":
        return importlib.import_module("conserved.track").Monitor
    if name in ("attention", "claims"):
        return importlib.import_module(f"conserved.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
