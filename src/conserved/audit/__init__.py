"""Is this backward pass right? Gradient identities, the softmax gauge, agreement of replicas, updates that land."""

from conserved.audit.agreement import Replicas, replicas
from conserved.audit.agreement import replicas as check_replicas
from conserved.audit.auditing import audit
from conserved.audit.every import GradientsDoNotConserve, audit_every
from conserved.audit.gauging import Gauge, gauge
from conserved.audit.hook import AuditHook
from conserved.audit.landed import Landing, landing
from conserved.audit.landed import landing as check_update
from conserved.audit.report import Audit, Finding, Row

__all__ = [
    "Audit",
    "AuditHook",
    "Finding",
    "Gauge",
    "GradientsDoNotConserve",
    "Landing",
    "Replicas",
    "Row",
    "audit",
    "audit_every",
    "check_replicas",
    "check_update",
    "gauge",
    "landing",
    "replicas",
]
