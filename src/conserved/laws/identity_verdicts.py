"""From the residuals of gradient identities to verdicts: one for each, and one on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from conserved.verdict import Evidence, Status, Verdict

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative residual of an identity on many entries that rounding explains, by precision of the pass."""

HALF = (torch.bfloat16, torch.float16)

_FEW = 6.0
"""Errors of few entries do not average out: of n entries they may be this many times 1/√n larger."""


@overload
def rounding(precision: torch.dtype, entries: int) -> float: ...
@overload
def rounding(precision: torch.dtype, entries: NDArray[np.int64]) -> NDArray[np.float64]: ...
def rounding(precision: torch.dtype, entries: int | NDArray[np.int64]) -> float | NDArray[np.float64]:
    """The relative residual that rounding explains in an identity whose legs have so many entries."""
    least = max(entries, 1) if isinstance(entries, int) else np.maximum(entries, 1)
    return TOLERANCE[precision] * (1 + _FEW / least**0.5)


def status(residual: float, limit: float, *, tested: bool, nearly: bool) -> Status:
    """What one identity's residual says, wherever it is judged; nothing, if it was not put to the test.

    Of a law that holds `nearly`, up to a norm's ε, a residual over the limit refutes nothing: what is left of it is
    Σ_t ε/(s_t + ε) ⟨y_t, ∂L/∂y_t⟩, and parameters and gradients do not say how small the s_t were. Fresh models
    normalise inputs of mean square ε. It is not verified either.
    """
    if not tested:
        return Status.INCONCLUSIVE
    if residual <= limit:
        return Status.VERIFIED
    return Status.INCONCLUSIVE if nearly and residual == residual else Status.REFUTED


def judged(name: str, residual: float, limit: float, *, tested: bool, nearly: bool) -> Verdict:
    """The same as a verdict."""
    found = status(residual, limit, tested=tested, nearly=nearly)
    if not tested:
        message = f"No gradient reached the parameters of {name}, or all of them are zero."
        return Verdict(status=found, message=message)
    message = {
        Status.VERIFIED: f"The gradient identity of {name} holds.",
        Status.INCONCLUSIVE: f"The gradient identity of {name} is further off than √ε, which ε may explain.",
        Status.REFUTED: f"The gradient identity of {name} does not hold.",
    }[found]
    evidence = (Evidence(what=f"relative residual of {name}", value=residual, limit=limit),)
    return Verdict(status=found, message=message, evidence=evidence)


def together(parts: Mapping[str, Verdict], precision: torch.dtype, *, nearly: int) -> Verdict:
    """The verdict on all identities: the broken ones as evidence, worst first, or else the one nearest its limit."""

    def excess(verdict: Verdict) -> float:
        evidence = verdict.evidence[0]
        assert isinstance(evidence.value, float)
        assert isinstance(evidence.limit, float)
        return evidence.value / evidence.limit if evidence.value == evidence.value else float("inf")

    judged = sorted((verdict for verdict in parts.values() if verdict.evidence), key=excess, reverse=True)
    broken = [verdict for verdict in judged if verdict == Verdict.REFUTED]
    unsure = [verdict for verdict in judged if verdict == Verdict.INCONCLUSIVE]
    evidence = tuple(verdict.evidence[0] for verdict in broken or unsure or judged[:1])
    if unsure and not broken:
        message = (
            f"{len(unsure)} of {len(parts)} identities are further off than the √ε of the norms they hold up to: "
            "either inputs of those norms are small against √ε, or the backward pass is wrong there. Verify with a "
            "smaller ε or larger weights to be sure. The others hold."
        )
        return Verdict(status=Verdict.INCONCLUSIVE, message=message, evidence=evidence, parts=parts)
    if broken:
        message = (
            f"{len(broken)} of {len(parts)} identities do not hold. Either the backward pass is wrong there, or the "
            "model computed something else than in the call its laws were read off."
        )
        return Verdict(status=Verdict.REFUTED, message=message, evidence=evidence, parts=parts)
    rounding = f"the rounding of {str(precision).removeprefix('torch.')}"
    message = f"All {len(judged)} gradient identities hold to {rounding}" + (f", {nearly} up to ε." if nearly else ".")
    if len(judged) < len(parts):
        message += f" No gradient reached the parameters of {len(parts) - len(judged)} more."
    return Verdict(status=Verdict.VERIFIED, message=message, evidence=evidence, parts=parts)
