"""Suggestions from a broken identity: the tensors it relates, a factor that would mend it, and usual causes.

Each family of laws tests one segment of the backward pass. What goes wrong there in practice is known from the bug
reports of attention kernels, sharded norms and fused experts; docs/audit.md cites them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from conserved.moment import Direction, Plan, Point
from conserved.symmetry import Symmetry, Tensors, whole

USUAL = {
    "query_key": "between queries and keys: a scale or rotation applied to one of dQ and dK only, heads swapped, "
    "query heads of a group not summed into dK, keys of an earlier step or block",
    "query_key_gain": "between the gains of query and key norms: a gain's gradient lost, halved or not summed over "
    "heads",
    "query_scale": "at the norm on queries: its input gradient does not stand at right angles to its input",
    "key_scale": "at the norm on keys: its input gradient does not stand at right angles to its input",
    "inert_bias": "at dK: softmax does not see the key bias: the sum of dK over positions should vanish, and does not",
    "value_output": "between values and output projection: dV with other attention weights than the forward pass, "
    "heads mixed up, a group not summed, the layout of dO misread",
    "neurons": "between the two layers of a network: the activation's derivative, a missing sum over ranks or tokens",
    "gated_neurons": "between the linear branch and the down projection: the fused gate's derivative, a branch "
    "detached, tokens of an expert lost",
    "linear_pair": "between two linear maps in a row, such as the factors of an adapter: a missing sum over ranks or "
    "tokens, a transposed layout, one of them scaled twice",
    "shift": "at the router: a softmax derivative without its correction term, or experts left out of the sum",
    "gain": "at a norm's gain against its readers: the gain's gradient lost, halved, in low precision or not summed "
    "over ranks; or one reader's input gradient wrong",
    "centre": "at a centring norm, whose input gradient should have mean zero over features",
    "stream_scale": "along the residual stream: at the input gradient of a norm, for a branch that is detached, or "
    "a writer whose gradient is scaled",
    "class_shift": "at the loss: its gradient over classes should sum to zero",
    "positions": "between two tables that are added: the gradient of one lost or scaled, positions shifted",
    "sum_scale": "at a norm of a sum: its input gradient does not stand at right angles to its input",
    "forgotten_scale": "at a norm: its input gradient does not stand at right angles to its input",
    "unused": "for who uses a parameter that the model never reads: it has a gradient",
    "frozen": "at a router with one active expert: it has no gradient",
}
"""By family of law; a family not listed is described by its tensors alone."""


_AT_LEAST = 4
"""Failures that a step must explain to be the explanation."""


def usual(symmetry: Symmetry) -> str:
    """Return usual causes for the family of a symmetry, or for the longest family it is a variant of."""
    known = [family for family in USUAL if symmetry.family.startswith(family) or family in symmetry.family]
    return f"look {USUAL[max(known, key=len)]}" if known else ""


def factor(symmetry: Symmetry, theta: Tensors, gradients: Tensors) -> str:
    """Return whether the two sides of an identity are parallel.

    Then one gradient is off by a factor, which is named.
    """
    sides: list[Tensor] = []
    for sign in (1, -1):
        legs = tuple(leg for leg in symmetry.legs if leg.degree * sign > 0)
        if not legs:
            return ""
        sides.append(sign * replace(symmetry, legs=legs).identity(theta, gradients, dtype=torch.float64))
    plus, minus = (side.flatten() for side in sides)
    names = {sign: _parameters(symmetry, sign) for sign in (1, -1)}
    for side, sign in ((plus, 1), (minus, -1)):
        if float(side.norm()) == 0:
            return f"the gradient of {names[sign]} contributes nothing at all"
    ratio = float(plus @ minus / (minus @ minus))
    # Not the other way round: nothing is said of gradients that are not finite.
    if not float((plus - ratio * minus).norm()) <= 0.02 * float(plus.norm()) or abs(ratio) < 1e-3:
        return ""
    return f"a gradient of {names[-1]} times {ratio:.4g}, or of {names[1]} times {1 / ratio:.4g}, would satisfy it"


def suggestions(symmetry: Symmetry, theta: Tensors, gradients: Tensors | None, moved: float | None) -> tuple[str, ...]:
    """Return where to look for what broke an identity; `moved` is the step that explains all of them, if one does."""
    if moved is not None:
        return (f"the parameters moved by −{moved:.3g} times this gradient after it was taken",)
    mended = None if gradients is None else factor(symmetry, theta, gradients)
    return tuple(filter(None, (mended, usual(symmetry))))


def step_size(symmetries: list[Symmetry], theta: Tensors, gradients: Tensors) -> float | None:
    """Return the τ for which parameters that moved by −τG after their gradient G was taken explain every failure, or
    None.

    μ(θ − τG, G) = −τ μ(G, G), because μ(θ, G) = 0: one number must fit all entries of all identities.
    """
    # In one order on every process: sharded tensors are gathered here.
    names = dict.fromkeys(name for symmetry in symmetries for name in symmetry.parameters)
    sources = (
        Point({name: whole(theta[name]) for name in names}),
        Direction({name: whole(gradients[name]) for name in names}),
    )
    moments = Plan.of(symmetries).evaluate(sources, [(0, 1), (1, 1)], dtype=torch.float64)
    left, right = ([value.flatten() for value in moments.values(pair)] for pair in (0, 1))
    # Every identity has its own units: each counts as much as any other.
    sizes = [max(float(part.norm()), 1e-300) for part in left]
    mu = torch.cat([part / size for part, size in zip(left, sizes, strict=True)])
    second = torch.cat([part / size for part, size in zip(right, sizes, strict=True)])
    # One number fits a few identities by chance.
    enough = len(symmetries) >= _AT_LEAST and mu.numel() >= 2 * _AT_LEAST
    if not enough or not bool(torch.isfinite(mu).all()) or float(second.norm()) == 0:
        return None
    tau = -float(mu @ second / (second @ second))
    explained = float((mu + tau * second).norm()) <= 0.02 * float(mu.norm())
    return tau if explained and tau > 0 else None


def _parameters(symmetry: Symmetry, sign: int) -> str:
    names = dict.fromkeys(leg.view.parameter for leg in symmetry.legs if leg.degree * sign > 0)
    return " and ".join(names)
