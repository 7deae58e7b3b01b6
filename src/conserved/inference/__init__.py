"""Which symmetries a program has: tensors get the most general type its operations allow; what stays free is a law."""

from conserved.inference.examples import NoExample
from conserved.inference.infer import recognize
from conserved.inference.rules import RULES, Step, rule

__all__ = ["RULES", "NoExample", "Step", "recognize", "rule"]
