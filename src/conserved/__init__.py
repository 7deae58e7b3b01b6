"""Find, prove, watch and use the quantities that neural-network training conserves."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from conserved import former_paths, on_demand
from conserved.version import __version__

if TYPE_CHECKING:
    from conserved import attention, integrations, report, store, testing, tracking, transform
    from conserved.auditing import (
        Audit,
        AuditHook,
        Check,
        Gauge,
        GradientsDoNotConserve,
        audit,
        check,
        check_replicas,
        check_update,
        gauge,
    )
    from conserved.certificates import Certificate, certify
    from conserved.discovery import Discovery, discover
    from conserved.inference import Component, recognize, register, register_operator
    from conserved.inference.probing import Probe, Uncheckable, probe
    from conserved.laws import Dropped, Law, LawSet, Reference
    from conserved.papers import blocks, claims, lab
    from conserved.symmetry import Kind, Leg, Symmetry, View
    from conserved.tracking import Monitor, MonitorConfig
    from conserved.verdict import Evidence, Status, Verdict, Witness

__all__ = [
    "Audit",
    "AuditHook",
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
    "MonitorConfig",
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
    "blocks",
    "certify",
    "check",
    "check_replicas",
    "check_update",
    "claims",
    "discover",
    "gauge",
    "integrations",
    "lab",
    "probe",
    "recognize",
    "register",
    "register_operator",
    "report",
    "store",
    "testing",
    "tracking",
    "transform",
]

_PARTS = {
    "auditing": (
        "Audit AuditHook Check Gauge GradientsDoNotConserve audit check check_replicas check_update gauge "
        "audit_every landing replicas"
    ),
    "certificates": "Certificate certify",
    "discovery": "Discovery discover find_laws",
    "inference": "Component recognize register register_operator",
    "inference.probing": "Probe Uncheckable probe",
    "laws": "Dropped Law LawSet Reference impostors",
    "symmetry": "Kind Leg Symmetry View",
    "tracking": "Monitor MonitorConfig",
    "verdict": "Evidence Status Verdict Witness",
}
"""Which part of the package defines which public name. Each is loaded when it is first asked for, so that the command
answers `--help` and completes words without waiting for PyTorch."""

_HOMES = {name: part for part, names in _PARTS.items() for name in names.split()}


_RENAMED = {
    "audit_every": "conserved.AuditHook(model, optimizer, every=…)",
    "find_laws": "conserved.discover(…, count=False)",
    "impostors": "laws.baselines()",
    "landing": "conserved.check_update",
    "replicas": "conserved.check_replicas",
}
"""Names of the first release, and what to write instead; they go with the next one."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(f"conserved.{_HOMES[name]}"), name)
        if name in _RENAMED:
            message = f"conserved.{name} goes with the next release: use {_RENAMED[name]}."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return found
    elif name in __all__ or name == "track":
        found = importlib.import_module(f"conserved.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


former_paths.install(__name__)
on_demand.provide("moment maps of legs", "conserved.moment:of_legs")
