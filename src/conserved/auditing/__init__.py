"""Is this function's backward right? `check` tests it, `probe` finds the symmetries of a forward pass."""

from conserved.auditing.checking import check
from conserved.auditing.function import Uncheckable
from conserved.auditing.moves import Axis, Group, ProbedSymmetry, TensorLeg
from conserved.auditing.probing import Probe, probe
from conserved.auditing.report import Check
from conserved.auditing.tested import Method, Tested

__all__ = [
    "Axis",
    "Check",
    "Group",
    "Method",
    "Probe",
    "ProbedSymmetry",
    "TensorLeg",
    "Tested",
    "Uncheckable",
    "check",
    "probe",
]
