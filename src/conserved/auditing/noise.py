r"""How much of a residual rounding explains: a floor by precision, a bound for linear laws, noise measured by replay.

**Floor.** The stored gradient is rounded once: a significand m in [1, 2) by an error uniform in ±u, u = eps/2. The
relative error has mean square u²/3 · E[1/m²] = u²/6. A residual is held against the root of the sum of squares of its
products, so that this rounding alone leaves u/√6 of the scale: 1.6e-3 in bfloat16. Clean passes of 2 million to 8
billion parameters leave 1.8e-3 in the median, 5e-4 to 1e-2 by family and regime (results/audit_noise_h200).

**Linear laws** add rows that should cancel: Σ_v dW_v = 0 over a vocabulary. Entries of equal size are rounded in one
direction (a fresh model gives 32,000 classes nearly one probability), so errors add up instead of averaging out:
|Σ_v δ_v dW_v| ≤ u Σ_v |dW_v|, column by column.

**Measured.** The backward pass is linear in the output gradient; rounding is not. A pass whose output gradient was
multiplied by c, divided by c again, minus the pass itself is one sample of the difference of two roundings:

    σ = ‖μ(θ, G_c/c − G)‖ / √2

A defect is linear in the output gradient and cancels. What the forward pass rounded is the same in both and is not
sampled; that is why a floor stays, and why a pass in higher precision has the last word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import fdtri

from conserved.laws.identities import balance_of, rounding
from conserved.moment import Direction, Magnitudes, Plan, Point, to_host
from conserved.symmetry import Symmetry, Tensors
from conserved.tolerances import HALF, ROOT_MEAN_SQUARE, SIGMAS

_CHANCE = math.erfc(SIGMAS / math.sqrt(2))
"""How often a normal number is further than six deviations from zero: 2e-9."""

_OWN = 3.0
"""Roundings of that size on the way from one leg to the other: of the gradient itself, of the activation gradient it is
made from and of the activation it is multiplied with. Errors add in squares, so three leave room for nine of them."""

_COHERENT = 0.75
"""Share of a residual's square that one factor on one side must explain to count as a wrong factor. Rounding of n
entries has 1/n of it in any one direction."""

_VANISHED = 1e-6
"""Size of the other terms, relative to one, below which they were multiplied by zero and have no direction."""

_ENTRIES = 16
"""Entries below which a factor fits rounding by chance."""


def suspicious(precision: torch.dtype, entries: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the residuals above which a pass is replayed: what the rounding of stored gradients leaves, times three.

    In single and double precision sums over tokens round more than storing does, and the floor of the precision is far
    below any defect: that one is used.
    """
    if precision not in HALF:
        return rounding(precision, entries)
    own = _OWN * ROOT_MEAN_SQUARE * torch.finfo(precision).eps / 2
    # Few entries do not average: the largest error is u, not its root mean square.
    return own * (1 + SIGMAS / np.sqrt(np.maximum(entries, 1)))


def linear_bounds(
    plan: Plan, indices: Sequence[int], gradients: Tensors, precision: torch.dtype, scales: NDArray[np.float64]
) -> dict[int, float]:
    """Return for linear laws the relative residual that rounding every entry in one direction leaves."""
    if not indices:
        return {}
    some = Plan.of([plan.symmetries[index] for index in indices], kernels=False)
    needed = {name: gradients[name] for name in some.needs}
    source = Magnitudes(Direction(needed))
    totals = to_host(some.evaluate((Magnitudes(Point(needed)), source), [(0, 1)]).values())
    unit = torch.finfo(precision).eps / 2
    return {
        index: unit * float(np.linalg.norm(total)) / scales[index] if scales[index] else 0.0
        for index, total in zip(indices, totals, strict=True)
    }


def subnormal_bound(symmetry: Symmetry, theta: Tensors, gradients: Tensors, scale: float) -> float:
    """Return the relative residual that underflow of gradients stored in float16 leaves; 0 for other types.

    Below 6e-5 float16 has a spacing of 2⁻²⁴, whatever the size of the number: an entry of μ has an error of at most
    half of that times ‖θ‖₁ of a row, and √n times ‖θ‖ of a leg bounds all of them together.
    """
    small = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps / 2
    squares = [
        leg.view.n * float(theta[name].detach().float().square().sum())
        for leg in symmetry.legs
        if gradients[name := leg.view.parameter].dtype == torch.float16
    ]
    return small * math.sqrt(sum(squares)) / scale if squares and scale > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseSample:
    """Residuals of some identities in a replayed pass, and the noise of each, relative to the same scales."""

    residuals: NDArray[np.float64]
    sigmas: NDArray[np.float64]
    samples: int
    """How many scaled passes the noise was taken from."""


def sample_noise(plan: Plan, theta: Tensors, first: Tensors, others: Iterable[Tensors]) -> NoiseSample:
    """Compare gradients of one pass that differ by rounding alone.

    Args:
        plan: the identities.
        theta: the parameters they read.
        first: gradients of a pass.
        others: gradients of the same pass with scaled output gradients, divided by the scale again.
    """
    balance = balance_of(plan, theta, first)
    squares = [difference_sizes(plan, theta, first, second) ** 2 / 2 for second in others]
    scales = np.where(balance.scales > 0, balance.scales, np.inf)
    sigmas = np.sqrt(np.mean(squares, axis=0)) / scales
    return NoiseSample(residuals=balance.residuals, sigmas=sigmas, samples=len(squares))


@torch.no_grad()
def difference_sizes(plan: Plan, theta: Tensors, first: Tensors, second: Tensors) -> NDArray[np.float64]:
    """Return ‖μ(θ, G₂ − G₁)‖ of every identity."""
    difference = {name: second[name].float() - first[name].float() for name in plan.needs}
    moments = to_host(plan.evaluate((Point(theta), Direction(difference)), [(0, 1)]).values())
    return np.array([float(np.linalg.norm(moment)) for moment in moments])


def noise_multiples(entries: NDArray[np.int64], samples: int) -> NDArray[np.float64]:
    """Return how many measured σ a residual may have: six, and more where few numbers were sampled.

    r²/σ² is a ratio of mean squares of n and of nk normal numbers, if n entries of μ were sampled k times. It has the
    F distribution, and exceeds the square of this multiple as rarely as one normal number exceeds six deviations: 29
    for one entry and eight samples, 6 for 16 entries and a single sample.
    """
    n = np.maximum(entries, 1).astype(np.float64)
    return np.maximum(SIGMAS, np.sqrt(fdtri(n, n * samples, 1 - _CHANCE)))


def expected_limits(precision: torch.dtype, symmetries: Sequence[Symmetry]) -> NDArray[np.float64]:
    """Return the residuals that replays are expected to explain where none was needed: from u/√6, see above.

    Up to eight samples are drawn, and the largest counts. Of n numbers each, it is about 1 + 1/√n times their σ.
    """
    counts = np.array([symmetry.identities for symmetry in symmetries], dtype=np.float64)
    return SIGMAS * (1 + 1 / np.sqrt(np.maximum(counts, 1))) * ROOT_MEAN_SQUARE * torch.finfo(precision).eps / 2


def unmistakable(precision: torch.dtype, symmetry: Symmetry) -> float:
    """Return the relative residual that rounding does not leave in any regime: above it no replay is needed.

    Set from clean passes and not derived (results/audit_noise_h200). The largest residual was 0.12 in half precision
    (queries and keys × 40), and twice that is taken. In single precision it was 2e-5, below the floor, which is taken
    itself; linear laws get 0.02, by choice. Identities of float64 models go through float32 in libraries.

    Laws of the loss are the exception. The gradient of logits, p − y, vanishes where training succeeds, and what is
    left of it is the rounding of p ≈ 1. Other sums that cancel (of a router that is sure) are small against all
    gradients, which linear laws are held against; but all gradients are made from this one.
    """
    if symmetry.of_loss:
        return 1.0
    if symmetry.kind.linear and precision not in HALF:
        return 0.02
    return 0.25 if precision in HALF else 0.0


def least_factor(symmetry: Symmetry) -> float:
    """Return the wrong factor on one leg, less one, below which only a replay tells it from half-precision rounding.

    Between two maps whose outputs are multiplied with each other lie the rounding of both on the way there (rotary
    positions, norms of queries and keys) and that of fused attention, whose errors are one number for every query and
    lie along a leg where few queries matter. In 6,824 clean passes on an H200 two identities had residuals along a leg,
    both of queries and keys: 0.0085, as a factor of 1.012 leaves, and 0.0077, as one above 1.015. Twice that is taken
    for such pairs; nothing lay along legs of other laws, where one map reads what the other writes.
    """
    return 0.03 if multiplied(symmetry) else 0.015


def multiplied(symmetry: Symmetry) -> bool:
    """Return whether the legs of a symmetry are maps whose outputs are multiplied with each other.

    Its group then acts on the same side of all weights. Where one map reads what another writes, it acts on the rows of
    one and the columns of the other. A gain has one side only: it is written, and read by weights.
    """
    wide = [leg for leg in symmetry.legs if leg.view.m > 1] or [*symmetry.legs]
    first = {min(leg.view.axes) < min(leg.view.rest, default=len(leg.view.grid)) for leg in wide}
    return len(first) == 1 and len({leg.degree > 0 for leg in wide}) == 2 and not symmetry.kind.linear


def shows_factors(symmetry: Symmetry) -> bool:
    """Return whether an identity has several legs and enough entries to tell a wrong factor from rounding."""
    return len(symmetry.legs) > 1 and symmetry.identities >= _ENTRIES


def wrong_factors(symmetries: Sequence[Symmetry], theta: Tensors, gradients: Tensors) -> list[float | None]:
    """Return for every identity the factor one of its legs is off by; None if no factor explains most of its residual.

    Rounding points in no direction in particular: of n entries it has 1/n of its square along the term of any one leg.
    A residual that lies along it is a wrong factor, and needs no measured noise to be called one.
    """
    if not symmetries:
        return []
    legs = [replace(symmetry, legs=(leg,)) for symmetry in symmetries for leg in symmetry.legs]
    plan = Plan.of(legs, kernels=False)
    with torch.no_grad():
        values = to_host(plan.evaluate((Point(theta), Direction(gradients)), [(0, 1)]).values())
    factors, begin = [], 0
    for symmetry in symmetries:
        terms = [value.reshape(-1) for value in values[begin : begin + len(symmetry.legs)]]
        begin += len(symmetry.legs)
        factors.append(_factor(terms) if shows_factors(symmetry) else None)
    return factors


def _factor(terms: Sequence[NDArray[np.float64]]) -> float | None:
    """Return the factor on one term, or on all of one sign, that explains a sum which should be zero.

    Without it the others sum to −t: the residual is (f − 1)t, and f is what the term is off by. The residual then lies
    along the others too. A spike in one term does not: it is most of that term, and has next to nothing of the others.
    """
    total = np.sum(terms, axis=0)
    size = float(np.linalg.norm(total))
    if not math.isfinite(size) or size == 0:
        return None
    best, factor = _COHERENT, None
    for term in terms:
        length = float(np.linalg.norm(term))
        if length == 0:
            continue
        along = float(total @ term) / length
        others = total - term
        rest = float(np.linalg.norm(others))
        if rest > _VANISHED * length and (float(total @ others) / (size * rest)) ** 2 < _COHERENT:
            continue
        if (along / size) ** 2 >= best:
            # total = t_wrong − t_right along the term itself: t_right = t_wrong − total.
            best, right = (along / size) ** 2, length - along
            factor = length / right if right else math.inf
    return factor


def coherent(
    symmetries: Sequence[Symmetry],
    theta: Tensors,
    gradients: Tensors,
    residuals: NDArray[np.float64],
    floors: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Return which residuals above their floors are wrong factors and not rounding, however small."""
    flags = np.zeros(len(symmetries), dtype=bool)
    indices = np.flatnonzero(residuals > floors)
    factors = wrong_factors([symmetries[index] for index in indices.tolist()], theta, gradients)
    flags[indices] = [factor is not None for factor in factors]
    return flags
