"""Find, prove, watch and use the quantities that neural-network training conserves."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from conserved.version import __version__

if TYPE_CHECKING:
    from conserved import attention, blocks, claims, integrations, lab, report, testing, track, transform
    from conserved.audit import Audit, Gauge, GradientsDoNotConserve, audit, audit_every, gauge, landing, replicas
    from conserved.auditing import Check, Probe, Uncheckable, check, probe
    from conserved.certify import Certificate, certify
    from conserved.discover import Discovery, discover, find_laws
    from conserved.impostors import impostors
    from conserved.inference import Component, recognize, register, register_operator
    from conserved.laws import Dropped, Law, LawSet, Reference
    from conserved.symmetry import Kind, Leg, Symmetry, View
    from conserved.track import Monitor
    from conserved.verdict import Evidence, Status, Verdict, Witness

__all__ = [
    "Audit",
    "Certificate",
    "Check",
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
    "Probe",
    "Reference",
    "Status",
    "Symmetry",
    "Uncheckable",
    "Verdict",
    "View",
    "Witness",
    "__version__",
    "attention",
    "audit",
    "audit_every",
    "blocks",
    "certify",
    "check",
    "claims",
    "discover",
    "find_laws",
    "gauge",
    "impostors",
    "integrations",
    "lab",
    "landing",
    "probe",
    "recognize",
    "register",
    "register_operator",
    "replicas",
    "report",
    "testing",
    "track",
    "transform",
]

_PARTS = {
    "audit": "Audit Gauge GradientsDoNotConserve audit audit_every gauge landing replicas",
    "auditing": "Check Probe Uncheckable check probe",
    "certify": "Certificate certify",
    "discover": "Discovery discover find_laws",
    "impostors": "impostors",
    "inference": "Component recognize register register_operator",
    "laws": "Dropped Law LawSet Reference",
    "symmetry": "Kind Leg Symmetry View",
    "track": "Monitor",
    "verdict": "Evidence Status Verdict Witness",
}
"""Which part of the package defines which public name. Each is loaded when it is first asked for, so that the command
answers `--help` and completes words without waiting for PyTorch."""

_HOMES = {name: part for part, names in _PARTS.items() for name in names.split()}


class _Package(ModuleType):
    """Some parts have the name of their main function (audit, certify, discover, impostors); importing a
    part would put the module in the place of the function, whichever was asked for first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in _HOMES):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(f"conserved.{_HOMES[name]}"), name)
    elif name in __all__:
        found = importlib.import_module(f"conserved.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
