"""Which symmetries a program has: every tensor gets the most general type its operations allow, and what stays free is a law."""

from conserved.inference.infer import recognize
from conserved.inference.rules import RULES, Step, rule

__all__ = ["RULES", "Step", "recognize", "rule"]
