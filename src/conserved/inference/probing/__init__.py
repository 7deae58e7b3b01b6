"""Find symmetries of a black-box function by moving its inputs."""

from conserved.inference.probing.numerical_function import UncheckableError
from conserved.inference.probing.symmetry_search import Probe, probe

__all__ = ["Probe", "UncheckableError", "probe"]
