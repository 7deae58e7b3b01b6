"""Is this function's backward right? `check` tests it with no reference and no model."""

from conserved.checking.check_result import Check
from conserved.checking.checking import check
from conserved.checking.gradient_test import GradientTest, Method
from conserved.inference.probing import Axis, Group, Probe, ProbedSymmetry, TensorLeg, UncheckableError, probe

__all__ = [
    "Axis",
    "Check",
    "GradientTest",
    "Group",
    "Method",
    "Probe",
    "ProbedSymmetry",
    "TensorLeg",
    "UncheckableError",
    "check",
    "probe",
]
