"""Is this backward pass right? Gradient identities, the softmax gauge, agreement of replicas, updates that land."""

from conserved.audit.auditing import audit
from conserved.audit.every import GradientsDoNotConserve, audit_every
from conserved.audit.gauge import Gauge, gauge
from conserved.audit.landing import Landing, landing
from conserved.audit.replicas import Replicas, replicas
from conserved.audit.report import Audit, Finding, Row

__all__ = [
    "Audit",
    "Finding",
    "Gauge",
    "GradientsDoNotConserve",
    "Landing",
    "Replicas",
    "Row",
    "audit",
    "audit_every",
    "gauge",
    "landing",
    "replicas",
]
