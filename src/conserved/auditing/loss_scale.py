r"""Hold gradients against the derivative of the loss, which a factor on all of them does not survive.

Every identity is linear in the gradient, and a replay starts from the output gradient of the run: neither sees a factor
in the loss, such as an accumulation that is not divided. The loss itself does. With W the gradient of the pass in
reference form, in float64, and d = W/‖W‖,

    D(h) = (L(θ + hd) − L(θ − hd)) / 2h = ⟨∇L, d⟩ + O(h²),     factor = ⟨G, W⟩/⟨W, W⟩ · ‖W‖/D.

The direction is W and not G, because W has no rounding to speak of: the second quotient is 1 up to the error of D. All
rounding is in the first. There it is known: with A the gradient of the same pass run again, ⟨A, W⟩/⟨W, W⟩ is off 1 by
rounding alone if the comparison with reference form has found nothing else.

Forward passes are made in float64; parameters are replaced in flight, and not written to. D is taken at three step
sizes, each four times the last: their differences show truncation, where the loss is curved, and rounding, where a
part of the program computes in less than float64. Three times the largest is the error of D. Beyond 10 % nothing is
said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from conserved.auditing.call_log import CallLog
from conserved.auditing.reference_comparison import SEEN, ReferenceComparison
from conserved.auditing.reference_form import PassForm
from conserved.auditing.replay import ClosureReplay, ReplayError
from conserved.plain_data import record_of
from conserved.symmetry import Tensors
from conserved.tolerances import ROOT_MEAN_SQUARE, SIGMAS
from conserved.verdict import Evidence, Status, Verdict

_MOVE = 1e-6
"""The change of the loss that the middle step along the gradient should make, relative to the loss. Differences of
losses in float64 then have ten digits, and saturated networks, whose gradient changes fast, are still linear there."""

_RATIO = 4.0
"""Ratio of one step size to the next."""


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
def loss_scale(
    replay: ClosureReplay, parameters: Tensors, gradients: Tensors | None, comparison: ReferenceComparison
) -> LossScale:
    """Compare gradients with the derivative of the loss.

    Args:
        replay: the loss.
        parameters: the trained parameters, by name.
        gradients: their gradients, where they should be those of the loss; else those of the pass in reference form
            are held against the loss alone.
        comparison: the gradients of the pass beside those of its reference form.

    Returns:
        The factor. It says in `obstacle` why it could not be decided.
    """
    log = CallLog()
    form = PassForm(eager=True, attention=True, functions=True, wide=torch.float64, log=log, trusted=set())
    try:
        own = replay.gradients(parameters, form=PassForm(log=log))
        if log.opaque:
            return _undecided(log.opaque)
        right = replay.gradients(parameters, form=form)
        factor, error = 1.0, _stored(right)
        if gradients is not None:
            factor, rounding = _ratio(gradients, own, right, comparison)
            error += rounding
        del own
        grads = _slopes(replay, parameters, right, form)
    except Exception as problem:
        # The one boundary to the user's program: it may not run in float64.
        return _undecided(f"{type(problem).__name__}: {problem}".splitlines()[0][:200])
    fine, middle, coarse = grads
    # Richardson's extrapolation: the error of central differences is a series in h².
    derivative = (_RATIO**2 * fine - middle) / (_RATIO**2 - 1)
    if not math.isfinite(derivative) or derivative == 0:
        return _undecided("the loss does not change along the gradient")
    error += 3 * max(abs(fine - middle), abs(middle - coarse)) / abs(derivative) + torch.finfo(torch.float32).eps
    if not error <= SEEN:
        reason = f"the factor is known to {error:.1g} only, because rounding, or the curvature of the loss, is large"
        return _undecided(reason)
    return LossScale(factor=factor * _length(right) / derivative, error=error)


def _undecided(reason: str) -> LossScale:
    return LossScale(factor=math.nan, error=math.inf, obstacle=reason)


def _slopes(replay: ClosureReplay, parameters: Tensors, along: Tensors, form: PassForm) -> list[float]:
    """Return the derivative of the loss along some gradients by central differences, from the smallest step on."""
    norm = _length(along)
    if not 0 < norm < math.inf:
        raise ReplayError("all gradients are zero, or one is not finite")

    def loss(length: float) -> float:
        moved = {id(p): p.detach().double() + length / norm * along[name].double() for name, p in parameters.items()}
        return replay.loss(replace(form, shifted=moved))

    step = _MOVE * max(abs(replay.loss(form)), _MOVE) / norm
    return [(loss(h) - loss(-h)) / (2 * h) for h in (step / _RATIO, step, step * _RATIO)]


def _ratio(gradients: Tensors, own: Tensors, right: Tensors, comparison: ReferenceComparison) -> tuple[float, float]:
    """Return ⟨G, W⟩/⟨W, W⟩, and how far rounding may have moved it from what it should be."""
    square = _product(right, right)
    factor, repeated = _product(gradients, right) / square, _product(own, right) / square
    # What the comparison calls rounding is known exactly. Beside a defect it is at most that of all directions.
    rounding = abs(repeated - 1) if comparison.ok else comparison.noise
    # Kernels that add in another order every time give other gradients when they are run again.
    scale = _product(gradients, own) / _product(own, own)
    apart = _product(gradients, gradients) / scale**2 - _product(own, own) if scale else math.inf
    return factor, rounding + math.sqrt(max(apart, 0.0) / square)


def _stored(gradients: Tensors) -> float:
    """Return the error of ‖W‖² that rounding entries of W to the type of their parameter leaves, at six deviations.

    An entry w has an error of mean square (uw)²/6, or a twelfth of the squared spacing where numbers are subnormal.
    """
    squares, total = 0.0, 0.0
    for gradient in gradients.values():
        kind, values = torch.finfo(gradient.dtype), gradient.double()
        errors = (kind.eps / 2 * ROOT_MEAN_SQUARE * values).square() + (kind.smallest_normal * kind.eps) ** 2 / 12
        squares += float((errors * values.square()).sum())
        total += float(values.square().sum())
    return SIGMAS * math.sqrt(squares) / total if total > 0 else math.inf


def _product(a: Tensors, b: Tensors) -> float:
    return sum(float((a[name].double() * b[name].double()).sum()) for name in b if name in a)


def _length(gradients: Tensors) -> float:
    return math.sqrt(_product(gradients, gradients))
