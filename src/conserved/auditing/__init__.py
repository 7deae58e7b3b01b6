"""Is this gradient right? Identities of a model's backward pass, the softmax gauge, replicas and updates."""

from typing import TYPE_CHECKING

from conserved.on_demand import load_on_demand

if TYPE_CHECKING:
    from conserved.auditing.audit_hook import AuditHook, GradientsDoNotConserveError
    from conserved.auditing.audit_result import Audit, GradientFinding, Row
    from conserved.auditing.dumped_gradients import audit_dump
    from conserved.auditing.eval_mode import EvalResult, check_eval
    from conserved.auditing.gradient_scale import GradientScale, check_scale
    from conserved.auditing.landed_updates import Landing, check_update
    from conserved.auditing.model_audit import audit
    from conserved.auditing.replica_agreement import Replicas, check_replicas
    from conserved.auditing.softmax_gauge import Gauge, gauge
else:
    __getattr__ = load_on_demand(
        __name__,
        {
            "audit_hook": "AuditHook GradientsDoNotConserveError",
            "audit_result": "Audit GradientFinding Row",
            "eval_mode": "EvalResult check_eval",
            "gradient_scale": "GradientScale check_scale",
            "dumped_gradients": "audit_dump",
            "landed_updates": "Landing check_update",
            "model_audit": "audit",
            "replica_agreement": "Replicas check_replicas",
            "softmax_gauge": "Gauge gauge",
        },
    )

__all__ = [
    "Audit",
    "AuditHook",
    "EvalResult",
    "Gauge",
    "GradientFinding",
    "GradientScale",
    "GradientsDoNotConserveError",
    "Landing",
    "Replicas",
    "Row",
    "audit",
    "audit_dump",
    "check_eval",
    "check_replicas",
    "check_scale",
    "check_update",
    "gauge",
]
