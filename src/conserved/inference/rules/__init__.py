"""The table of operators: what each allows its inputs and outputs to do, one entry per ATen operation.

An entry is a function from a `Step` (the operation with the types of its inputs) to the types of its results. Most
entries are one of a few families: moves of entries, sums, products, contractions, homogeneous functions
f(s·x) = s^k f(x), functions that fix their input, normalisations. An operation without an entry fixes all it touches.
"""

from conserved.inference.rules import (  # noqa: F401
    constants,
    contractions,
    joins,
    lookups,
    norms,
    pooling,
    products,
    reductions,
    sums,
    views,
)
from conserved.inference.rules.step import RULES, Known, Step, TypingRule, base_name, fix_all, rule, same_value

__all__ = ["RULES", "Known", "Step", "TypingRule", "base_name", "fix_all", "rule", "same_value"]
