"""Proofs by ball arithmetic of how many conservation laws a function has; the only part that uses python-flint."""

from conserved.certify.certificate import Certificate
from conserved.certify.certifying import certify
from conserved.certify.program import Malformed

__all__ = ["Certificate", "Malformed", "certify"]
