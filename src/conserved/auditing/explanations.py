"""Why an identity that does not hold may not mean a wrong gradient: tables, functions, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conserved._torch_compat import tree_map_only
from conserved.auditing.backward_pass import BackwardPass
from conserved.auditing.lookup_tables import lost, tables
from conserved.auditing.replay import RecordedPass, is_fully_sharded
from conserved.inference.derivation import Derivation
from conserved.inference.further_laws.moving_parameters import is_seen, move_parameters, runs
from conserved.layout import has_flat_shards
from conserved.moment import Direction, Plan, Point
from conserved.symmetry import Symmetry, Tensors, whole
from conserved.tolerances import HALF

EXPLAINED = 24
"""Failures that are looked into one by one, worst first; each costs a transfer from the device."""

EITHER = "either the backward is wrong or this function is not what its place suggests"

_SEEDS = 6
"""Random group elements, and seeds of the model's own randomness, that a law in doubt is tried with."""

_SOFT = 0.2
"""The share of what half a motion does to the outputs that a law up to ε may do to them."""

_SAME_WAY = 1e-2
"""The same for the call that is audited: laws up to ε were seen to hold to a ten-thousandth or so when they were read.
A part of the model that they leave out changes the outputs by its share of them."""

_FITTED = 4
"""Numbers that one factor must fit to be the explanation: fewer are fitted by chance."""

_UNEXPLAINED = 0.05
"""The share of broken identities that may be left over once they are explained."""

_NEAR = 0.9
"""The share of the largest magnitude from which on entries count as just below it."""

_CUT = 16
"""Entries of several gradients that have one magnitude, the largest, if gradients were clipped by value."""


def untrue(backward: BackwardPass, broken: Sequence[Symmetry]) -> dict[str, tuple[str, ...]]:
    """Return broken laws without a proof that the forward pass does not keep either.

    Parameters are moved along them, with the inputs that the laws were read off and the randomness of several seeds.
    """
    result = _longer(broken)
    known = backward.laws.derivation
    broken = [symmetry for symmetry in broken if symmetry.name not in result]
    doubted = [symmetry for symmetry in broken if symmetry.source != "typed"][:EXPLAINED]
    if not doubted or not isinstance(known, Derivation) or known.call is None:
        return result
    return result | _not_kept(backward, doubted, known.call)


def of_another_way(
    backward: BackwardPass,
    broken: Sequence[Symmetry],
    replay: RecordedPass,
) -> dict[str, tuple[str, ...]]:
    """Return broken laws that the audited call does not keep, because it took another path than the one they were read
    off.

    Experts that got no token then, or layers that were dropped, are no part of such a law.

    Args:
        backward: the audited pass.
        broken: the laws.
        replay: its forward pass, which runs it again.

    Returns:
        Words for each of those laws, by its name.
    """
    doubted = list(broken)[:EXPLAINED]
    if not doubted or replay.call is None:
        return {}
    reached = _reached(backward, doubted, replay)
    return _not_kept(backward, doubted, replay.call, replay.restore_random, soft=_SAME_WAY, reached=reached)


def _reached(backward: BackwardPass, doubted: Sequence[Symmetry], replay: RecordedPass) -> set[str] | None:
    """Return the parameters of laws that have a gradient in this pass; None if it cannot be run again.

    The outputs do not see a layer that was dropped, as they do not see one that is held elsewhere: its gradient tells.
    """
    names = dict.fromkeys(name for symmetry in doubted for name in symmetry.parameters)
    try:
        gradients = replay.gradients({name: backward.points[name] for name in names})
    except Exception:
        # The program may refuse to run a second time.
        return None
    return {name for name, gradient in gradients.items() if bool(gradient.any())}


def _not_kept(
    backward: BackwardPass,
    doubted: Sequence[Symmetry],
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    start: Callable[[], None] | None = None,
    *,
    soft: float = _SOFT,
    reached: Collection[str] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return the laws along which a call of the model changes its outputs, and words.

    All parameters of a law have to be seen in the outputs, or those among `reached`.
    """
    result: dict[str, tuple[str, ...]] = {}
    if not doubted or has_flat_shards(backward.model) or is_fully_sharded(backward.model):
        # A forward pass alone, with other tensors as parameters, would leave these modules in a state of their own.
        return result
    theta: dict[str, Tensor] = dict(backward.model.named_parameters())
    if any(value.dtype in HALF for value in theta.values()):
        # Half precision rounds away what a motion does to the outputs.
        theta, call = tree_map_only(Tensor, _widened, (theta, call))
    run = runs(backward.model, *call, start=start)
    try:
        if all(move_parameters(run, theta, doubted, seed=seed).holds for seed in range(_SEEDS)):
            return result
        for symmetry in doubted:
            changes = [move_parameters(run, theta, [symmetry], seed=seed) for seed in range(_SEEDS)]
            worst = max(changes, key=lambda item: item.change)
            # A law up to ε changes the outputs by as much as ε is worth.
            bound = 0.0 if symmetry.exact else soft
            changed = any(change.holds is False and change.change > bound * change.half for change in changes)
            if changed and (len(symmetry.parameters) == 1 or is_seen(run, theta, symmetry, names=reached)):
                text = f"moving the parameters along it changes the outputs by {worst.change:.1g}: it is not a law here"
                result[symmetry.name] = (f"{EITHER}: {text}",)
    except Exception:
        # A model that cannot be called again decides nothing.
        return result
    return result


def _widened(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.dtype in HALF else tensor


def _longer(broken: Sequence[Symmetry]) -> dict[str, tuple[str, ...]]:
    """Return broken laws of tables with rows that the call the laws were read off did not reach, and that are reached
    now.
    """
    reached = {name for symmetry in broken if symmetry.family == "unused" for name in symmetry.parameters}
    text = "rows have a gradient that inputs did not reach when the laws were read off: infer them from longer inputs"
    return {symmetry.name: (text,) for symmetry in broken if reached.intersection(symmetry.parameters)}


def lost_since(backward: BackwardPass, broken: Sequence[Symmetry]) -> dict[str, str]:
    """Return laws that seem broken but no longer hold because of what training did to a table."""
    looked_up = tables(backward.model) if broken else {}
    return {symmetry.name: reason for symmetry in broken if (reason := lost(symmetry, looked_up))}


def clipped_at(broken: Sequence[Symmetry], gradients: Tensors) -> float | None:
    """Return the value at which gradients were cut off, if they look as if they were; no law survives that.

    Many entries have exactly the largest magnitude of all; one or two may by chance, or by symmetry. Where tensors were
    clipped one by one, several have exactly the largest norm of all.
    """
    if (norm := _repeated_norm(gradients)) is not None:
        return norm
    names = dict.fromkeys(name for symmetry in broken for name in symmetry.parameters)
    tensors = [whole(gradients[name]).detach() for name in names if name in gradients and not gradients[name].is_sparse]
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return None
    peaks = [tensor.abs().max() for tensor in tensors]
    peak = float(torch.stack([part.double().to(peaks[0].device) for part in peaks]).max())
    if not 0 < peak < math.inf:
        return None
    cut = [tensor.abs() == peak for tensor in tensors]
    many = sum(int(part.sum()) for part in cut)
    if any(tensor.dtype in HALF for tensor in tensors):
        # Few bits: neighbours of the largest magnitude share its value. Clipping leaves more there than just below.
        below = sum(int(((tensor.abs() >= _NEAR * peak) & (tensor.abs() < peak)).sum()) for tensor in tensors)
        many = many if many > below else 0
    pairs = zip(tensors, cut, strict=True)
    both = any(bool((part[where] > 0).any()) and bool((part[where] < 0).any()) for part, where in pairs)
    return peak if many >= _CUT and both and sum(bool(part.any()) for part in cut) > 1 else None


_SAME_NORM = 3e-6
"""How far norms of tensors that were clipped to one norm differ, relatively, because of what is added to it."""


def _repeated_norm(gradients: Tensors) -> float | None:
    """Return the largest norm of gradients if several different ones have it."""
    dense = [g.detach() for g in gradients.values() if not g.is_sparse and g.dtype not in HALF and g.numel() > 1]
    if len(dense) < 2 or any(hasattr(g, "full_tensor") for g in dense):
        return None
    norms = torch.stack([g.double().norm().to(dense[0].device) for g in dense])
    most = float(norms.max())
    close = [dense[index] for index in (norms >= (1 - _SAME_NORM) * most).nonzero().flatten().tolist()]
    if not 0 < most < math.inf or len(close) < 2:
        return None
    alike = close[0].shape == close[1].shape and torch.equal(close[0], close[1])
    return None if alike else most


def decay_in_gradient(broken: Sequence[Symmetry], points: Tensors, gradients: Tensors) -> float | None:
    """Return the λ for which gradients G + λθ explain every broken identity: a penalty on the weights in the loss.

    μ(θ, G + λθ) = λ μ(θ, θ), because μ(θ, G) = 0: one number must fit all entries of all identities. It is tried for
    all parameters and for those of two axes and more, as penalties usually leave biases and gains out.
    """
    for least in (1, 2):
        names = dict.fromkeys(name for symmetry in broken for name in symmetry.parameters)
        theta = {name: whole(points[name]).detach() for name in names}
        decayed = {name: value if value.ndim >= least else torch.zeros_like(value) for name, value in theta.items()}
        sources = Point(theta), Direction({n: whole(gradients[n]).detach() for n in names}), Direction(decayed)
        moments = Plan.of(broken).evaluate(sources, [(0, 1), (0, 2)], dtype=torch.float64)
        left, right = (torch.cat([value.flatten() for value in moments.values(pair)]) for pair in (0, 1))
        size = float(right @ right)
        if not size or not bool(torch.isfinite(left).all()) or left.numel() < _FITTED:
            continue
        factor = float(left @ right) / size
        if factor > 0 and float((left - factor * right).norm()) <= _UNEXPLAINED * float(left.norm()):
            return factor
    return None
