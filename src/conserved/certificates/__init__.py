"""Proofs by ball arithmetic of how many conservation laws a function has; the only part that uses python-flint."""

from conserved.optional import require

require("flint", "A certificate")

from conserved.certificates.certificate import Certificate
from conserved.certificates.certifying import certify
from conserved.certificates.program import MalformedError

__all__ = ["Certificate", "MalformedError", "certify"]
