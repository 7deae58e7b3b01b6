"""Find, prove, watch and use the quantities that neural-network training conserves."""

import importlib
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from conserved import former_paths
from conserved.version import __version__

if TYPE_CHECKING:
    from conserved import attention, blocks, claims, integrations, lab, report, testing, track, transform
    from conserved.audit import (
        Audit,
        AuditHook,
        Gauge,
        GradientsDoNotConserve,
        audit,
        check_replicas,
        check_update,
        gauge,
    )
    from conserved.auditing import Check, Probe, Uncheckable, check, probe
    from conserved.certify import Certificate, certify
    from conserved.discover import Discovery, discover
    from conserved.inference import Component, recognize, register, register_operator
    from conserved.laws import Dropped, Law, LawSet, Reference
    from conserved.symmetry import Kind, Leg, Symmetry, View
    from conserved.track import Monitor, MonitorConfig
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
    "testing",
    "track",
    "transform",
]

_PARTS = {
    "audit": (
        "Audit AuditHook Gauge GradientsDoNotConserve audit check_replicas check_update gauge "
        "audit_every landing replicas"
    ),
    "auditing": "Check Probe Uncheckable check probe",
    "certify": "Certificate certify",
    "discover": "Discovery discover find_laws",
    "impostors": "impostors",
    "inference": "Component recognize register register_operator",
    "laws": "Dropped Law LawSet Reference",
    "symmetry": "Kind Leg Symmetry View",
    "track": "Monitor MonitorConfig",
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


class _Package(ModuleType):
    """Some parts have the name of their main function (audit, certify, discover, impostors); importing a
    part would put the module in the place of the function, whichever was asked for first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in _HOMES):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(f"conserved.{_HOMES[name]}"), name)
        if name in _RENAMED:
            message = f"conserved.{name} goes with the next release: use {_RENAMED[name]}."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return found
    elif name in __all__:
        found = importlib.import_module(f"conserved.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
former_paths.install()
