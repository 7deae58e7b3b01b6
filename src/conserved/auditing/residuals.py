"""What is left of every gradient identity, and what rounding explains of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from conserved.auditing.backward_pass import BackwardPass
from conserved.auditing.softmax_gauge import Gauge
from conserved.laws.identities import Balance
from conserved.laws.identity_verdicts import HALF, rounding
from conserved.laws.pass_precision import coarsest

Known = Literal["given", "stored", "bits"]
"""How the precision of a pass is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """Residuals and what rounding explains of them, after laws up to ε were made exact where that is possible."""

    balance: Balance
    residuals: NDArray[np.float64]
    limits: NDArray[np.float64]
    nearly: NDArray[np.bool_]
    """Laws that still hold only up to ε."""


def residuals_of(
    backward: BackwardPass,
    balance: Balance,
    used: torch.dtype,
    accumulated: int,
    gauge: Gauge | None,
    *,
    given: bool,
) -> Residuals:
    """Of every identity; those up to ε are made exact where the pass was watched."""
    plan = backward.laws.plan
    rounding_alone = _limits(backward, used, accumulated, given=given)
    residuals, limits = balance.residuals.copy(), rounding_alone + plan.epsilons**0.5
    nearly = plan.epsilons > 0
    terms, slopes = None if gauge is None else gauge.terms, backward.slopes
    for place in np.flatnonzero(nearly).tolist():
        if terms is None or slopes is None:
            break
        symmetry = plan.symmetries[place]
        side = terms.of(symmetry, slopes)
        if side is None or not balance.tested[place]:
            continue
        mu = symmetry.identity(backward.points, slopes, dtype=torch.float64).flatten()
        value = side.value.to(mu.device)
        size = math.hypot(balance.scales[place], float(value.norm()), side.spread**0.5)
        residuals[place] = float((mu - value).norm()) / size if size else 0.0
        limits[place], nearly[place] = rounding_alone[place], False
    return Residuals(balance=balance, residuals=residuals, limits=limits, nearly=nearly)


def precision_of(given: torch.dtype | None, backward: BackwardPass, balance: Balance) -> tuple[torch.dtype, Known]:
    """The coarsest precision of the pass, and how it is known."""
    if given is not None:
        return given, "given"
    stored = coarsest(*{slope for _, slope in backward.types.values()})
    seen = None if stored in HALF else balance.grain
    return (stored, "stored") if seen is None else (seen, "bits")


def _limits(backward: BackwardPass, used: torch.dtype, accumulated: int, *, given: bool) -> NDArray[np.float64]:
    """The residual that rounding explains, for every symmetry: its tensors may be stored more coarsely than others."""
    # Libraries run norms, softmax and routers in float32 inside a float64 model, and gradients do not show it.
    least = used if given else coarsest(used, torch.float32)
    plan = backward.laws.plan

    def limits(kind: torch.dtype) -> NDArray[np.float64]:
        # Each pass that is added to a half-precision gradient rounds it once more.
        more = math.sqrt(accumulated) if kind in HALF else 1.0
        return more * rounding(coarsest(least, kind), plan.entries)

    by_kind = {kind: limits(kind) for kind in {coarsest(*pair) for pair in set(backward.types.values())}}
    if len(by_kind) == 1:
        return next(iter(by_kind.values()))
    stored = {name: coarsest(*pair) for name, pair in backward.types.items()}
    kinds = (coarsest(*(stored[name] for name in symmetry.parameters)) for symmetry in plan.symmetries)
    return np.array([by_kind[kind][place] for place, kind in enumerate(kinds)])
