"""Does every gradient arrive, finite and where one is needed?"""

from __future__ import annotations

import torch

from conserved.checking.gradient_test import GradientTest, Method
from conserved.checking.line_derivatives import has_derivative
from conserved.checking.locating import where
from conserved.checking.pass_under_test import Setting


def presence_tests(setting: Setting) -> tuple[list[GradientTest], dict[str, list[str]]]:
    """Test that every gradient which arrives is finite, and that a missing one is not needed."""
    tests: list[GradientTest] = []
    untested: dict[str, list[str]] = {}
    for index, name in enumerate(setting.function.names):
        grad = setting.grads[index]
        if grad is None:
            needed = any(has_derivative(setting.function, index, setting.seed) or ())
            tests.append(_missing(name, needed=needed))
            if not needed:
                untested[name] = ["no gradient arrives, and the output does not depend on it"]
            continue
        finite = bool(torch.isfinite(grad).all())
        share = float((~torch.isfinite(grad)).double().mean())
        tests.append(
            GradientTest(
                gradients=(name,),
                method=Method.PRESENCE,
                what="the gradient is finite and of its input's precision and shape",
                residual=share,
                limit=0.0,
                worst=0.0 if finite else float("inf"),
                where="" if finite else where(~torch.isfinite(grad)),
                meaning="" if finite else "a division by zero, an overflow, or memory that was never written",
            )
        )
    return tests, untested


def _missing(name: str, *, needed: bool) -> GradientTest:
    """Return the test of a gradient that does not arrive; `needed` if the outputs have a derivative by the input."""
    return GradientTest(
        gradients=(name,),
        method=Method.PRESENCE,
        what="the gradient arrives where the output depends on the input",
        residual=float(needed),
        limit=0.0,
        worst=float("inf") if needed else 0.0,
        sees_factor=not needed,
        where="everywhere" if needed else "",
        meaning=f"{name} changes the output, and its backward returns None: detached, or left out" if needed else "",
    )
