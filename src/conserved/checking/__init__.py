"""Is this function's backward right? `check` tests it with no reference and no model."""

from conserved.checking.check_result import Check
from conserved.checking.checking import check
from conserved.checking.gradient_test import GradientTest, Method
from conserved.inference.probing import Probe, UncheckableError, probe

__all__ = [
    "Check",
    "GradientTest",
    "Method",
    "Probe",
    "UncheckableError",
    "check",
    "probe",
]
