"""Verifies the gradient identities of laws with one backward pass of a loss, in the precision the pass was computed in.

Models are not computed in the precision of their parameters throughout: libraries run norms and routers in float32
inside a float64 model, and autocast runs products in half precision. The graph of a loss knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.laws.identities import coarsest, residual_evidence, rounding, status
from conserved.laws.shared_memory import overlapping
from conserved.product_precision import SHORTENED, rounds_factors
from conserved.symmetry import Symmetry
from conserved.verdict import Status, Verdict

if TYPE_CHECKING:
    from conserved.laws.law_set import LawSet

_COMPILED, _CHECKPOINTED = "CompiledFunctionBackward", "CheckpointFunctionBackward"
"""Nodes that run a graph of their own: what precision that uses is not visible, so single is assumed."""


_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
"""By complex type, the precision of its parts."""


def verify(laws: LawSet, theta: Mapping[str, Tensor], loss_fn: Callable[[], Tensor]) -> Verdict:
    """Run one backward pass of `loss_fn()` and test every identity against the rounding of that pass."""
    names = list(laws.plan.needs)
    if not names:
        return Verdict(status=Verdict.INCONCLUSIVE, message="There is not a law to verify.")
    still = [name for name in names if not theta[name].requires_grad]
    if still:
        raise ValueError(
            f"Expected trainable parameters, got {still[0]}, which requires no gradient. Verify the model's own "
            "parameters."
        )
    loss = loss_fn()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            "Expected loss_fn to return a scalar tensor with a graph, got another result. Call it outside "
            "no_grad, and do not detach the loss."
        )
    if not bool(torch.isfinite(loss.detach())):
        message = f"The loss is {loss.item()}; identities need a finite one."
        return Verdict(status=Verdict.INCONCLUSIVE, message=message)
    away = [name for name in names if theta[name].is_meta]
    if away:
        raise ValueError(
            f"Expected parameters with values, got {away[0]} on the meta device. Load the weights; without them "
            "laws can be listed but not verified."
        )
    precision = precision_of(loss)
    reached_by = gradients_of(loss, theta)
    verdicts = {name: reached_by[name] for name in names}
    gradients = {name: torch.zeros_like(theta[name]) if g is None else g for name, g in verdicts.items()}
    balance = laws.balance(gradients)
    beside = overlapping(theta)
    moved_along = {s.name: why for s in laws.symmetries if (why := _not_alone(s, beside)) is not None}
    if not balance.tested.any():
        message = "No gradient reached any parameter of any law, or those it reached are zero."
        return Verdict(status=Verdict.INCONCLUSIVE, message=message)
    parts = {
        s.name: moved_along[s.name]
        if s.name in moved_along
        else _judge(
            s.name,
            float(residual),
            rounding(coarsest(precision, *(theta[p].dtype for p in s.parameters)), s.entries) + s.epsilon**0.5,
            tested=bool(tested),
            nearly=not s.exact,
        )
        for s, residual, tested in zip(laws.symmetries, balance.residuals, balance.tested, strict=True)
    }
    if moved_along and not any(part.status is Verdict.REFUTED for part in parts.values()):
        message = next(iter(moved_along.values())).message
        return Verdict(status=Verdict.INCONCLUSIVE, message=message, parts=parts)
    return _together(parts, precision, nearly=sum(not symmetry.exact for symmetry in laws.symmetries))


def _nodes(loss: Float[Tensor, "..."]) -> Iterator[Any]:
    """Yield every node of the graph behind a loss."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _kind(node: Any) -> str:
    return str(node.name()).rpartition("::")[2]


def precision_of(loss: Float[Tensor, "..."]) -> torch.dtype:
    """Return the coarsest precision of any gradient that flows when `loss` is differentiated."""
    dtypes, through_cudnn = {loss.dtype}, False
    for node in _nodes(loss):
        through_cudnn |= _kind(node).startswith(("Convolution", "Cudnn"))
        kinds = {part.dtype for part in getattr(node, "_input_metadata", ()) if part is not None}
        dtypes.update(_REAL.get(kind, kind) for kind in kinds)
        if _kind(node) in (_COMPILED, _CHECKPOINTED):
            dtypes.add(torch.float32)
    used = coarsest(*dtypes)
    rounded = used == torch.float32 and rounds_factors(loss.device.type, convolutions=through_cudnn)
    return SHORTENED if rounded else used


def gradients_of(loss: Float[Tensor, "..."], parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the gradient of a loss in each parameter, None where it reaches none; `.grad` is left as it was."""
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not any(_kind(node) == _CHECKPOINTED for node in _nodes(loss)):
        gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
        return dict(zip(names, gradients, strict=True))
    # Reentrant checkpointing refuses autograd.grad: let it accumulate, and put back what was there.
    before = {name: parameters[name].grad for name in names}
    try:
        for name in names:
            parameters[name].grad = None
        loss.backward()
        return {name: parameters[name].grad for name in names}
    finally:
        for name in names:
            parameters[name].grad = before[name]


def _judge(name: str, residual: float, limit: float, *, tested: bool, nearly: bool) -> Verdict:
    """Return the status of one identity as a verdict."""
    outcome = status(residual, limit, tested=tested, nearly=nearly)
    if not tested:
        message = f"No gradient reached the parameters of {name}, or all of them are zero."
        return Verdict(status=outcome, message=message)
    message = {
        Status.VERIFIED: f"The gradient identity of {name} holds.",
        Status.INCONCLUSIVE: f"The gradient identity of {name} is further off than √ε, which ε may explain.",
        Status.REFUTED: f"The gradient identity of {name} does not hold.",
    }[outcome]
    return Verdict(status=outcome, message=message, evidence=(residual_evidence(name, residual, limit),))


def _together(parts: Mapping[str, Verdict], precision: torch.dtype, *, nearly: int) -> Verdict:
    """Return the verdict on all identities.

    The evidence is the broken identities, worst first, or else the one nearest its limit.
    """

    def excess(verdict: Verdict) -> float:
        evidence = verdict.evidence[0]
        assert isinstance(evidence.value, float)
        assert isinstance(evidence.limit, float)
        return evidence.value / evidence.limit if evidence.value == evidence.value else float("inf")

    tested = sorted((verdict for verdict in parts.values() if verdict.evidence), key=excess, reverse=True)
    broken = [verdict for verdict in tested if verdict == Verdict.REFUTED]
    unsure = [verdict for verdict in tested if verdict == Verdict.INCONCLUSIVE]
    evidence = tuple(verdict.evidence[0] for verdict in broken or unsure or tested[:1])
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
    message = f"All {len(tested)} gradient identities hold to {rounding}" + (f", {nearly} up to ε." if nearly else ".")
    if len(tested) < len(parts):
        message += f" No gradient reached the parameters of {len(parts) - len(tested)} more."
    return Verdict(status=Verdict.VERIFIED, message=message, evidence=evidence, parts=parts)


def _not_alone(symmetry: Symmetry, beside: Mapping[str, str]) -> Verdict | None:
    """Return why a verdict is impossible for a law with a parameter that shares memory with another one."""
    for name in symmetry.parameters:
        if name in beside:
            message = (
                f"{name} shares memory with {beside[name]}, so that steps of one move the other: {symmetry.name} is no "
                "law of this model, whatever its gradients are."
            )
            return Verdict(status=Verdict.INCONCLUSIVE, message=message)
    return None
