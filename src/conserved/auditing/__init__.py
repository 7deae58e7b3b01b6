"""Is this gradient right? Identities of a model's backward pass, the softmax gauge, replicas that agree, updates that
land; and the backward of a single function, with no model and no reference."""

from typing import TYPE_CHECKING

from conserved.on_demand import loaded_on_demand

if TYPE_CHECKING:
    from conserved.auditing.audit_hook import AuditHook, GradientsDoNotConserve
    from conserved.auditing.audit_result import Audit, GradientFinding, Row
    from conserved.auditing.functions import Check, Method, Tested, check
    from conserved.auditing.landed_updates import Landing, check_update
    from conserved.auditing.model_audit import audit
    from conserved.auditing.replica_agreement import Replicas, check_replicas
    from conserved.auditing.softmax_gauge import Gauge, gauge
    from conserved.inference.probing import Axis, Group, Probe, ProbedSymmetry, TensorLeg, Uncheckable, probe
else:
    __getattr__ = loaded_on_demand(
        __name__,
        {
            "audit_hook": "AuditHook GradientsDoNotConserve",
            "audit_result": "Audit GradientFinding Row",
            "functions": "Axis Check Group Method Probe ProbedSymmetry TensorLeg Tested Uncheckable check probe",
            "landed_updates": "Landing check_update",
            "model_audit": "audit",
            "replica_agreement": "Replicas check_replicas",
            "softmax_gauge": "Gauge gauge",
        },
    )

__all__ = [
    "Audit",
    "AuditHook",
    "Axis",
    "Check",
    "Gauge",
    "GradientFinding",
    "GradientsDoNotConserve",
    "Group",
    "Landing",
    "Method",
    "Probe",
    "ProbedSymmetry",
    "Replicas",
    "Row",
    "TensorLeg",
    "Tested",
    "Uncheckable",
    "audit",
    "check",
    "check_replicas",
    "check_update",
    "gauge",
    "probe",
]
