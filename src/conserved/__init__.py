"""Find, prove, watch and use the quantities that neural-network training conserves."""

import importlib
from typing import TYPE_CHECKING, Any

from conserved.version import __version__

if TYPE_CHECKING:
    from conserved import attention, blocks, claims, integrations, report, store, testing, tracking, transform
    from conserved.auditing import (
        Audit,
        AuditHook,
        Gauge,
        GradientsDoNotConserveError,
        audit,
        check_eval,
        check_replicas,
        check_scale,
        check_update,
        gauge,
    )
    from conserved.certificates import Certificate, certify
    from conserved.checking import Check, check
    from conserved.discovery import Discovery, discover
    from conserved.inference import recognize, register_operator
    from conserved.inference.probing import Probe, UncheckableError, probe
    from conserved.laws import Dropped, Law, LawSet, Reference
    from conserved.symmetry import Kind, Leg, Symmetry, View
    from conserved.testing import assert_backward
    from conserved.tracking import Monitor, MonitorConfig
    from conserved.verdict import Evidence, Status, Verdict, Witness

__all__ = [
    "Audit",
    "AuditHook",
    "Certificate",
    "Check",
    "Discovery",
    "Dropped",
    "Evidence",
    "Gauge",
    "GradientsDoNotConserveError",
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
    "UncheckableError",
    "Verdict",
    "View",
    "Witness",
    "__version__",
    "assert_backward",
    "attention",
    "audit",
    "blocks",
    "certify",
    "check",
    "check_eval",
    "check_replicas",
    "check_scale",
    "check_update",
    "claims",
    "discover",
    "gauge",
    "integrations",
    "probe",
    "recognize",
    "register_operator",
    "report",
    "store",
    "testing",
    "tracking",
    "transform",
]

_PARTS = {
    "auditing": (
        "Audit AuditHook Gauge GradientsDoNotConserveError "
        "audit check_eval check_replicas check_scale check_update gauge"
    ),
    "certificates": "Certificate certify",
    "checking": "Check check",
    "discovery": "Discovery discover",
    "inference": "recognize register_operator",
    "inference.probing": "Probe UncheckableError probe",
    "laws": "Dropped Law LawSet Reference",
    "symmetry": "Kind Leg Symmetry View",
    "testing": "assert_backward",
    "tracking": "Monitor MonitorConfig",
    "verdict": "Evidence Status Verdict Witness",
}
"""Public names by the subpackage that defines them. Each is imported on first access (PEP 562), so that the command
answers `--help` and completes words without importing PyTorch."""

_HOMES = {name: part for part, names in _PARTS.items() for name in names.split()}


if not TYPE_CHECKING:  # A type checker would take any name for known.

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(importlib.import_module(f"conserved.{_HOMES[name]}"), name)
        elif name in __all__:
            value = importlib.import_module(f"conserved.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
