"""One audit of a run in a few numbers, kept in a series beside the drift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conserved.auditing import Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One audit of a run in a few numbers, for a series beside the drift."""

    step: int
    status: str
    ok: bool
    conclusive: bool
    worst: float
    """The largest relative residual."""
    excess: float
    """The largest residual over what rounding explains of it."""
    law: str
    """The law furthest beyond its limit; empty if there is none."""
    tested: int
    refuted: int
    gauge: float | None
    """The largest relative sum of key gradients, where attention was watched."""
    families: Mapping[str, float]
    """The largest residual over what rounding explains, by family of law."""
    seconds: float
    why: str
    """Why this step was audited."""
    sensitivity: float | None = None
    """The relative error of a leg that a typical law would have shown, where it was worked out."""
    replays: int = 0
    """Identities above the floor for which the pass was run again."""
    rounding: Mapping[str, float] = field(default_factory=dict)
    """The largest predicted rounding errors of dQ and dK of attention, where it runs in half precision."""

    def __repr__(self) -> str:
        return f"<AuditEntry of step {self.step}: {self.status}, {self.tested} tested, {self.refuted} refuted>"

    def readings(self) -> dict[str, float]:
        """Return named numbers for a dashboard."""
        result = {"audit/residual": self.worst, "audit/of_rounding": self.excess, "audit/refuted": float(self.refuted)}
        result |= {f"audit/of_rounding/{family}": value for family, value in self.families.items()}
        result |= {f"audit/{name}": value for name, value in self.rounding.items()}
        result["audit/seconds"] = self.seconds
        return result if self.gauge is None else result | {"audit/gauge": self.gauge}

    @staticmethod
    def of(audit: Audit, step: int, seconds: float, why: str, rounding: Mapping[str, float]) -> AuditEntry:
        """Return an audit in a few numbers."""
        families = dict(audit.by_family())
        watched = audit.gauge is not None and audit.gauge.rows
        return AuditEntry(
            step=step,
            status=audit.verdict.status.value,
            ok=audit.ok,
            conclusive=audit.conclusive,
            worst=audit.worst,
            excess=max(families.values(), default=0.0),
            law=audit.failures[0].name if audit.failures else audit.left_open[0].name if audit.left_open else "",
            tested=audit.tested,
            refuted=len(audit.failures),
            gauge=audit.gauge.worst if audit.gauge is not None and watched else None,
            families=families,
            seconds=seconds,
            why=why,
            sensitivity=None if audit.sensitivity is None else audit.sensitivity.typical,
            replays=len(audit.diagnoses),
            rounding=rounding,
        )
