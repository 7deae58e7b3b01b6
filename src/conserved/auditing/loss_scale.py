r"""Hold gradients against the derivative of the loss along them, which a factor on all of them does not survive.

Every identity is linear in the gradient, and a replay starts from the output gradient of the run: neither sees a factor
in the loss, such as an accumulation that is not divided. The loss itself does. With d = G/‖G‖,

    D(ε) = (L(θ + εd) − L(θ − εd)) / 2ε = ⟨∇L, d⟩ + O(ε²),     ‖G‖ / D = the factor on all gradients.

Forward passes are made in float64, so that differences of losses are not rounding; parameters are replaced in flight,
and not written to. Two step sizes and Richardson's extrapolation, (4 D(ε/2) − D(ε))/3, leave an error of O(ε⁴), of
which the change from D(ε/2) is an upper estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from conserved.auditing.call_log import CallLog
from conserved.auditing.noise import SIGMAS
from conserved.auditing.reference_form import PassForm
from conserved.auditing.replay import ClosureReplay
from conserved.plain_data import record_of
from conserved.symmetry import Tensors
from conserved.verdict import Evidence, Status, Verdict

_MOVE = 1e-6
"""The change of the loss that a step along the gradient should make, relative to the loss. Differences of losses in
float64 then have ten digits, and saturated networks, whose gradient changes fast, are still in their linear range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor between gradients and the derivative of the loss along them."""

    factor: float
    error: float
    """How far the factor may be from 1 by rounding and by the finite step."""
    obstacle: str = ""

    @property
    def ok(self) -> bool:
        """Whether the gradients are those of the loss, up to the error; also if that could not be decided."""
        return bool(self.obstacle) or abs(self.factor - 1) <= self.error

    @property
    def verdict(self) -> Verdict:
        """The factor in one sentence."""
        if self.obstacle:
            return Verdict(status=Status.INCONCLUSIVE, message=f"Not held against the loss: {self.obstacle}.")
        message = (
            f"The gradients are {self.factor:.4g} (± {self.error:.1g}) times the derivative of the loss along them"
        )
        evidence = Evidence(what="factor on all gradients, less one", value=abs(self.factor - 1), limit=self.error)
        if self.ok:
            return Verdict(status=Status.VERIFIED, message=f"{message}.", evidence=(evidence,))
        message += ". They were accumulated, scaled or clipped, or the backward pass has a factor that it should not."
        return Verdict(status=Status.REFUTED, message=message, evidence=(evidence,))

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return record_of(self, "factor error obstacle ok")

    def __str__(self) -> str:
        return self.verdict.message


@torch.no_grad()
def loss_scale(replay: ClosureReplay, parameters: Tensors, gradients: Tensors, noise: float) -> LossScale:
    """Compare gradients with the derivative of the loss along them.

    Args:
        replay: the loss.
        parameters: the trained parameters, by name.
        gradients: their gradients, which give the direction.
        noise: the share of the gradient that is rounding.

    Returns:
        The factor. It says in `obstacle` if the loss could not be evaluated in float64.
    """
    norm = math.sqrt(sum(float(gradients[name].double().square().sum()) for name in parameters if name in gradients))
    if not 0 < norm < math.inf:
        return LossScale(factor=math.nan, error=math.inf, obstacle="all gradients are zero or one is not finite")
    if SIGMAS * noise >= 1:
        return LossScale(factor=math.nan, error=math.inf, obstacle="rounding is as large as the gradient")
    log = CallLog()
    try:
        here = replay.loss(PassForm(log=log))
        if log.opaque:
            return LossScale(factor=math.nan, error=math.inf, obstacle=log.opaque)
        step = _MOVE * max(abs(here), _MOVE) / norm

        def loss(length: float) -> float:
            moved = {
                id(p): p.detach().double() + length / norm * gradients[name].double()
                for name, p in parameters.items()
                if name in gradients
            }
            form = PassForm(
                eager=True, attention=True, functions=True, wide=torch.float64, log=log, trusted=set(), shifted=moved
            )
            return replay.loss(form)

        coarse = (loss(step) - loss(-step)) / (2 * step)
        fine = (loss(step / 2) - loss(-step / 2)) / step
    except Exception as problem:
        # The one boundary to the user's program: it may not run in float64.
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        return LossScale(factor=math.nan, error=math.inf, obstacle=reason)
    slope = (4 * fine - coarse) / 3
    if slope == 0 or not math.isfinite(slope):
        return LossScale(factor=math.nan, error=math.inf, obstacle="the loss does not change along the gradient")
    # Rounding of relative size e makes ‖G‖² larger by e², and leaves at most e of it in the one direction of G.
    error = noise + SIGMAS * noise**2 + abs(fine - coarse) / abs(slope) + torch.finfo(torch.float32).eps
    return LossScale(factor=norm / slope, error=error)
