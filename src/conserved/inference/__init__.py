"""Which symmetries a program has: every tensor gets the most general type its operations allow, and what stays free
is a law.
"""

from typing import TYPE_CHECKING

from conserved.on_demand import load_on_demand

if TYPE_CHECKING:
    from conserved.inference.examples import NoExampleError
    from conserved.inference.first_calls import FirstCall
    from conserved.inference.infer import recognize
    from conserved.inference.live import being_followed, known_laws, laws_of_model
    from conserved.inference.rules import RULES, Step, rule
    from conserved.inference.rules import rule as register_operator
else:
    __getattr__ = load_on_demand(
        __name__,
        {
            "examples": "NoExampleError",
            "first_calls": "FirstCall",
            "infer": "recognize",
            "live": "being_followed known_laws laws_of_model",
            "rules": "RULES Step register_operator:rule rule",
        },
    )

__all__ = [
    "RULES",
    "FirstCall",
    "NoExampleError",
    "Step",
    "being_followed",
    "known_laws",
    "laws_of_model",
    "recognize",
    "register_operator",
    "rule",
]
